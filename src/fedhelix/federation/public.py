"""The names that `import fedhelix` offers."""

from fedhelix import methods
from fedhelix.core.errors import BadInput, UserError
from fedhelix.core.method import (
    Batch,
    Capabilities,
    Client,
    Context,
    Local,
    LocalRound,
    Method,
    Phase,
    Upload,
)
from fedhelix.core.optimizers import OptimizerRule
from fedhelix.core.options import option
from fedhelix.core.registry import METHODS, register
from fedhelix.core.version import __version__
from fedhelix.core.wrapper import Wrapper
from fedhelix.data import Augmentation, Dataset, from_arrays, from_clients, from_table, load
from fedhelix.federation.federation import Federation
from fedhelix.federation.run import Run
from fedhelix.federation.setup import FederationSettings
from fedhelix.federation.state import FederationState
from fedhelix.methods import *  # noqa: F403 - its `__all__` says what
from fedhelix.models.lora import add_lora
from fedhelix.robust.defences import (
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    TrimmedMean,
)

__all__ = [
    "METHODS",
    "Augmentation",
    "BadInput",
    "Batch",
    "Bucketing",
    "Capabilities",
    "CentredClipping",
    "Client",
    "Context",
    "Dataset",
    "Federation",
    "FederationSettings",
    "FederationState",
    "GeometricMedian",
    "Krum",
    "Local",
    "LocalRound",
    "Median",
    "Method",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormBound",
    "OptimizerRule",
    "Phase",
    "Run",
    "TrimmedMean",
    "Upload",
    "UserError",
    "Wrapper",
    "__version__",
    "add_lora",
    "from_arrays",
    "from_clients",
    "from_table",
    "load",
    "option",
    "register",
]
__all__ += methods.__all__
