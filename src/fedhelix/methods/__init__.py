"""The methods, one file each. Importing this package registers them all."""

from fedhelix.methods.ancestors import Ancestors
from fedhelix.methods.apfl import APFL
from fedhelix.methods.calibrated import Calibrated
from fedhelix.methods.clustered import Clustered
from fedhelix.methods.compact import Compact
from fedhelix.methods.cull import Cull
from fedhelix.methods.denoised_heads import DenoisedHeads
from fedhelix.methods.ditto import Ditto
from fedhelix.methods.dp_sgd import DPSGD
from fedhelix.methods.fedala import FedALA
from fedhelix.methods.fedamp import FedAMP
from fedhelix.methods.fedasync import FedAsync
from fedhelix.methods.fedau import FedAU
from fedhelix.methods.fedavg import FedAvg
from fedhelix.methods.fedavg_ft import FedAvgFT
from fedhelix.methods.fedavgm import FedAvgM
from fedhelix.methods.fedbabu import FedBABU
from fedhelix.methods.fedbn import FedBN
from fedhelix.methods.fedbuff import FedBuff
from fedhelix.methods.fedcp import FedCP
from fedhelix.methods.feddbe import FedDBE
from fedhelix.methods.feddyn import FedDyn
from fedhelix.methods.fedfina import FedFina
from fedhelix.methods.fedit import FedIT
from fedhelix.methods.fedlc import FedLC
from fedhelix.methods.fedlg import FedLG
from fedhelix.methods.fedlp import FedLP
from fedhelix.methods.fedlps import FedLPS
from fedhelix.methods.fednova import FedNova
from fedhelix.methods.fedopt import FedOpt
from fedhelix.methods.fedpac import FedPAC
from fedhelix.methods.fedper import FedPer
from fedhelix.methods.fedproto import FedProto
from fedhelix.methods.fedprox import FedProx
from fedhelix.methods.fedrep import FedRep
from fedhelix.methods.fedrolex import FedRolex
from fedhelix.methods.fedsa_lora import FedSALoRA
from fedhelix.methods.fedumf import FedUmf
from fedhelix.methods.ffa_lora import FFALoRA
from fedhelix.methods.finish import Finish
from fedhelix.methods.flexlora import FlexLoRA
from fedhelix.methods.gene_fl import GeneFL
from fedhelix.methods.genfed import GenFed
from fedhelix.methods.gpfl import GPFL
from fedhelix.methods.helix import Helix
from fedhelix.methods.heterofl import HeteroFL
from fedhelix.methods.ifca import IFCA
from fedhelix.methods.knn_per import KNNPer
from fedhelix.methods.lg_fedavg import LGFedAvg
from fedhelix.methods.local import LocalOnly
from fedhelix.methods.moon import Moon
from fedhelix.methods.partialfed import PartialFed
from fedhelix.methods.pfedgpa import PFedGPA
from fedhelix.methods.pfedhn import PFedHN
from fedhelix.methods.pfedme import PFedMe
from fedhelix.methods.private import Private
from fedhelix.methods.scaffold import Scaffold
from fedhelix.methods.secure import Secure
from fedhelix.methods.warm_start import WarmStart

__all__ = [
    "APFL",
    "DPSGD",
    "GPFL",
    "IFCA",
    "Ancestors",
    "Calibrated",
    "Clustered",
    "Compact",
    "Cull",
    "DenoisedHeads",
    "Ditto",
    "FFALoRA",
    "FedALA",
    "FedAMP",
    "FedAU",
    "FedAsync",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedBuff",
    "FedCP",
    "FedDBE",
    "FedDyn",
    "FedFina",
    "FedIT",
    "FedLC",
    "FedLG",
    "FedLP",
    "FedLPS",
    "FedNova",
    "FedOpt",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRolex",
    "FedSALoRA",
    "FedUmf",
    "Finish",
    "FlexLoRA",
    "GenFed",
    "GeneFL",
    "Helix",
    "HeteroFL",
    "KNNPer",
    "LGFedAvg",
    "LocalOnly",
    "Moon",
    "PFedGPA",
    "PFedHN",
    "PFedMe",
    "PartialFed",
    "Private",
    "Scaffold",
    "Secure",
    "WarmStart",
]
