from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiny import write_tokenizer

from hearth.errors import ConfigError
from hearth.models.loading import load_tokenizer
from hearth.models.vocabulary import check_tokenizer


def tokenizer_of(folder: Path, ids: dict[str, int]) -> Any:
    """A tokenizer of some words, read back from its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture
def bare(qwen_folder: Path, tmp_path: Path) -> str:
    """The model without its tokenizer: an embedding of 64 rows."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(qwen_folder / name, folder)
    return str(folder)


OWN = {f"w{number}": number for number in range(64)}
FITTING = [
    ("a copy", OWN),
    ("fewer tokens", {name: id for name, id in OWN.items() if id < 9}),
    ("tokens of its own", {**OWN, "<tool>": 64}),
    ("another name for an id", {"<tool>": 0, **{name: id for name, id in OWN.items() if id}}),
]


@pytest.mark.parametrize("ids", [ids for _, ids in FITTING], ids=[name for name, _ in FITTING])
def test_a_tokenizer_with_the_models_ids_fits(qwen_folder, tmp_path, ids):
    check_tokenizer(tokenizer_of(tmp_path / "mine", ids), "mine", str(qwen_folder))


MOVED = {**OWN, "w7": 8, "w8": 7}
FOREIGN = [
    (
        MOVED,
        "2 of 64 tokens in common have another id, the first is 'w7', 8 instead of 7; the model",
    ),
    ({"the": 0, "a": 1}, "the two have no token in common"),
]


@pytest.mark.parametrize(("ids", "fault"), FOREIGN, ids=["moved", "foreign"])
def test_a_tokenizer_whose_ids_mean_other_tokens_is_refused(qwen_folder, tmp_path, ids, fault):
    tokenizer = tokenizer_of(tmp_path / "mine", ids)

    with pytest.raises(ConfigError) as refused:
        check_tokenizer(tokenizer, "mine", str(qwen_folder), field="deployment.tokenizer_model")

    rule = f"deployment.tokenizer_model must be the tokenizer of {str(qwen_folder)!r}, got 'mine': "
    assert str(refused.value).startswith(rule + fault)


def test_without_a_tokenizer_of_the_model_every_id_must_have_a_row(bare, tmp_path):
    check_tokenizer(tokenizer_of(tmp_path / "other", {"the": 0, "a": 63}), "other", bare)

    with pytest.raises(ConfigError, match="its ids go to 64, and the model's embedding has 64 row"):
        check_tokenizer(tokenizer_of(tmp_path / "large", {"the": 0, "a": 64}), "large", bare)


def test_the_rows_of_a_model_with_several_parts_are_those_of_its_text(bare, tmp_path):
    config = Path(bare) / "config.json"
    config.write_text(json.dumps({"text_config": {"vocab_size": 9}}))

    with pytest.raises(ConfigError, match="its ids go to 9, and the model's embedding has 9 rows"):
        check_tokenizer(tokenizer_of(tmp_path / "large", {"the": 0, "a": 9}), "large", bare)


@pytest.mark.parametrize("config", [None, "{}"], ids=["no config", "no vocabulary"])
def test_a_model_that_cannot_be_read_is_left_to_whoever_loads_it(bare, tmp_path, config):
    path = Path(bare) / "config.json"
    path.unlink()
    if config is not None:
        path.write_text(config)

    check_tokenizer(tokenizer_of(tmp_path / "other", {"the": 0, "a": 999}), "other", bare)


def test_a_model_keeps_its_own_tokenizer_whatever_is_in_it(bare):
    # Some models come with tokens that their embedding has no row for.
    folder = write_tokenizer(Path(bare))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 60}))

    check_tokenizer(load_tokenizer(folder), str(folder), str(folder))
