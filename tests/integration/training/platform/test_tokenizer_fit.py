"""A client's tokenizer that is another model's, refused before anything is trained."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.errors import ConfigError, EngineError
from training.data.rows import load_rows, prompt_messages
from training.platform.run_infra import provision
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config
from training.utils import DeployConfig

RULE = f"deployment.tokenizer_model must be the tokenizer of '{MODEL}', got '{{name}}': "


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """The shipped tokenizer with the ids of two of its letters exchanged."""
    folder = tmp_path / "other"
    copy_tokenizer(folder)
    path = folder / "tokenizer.json"
    content: Any = orjson.loads(path.read_bytes())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_bytes(orjson.dumps(content))
    return folder


def copy_tokenizer(folder: Path) -> None:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder)


def config_of(tokenizer: Path, folder: Path) -> Config:
    deployment = DeployConfig(tokenizer_model=str(tokenizer))
    return Config(
        log_path=str(folder),
        base_model=str(MODEL),
        max_seq_len=128,
        kl_beta=0.0,
        deployment=deployment,
        max_concurrent=4,
    )


def test_an_embedded_run_with_another_models_tokenizer_ends_before_anything_is_provisioned(
    other_tokenizer, tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    caplog.set_level(logging.DEBUG)

    with (
        pytest.raises(ConfigError, match=r"'a', .* instead of") as refused,
        provision(config_of(other_tokenizer, tmp_path / "run")),
    ):
        pass

    assert str(refused.value).startswith(RULE.format(name=other_tokenizer))
    assert not [message for message in caplog.messages if "waiting for" in message]


def test_an_embedded_run_with_a_copy_of_the_models_tokenizer_draws(tmp_path, monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    copy_tokenizer(tmp_path / "copy")
    messages = prompt_messages(load_rows(str(TRAIN_ROWS), 1)[0])

    with provision(config_of(tmp_path / "copy", tmp_path / "run")) as infra:
        (drawn,) = infra.sampler.sample_with_tokens(messages, n=1, max_tokens=4)

    assert drawn.completion_len > 0


def test_a_served_deployment_refuses_another_models_tokenizer_and_all_is_taken_down(
    other_tokenizer, stage
):
    config = DeployConfig(deployment_id="serving", tokenizer_model=str(other_tokenizer))

    with (
        pytest.raises(EngineError, match="1 of 3 parts:\n  - deployment serving: ") as refused,
        stage.cleanup() as cleanup,
    ):
        stage.setup(needs_reference=True, needs_inference=True, deploy_cfg=config, cleanup=cleanup)

    assert f"tokenizer must be the tokenizer of '{MODEL}', got '{other_tokenizer}'" in str(
        refused.value
    )
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    assert stage.replicas() == {"serving": 0}
