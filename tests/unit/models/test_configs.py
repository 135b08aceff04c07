"""A model's config alone: from a folder, and from a hub that answers or does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from hearth.errors import ConfigError
from hearth.models.configs import read_config

SIZES = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))

    found = read_config(str(tmp_path))

    assert (found.hidden_size, found.num_attention_heads) == (64, 4)
    # What the file leaves out is the family's.
    assert found.num_key_value_heads == 4
    assert found.vocab_size == 32000


@pytest.mark.parametrize(
    "content", [None, "{", '{"model_type": "no-such"}', '{"hidden_size": 3}', "[]"]
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(
        ConfigError, match=r"model must have a config\.json that transformers knows"
    ):
        read_config(str(tmp_path))


@pytest.mark.parametrize("kind", [OSError, HTTPError])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def unreachable(*_: object, **__: object) -> NoReturn:
        raise kind("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)

    with pytest.raises(ConfigError, match=r"must be a folder when the hub cannot.*no route"):
        read_config("somebody/a-model-that-nobody-has")


def test_of_a_hub_id_the_config_alone_is_downloaded_or_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []
    (tmp_path / "config.json").write_text(json.dumps(SIZES))

    def download(name: str, file: str, *, local_files_only: bool) -> str:
        asked.append((name, file, local_files_only))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    assert read_config("somebody/a-model").hidden_size == 64
    assert asked == [("somebody/a-model", "config.json", False)]


def test_a_gone_cache_and_a_bad_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> NoReturn:
        raise LocalEntryNotFoundError("gone")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", gone)

    with pytest.raises(ConfigError, match="must be a folder when the hub cannot be reached"):
        read_config("somebody/a-model")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="model must be a registered name, a folder or a hub id"):
        read_config("not a name")
