"""``hearth push``: a trained model's folder as a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

import hearth
from hearth.errors import ConfigError, TransportError
from hearth.exit_codes import exit_code, print_error
from hearth.records.models import find_model_folder

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


@dataclass(frozen=True, kw_only=True)
class PushFlags:
    """Push a run's trained model to the Hugging Face hub, as a private repository."""

    model: Annotated[str, tyro.conf.Positional]
    """A run, whose newest model or adapter is pushed, or a model's folder."""
    name: Annotated[str, tyro.conf.Positional]
    """The repository, as ORG/NAME."""
    public: bool = False
    """Let everybody see a new repository; not given, it is private."""
    replace: bool = False
    """Push onto a repository that exists, as one commit: it has these files alone then."""


def push(arguments: list[str]) -> int:
    """Push a run's trained model to the Hugging Face hub, as a private repository."""
    flags = tyro.cli(PushFlags, args=arguments, prog="hearth push")
    return exit_code(lambda: _push(flags))


def _push(flags: PushFlags) -> None:
    if not _NAME.fullmatch(flags.name):
        raise ConfigError(f"name must be ORG/NAME, got {flags.name!r}")
    folder = find_model_folder(flags.model)
    _warn_about_base(folder)
    # Half a second to import, which --help is spared.
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not get_token():
        raise ConfigError(
            "HF_TOKEN must be set to a token that may write, got none: make one in the hub's "
            "settings, or log in with `hf auth login`"
        )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        _upload(HfApi(library_name="hearth", library_version=hearth.__version__), flags, folder)
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = error.server_message or f"HTTP {status}"
        what = "HF_TOKEN must be one that may write there" if status in (401, 403) else "it refused"
        raise TransportError(f"the hub did not take {flags.name!r}: {what}: {reason}") from None
    except (httpx.HTTPError, OSError) as error:
        raise TransportError(f"the hub must be reached for {flags.name!r}, got {error}") from None
    from huggingface_hub import constants

    console.print(f"{folder} is at {constants.ENDPOINT}/{flags.name}")


def _upload(api: Any, flags: PushFlags, folder: Path) -> None:
    """Make the repository and upload the folder in one commit.

    Raises:
        ConfigError: the hub has a repository of this name, and it is not to be replaced.
    """
    if not flags.replace and api.repo_exists(flags.name):
        raise ConfigError(
            f"name must be new, got {flags.name!r}, which the hub has: choose another, or put "
            "these files in its place with --replace (its history keeps the older ones)"
        )
    api.create_repo(flags.name, private=not flags.public, exist_ok=flags.replace)
    api.upload_folder(
        repo_id=flags.name,
        folder_path=folder,
        commit_message=f"Push from Hearth {hearth.__version__}",
        ignore_patterns=[".*"],
        delete_patterns="*" if flags.replace else None,
    )


def _warn_about_base(folder: Path) -> None:
    """Say where an adapter's base is a folder of this machine, which nobody else has."""
    config = folder / "adapter_config.json"
    if not config.is_file():
        return
    base = json.loads(config.read_text()).get("base_model_name_or_path")
    if isinstance(base, str) and Path(base).expanduser().is_absolute():
        print_error(
            f"adapter_config.json names the base {base!r}, a folder of this machine: others cannot "
            "load the adapter; push a merged model (merge_adapter=True), or edit that line",
            label="warning",
        )
