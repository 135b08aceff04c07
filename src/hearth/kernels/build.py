"""Compiles ``cpu.c`` for this machine once, and keeps the result in the user's cache.

Without a compiler, with one that fails and with ``HEARTH_KERNELS=0`` there is no library, and
callers use torch's own operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import torch  # loads the OpenMP runtime that the compiled loops share with it

logger = logging.getLogger(__name__)

SWITCH = "HEARTH_KERNELS"
SOURCE = Path(__file__).with_name("cpu.c")
COMPILERS = ("cc", "gcc", "clang")
# Only sums that the source marks (omp simd) may be reordered: elsewhere the order makes them exact.
# NaN and infinity keep their meaning.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c11",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
)
# Compilers use half of this width by default, where the processor has it.
WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
TIMEOUT_S = 120.0
_compiling = threading.Lock()


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled loops; None where they are switched off or cannot be compiled."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (%s): using torch's own loops", ", ".join(COMPILERS))
        return None
    try:
        with _compiling:
            return ctypes.CDLL(str(_compile_once(compiler, cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the loops in C cannot be compiled, using torch's own: %s", error)
        return None


def cache_folder() -> Path:
    """Where compiled loops are kept.

    Raises:
        RuntimeError: the user's home folder is unknown.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hearth" / "kernels"


def _compile_once(compiler: str, folder: Path) -> Path:
    """The shared library for this source, compiler, torch and processor; compiled if missing."""
    parts = (SOURCE.read_text(), compiler, torch.__version__, " ".join(FLAGS), _processor_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = folder / f"cpu-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch) / "cpu.so"
        _compile(compiler, library)
        library.replace(target)  # another process may have been first, with the same content
    return target


def _compile(compiler: str, library: Path) -> None:
    command = [compiler, *FLAGS, *WIDE, str(SOURCE), "-o", str(library), "-lm"]
    try:
        _run([*command, "-fopenmp"])
    except subprocess.CalledProcessError as error:
        logger.info("compiling without OpenMP: %s", error.stderr.strip().splitlines()[:1])
        _run(command)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


def _processor_flags() -> str:
    """What ``-march=native`` depends on: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
