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
from training.platform.run_infra import load_tokenizer, provision
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config, main
from training.utils import DeployConfig

RULE = f"deployment.tokenizer_model must be the tokenizer of '{MODEL}', got '{{name}}': "

ROWS = load_rows(str(TRAIN_ROWS), 1)


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


def start(config: Config):
    """What a recipe runs on, with the tokenizer that its config names."""
    return provision(config, load_tokenizer(config.deployment))


def test_an_embedded_run_with_another_models_tokenizer_ends_before_anything_is_provisioned(
    other_tokenizer, tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    caplog.set_level(logging.DEBUG)

    with (
        pytest.raises(ConfigError, match=r"'a', .* instead of") as refused,
        start(config_of(other_tokenizer, tmp_path / "run")),
    ):
        pass

    assert str(refused.value).startswith(RULE.format(name=other_tokenizer))
    assert not [message for message in caplog.messages if "waiting for" in message]


def test_an_embedded_run_with_a_copy_of_the_models_tokenizer_samples(tmp_path, monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    copy_tokenizer(tmp_path / "copy")
    messages = prompt_messages(ROWS[0])

    with start(config_of(tmp_path / "copy", tmp_path / "run")) as infra:
        (completion,) = infra.sampler.sample_with_tokens(messages, n=1, max_tokens=4)

    assert completion.completion_len > 0


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


@pytest.fixture
def plain_tokenizer(tmp_path: Path) -> Path:
    """The shipped tokenizer without its chat template."""
    folder = tmp_path / "plain"
    copy_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def test_a_tokenizer_without_chat_template_is_refused_before_anything_is_started(
    plain_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    folder = tmp_path / "run"

    with pytest.raises(ConfigError, match=r"deployment\.tokenizer_model must have") as refused:
        main(config_of(plain_tokenizer, folder), ROWS)

    said = f"a chat template for the rows' messages, got '{plain_tokenizer}', which has none"
    assert said in str(refused.value)
    assert not list(folder.rglob("*"))


def test_messages_that_the_chat_template_refuses_are_refused_as_early(tmp_path, monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    copy_tokenizer(tmp_path / "copy")
    rule = "{{ raise_exception('Roles must alternate') }}"
    (tmp_path / "copy" / "chat_template.jinja").write_text(rule)

    with pytest.raises(ConfigError, match=r"rows\[0\]\.messages must be .*: Roles must alternate"):
        main(config_of(tmp_path / "copy", tmp_path / "run"), ROWS)

    assert not list((tmp_path / "run").rglob("*"))


def test_prompts_of_token_ids_need_no_chat_template(plain_tokenizer, tmp_path, monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)

    with start(config_of(plain_tokenizer, tmp_path / "run")) as infra:
        (completion,) = infra.sampler.sample_with_prompt_tokens([5, 6, 7], n=1, max_tokens=4)
        with pytest.raises(ConfigError, match="tokenizer must have a chat template to sample"):
            list(infra.sampler.sample_with_tokens(prompt_messages(ROWS[0]), n=1, max_tokens=4))

    assert completion.completion_len > 0
