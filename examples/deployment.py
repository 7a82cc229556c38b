"""Train across a server and three sites on this machine, with TLS and keys, and compare the result
with the simulation.

python examples/deployment.py [METHOD] [ROUNDS]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedhelix.deploy import submit
from fedhelix.deploy.localhost import Local
from fedhelix.runs.config import make_spec
from fedhelix.store import RunFolder

FOLDER = Path("runs/demo-deploy")


def main(method: str = "genfed", rounds: int = 5) -> None:
    """Run the deployment and the simulation with the same seed, and print both."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    spec = make_spec(method, {"clients": 3, "rounds": rounds})
    print("Starting a server and three sites ...")
    with Local(FOLDER / "deployment", sites=3) as local:
        print(
            f"They communicate through https://{local.address}; their logs are in {local.folder / 'logs'}."
        )
        submit.run_rounds(local.control(), submit.create(spec, FOLDER / "sites"), quiet=False)
    print("All processes have stopped. Now the simulation with the same seed ...")
    spec.config.federation(spec.method).fit(
        rounds, out=FOLDER / "simulation", config=spec.as_dict(), quiet=True
    )
    heads = ("round", "sites: global", "personal", "simulation: global", "personal")
    print("{:>5}  {:>14} {:>9}  {:>18} {:>9}".format(*heads))
    for one, other in zip(
        *(RunFolder.open(FOLDER / name).records() for name in ("sites", "simulation")), strict=True
    ):
        figures = [
            record[key] for record in (one, other) for key in ("accuracy", "personal_accuracy")
        ]
        print("{:>5}  {:>14.4f} {:>9.4f}  {:>18.4f} {:>9.4f}".format(one["round"], *figures))
        if [f"{value:.4f}" for value in figures[:2]] != [f"{value:.4f}" for value in figures[2:]]:
            sys.exit("The accuracies differ.")
    print(
        f"The accuracies are the same. The run folders are {FOLDER / 'sites'} and {FOLDER / 'simulation'}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
