import pytest

from fedhelix.runs.comparison import name_of


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["fedavg", "genfed"], "compare-fedavg-genfed"),
        (["a" * 29, "b" * 30], f"compare-{'a' * 29}-{'b' * 30}"),  # 60 characters
        (["a" * 30, "b" * 30], f"compare-{'a' * 30}-and-1-more"),
        (
            ["fedavg", "fedprox@mu=0.1", "anchored-compact+anchored-genfed+anchored-local"],
            "compare-fedavg-fedprox@mu=0.1-and-1-more",
        ),
        (["a" * 20, "b" * 20, "c" * 9, "d" * 9], f"compare-{'a' * 20}-{'b' * 20}-and-2-more"),
        (["a" * 70, "b"], f"compare-{'a' * 70}-and-1-more"),
        (["a" * 70], f"compare-{'a' * 70}"),
    ],
)
def test_a_long_comparison_is_called_by_its_first_methods(labels, name):
    assert name_of(labels) == name


def test_the_folder_of_a_long_comparison_says_how_many_methods_it_leaves_out(cli):
    variants = [f"fedavg@lr=0.0{n}" for n in range(1, 9)]
    small = ("--clients", 2, "--rounds", 1, "--model", "linear", "--quiet")
    done = cli("compare", *variants, *small)
    assert "compare-fedavg@lr=0.01-fedavg@lr=0.02-fedavg@lr=0.03-and-5-more\n" in done.out
