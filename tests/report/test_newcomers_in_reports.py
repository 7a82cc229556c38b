"""Whose values are whose, once newcomers are evaluated in the place of the known clients."""

import csv

from fedhelix.report.results import read
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

SETTINGS = {
    "data": "digits", "clients": 6, "newcomers": 2, "newcomers_after": 2, "rounds": 4,
    "model": "linear", "attack": "sign-flip", "attack_share": 0.34,
}  # fmt: skip


def test_newcomers_keep_their_numbers_and_marks(tmp_path, cli):
    Session(quiet=True).start(make_spec("fedavg", SETTINGS), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    result, (*_, last) = read(folder), folder.records()
    assert sorted(result.clients()) == list(range(8))
    for client, history in result.clients().items():
        assert [round for round, _ in history] == ([3, 4] if client >= 6 else [1, 2])
    assert [result.client_finals()[client] for client in (6, 7)] == last["personal"]
    assert cli("export", "run", "--clients", "--out", "clients.csv").code == 0
    with (tmp_path / "clients.csv").open(newline="") as file:
        marked = {int(row["client"]) for row in csv.DictReader(file) if row["attacker"] == "True"}
    assert marked == set(result.attackers)
