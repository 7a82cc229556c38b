import re

import method_metadata as metadata
import pandas as pd
import pytest

from fedhelix.core.errors import UserError
from fedhelix.report.export import export
from fedhelix.report.headline import warnings
from fedhelix.report.results import read as result_of

pytest.importorskip("pyarrow", reason="needs pip install 'fedhelix[report]'")


def test_a_run_that_was_cut_is_named(make_run, tmp_path):
    run = make_run(rounds=4)
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(lines[:3]))
    damage = f"{run.path} was cut: metrics.jsonl holds 3 of its 4 rounds."
    with pytest.warns(UserWarning, match=f"^{re.escape(damage)}$"):
        assert len(export([run], tmp_path / "t.csv")) == 3
    assert warnings([result_of(run)]) == [damage]


def test_a_row_per_round_or_per_client(make_run, tmp_path):
    runs = [
        make_run("fedavg", rounds=4, clients=3, census=metadata.CENSUS),
        make_run("local", 5, rounds=2, clients=3),
    ]
    for name, read in (("t.csv", pd.read_csv), ("t.parquet", pd.read_parquet)):
        export(runs, tmp_path / name)
        table = read(tmp_path / name)
        assert table["method"].tolist() == ["fedavg"] * 4 + ["local"] * 2
        assert table["seed"].tolist() == [0] * 4 + [5] * 2 and table["round"].tolist() == [
            1,
            2,
            3,
            4,
            1,
            2,
        ]
        assert "notes" not in table and table["personal_accuracy"].notna().sum() == 3
    each = export(runs, tmp_path / "c.csv", by_client=True)
    assert len(each) == 9 and each["attacker"].sum() == 2
    with pytest.raises(UserError, match=r"must end in \.csv or \.parquet"):
        export(runs, tmp_path / "t.xlsx")


def test_clients_keep_their_names(make_run, tmp_path):
    census = {**metadata.CENSUS, "names": ["ulm", "aachen", "köln"]}
    runs = [make_run("fedavg", rounds=2, clients=3, census=census), make_run("local", 5, rounds=2)]
    each = export(runs, tmp_path / "c.csv", by_client=True)
    named = each[each["method"] == "fedavg"]
    assert dict(zip(named["client"], named["name"], strict=True)) == {
        0: "ulm",
        1: "aachen",
        2: "köln",
    }
    assert set(each[each["method"] == "local"]["name"]) == {""}


def test_the_largest_epsilon_of_a_round_is_a_column(make_run, tmp_path):
    private = make_run("private", rounds=2, metadata=lambda n: {"epsilon": {"0": n, "1": n / 2}})
    table = export([private, make_run("fedavg", rounds=1)], tmp_path / "t.csv")
    assert table["epsilon"].tolist()[:2] == [1, 2] and pd.isna(table["epsilon"][2])
