"""A server and three sites on this machine, with TLS and keys: train across them, and compare with
the simulation.

python examples/deployment.py [METHOD] [ROUNDS]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedhelix.deploy import submit
from fedhelix.deploy.localhost import Local
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

FOLDER = Path("runs/demo-deploy")


def main(method: str = "genfed", rounds: int = 5) -> None:
    """Both ways with one seed, side by side."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    spec = make_spec(method, {"clients": 3, "rounds": rounds})
    print("Starting a server and three sites ...")
    with Local(FOLDER / "deployment", sites=3) as local:
        print(
            f"They talk through https://{local.address}; their logs are in {local.folder / 'logs'}."
        )
        submit.run_rounds(local.control(), submit.create(spec, FOLDER / "sites"), quiet=False)
    print("Everything is stopped. Now the simulation with the same seed ...")
    spec.config.federation(spec.method).fit(
        rounds, out=FOLDER / "simulation", config=spec.as_dict(), quiet=True
    )
    print(
        f"{'round':>5}  {'sites: global':>14} {'personal':>9}  {'simulation: global':>18} {'personal':>9}"
    )
    for one, other in zip(
        *(RunFolder.open(FOLDER / name).records() for name in ("sites", "simulation")), strict=True
    ):
        figures = [
            record[key] for record in (one, other) for key in ("accuracy", "personal_accuracy")
        ]
        print("{:>5}  {:>14.4f} {:>9.4f}  {:>18.4f} {:>9.4f}".format(one["round"], *figures))
        if [f"{value:.4f}" for value in figures[:2]] != [f"{value:.4f}" for value in figures[2:]]:
            sys.exit("The two differ.")
    print(
        f"The same accuracies. The run folders are {FOLDER / 'sites'} and {FOLDER / 'simulation'}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
