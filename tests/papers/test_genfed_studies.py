from fedhelix.papers.genfed import OURS, TABLE_2, TABLE_3, TABLE_5, method_of, rows_of, table_2, table_3, table_4


def test_rows_name_their_methods():
    assert method_of("GenFed (3)") == ("genfed", {"genfed.schedule": "linear"})
    assert method_of("GenFedUmf (5)") == ("genfed+fedumf", {"genfed.schedule": "wave"})
    assert method_of("GenFedAU (1)") == ("genfed+fedau", {"genfed.schedule": "constant"})
    assert [method_of(row)[0] for row in ("FedAvg", "FedUmf", "FedAU")] == ["fedavg", "fedumf", "fedau"]


def test_the_papers_figures_are_read_as_they_stand():
    assert len(rows_of(TABLE_2)) == 18 and {len(row) for row in rows_of(TABLE_2).values()} == {8}
    assert rows_of(TABLE_5)["FedAvg"][-1] == 44.931
    cell = next(c for c in table_2("gpu") if (c.row, c.column) == ("GenFedAU (3)", "SVHN"))
    assert cell.paper == {"rounds to target": 60, "best on test": 92.894}


def test_time_in_table_3_is_rounds_in_table_2():
    # METHODS: the paper's ratios equal those of its rounds within 0.015.
    rounds, times = rows_of(TABLE_2), rows_of(TABLE_3)
    for row, ratios in times.items():
        full = row if row in rounds else f"{row} (3)"
        for place, ratio in enumerate(ratios):
            assert abs(rounds[full][2 * place] / rounds["FedAvg"][2 * place] - ratio) < 0.016


def test_tables_share_their_runs():
    wide = {(cell.method, repr(sorted(cell.settings.items()))) for cell in table_2("gpu")}
    narrow = {(cell.method, repr(sorted(cell.settings.items()))) for cell in table_3("gpu")}
    calm = {(cell.method, repr(sorted(cell.settings.items()))) for cell in table_4("gpu") if cell.column == "no attack"}
    assert narrow <= wide and calm <= wide
    assert len(table_2("gpu")) == 4 * (18 + len(OURS))
