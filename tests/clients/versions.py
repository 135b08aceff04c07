"""Calls every public method of several versions of the official clients against one platform.

    python -m tests.clients.versions --into FOLDER

Each version is installed alone into a folder of its own; what it needs is that of this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.calls import ANSWERED, REFUSED

from hearth.local import tinker_server
from hearth.settings import CATALOG_VARIABLE
from training.quickstart import MODEL

TINKER = ("0.38.0", "0.36.0", "0.35.0", "0.34.0", "0.33.1")
FIREWORKS = ("1.2.30", "1.2.29", "1.2.28", "1.2.9")
_FIREWORKS_NEEDS = (
    *("aiohttp", "httpx-aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "distro"),
    *("frozenlist", "multidict", "propcache", "sniffio", "yarl"),
)
_OLD_FIREWORKS_NEEDS = ("pyqwest==0.6.2", "tinker==0.23.0")
_NAME = "accounts/fireworks/models/tiny"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Client:
    """A version of a client, and how its methods are called."""

    name: str
    packages: tuple[str, ...]
    """What is installed for it; the first names it."""
    module: str
    """Calls its methods."""
    arguments: tuple[str, ...]


def list_clients() -> Iterator[Client]:
    """Every version that is tried."""
    for version in TINKER:
        packages = (f"tinker=={version}",)
        yield Client(f"tinker {version}", packages, "tests.clients.surface", (str(MODEL),))
    for version in FIREWORKS:
        old = _OLD_FIREWORKS_NEEDS if version == FIREWORKS[-1] else ("pyqwest==0.10.0",)
        packages = (f"fireworks-ai=={version}", *_FIREWORKS_NEEDS, *old)
        for rank in ("0", "8"):
            yield Client(
                f"fireworks-ai {version}, rank {rank}",
                packages,
                "tests.clients.fireworks_surface",
                (_NAME, str(MODEL), rank),
            )


def install(packages: Sequence[str], into: Path) -> Path:
    """The folder with a version of a client."""
    folder = into / packages[0].replace("==", "-")
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), *packages], check=True)
    return folder


def call_all(
    folder: Path | None, module: str, arguments: Sequence[str], url: str, key: str = "tml-any"
) -> tuple[bool, list[dict[str, str]]]:
    """Whether all is as it should be, and a line per method; None is the installed client."""
    paths = [str(path) for path in (folder, _REPOSITORY) if path is not None]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_PROJECT_ID": "any",
        "TINKER_TELEMETRY": "0",
        "FIREWORKS_BASE_URL": url,
        "FIREWORKS_API_KEY": "fw_any",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
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
    parser.add_argument("--only", default="", help="the clients whose name has this in it")
    options = parser.parse_args()
    print("| client | methods | answered | refused with a reason | wrong |")
    print("|---|---:|---:|---:|---:|")
    are_right = True
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(folder) / "catalog.toml"
        catalog.write_text(f"[models.{json.dumps(_NAME)}]\nsource = {json.dumps(str(MODEL))}\n")
        os.environ[CATALOG_VARIABLE] = str(catalog)
        with tinker_server() as url:
            for client in list_clients():
                if options.only in client.name:
                    installed = install(client.packages, options.into.resolve())
                    is_right, lines = call_all(installed, client.module, client.arguments, url)
                    are_right &= is_right
                    print(_describe(client.name, lines), flush=True)
    return 0 if are_right else 1


def _describe(name: str, lines: Sequence[dict[str, str]]) -> str:
    """A row of the table, and below it what is not as it should be."""
    outcomes = [line["outcome"] for line in lines]
    answered, refused = outcomes.count(ANSWERED), outcomes.count(REFUSED)
    row = f"| {name} | {len(lines)} | {answered} | {refused} | {len(lines) - answered - refused} |"
    wrong = [f"  {line}" for line in lines if not line.get("is_expected")]
    return "\n".join([row, *wrong])


if __name__ == "__main__":
    sys.exit(main())
