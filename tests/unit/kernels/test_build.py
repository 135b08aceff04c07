"""Compilers here are scripts on a path of their own; those that work hand on to the real one."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.kernels import build

pytestmark = pytest.mark.slow

# Nobody looks at how fast it is.
COMPILE = f'exec {shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")} "$@" -O0'

Install = Callable[..., Path]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="needs a C compiler"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put compilers of the given names on the path, alone, with a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    tools = os.environ["PATH"]

    def make(*names: str, script: str = COMPILE) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name in names:
            # What the script itself calls is on the path of before.
            text = f'#!/bin/sh\nPATH={tools}\necho "$@" >> {tmp_path}/calls\n{script}\n'
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return folder

    return make


def calls(tmp_path: Path) -> list[str]:
    """The arguments of each compilation."""
    file = tmp_path / "calls"
    return file.read_text().splitlines() if file.exists() else []


def files(tmp_path: Path) -> list[str]:
    """What is in the cache, scratch folders included."""
    folder = tmp_path / "cache" / "hearth" / "kernels"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def load() -> ctypes.CDLL | None:
    """What a process gets that loads the library for the first time."""
    return build.load_library.__wrapped__()


def double(library: ctypes.CDLL | None) -> list[float]:
    """A calculation of the library: [1, 2] added to itself."""
    assert library is not None
    x, weight, out = (
        (ctypes.c_float * 2)(*values) for values in ([1.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    )
    library.hearth_add_rms_norm(
        x, x, weight, ctypes.c_float(0.0), ctypes.c_int64(1), ctypes.c_int64(2), out, 1
    )
    return list(x)


def test_without_a_compiler_there_are_no_loops(install: Install, tmp_path: Path) -> None:
    install()

    assert load() is None
    assert files(tmp_path) == []


def test_a_compiler_that_fails_is_logged_once_and_leaves_nothing(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("cc", script="echo no such processor >&2; exit 1")

    with caplog.at_level(logging.WARNING):
        assert load() is None

    assert len(calls(tmp_path)) == 2
    assert files(tmp_path) == []
    assert [record.getMessage()[:38] for record in caplog.records] == [
        "the loops in C cannot be compiled, usi"
    ]


def test_a_compiler_that_hangs_is_given_up(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cc", script="exec sleep 600")
    # Without this the test would take two minutes; nobody else needs another timeout.
    monkeypatch.setattr(build, "TIMEOUT_S", 0.05)

    assert load() is None
    assert files(tmp_path) == []


def test_what_a_compiler_made_may_be_no_library(install: Install) -> None:
    install("cc", script='while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')

    assert load() is None


@needs_compiler
@pytest.mark.parametrize("name", build.COMPILERS)
def test_any_of_the_usual_compilers_will_do(install: Install, name: str) -> None:
    install(name)

    assert double(load()) == [2.0, 4.0]


@needs_compiler
def test_a_compiler_without_openmp_makes_loops_for_one_thread(
    install: Install, tmp_path: Path
) -> None:
    refuse = 'for flag in "$@"; do [ "$flag" = -fopenmp ] && exit 1; done\n'
    install("cc", script=refuse + COMPILE)

    assert double(load()) == [2.0, 4.0]
    assert ["-fopenmp" in call.split() for call in calls(tmp_path)] == [True, False]


def test_switched_off_nothing_is_compiled(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cc")
    monkeypatch.setenv("HEARTH_KERNELS", "0")

    assert load() is None
    assert calls(tmp_path) == []


@needs_compiler
def test_what_was_compiled_once_is_taken_by_all_that_follow(
    install: Install, tmp_path: Path
) -> None:
    install("cc")

    assert load() is not None
    assert load() is not None

    assert len(calls(tmp_path)) == 1
    assert len(files(tmp_path)) == 1


@needs_compiler
def test_two_at_once_both_get_a_whole_library(install: Install, tmp_path: Path) -> None:
    # Neither compiles before the other has begun.
    meet = (
        f"echo >> {tmp_path}/started\n"
        f"while [ $(wc -l < {tmp_path}/started) -lt 2 ]; do sleep 0.01; done\n"
    )
    folder = install("cc", script=meet + COMPILE)

    with ThreadPoolExecutor(2) as pool:
        compiled = list(
            pool.map(build._compile_once, [str(folder / "cc")] * 2, [build.cache_folder()] * 2)
        )

    assert compiled[0] == compiled[1]
    assert files(tmp_path) == [compiled[0].name]
    assert double(ctypes.CDLL(str(compiled[0]))) == [2.0, 4.0]


@needs_compiler
def test_two_threads_of_a_process_compile_once(install: Install, tmp_path: Path) -> None:
    install("cc")

    with ThreadPoolExecutor(2) as pool:
        loaded = [pool.submit(load), pool.submit(load)]

    assert [double(library.result()) for library in loaded] == [[2.0, 4.0]] * 2
    assert len(calls(tmp_path)) == 1


@needs_compiler
def test_a_changed_source_is_compiled_anew(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cc")
    first = load()
    changed = tmp_path / "cpu.c"
    changed.write_text(build.SOURCE.read_text() + "int hearth_answer(void) { return 42; }\n")
    # A new version of Hearth changes the file itself.
    # The source is part of the package: no setting names another.
    monkeypatch.setattr(build, "SOURCE", changed)

    second = load()

    assert first is not None
    assert second is not None
    assert not hasattr(first, "hearth_answer")
    assert second.hearth_answer() == 42
    assert len(files(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_means_no_loops(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("cc")
    (tmp_path / "cache").write_text("a file where a folder should be")

    with caplog.at_level(logging.WARNING):
        assert load() is None

    assert "cannot be compiled" in caplog.text
    assert calls(tmp_path) == []


def test_a_user_without_a_home_has_no_loops(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cc")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)

    assert load() is None
