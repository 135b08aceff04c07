"""Calls every public method of several versions of the Tinker client against one platform.

    python -m tests.clients.versions --into FOLDER

Each version is installed alone into a folder of its own; what it needs is that of this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.surface import ANSWERED, REFUSED, REFUSES

from hearth.local import tinker_server
from training.quickstart import MODEL

VERSIONS = ("0.38.0", "0.36.0", "0.35.0", "0.34.0", "0.33.1")
_REPOSITORY = Path(__file__).parents[2]


def install(version: str, into: Path) -> Path:
    """The folder with a version of the client."""
    folder = into / f"tinker-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--target", str(folder), f"tinker=={version}"]
        subprocess.run([*pip, *wanted], check=True)
    return folder


def call_all(
    client: Path | None, url: str, key: str = "tml-any"
) -> tuple[bool, list[dict[str, str]]]:
    """Whether all is as it should be, and a line per method; None is the installed client."""
    paths = [str(path) for path in (client, _REPOSITORY) if path is not None]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_PROJECT_ID": "any",
        "TINKER_TELEMETRY": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.clients.surface", str(MODEL)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        lines = [{"method": "all", "outcome": "failed", "says": done.stderr[-2000:]}]
    return done.returncode == 0, lines


def main() -> int:
    """Print a table of versions, and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("runs/clients"))
    options = parser.parse_args()
    print(
        "| tinker | methods | answered | refused with a reason | wrong |\n|---|---:|---:|---:|---:|"
    )
    are_right = True
    with tinker_server() as url:
        for version in VERSIONS:
            is_right, lines = call_all(install(version, options.into.resolve()), url)
            are_right &= is_right
            outcomes = [line["outcome"] for line in lines]
            answered, refused = outcomes.count(ANSWERED), outcomes.count(REFUSED)
            wrong = len(lines) - answered - refused
            print(f"| {version} | {len(lines)} | {answered} | {refused} | {wrong} |", flush=True)
            for line in lines:
                expected = REFUSED if line["method"] in REFUSES else ANSWERED
                if line["outcome"] != expected:
                    print(f"  {line}")
    return 0 if are_right else 1


if __name__ == "__main__":
    sys.exit(main())
