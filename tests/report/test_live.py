"""Folders as strangers, crashes and deletions leave them: shown harmlessly or not at all."""

import json
import os
import shutil
import subprocess
import sys

import method_metadata as metadata
import pytest

from fedhelix import Federation, partition
from fedhelix.report.headline import warnings
from fedhelix.report.live import Watch, client_history, files, run_details
from fedhelix.report.live import watch as watch_module
from fedhelix.report.live.details import MOST_INCIDENTS
from fedhelix.report.results import read
from fedhelix.store import RunFolder


@pytest.fixture
def watch(tmp_path) -> Watch:
    return Watch(tmp_path)


def only(watch: Watch) -> dict:
    watch.refresh()
    (run,) = watch.overview()
    return run


def test_a_finished_run_costs_no_record(make_run, watch):
    make_run("genfed", seed=3, rounds=4, name="mine")
    run = only(watch)
    assert (run["id"], run["method"], run["data"], run["seed"]) == ("mine", "genfed", "digits", 3)
    assert (run["status"], run["done"], run["uploaded"], run["seconds"]) == (
        "complete",
        4,
        4 * 2**20,
        6.0,
    )
    assert watch.runs["mine"].offset == 0, "its records were not read"


def test_a_run_made_in_python_is_listed_with_its_partition(make_run, watch):
    folder = make_run(config={"library": True, "made_from": {"partition": "dirichlet:0.1"}})
    assert only(watch)["setting"] == "digits · dirichlet:0.1"
    assert read(folder).circumstances["partition"] == "dirichlet:0.1", "reports tell it, too"


def test_attacked_runs_and_those_with_devices_are_listed_apart(make_run, watch):
    make_run(config={"attack": "sign-flip"})
    assert only(watch)["setting"] == "digits · sign-flip"
    make_run(name="slow", summary=False, incidents={"clock": 9.0}, config={"data": "digits"})
    done = make_run(name="done").path / "summary.json"
    done.write_text(json.dumps({**json.loads(done.read_text()), "clock": 9.0}))
    watch.refresh()
    for name in ("slow", "done"):
        assert watch.runs[name].overview()["setting"] == "digits · simulated devices"


def test_a_partition_that_is_a_value_is_listed_as_on_the_command_line(watch, tmp_path):
    clients = partition.dirichlet(clients=3, alpha=0.5)
    fed = Federation("wine", clients, model="linear", engine="serial", kernels="onednn")
    run = fed.fit(1, out=tmp_path / "mine", quiet=True)
    assert only(watch)["setting"] == "wine · dirichlet:0.5"
    assert read(run.folder).circumstances["partition"] == "dirichlet:0.5", "reports tell it, too"


def test_a_growing_run_is_read_once(watch, tmp_path):
    with RunFolder.create(
        tmp_path / "mine", {"seed": 0, "rounds": 9, "method": {"name": "fedavg"}}
    ) as folder:
        folder.append({"round": 1, "personal_accuracy": 0.5, "uplink_bytes": 2**20, "seconds": 1.0})
        run = only(watch)
        assert (run["status"], run["done"], run["rounds"], run["value"]) == ("running", 1, 9, 0.5)
        before = watch.runs["mine"].offset
        assert watch.refresh() == ([], []), "nothing new"
        folder.append({"round": 2, "uplink_bytes": 2**20, "seconds": 1.0})
        assert watch.refresh() == (["mine"], [])
        with (tmp_path / "mine" / "metrics.jsonl").open("ab") as file:
            file.write(b'{"round": 3, "pers')
        assert only(watch)["done"] == 2 and watch.runs["mine"].offset > before
        line = watch.runs["mine"].line()
        assert line["x"] == {"round": [1, 2], "mib": [1.0, 2.0], "seconds": [1.0, 2.0]}
        assert line["y"] == {"personal_accuracy": {"mid": [0.5, None]}}
    assert only(watch)["status"] == "stopped"


def test_a_file_that_was_written_anew_is_read_anew(watch, tmp_path):
    folder = RunFolder.create(tmp_path / "mine", {"method": {"name": "fedavg"}})
    with folder:
        for round in (1, 2, 3):
            folder.append({"round": round})
        assert only(watch)["done"] == 3
        folder.restore()  # no checkpoint: all rounds are run again
        folder.append({"round": 1})
    assert only(watch)["done"] == 1


def test_damage_is_named_and_the_others_go_on(make_run, watch, tmp_path):
    make_run(rounds=2, name="good")
    bad = make_run(rounds=3, name="bad", summary=False)
    with (bad.path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'not json\n[1]\n{"round": "x"}\n{"round": 4, "personal_accuracy": 1e999}\n'
            + b"[" * 100000
            + b"\n"
        )
    torn = make_run(rounds=1, name="torn", summary=False)
    (torn.path / "config.toml").write_bytes(b"\xff = [")
    (make_run(rounds=1, name="half").path / "summary.json").write_text("{")
    watch.refresh()
    shown = {run["id"]: run for run in watch.overview()}
    assert shown["good"]["status"] == "complete"
    assert shown["bad"]["done"] == 3 and shown["bad"]["skipped"] == 5
    assert (shown["torn"]["status"], shown["torn"]["problem"]) == (
        "damaged",
        "config.toml is damaged",
    )
    assert shown["half"]["problem"] == "summary.json is damaged"
    for name in shown:
        json.dumps(run_details(watch.runs[name]), allow_nan=False)
    shutil.rmtree(bad.path)
    assert watch.refresh() == ([], ["bad"]) and watch.get("bad") is None
    assert list(watch.runs["good"].records())


def test_each_file_is_mended_by_itself(make_run, watch, tmp_path):
    run = make_run(rounds=1, name="mine")
    config, summary = run.path / "config.toml", run.path / "summary.json"
    sound = config.read_bytes(), summary.read_bytes()
    summary.write_text("{")
    assert only(watch)["problem"] == "summary.json is damaged"
    config.write_bytes(sound[0] + b"# changed\n")
    assert only(watch)["problem"] == "summary.json is damaged"
    config.write_text("[")
    assert only(watch)["problem"] == "config.toml is damaged; summary.json is damaged"
    summary.write_bytes(sound[1])
    assert only(watch)["problem"] == "config.toml is damaged"
    config.write_bytes(sound[0])
    assert only(watch)["status"] == "complete"


def test_links_and_pipes_are_not_followed(make_run, watch, tmp_path):
    secret = tmp_path / ".elsewhere"
    secret.mkdir()
    (secret / "config.toml").write_text('format = 1\n[method]\nname = "secret"\n')
    (secret / "summary.json").write_text('{"method": "secret"}')
    (tmp_path / "link").symlink_to(secret, target_is_directory=True)
    (tmp_path / "files").mkdir()
    for name in ("config.toml", "summary.json", "metrics.jsonl", "lock"):
        (tmp_path / "files" / name).symlink_to(secret / name)
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "config.toml").write_text("format = 1")
    os.mkfifo(tmp_path / "pipes" / "metrics.jsonl")
    watch.refresh()
    shown = {run["id"]: run for run in watch.overview()}
    assert shown.keys() == {"files", "pipes"}
    assert shown["files"]["status"] == "damaged" and "secret" not in json.dumps(shown)
    assert run_details(watch.runs["pipes"])["done"] == 0


def test_huge_lines_and_files_are_bounded(make_run, watch, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES_OF_A_LINE", 1000)
    monkeypatch.setattr(files, "MOST_BYTES_OF_A_FILE", 1000)
    run = make_run(rounds=1, name="mine", summary=False, clients=2)
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "x": "' + b"a" * 5000 + b'"}\n{"round": 3}\n')
    assert only(watch)["done"] == 3 and list(watch.runs["mine"].rounds) == [1, 3]
    (run.path / "config.toml").write_text("x = 1\n" * 1000)
    assert only(watch)["problem"] == "config.toml cannot be read"


def test_of_a_large_file_the_last_records_count(make_run, watch, monkeypatch):
    make_run(rounds=40, clients=2, name="mine", incidents={"refused": {"1": "NaN"}})
    monkeypatch.setattr(files, "MOST_BYTES_AT_ONCE", 1000)
    watch.refresh()
    assert run_details(watch.runs["mine"])["incidents"][-1][0] == 40
    assert client_history(watch.runs["mine"], 0)["rounds"][-1] == 40
    assert 0 < len(list(watch.runs["mine"].records())) < 40


def test_a_run_that_diverged_is_not_shown_with_an_earlier_value(watch, tmp_path):
    with RunFolder.create(tmp_path / "mine", {"method": {"name": "fedavg"}}) as folder:
        folder.append({"round": 1, "personal_score": 0.5, "personal": [0.5]})
        assert only(watch)["value"] == 0.5
        folder.append({"round": 2, "personal_score": None, "personal": [None], "score": 0.4})
        folder.append({"round": 3})
        assert only(watch)["value"] is None
        folder.write_summary({"complete": True, "personal_score": None})
    assert only(watch)["value"] is None and run_details(watch.runs["mine"])["clients"] == []


def test_only_known_names_lead_to_runs(make_run, tmp_path):
    make_run(rounds=1, name="mine")
    (tmp_path / "inside").mkdir()
    watch = Watch(tmp_path / "inside")
    watch.refresh()
    for name in ("../mine", "/etc", "", ".", "mine\0", str(tmp_path / "mine")):
        assert watch.get(name) is None


def test_clients_and_their_histories(make_run, watch):
    census = {"samples": [5, 6, 7, 8], "attackers": [3], "evaluated": [1, 3]}
    census["names"] = ["bern", "graz", "metz", "ulm"]
    make_run(rounds=4, clients=2, name="mine", census=census, metadata=metadata.genfed)
    watch.refresh()
    details = run_details(watch.runs["mine"])
    people = [(one["client"], one["attacker"], one["samples"]) for one in details["clients"]]
    assert people == [(1, False, 6), (3, True, 8)]
    assert [one["name"] for one in details["clients"]] == ["graz", "ulm"]
    assert [figure["name"] for figure in details["figures"]] == ["fitness"]
    assert ["rho", "1"] in details["recorded"] and ["fitness", "0.16, 0.12, 0.1"] in details[
        "recorded"
    ]
    history = client_history(watch.runs["mine"], 3)
    assert history["rounds"] == [2, 4] and history["values"][-1] == details["clients"][1]["value"]
    assert history["name"] == "ulm" and client_history(watch.runs["mine"], 99)["name"] == "99"
    assert client_history(watch.runs["mine"], 99)["values"] == []


def test_what_went_wrong_last(make_run, watch):
    reported = {
        "refused": {"1": "NaN \ud800"},
        "missing": {"2": "late"},
        "troubles": {"site-2": "twice"},
        "unevaluated": [1],
    }
    make_run(rounds=40, clients=2, name="mine", incidents=reported)
    watch.refresh()
    incidents = run_details(watch.runs["mine"])["incidents"]
    assert incidents[-3:] == [
        [40, "refused", "1", "NaN ?"],
        [40, "missing", "2", "late"],
        [40, "troubles", "site-2", "twice"],
    ]
    assert len(incidents) == MOST_INCIDENTS


def test_a_folder_that_is_itself_a_run(make_run):
    run = make_run(rounds=1, name="mine")
    assert only(Watch(run.path))["id"] == "mine"


def test_a_scan_that_took_long_is_not_repeated_at_once(make_run, watch, monkeypatch):
    make_run(rounds=2, name="first")
    monkeypatch.setattr(watch_module, "QUICK", -1.0)  # every scan is slow
    only(watch)
    make_run(rounds=2, name="second")
    assert watch.refresh() == ([], []) and list(watch.runs) == ["first"]
    watch.due = 0.0
    assert watch.refresh() == (["second"], [])


def test_reports_and_the_dashboard_do_without_pytorch():
    code = (
        "import sys, fedhelix.report.page, fedhelix.report.server, fedhelix.report.live.comparison;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_that_diverges_says_so_while_it_runs_and_after(watch, tmp_path):
    with RunFolder.create(tmp_path / "mine", {"method": {"name": "fedavg"}}) as folder:
        record = {"participants": [0, 1], "missing": {}, "personal_accuracy": 0.9}
        folder.append({"round": 1, "train_loss": 0.8, **record})
        folder.append({"round": 2, "train_loss": None, **record, "participants": []})
        assert only(watch)["diverged"] is None, "nobody trained in round 2"
        folder.append({"round": 3, "train_loss": None, **record})
        assert only(watch)["diverged"] == 3
        (sentence, idle, _) = run_details(watch.runs["mine"])["warnings"]
        assert sentence == "mine has diverged since round 3."
        assert idle == "mine: no upload arrived in 1 round."
        folder.write_summary({"complete": True, "diverged": 3, "advice": "lower lr", "rounds": 3})
    fresh = Watch(tmp_path)
    assert only(fresh)["diverged"] == 3 and fresh.runs["mine"].offset == 0
    sentences = run_details(fresh.runs["mine"])["warnings"]
    assert sentences[0] == "mine has diverged since round 3. Lower lr."
    told = warnings([read(RunFolder.open(tmp_path / "mine"))])
    assert sentences == [one.replace(str(tmp_path / "mine"), "mine") for one in told]


def test_entries_of_a_wrong_type_are_left_out(watch, tmp_path):
    odd = ("x", 5, [1], {"a": [2]}, None, True)
    with RunFolder.create(tmp_path / "mine", {"method": {"name": "fedavg"}}) as folder:
        folder.write_clients({key: ["x", None, 3] for key in ("evaluated", "samples", "attackers")})
    keys = ("participants", "missing", "refused", "unevaluated", "troubles", "personal", "metadata",
            "train_loss", "loss", "personal_accuracy", "arrival_bytes", "seconds")  # fmt: skip
    pairs = [(key, value) for key in keys for value in odd]
    with (tmp_path / "mine" / "metrics.jsonl").open("w") as file:
        for number, (key, value) in enumerate(pairs, start=1):
            file.write(json.dumps({"round": number, "train_loss": 1.0, key: value}) + "\n")
    assert only(watch)["done"] == len(pairs)
    json.dumps(run_details(watch.runs["mine"]), allow_nan=False)
    json.dumps(client_history(watch.runs["mine"], 0), allow_nan=False)
