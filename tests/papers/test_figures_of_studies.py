"""Figures of studies: a line for each row in every column, or a dot for each client."""

from fedhelix.papers.figures import figure


def cell(row, column, **more):
    return {"row": row, "column": column, "method": "fedavg", "runs": 2, **more}


def test_curves_are_lines_with_the_mean_of_the_seeds():
    curve = {"rounds": [1, 2], "by_seed": [[0.2, 0.4], [0.4, 0.8]]}
    cells = [
        cell(row, column, accuracy_curve=curve)
        for row in ("one", "other")
        for column in ("left", "right")
    ]
    drawn = figure({"cells": [*cells, {**cell("late", "left"), "runs": 0}]})
    assert [axes.get_title("left") for axes in drawn.axes] == ["left", "right"]
    assert [line.get_label() for line in drawn.axes[0].lines] == ["one", "other"]
    assert [round(value, 6) for value in drawn.axes[0].lines[0].get_ydata()] == [0.3, 0.6]
    band = drawn.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.2, 0.8)
    assert [text.get_text() for text in drawn.legends[0].texts] == ["one", "other"]


def test_vectors_are_dots_for_every_client_of_every_seed():
    vectors = {"untuned": [[0.5, 0.7], [None, 0.6]], "personal": [[0.8, 0.9], [1.0]]}
    drawn = figure({"cells": [cell("one", "left", **vectors)]})
    before, after = drawn.axes[0].collections
    assert before.get_offsets()[:, 0].tolist() == [0.5, 0.6, 0.7]
    assert after.get_offsets()[:, 0].tolist() == [0.8, 0.9, 1]
    assert [text.get_text() for text in drawn.legends[0].texts] == [
        "before fine-tuning",
        "after fine-tuning",
    ]


def test_only_the_rows_that_a_study_names_are_drawn():
    curve = {"rounds": [1, 2], "by_seed": [[0.2, 0.4]]}
    cells = [cell(row, "left", accuracy_curve=curve) for row in ("one", "other")]
    drawn = figure({"drawn": ["other"], "cells": cells})
    assert [line.get_label() for line in drawn.axes[0].lines] == ["other"]


def test_a_measure_goes_across_the_columns_in_which_it_is_known():
    known, unknown = {"mean": 40.0, "se": 1.0}, {"mean": None, "se": None}
    cells = [
        cell("one", column, best=best)
        for column, best in (("20", known), ("40", unknown), ("180", known))
    ]
    axes = figure({"across": "best", "title": "Many", "cells": cells}).axes[0]
    assert axes.containers[0].lines[0].get_xydata().tolist() == [[0, 40], [2, 40]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["20", "40", "180"]


def test_measures_against_a_cost_say_which_rows_have_fewer_seeds():
    def priced(row, runs, column="left"):
        return cell(row, column, sent={"mean": 3.0}, good={"mean": 40.0}) | {"runs": runs}

    cells = [priced("one", 3), priced("few", 1), priced("elsewhere", 5, "right")]
    axes = figure({"against": ["sent", ["good"]], "cells": cells}).axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[3, 40]], [[3, 40]]]
    assert [text.get_text() for text in axes.texts] == ["one", "few (1 seed)"]
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "sent"


def test_costs_are_plain_numbers_that_do_not_overlap():
    cells = [
        cell(f"row {cost}", "left", sent={"mean": cost}, good={"mean": 40.0})
        for cost in (3.2, 5.7, 7.0, 12.5, 25.0)
    ]
    drawn = figure({"against": ["sent", ["good"]], "cells": cells})
    drawn.draw_without_rendering()
    axes = drawn.axes[0]
    left, right = axes.get_xlim()
    ticks = [tick for tick in axes.xaxis.get_major_ticks() if left <= tick.get_loc() <= right]
    assert [tick.label1.get_text() for tick in ticks] == ["5", "10", "20"]
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))


def test_a_table_without_curves_has_no_figure():
    accuracy = {"by_seed": [0.5], "mean": 0.5}
    assert figure({"cells": [cell("one", "left", accuracy=accuracy)]}) is None
