from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from hearth.errors import RequestError
from hearth.sync.folders import put_in_place, remove_folder, sweep, write_draft


def write(folder: Path, text: str, *, overwrite: bool = True) -> None:
    with write_draft(folder, overwrite=overwrite) as draft:
        (draft / "text").write_text(text)


def plant(folder: Path, text: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "text").write_text(text)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_folder_appears_when_the_draft_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "a"

    with write_draft(folder) as draft:
        (draft / "below").mkdir()
        (draft / "below" / "text").write_text("x")
        assert not folder.exists()

    assert (folder / "below" / "text").read_text() == "x"
    assert names(tmp_path / "root") == ["a"]


def test_a_draft_that_fails_leaves_the_old_version(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")

    with pytest.raises(ZeroDivisionError), write_draft(tmp_path / "a", overwrite=True) as draft:
        (draft / "text").write_text(str(1 // 0))

    assert (tmp_path / "a" / "text").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_taken_name_is_refused_also_when_it_is_taken_meanwhile(tmp_path: Path) -> None:
    with (
        pytest.raises(RequestError, match="name must be new, got 'a': it exists already"),
        write_draft(tmp_path / "a"),
    ):
        plant(tmp_path / "a", "first")
    with pytest.raises(RequestError, match="must be new"):
        write(tmp_path / "a", "second", overwrite=False)

    assert (tmp_path / "a" / "text").read_text() == "first"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_new_version_takes_the_place_of_the_old(tmp_path: Path, can_exchange: bool) -> None:
    old, new = plant(tmp_path / "a", "old"), plant(tmp_path / ".draft-a-00", "new")
    (old / "only-old").touch()

    put_in_place(new, old, overwrite=True, can_exchange=can_exchange)

    assert names(tmp_path / "a") == ["text"]
    assert (tmp_path / "a" / "text").read_text() == "new"
    sweep(tmp_path)
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux swaps two names in one step")
def test_an_overwritten_folder_is_there_at_every_moment(tmp_path: Path) -> None:
    write(tmp_path / "a", "0")
    missed: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                # The directory itself: a name that was looked up may be the old version's by now.
                os.stat(tmp_path / "a")  # noqa: PTH116 - the plain system call
            except FileNotFoundError:
                missed.append("a")

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(100):
        put_in_place(plant(tmp_path / f".draft-a-{number}"), tmp_path / "a", overwrite=True)
    done.set()
    watcher.join()

    assert missed == []


@pytest.mark.parametrize(
    ("beside", "text"),
    [(".draft-step-1-00", "complete"), ("step-1", "new")],
    ids=["nothing took its place", "its place is taken"],
)
def test_what_stepped_aside_returns_or_goes(tmp_path: Path, beside: str, text: str) -> None:
    # As a writer leaves it that was killed between two renames; the name itself has a mark.
    plant(tmp_path / ".old-step-1-0a1b2c3d", "complete")
    plant(tmp_path / beside, "new")

    sweep(tmp_path)

    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1" / "text").read_text() == text


def test_a_living_writers_draft_is_left_alone(tmp_path: Path) -> None:
    plant(tmp_path / ".draft-b-00")
    with write_draft(tmp_path / "a") as draft:
        write(tmp_path / "c", "c")  # another writer sweeps
        (draft / "text").write_text("still here")

    assert names(tmp_path) == ["a", "c"]
    assert (tmp_path / "a" / "text").read_text() == "still here"


def test_a_removed_folder_is_gone(tmp_path: Path) -> None:
    remove_folder(plant(tmp_path / "a"))

    assert names(tmp_path) == []
