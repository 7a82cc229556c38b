import io

import pytest
from rich.console import Console

from fedhelix.store import progress
from fedhelix.store.progress import Progress, below, human_bytes, human_seconds, track


def screen(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system=None,
        legacy_windows=False,
    )


def shown(console: Console) -> str:
    return console.file.getvalue()


def record(round: int, **more) -> dict:
    return {"round": round, "uplink_bytes": 2**20, "seconds": 1.0, **more}


def test_a_terminal_shows_bar_numbers_and_time(monkeypatch):
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    console = screen(terminal=True)
    with Progress(10, "genfed", console=console) as display:
        display.update(record(1, accuracy=0.812, personal_accuracy=0.9))
        display.update(record(2, refused={"3": "NaN"}))
    last = shown(console).splitlines()[-2]  # the very last one only brings the cursor back
    # Two rounds took two minutes of this clock, so eight rounds take eight.
    for text in (
        "genfed",
        "2/10",
        "global 81.2 %",
        "personal 90.0 %",
        "↑ 2.0 MiB",
        "1 refused",
        "8 min 00 s left",
    ):
        assert text in last


def test_the_start_of_processes_is_not_expected_again(monkeypatch):
    clock = iter([0, 0, 70, 80])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    console = screen(terminal=True)
    with Progress(10, "fedavg", console=console) as display:
        display.update(record(1, start_seconds=60.0))
        display.update(record(2))
    # 20 of the 80 seconds were rounds, so eight more rounds take 80.
    assert "1 min 20 s left" in shown(console).splitlines()[-2]


@pytest.mark.parametrize("width", [90, 120])
def test_one_line_is_enough(width, monkeypatch):
    clock = iter([0, 0, 754])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    console = screen(terminal=True, width=width)
    with Progress(200, "pfedgpa", console=console) as display:
        display.update(record(100, accuracy=0.812, personal_accuracy=0.9))
    last = shown(console).splitlines()[-2]
    assert (
        "100/200 global 81.2 % · personal 90.0 % · ↑ 1.0 MiB" in last and "12 min 34 s left" in last
    )
    assert "…" not in last, "nothing is cut off"


def test_a_run_whose_sites_keep_their_scores_has_lines():
    console = screen(terminal=False)
    with Progress(2, "fedavg", lines=True, console=console) as display:
        display.update(record(1))
        display.update(record(2, unevaluated={"0": "reports no scores"}))
    assert [line.split()[0] for line in shown(console).splitlines()] == ["round=2"]


@pytest.mark.parametrize("title", ["fedper", "fedper seed 1 (6/6)", "fedprox (mu=0.1) " * 5])
@pytest.mark.parametrize("first", [0, 90])
@pytest.mark.parametrize("final_work", [False, True])
def test_the_time_left_is_never_cut(title, first, final_work, monkeypatch):
    clock = iter(range(0, 1_000, 54))
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    console = screen(terminal=True, width=80)
    more = {"accuracy": 0.812, "personal_accuracy": 0.9, "clock": 3600.0, "refused": {"1": "NaN"},
            "participants": [0, 1]}  # fmt: skip
    with Progress(200, title, first, console=console, final_work=final_work) as display:
        for round in (90, 100):
            display.update(record(round, **more))
    last = shown(console).splitlines()[-2].removeprefix("\x1b[2K")
    assert "personal 90.0 %" in last and last.rstrip().endswith(
        " s + final fit left" if final_work else " s left"
    )
    assert len(last.rstrip()) <= 78, "a terminal adds ^C, which must not begin another line"


def test_a_long_title_takes_the_place_of_the_uploads():
    console = screen(terminal=True, width=80)
    title = "fedprox@mu=0.1 seed 0 (2/6)"
    with Progress(2, title, console=console) as display:
        display.update(record(2, accuracy=0.27, personal_accuracy=0.255))
    last = shown(console).splitlines()[-2]
    assert title in last and "2/2 global 27.0 % · personal 25.5 %" in last and "↑" not in last


def test_without_a_terminal_it_is_silent_by_default():
    def output(**arguments) -> str:
        console = screen(terminal=False)
        with Progress(10, "fedavg", console=console, **arguments) as display:
            display.update(record(1))
            display.update(record(2, accuracy=0.5, personal_accuracy=None))
        return shown(console)

    assert output() == ""
    assert output(quiet=True, lines=True) == ""
    assert output(lines=True).startswith(
        "round=2 rounds=10 accuracy=0.5000 uploaded_bytes=2097152 seconds="
    )
    assert len(output(lines=True).splitlines()) == 1
    assert output(quiet=False).startswith("round=2 ")


def test_quiet_on_a_terminal():
    console = screen(terminal=True)
    with Progress(10, "fedavg", quiet=True, console=console) as display:
        display.update(record(1, accuracy=0.5))
    assert shown(console) == ""


def test_a_resumed_run_counts_what_was_sent_before():
    console = screen(terminal=False)
    with Progress(4, "fedavg", done=2, lines=True, console=console) as display:
        for round in (1, 2, 3):
            display.update(record(round, score=0.25))
    assert shown(console).startswith("round=3 rounds=4 score=0.2500 uploaded_bytes=3145728")


def test_track_yields_everything_and_leaves_no_bar():
    for terminal in (True, False):
        console = screen(terminal)
        assert list(track([1, 2, 3], "reading", console)) == [1, 2, 3]
        assert ("reading" in shown(console)) == terminal


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (2**50, "1.0 PiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.25, "0.2 s"),
        (9.97, "10 s"),
        (59.6, "1 min 00 s"),
        (3725, "1 h 02 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_long_work_inside_of_a_round_has_a_bar_of_its_own():
    console = screen(terminal=True)
    with Progress(10, "pfedgpa", console=console):
        assert list(below(range(3), "autoencoder")) == [0, 1, 2]
        for number in below(range(100), "diffusion model"):
            if number == 50:
                break
    text = shown(console)
    assert "autoencoder" in text and "diffusion model" in text
    assert "diffusion" not in text.splitlines()[-2]
    assert list(below(range(3), "nobody sees it")) == [0, 1, 2]
