"""Rows times columns, and the published numbers that belong to the cells."""

import pytest

from fedhelix.papers.cells import Column, Row, cross
from fedhelix.papers.published import NUMBERS, load

GENE_FL = load("gene_fl")
ROWS = [Row("FedAvg", "fedavg"), Row("GenFed", "genfed", {"lr": 0.5})]
COLUMNS = [Column("C10 s=4", {"data": "cifar10", "lr": 0.1}), Column("digits", {})]


def test_cells_are_ordered_by_column_or_by_row():
    def positions(**options):
        return [(cell.row, cell.column) for cell in cross(ROWS, COLUMNS, **options)]

    first, second = COLUMNS
    by_column = [(row.name, column.name) for column in (first, second) for row in ROWS]
    assert positions() == by_column
    assert positions(by_row=True) == sorted(by_column)


def test_settings_of_a_row_override_those_of_its_column():
    fedavg, genfed = cross(ROWS, COLUMNS[:1])
    assert fedavg.settings == {"data": "cifar10", "lr": 0.1}
    assert genfed.settings == {"data": "cifar10", "lr": 0.5}


def test_cells_have_the_published_numbers_of_their_row_and_column():
    cells = {
        (cell.row, cell.column): cell.paper for cell in cross(ROWS, COLUMNS, GENE_FL["table1"])
    }
    assert cells["FedAvg", "C10 s=4"] == {"accuracy of the known": 60.89, "uploads in GiB": 41.66}
    assert cells["FedAvg", "digits"] == cells["GenFed", "C10 s=4"] == {}


def test_a_single_number_holds_for_all_columns():
    downloads = GENE_FL["table3"].numbers["initial download in MiB"]
    assert {downloads["FedBN", column] for column in GENE_FL["table3"].columns} == {42.6}


@pytest.mark.parametrize("paper", sorted(path.stem for path in NUMBERS.iterdir()))
def test_every_row_has_a_number_in_every_column(paper):
    for table in load(paper).values():
        for numbers in table.numbers.values():
            assert len(numbers) == len({row for row, _ in numbers}) * len(table.columns)
