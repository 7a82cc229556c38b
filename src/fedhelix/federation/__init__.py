"""Clients with their data, a model and a method: the round loop and what belongs to it."""

from fedhelix.federation.federation import Federation, ServedElsewhere
from fedhelix.federation.run import Run
from fedhelix.federation.setup import FederationSettings
from fedhelix.federation.state import FederationState

__all__ = ["Federation", "FederationSettings", "FederationState", "Run", "ServedElsewhere"]
