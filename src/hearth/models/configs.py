"""A model's config without its weights: from a folder, or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hearth.errors import ConfigError

_TIMEOUT_S = 10.0


def read_config(source: str) -> Any:
    """The transformers config of a folder's or hub id's text model.

    From the hub only ``config.json`` is downloaded.

    Raises:
        ConfigError: there is no such model, its config cannot be read, or the hub does not answer
            and its cache has no copy.
    """
    # Importing takes seconds, and only this function needs it.
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    path = Path(source).expanduser()
    folder = path if path.is_dir() else _download_config(source)
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model must have a config.json that transformers knows, got {source!r}: {first}"
        ) from None
    return config.get_text_config()


def _download_config(name: str) -> Path:
    """The folder of a hub id's ``config.json``."""
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    unreachable: Exception | None = None
    try:
        # One request up front: a download retries for a while when the hub does not answer.
        huggingface_hub.HfApi().model_info(name, timeout=_TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model must be a registered name, a folder or a hub id, got {name!r}: {first}"
        ) from None
    except (OSError, HTTPError) as error:
        unreachable = error
    try:
        file = huggingface_hub.hf_hub_download(
            name, "config.json", local_files_only=unreachable is not None
        )
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"model must be a folder when the hub cannot be reached, got {name!r}: its config is "
            f"not in the hub's cache ({unreachable}); a folder with config.json is enough"
        ) from None
    except (EntryNotFoundError, OSError, HTTPError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"model must have a config.json, got {name!r}: {first}") from None
    return Path(file).parent
