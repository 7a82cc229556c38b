"""What the methods record of a round, as small examples."""

CENSUS = {
    "samples": [30, 50, 20],
    "attackers": [2],
    "evaluated": [0, 1, 2],
    "classes": [[10, 20], [50, 0], [0, 20]],
}


def genfed(round: int) -> dict:
    return {
        "rho": 1 + round // 10,
        "selected": [0],
        "fitness": {"0": 0.04 * round, "1": 0.03 * round, "2": 0.1},
    }


def gene_fl(round: int) -> dict:
    where = {"positions": {"0": [0.0, 1.0], "1": [1.0, 0.0], "2": [1.1, 0.1]}} if round == 1 else {}
    layers = {"0": ["layer2.conv", "layer10.conv"], "1": ["layer2.conv"]}
    return {
        "units": layers,
        "clusters": {"0": 0, "1": 1},
        "mask_density": 0.5 / round,
        "gamma": 2,
        **where,
    }


def pfedgpa(round: int) -> dict:
    near = {
        "generated_to_nearest": [1.0, 2.0],
        "uploads_spread": [4.0, 5.0, 6.0],
        "nearest_upload": [4.0, 5.0, 5.0],
    }
    return {"distances": near, "reconstruction": 0.01} if round == 20 else {}
