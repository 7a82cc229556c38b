"""Train across a server and three sites on this machine, with TLS and keys, and compare the result
with the simulation.

python examples/deployment.py [METHOD] [ROUNDS]
python examples/deployment.py --protected

With --protected the sites have a policy, the method has differential privacy and secure
aggregation, sites sign their masking keys, and in the end all audit logs are checked.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedhelix.deploy import submit
from fedhelix.deploy.audit_log import read_log
from fedhelix.deploy.localhost import LocalDeployment
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

FOLDER = Path("runs/demo-deploy")


def main(method: str = "genfed", rounds: int = 5) -> None:
    """Run the deployment and the simulation with the same seed, and print both."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    spec = make_spec(method, {"clients": 3, "rounds": rounds})
    print("Starting a server and three sites ...")
    with LocalDeployment(FOLDER / "deployment", sites=3) as local, local.control() as control:
        print(f"They communicate through https://{local.address}; logs: {local.folder / 'logs'}.")
        submit.follow(control, submit.create(spec, FOLDER / "sites"), quiet=False)
    print("All processes have stopped. Now the simulation with the same seed ...")
    spec.config.federation(spec.method).fit(
        rounds, out=FOLDER / "simulation", config=spec.as_dict(), quiet=True
    )
    show(FOLDER / "sites", FOLDER / "simulation")


def protected(rounds: int = 5) -> None:
    """Run with differential privacy, secure aggregation and a policy at every site.

    Three sites are too few to hide a whole site (`private`); noise hides single samples instead.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    options = {"model": "linear", "epochs": 1, "lr": 0.1, "method.epsilon": 8.0}
    spec = make_spec("secure+dp-sgd", {"clients": 3, "rounds": rounds, **options})
    FOLDER.mkdir(parents=True)
    policy, rules = FOLDER / "policy.toml", Path(__file__).with_name("protected.toml").read_text()
    policy.write_text(f'{rules}\npeers = "deployment/keys"\n')  # whose masks sites trust
    print(f"Starting a server and three sites with the policy {policy.name} ...")
    with LocalDeployment(FOLDER / "deployment", sites=3, policy=policy) as local:
        run = submit.create(spec, FOLDER / "sites", ["minimum=2"])
        with local.control() as control:
            submit.follow(control, run, quiet=False)
        names = local.names
    for record in run.records():
        spent = max(record["metadata"]["epsilon"].values())
        print(f"round {record['round']}: epsilon {spent:.2f}, accuracy {record['accuracy']:.4f}")
    log = read_log(run.path / "audit.jsonl", run.path / "audit.pub")
    print(f"The server's audit log is whole, {len(log)} lines.")
    for name in names:
        folder = FOLDER / "deployment"
        log = read_log(folder / "sites" / f"{name}.jsonl", folder / "keys" / f"{name}.pub")
        sent = sum(entry.get("bytes", 0) for entry in log)
        print(f"{name}: its audit log is whole, {len(log)} lines, {sent:,} bytes left the site.")


def show(sites: Path, simulation: Path) -> None:
    """Print the accuracies of both runs, and stop if they differ."""
    heads = ("round", "sites: global", "personal", "simulation: global", "personal")
    print("{:>5}  {:>14} {:>9}  {:>18} {:>9}".format(*heads))
    records = (RunFolder.open(folder).records() for folder in (sites, simulation))
    for pair in zip(*records, strict=True):
        values = [
            f"{record[key]:.4f}" for record in pair for key in ("accuracy", "personal_accuracy")
        ]
        print("{:>5}  {:>14} {:>9}  {:>18} {:>9}".format(pair[0]["round"], *values))
        if values[:2] != values[2:]:
            sys.exit("The accuracies differ.")
    print(f"The accuracies are the same. The run folders are {sites} and {simulation}.")


if __name__ == "__main__":
    if sys.argv[1:] == ["--protected"]:
        protected()
    else:
        main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
