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
from typing import Any

from tests.clients.calls import ANSWERED, FAILED, REFUSED

from hearth.local import tinker_server
from hearth.settings import CATALOG_VARIABLE
from training.quickstart import MODEL

REFUSES = {
    "AdminClient.get_audit_log": "audit",
    "AdminClient.get_billing_usage": "billing/usage/events",
    "AdminClient.get_current_checkpoint_storage_usage": "billing/usage/checkpoints/current",
    "RestClient.assign_session_project": "sessions/{id}/project",
    "RestClient.copy_weights": "copy_weights",
    "RestClient.export_session_trace": "sessions/{id}/trace_export",
    "RestClient.get_audit_log": "audit",
    "RestClient.get_billing_usage": "billing/usage/events",
    "RestClient.get_current_checkpoint_storage_usage": "billing/usage/checkpoints/current",
    "RestClient.search_sessions": "sessions/search",
    "RestClient.whoami": "auth/apikey/me",
    "ServiceClient.copy_weights": "copy_weights",
}
"""What a platform refuses of Tinker's client, with the reason of a route."""
TINKER = ("0.38.0", "0.36.0", "0.35.0", "0.34.0", "0.33.1")
LITELLM = "1.110.2"
FIREWORKS = ("1.2.30", "1.2.29", "1.2.28", "1.2.9")
_FIREWORKS_NEEDS = (
    *("aiohttp", "httpx-aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "distro"),
    *("frozenlist", "multidict", "propcache", "sniffio", "yarl"),
)
_LITELLM_NEEDS = (
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "fastuuid", "frozenlist", "multidict"),
    *("propcache", "pydantic-settings", "regex", "tiktoken", "yarl"),
)
_OLD_FIREWORKS_NEEDS = ("pyqwest==0.6.2", "tinker==0.23.0")
_NAME = "accounts/fireworks/models/tiny"
_HEARTH = "import sys; from hearth.cli.main import main; sys.exit(main())"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Client:
    """A version of a client, and how its methods are called."""

    name: str
    packages: tuple[str, ...]
    """What is installed for it; the first names it."""
    program: tuple[str, ...] = ()
    """What calls it and prints a line for each method; none for Tinker's client, which the
    conformance suite calls."""


def list_clients() -> Iterator[Client]:
    """Every version that is tried."""
    for version in TINKER:
        yield Client(f"tinker {version}", (f"tinker=={version}",))
    for version in FIREWORKS:
        old = _OLD_FIREWORKS_NEEDS if version == FIREWORKS[-1] else ("pyqwest==0.10.0",)
        packages = (f"fireworks-ai=={version}", *_FIREWORKS_NEEDS, *old)
        for rank in ("0", "8"):
            program = ("tests.clients.fireworks_surface", _NAME, str(MODEL), rank)
            yield Client(f"fireworks-ai {version}, rank {rank}", packages, program)
    program = ("tests.clients.litellm_overflow", _NAME)
    yield Client(f"litellm {LITELLM}", (f"litellm=={LITELLM}", *_LITELLM_NEEDS), program)


def install(packages: Sequence[str], into: Path) -> Path:
    """The folder with a version of a client."""
    folder = into / packages[0].replace("==", "-")
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), *packages], check=True)
    return folder


def call_all(client: Client, folder: Path, url: str) -> list[dict[str, Any]]:
    """What became of each method."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(_REPOSITORY)]),
        "TINKER_API_KEY": "tml-any",
        "FIREWORKS_BASE_URL": url,
        "FIREWORKS_API_KEY": "fw_any",
    }
    with tempfile.NamedTemporaryFile() as report:
        if not client.program:
            command = ["-c", _HEARTH, "conformance", url, "--base-model", str(MODEL)]
            command += ["--only", "surface", "--json", report.name]
        else:
            command = ["-m", *client.program]
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if client.program:
            lines = [json.loads(line) for line in done.stdout.splitlines()]
        else:
            content = report.read()
            lines = [_as_line(check) for check in json.loads(content)["checks"]] if content else []
    failure = {"method": "all", "outcome": FAILED, "says": done.stderr[-2000:]}
    return lines or [failure | {"is_expected": False}]


def _as_line(check: dict[str, str]) -> dict[str, Any]:
    name, verdict = check["name"], check["verdict"]
    outcome = {"passed": ANSWERED, "refused": REFUSED}.get(verdict, FAILED)
    is_expected = outcome == (REFUSED if name in REFUSES else ANSWERED)
    says = check["detail"]
    return {"method": name, "outcome": outcome, "says": says, "is_expected": is_expected}


def main() -> int:
    """Print a table of versions, and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("runs/clients"))
    parser.add_argument(
        "--only", nargs="*", default=[""], help="the clients whose name has one of these in it"
    )
    options = parser.parse_args()
    print("| client | methods | answered | refused with a reason | wrong | slowest, s |")
    print("|---|---:|---:|---:|---:|---|")
    are_right = True
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(folder) / "catalog.toml"
        catalog.write_text(f"[models.{json.dumps(_NAME)}]\nsource = {json.dumps(str(MODEL))}\n")
        os.environ[CATALOG_VARIABLE] = str(catalog)
        with tinker_server() as url:
            for client in list_clients():
                if any(text in client.name for text in options.only):
                    installed = install(client.packages, options.into.resolve())
                    lines = call_all(client, installed, url)
                    are_right &= all(line["is_expected"] for line in lines)
                    print(_describe(client.name, lines), flush=True)
    return 0 if are_right else 1


def _describe(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """A row of the table, and below it what is not as it should be."""
    outcomes = [line["outcome"] for line in lines]
    answered, refused = outcomes.count(ANSWERED), outcomes.count(REFUSED)
    timed = sorted((line for line in lines if "seconds" in line), key=lambda line: -line["seconds"])
    times = ", ".join(f"{line['method']} {line['seconds']}" for line in timed[:2])
    wrong_count = len(lines) - answered - refused
    row = f"| {name} | {len(lines)} | {answered} | {refused} | {wrong_count} | {times} |"
    wrong = [f"  {line}" for line in lines if not line["is_expected"]]
    return "\n".join([row, *wrong])


if __name__ == "__main__":
    sys.exit(main())
