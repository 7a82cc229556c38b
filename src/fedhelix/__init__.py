"""fedhelix: federated learning on clients whose data differ."""

from importlib.metadata import PackageNotFoundError, version

from fedhelix.data import Dataset, from_arrays, from_clients, load
from fedhelix.data import partitions as partition
from fedhelix.defences import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)
from fedhelix.errors import BadInput
from fedhelix.federation import Federation
from fedhelix.method import Batch, Client, Context, Local, LocalRound, Method, Phase, Upload
from fedhelix.methods import (
    Clustered,
    Ditto,
    FedAU,
    FedAvg,
    FedAvgFT,
    FedAvgM,
    FedBABU,
    FedBN,
    FedFina,
    FedLG,
    FedLP,
    FedLPS,
    FedOpt,
    FedPer,
    FedProx,
    FedRep,
    FedUmf,
    GeneFL,
    GenFed,
    LGFedAvg,
    LocalOnly,
    PartialFed,
    PFedGPA,
    PFedHN,
    Scaffold,
)
from fedhelix.options import option
from fedhelix.registry import METHODS, register
from fedhelix.standing import Run
from fedhelix.wrapper import Wrapper

try:
    __version__ = version("fedhelix")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0.1.0"

__all__ = [
    "METHODS",
    "BadInput",
    "Batch",
    "CentredClipping",
    "Client",
    "Clustered",
    "Context",
    "Dataset",
    "Ditto",
    "FedAU",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedFina",
    "FedLG",
    "FedLP",
    "FedLPS",
    "FedOpt",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedUmf",
    "Federation",
    "GenFed",
    "GeneFL",
    "GeometricMedian",
    "Krum",
    "LGFedAvg",
    "Local",
    "LocalOnly",
    "LocalRound",
    "Median",
    "Method",
    "MultiKrum",
    "NormBound",
    "PFedGPA",
    "PFedHN",
    "PartialFed",
    "Phase",
    "Run",
    "Scaffold",
    "TrimmedMean",
    "Upload",
    "Wrapper",
    "from_arrays",
    "from_clients",
    "load",
    "option",
    "partition",
    "register",
]
