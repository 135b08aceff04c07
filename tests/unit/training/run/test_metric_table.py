"""The table of metrics explains every name that the code writes, and has no other."""

from __future__ import annotations

import re
from pathlib import Path

import training
from training.run import metric_table
from training.run.metric_table import FAMILIES, METRICS, find_note, find_unexplained

SOURCES = Path(training.__file__).parent
NAMES = re.compile(rf'"((?:{"|".join(FAMILIES)})/[^" ]+)"')


def read_code() -> str:
    table = Path(metric_table.__file__)
    return "\n".join(path.read_text() for path in SOURCES.rglob("*.py") if path != table)


def test_every_name_that_the_code_writes_is_explained():
    names = set(NAMES.findall(read_code()))

    assert len(names) > 90
    assert find_unexplained(names - {"train/{name}", "eval/{name}"}) == []


def test_every_explained_name_is_one_that_the_code_has():
    hearth = SOURCES.parent / "hearth"
    folders = ("losses", "sdk", "trainer")
    parts = [path for folder in folders for path in (hearth / folder).rglob("*.py")]
    code = read_code() + "".join(path.read_text() for path in parts)

    for note in METRICS:
        end = note.name.split("/", 1)[1]
        bare = end.removesuffix("_sum")
        forms = (f'"{note.name}"', f'/{end}"', f'"{end}"', f'"{bare}"', f'"{bare}:sum"')
        assert any(form in code for form in forms), note.name


def test_each_metric_is_explained_once_in_a_family_in_whole_sentences():
    names = [note.name for note in METRICS]
    assert len(set(names)) == len(names) > 120
    for note in METRICS:
        assert note.name.split("/")[0] in FAMILIES
        assert note.meaning.endswith(".")
        assert note.healthy
        assert not note.healthy.endswith(".")


def test_names_with_a_part_of_their_own_are_found_and_others_are_not():
    assert find_note("eval/pass@16").name == "eval/pass@{k}"
    assert find_note("rollout/dropped/too_easy").name == "rollout/dropped/{reason}"
    assert find_unexplained(["type", "step", "train/lr", "train/lr2", "made/0"]) == [
        "train/lr2",
        "made/0",
    ]
