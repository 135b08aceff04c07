"""Build the wheel, install it outside the repository, and use it there.

    python tools/test_wheel.py                    with the lowest versions, then with the newest
    python tools/test_wheel.py --versions newest  with the newest alone

The lowest versions are the bounds of pyproject.toml, the newest what pip chooses. torch is the
version of constraints.txt in both: it comes first, so that nothing pulls another build of it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/unit/cli/test_main.py",
    "tests/unit/losses/test_batch.py",
    "tests/unit/records/test_samples.py",
    "tests/unit/wire/test_records.py",
    "tests/unit/models/test_loading.py",
    "tests/unit/models/test_lora.py",
    "tests/unit/inference/test_tool_calls.py",
    "tests/unit/viewer/test_api.py",
)
"""What reads and writes through the packages that we depend on, and takes a few seconds."""
ASSETS = (
    "hearth/kernels/cpu.c",
    "hearth/control/catalog.toml",
    "hearth/py.typed",
    "hearth/viewer/assets/app.js",
    "hearth/viewer/templates/base.html",
    "training/quickstart/model/model.safetensors",
    "training/quickstart/data/train.jsonl",
)
TESTERS = ("pytest", "pytest-asyncio", "hypothesis")
STEPS = 3


def main() -> int:
    """Test the wheel with the chosen versions; 0 if everything works with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", choices=("lowest", "newest", "both"), default="both")
    chosen = parser.parse_args().versions
    with tempfile.TemporaryDirectory(prefix="hearth-wheel-") as folder:
        place = Path(folder)
        wheel = build_wheel(place / "dist")
        shutil.copytree(ROOT / "tests", place / "tests")
        shutil.copytree(ROOT / "docs", place / "docs")
        shutil.copy(ROOT / "pyproject.toml", place)
        for versions in ("lowest", "newest") if chosen == "both" else (chosen,):
            began = time.monotonic()
            python = install(wheel, place / versions, list_lowest() if versions == "lowest" else [])
            try_out(python, place)
            print(
                f"{wheel.name} works with the {versions} versions: {time.monotonic() - began:.0f} s"
            )
    return 0


def build_wheel(folder: Path) -> Path:
    """The wheel, built from the source distribution; both have all assets."""
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    missing = set(ASSETS) - set(zipfile.ZipFile(wheel).namelist())
    assert not missing, f"the wheel lacks {sorted(missing)}"
    return wheel


def install(wheel: Path, folder: Path, lowest: list[str]) -> Path:
    """The interpreter of a new environment that has the wheel and pytest."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==\S+", constraints, re.MULTILINE)
    # What is never imported need not be compiled, which takes longer than all else.
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    pip = (*pip, "install", "--quiet", "--no-compile")
    run(*pip, torch)
    bounds = folder / "bounds.txt"
    bounds.write_text("\n".join([torch, *lowest]), encoding="utf-8")
    run(*pip, "--constraint", str(bounds), f"{wheel}[plot]", *TESTERS)
    return python


def list_lowest() -> list[str]:
    """``NAME==VERSION`` of each bound, torch's excepted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["plot"]
    bounds = [re.match(r"([\w.-]+)>=([\w.]+)", text) for text in needed]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] != "torch"]


def try_out(python: Path, place: Path) -> None:
    """Run the command, a few steps of the quickstart and a part of the tests, in ``place``."""
    hearth = str(python.with_name("hearth"))
    where = "import hearth, training; print(hearth.__file__, training.__file__)"
    assert str(ROOT) not in run(str(python), "-c", where, cwd=place), "the wheel must be used"
    run(hearth, "--help", cwd=place)
    runs = place / python.parents[1].name / "runs"
    run(hearth, "quickstart", "--log-path", str(runs), "--steps", str(STEPS), cwd=place)
    assert (runs / "curve.png").is_file(), "the quickstart must draw its plot"
    warnings = ("-o", "filterwarnings=default")  # other versions warn of other things
    run(str(python), "-m", "pytest", *warnings, "-p", "no:cacheprovider", *TESTS, cwd=place)


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command and return what it printed; one that fails shows it and ends the program."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        raise SystemExit(1)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
