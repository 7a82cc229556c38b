import json

import pytest

from fedhelix.engines.remembered import remembered

COLOURS = ("red", "blue")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedhelix" / "colours.json"


def never():
    pytest.fail("it was chosen already")


def test_a_choice_is_made_once(cache):
    assert remembered("colours.json", "sky", COLOURS, lambda: "blue") == "blue"
    assert remembered("colours.json", "sky", COLOURS, never) == "blue"
    assert remembered("colours.json", "rose", COLOURS, lambda: "red") == "red"
    assert json.loads(cache.read_text()) == {"sky": "blue", "rose": "red"}


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"sky": "gre', '{"sky": "green"}', '{"sky": 3}'])
def test_a_damaged_file_or_an_unknown_choice_counts_as_none(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert remembered("colours.json", "sky", COLOURS, lambda: "blue") == "blue"
    assert json.loads(cache.read_text()) == {"sky": "blue"}


def test_of_two_that_choose_at_the_same_time_the_first_counts(cache):
    def slow():
        remembered("colours.json", "sky", COLOURS, lambda: "blue")  # another process
        return "red"

    assert remembered("colours.json", "sky", COLOURS, slow) == "blue"


def test_without_a_cache_everybody_chooses(cache):
    cache.parent.write_text("a file where the folder should be")
    assert remembered("colours.json", "sky", COLOURS, lambda: "red") == "red"
    assert remembered("colours.json", "sky", COLOURS, lambda: "blue") == "blue"
