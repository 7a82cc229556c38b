"""Named settings: the papers' experiments, and what we recommend after trying them."""

from __future__ import annotations

from typing import Any

_PFEDGPA = {
    "clients": 20,
    "cohort": 20,
    "partition": "dominant:20",
    "valid": 0.0,
    "epochs": 2,
    "batch_size": 50,
    "momentum": 0.5,
    "weight_decay": 5e-4,
    "lr": 0.01,
    "rounds": 200,
    "eval_every": 10,
}

_GENFED = {
    "clients": 100,
    "cohort": 10,
    "partition": "dirichlet:0.1",
    "model": "genfed-cnn",
    "epochs": 5,
    "batch_size": 32,
    "lr": 0.001,
    "lr_decay": 0.9995,
    "momentum": 0.0,
    "validation_size": 1000.0,
    "supplement_size": 50.0,
    "supplement_below": 0.2,
}

_GENE_FL = {
    "model": "resnet18",
    "clients": 50,
    "cohort": 10,
    "newcomers": 50,
    "newcomers_after": 100,
    "rounds": 150,
    "epochs": 10,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    # Counted as in the paper: the smallest 15 layers of ResNet-18 weigh 8.8 MiB.
    "gene-fl": {"gene_budget": 0.0, "gene_gamma0": 18, "gene_gamma_min": 15, "gen_squared": False},
}

PRESETS: dict[str, dict[str, Any]] = {
    "gene-fl.cifar10": {**_GENE_FL, "data": "cifar10", "partition": "shard:4"},
    "gene-fl.cifar100": {**_GENE_FL, "data": "cifar100", "partition": "shard:10"},
    "gene-fl.svhn": {**_GENE_FL, "data": "svhn", "partition": "shard:4"},
    # The whole body of the five-layer network at first, then its three smallest layers.
    "gene-fl.whole": {
        **_GENE_FL,
        "data": "cifar10",
        "partition": "shard:4",
        "model": "bn-cnn",
        "gene-fl": {
            "gene_budget": 0.0,
            "gene_gamma0": 5,
            "gene_gamma_min": 3,
            "gene_shrink_every": 4,
            "clusters": 1,
            "lambda_elg": 0.0,
        },
    },
    "pfedgpa.fashion-mnist": {
        **_PFEDGPA,
        "data": "fashion-mnist",
        "model": "small-cnn",
        "pfedgpa": {"ft_rate": 1.0},
        "fedbabu": {"ft_rate": 1.0},
    },
    "pfedgpa.emnist": {
        **_PFEDGPA,
        "data": "emnist",
        "model": "fedpac-cnn",
        "pfedgpa": {"slice": "last:2", "ft_rate": 1.0},
        "fedbabu": {"ft_rate": 1.0},
    },
    "pfedgpa.cifar10": {
        **_PFEDGPA,
        "data": "cifar10",
        "model": "fedpac-cnn",
        "lr": 0.02,
        "rounds": 300,
        "augment": True,
        "pfedgpa": {"slice": "last:2", "ft_rate": 1.0},
        "fedbabu": {"ft_rate": 1.0},
    },
    # Small enough for a laptop: principal components instead of an autoencoder.
    "pfedgpa.digits": {
        **_PFEDGPA,
        "data": "digits",
        "partition": "dominant:20",
        "valid": 0.1,
        "rounds": 30,
        "lr": 0.02,
        "pfedgpa": {"size": "fast"},
    },
    # What the paper says, and our reading of what it leaves open. Supplements come from all of the
    # validation set; clients ask for one by their number of samples, whatever the others have. The
    # paper's FedAvg gets none: run it with --supplement-size 0.
    "genfed.literal": {
        **_GENFED,
        "validation_shared": True,
        "supplement_below": 300.0,
        "rounds": 2000,
        "eval_every": 10,
        "genfed": {"rho_max": 5, "twins": True},
    },
    # What worked best when we tried: a generous supplement and few parents. Run fedavg with it too,
    # to see what the data do alone, fedavg with --supplement-size 0, and fedavg with --server-only.
    "genfed.strong": {
        **_GENFED,
        "momentum": 0.9,
        "valid": 0.0,
        "validation_size": 0.1,
        "validation_shared": True,
        "supplement_size": 1.0,
        "supplement_below": 1.0,
        "rounds": 150,
        "eval_every": 2,
        "genfed": {"rho_max": 3, "c": 50.0},
    },
}
