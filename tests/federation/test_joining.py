"""A client that joins a finished run: its labels and columns mean what they mean in the run."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedhelix import Federation, UserError, from_arrays, load_run

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
NAMES = np.where(Y, "well", "sick")
WELL = X[Y == 1]


def fit(data, split=None, rounds=1, out=None, **more):
    usual = {"engine": "serial", "model": "linear", "kernels": "onednn", "epochs": 1, "cohort": 2}
    return Federation(data, split, **usual | more).fit(rounds, out=out, quiet=True)


def halves(x, y):
    return [(x[:30], y[:30]), (x[30:], y[30:])]


def test_the_labels_of_a_newcomer_are_those_of_the_run():
    run = fit(halves(X, NAMES), method="fedavg-ft", rounds=3)
    number = run.onboard((WELL, ["well"] * len(WELL)))
    split = run.federation.splits[number]
    assert run.federation.data.y[split.train].unique().tolist() == [1]
    assert run.federation.data.y_test[split.test].unique().tolist() == [1]
    with pytest.raises(UserError, match="unknown label of the newcomer 'dead'; there are: sick, "):
        run.onboard((WELL, ["dead"] * len(WELL)))
    with pytest.raises(UserError, match="no label in sample 1"):
        run.onboard((WELL[:3], ["well", None, "well"]))
    with pytest.raises(UserError, match="the classes have no names; give numbers"):
        fit(halves(X, Y)).onboard((WELL, ["well"] * len(WELL)))


def test_numbers_that_could_be_names_or_places_are_refused():
    run = fit(halves(X, (Y + 1).astype(str)))
    with pytest.raises(UserError, match="names or places of the classes 1, 2; give these names"):
        run.onboard((X, Y + 1))
    assert run.onboard((X, (Y + 1).astype(str))) == 2
    assert fit(halves(X, NAMES)).onboard((X, Y)) == 2


def test_a_newcomer_may_be_a_table_with_other_columns_in_another_order():
    table = pd.DataFrame(X, columns=list("abcd")).assign(label=NAMES)
    run = fit([table[:30], table[30:]])
    newcomer = table[["label", "d", "c", "b", "a"]].assign(town="metz")
    number = run.onboard(newcomer)
    pair = run.onboard((newcomer[list("dcba")], NAMES))
    data, splits = run.federation.data, run.federation.splits
    for client in (number, pair):
        first = data.x[splits[client].train[0]]
        assert any(torch.equal(first, row) for row in torch.from_numpy(X))


@pytest.mark.parametrize(
    ("y", "wrong", "words"),
    [(X[:, :3] > 0, 2, r"has 2, but the targets of 'data' are 0 or 1"),
     (np.digitize(X[:, :2], [0, 1]), 3, r"has 3, but the targets of 'data' are 0 to 2")],
    ids=["labels", "classes of tokens"],
)  # fmt: skip
def test_the_targets_of_a_newcomer_have_the_type_of_the_run(y, wrong, words):
    class PerToken(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).reshape(len(x), 2, 3)

    model = "linear" if y.dtype == bool else (lambda: PerToken(4, 6))
    run = fit(from_arrays(X, y), "iid", clients=2, model=model)
    before = run.federation.data.y.dtype
    run.onboard((X[:20], y[:20].astype(int)))
    assert run.federation.data.y.dtype == before
    y = y[:20].astype(int)
    y[5, 1] = wrong
    with pytest.raises(UserError, match=words):
        run.onboard((X[:20], y))


def test_newcomers_have_rows_and_numbers_beside_named_clients(tmp_path):
    metric = {"share": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}
    for owners, number, names in [
        (np.array(["ulm", "bern"])[np.arange(60) % 2], 2, ["bern", "ulm", "newcomer-2"]),
        (np.arange(60) % 2 + 2, 4, [2, 3, 4]),
        (np.arange(60) % 2 + 1, 3, [1, 2, 3]),
        (np.arange(60) % 2, 2, [0, 1, 2]),
    ]:
        run = fit(from_arrays(X, Y, owners=owners))
        assert run.onboard((X[:20], Y[:20])) == number
        assert run.evaluate(metric).index.tolist() == names
        assert run.predict(X[:3], client=number).shape == (3,)
        split = run.federation.splits[2]
        assert np.isin(split.train, np.arange(48, 64)).all() and len(split.train) == 16


def test_a_newcomer_has_the_name_that_is_given():
    run = fit(from_arrays(X, Y, owners=np.array(["ulm", "bern"])[np.arange(60) % 2]))
    assert run.onboard((X[:20], Y[:20]), name="basel") == 2
    assert run.onboard((X[:20], Y[:20]), name=7) == 3
    assert run.federation.names == ("bern", "ulm", "basel", "7")
    assert run.predict(X[:3], client="basel").shape == (3,)
    with pytest.raises(UserError, match="there is a client 'ulm' already; give the newcomer anot"):
        run.onboard((X[:20], Y[:20]), name="ulm")
    with pytest.raises(UserError, match=r"name is text or a whole number, not \['a'\]"):
        run.onboard((X[:20], Y[:20]), name=["a"])
    assert run.federation.clients == 4

    numbers = fit(from_arrays(X, Y, owners=np.arange(60) % 2 + 5))
    assert numbers.onboard((X[:20], Y[:20]), name=40) == 40
    assert numbers.onboard((X[:20], Y[:20])) == 41
    with pytest.raises(UserError, match="names of these clients are whole numbers, not 'basel'"):
        numbers.onboard((X[:20], Y[:20]), name="basel")
    nameless = Federation(from_arrays(X, Y), "iid", clients=2, model="linear").fit(1, quiet=True)
    with pytest.raises(UserError, match="have no names, only numbers, and the newcomer is 2"):
        nameless.onboard((X[:20], Y[:20]), name="basel")


def test_the_summary_of_a_run_counts_its_own_clients(tmp_path):
    data = from_arrays(X, Y, owners=np.arange(60) % 2)
    run = fit(data, out=tmp_path / "run")
    run.onboard((X[:20], Y[:20]))
    assert run.summary["clients"] == 2 and "| Clients | 2 |" in run.export(tmp_path).joinpath(
        "README.md"
    ).read_text(encoding="utf-8")
    with pytest.raises(
        UserError, match=r"^1 client joined this federation after .*; run_rounds\(rounds=.* folder"
    ):
        load_run(tmp_path / "run", run.federation)
    later = run.federation.fit(1, out=tmp_path / "later", quiet=True)
    assert later.summary["clients"] == 3
    assert load_run(tmp_path / "later", run.federation).summary["clients"] == 3


def test_a_usual_cohort_grows_with_the_clients():
    """All of three clients take part, and all of four; two that were asked for stay two."""
    thirds = [(X[:20], Y[:20]), (X[20:40], Y[20:40]), (X[40:], Y[40:])]

    def participants(cohort):
        run = fit(thirds, cohort=cohort)
        run.onboard((X[:10], Y[:10]))
        rounds = run.federation.run_rounds(rounds=3, state=run.state)
        return [len(record["participants"]) for record, _ in rounds]

    assert participants(None) == [4, 4]
    assert participants(2) == [2, 2]
