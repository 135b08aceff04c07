from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.rollouts import make_rollouts
from tests.integration.runs import Trial
from tests.integration.served import Served, share_recipes

from hearth.local import EmbeddedPlatform
from training.data.rows import load_rows
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes import async_rl_loop
from training.recipes.rl_loop import Config, main
from training.rewards import answer_reward
from training.utils import DeployConfig


def small_fields(folder: Path) -> dict[str, Any]:
    """What both recipes' configs say for a run of a few seconds on the shipped model."""
    return {
        "log_path": str(folder),
        "base_model": str(MODEL),
        "dataset": str(TRAIN_ROWS),
        "max_rows": 8,
        "completions_per_prompt": 4,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 16,
        "max_seq_len": 128,
        "learning_rate": 1e-3,
        "kl_beta": 0.0,
        "output_model_id": "out",
        "deployment": DeployConfig(tokenizer_model=str(MODEL)),
    }


def config(folder: Path, **changes: Any) -> Config:
    """A config of ``rl_loop``."""
    own = {"max_concurrent": 64, "truncated_completions": "score"}
    return Config(**small_fields(folder) | own | changes)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A recipe's command sets up logging for its process, which here is everybody's."""
    loggers = [logging.getLogger(name) for name in ("hearth", "training")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe starts a platform of its own, unless a test names one."""
    names = ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL", "FIREWORKS_API_KEY")
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def named_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_platform: None
) -> Iterator[EmbeddedPlatform]:
    """A platform that recipes find by its URL; it stays while they come and go."""
    with EmbeddedPlatform(work_dir=tmp_path / "platform") as platform:
        monkeypatch.setenv("FIREWORKS_BASE_URL", platform.base_url)
        monkeypatch.setenv("FIREWORKS_API_KEY", "x")
        yield platform


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., Trial]:
    """Run ``rl_loop`` in a folder of its own; ``reward_fn`` sees every text it scores."""
    count = 0

    def run(*, reward_fn=answer_reward, folder: str | None = None, rows=None, **changes) -> Trial:
        nonlocal count
        count += 1
        path = tmp_path / (folder or f"run-{count}")
        seen: list[str] = []

        def spy(text: str, row: Any) -> float:
            seen.append(row["messages"][0]["content"])
            return reward_fn(text, row)

        return Trial(path, main(config(path, **changes), rows, reward_fn=spy), seen)

    return run


def async_config(folder: Path, **changes: Any) -> async_rl_loop.Config:
    """A config of ``async_rl_loop``."""
    return async_rl_loop.Config(**small_fields(folder) | {"shuffle": False} | changes)


@pytest.fixture
def async_trial(tmp_path: Path) -> Callable[..., Trial]:
    """Run ``async_rl_loop`` in a folder of its own; ``make`` is the rollout function's factory."""
    count = 0

    def run(
        *, make=None, accepts=None, folder: str | None = None, rows=None, held_out=None, **changes
    ) -> Trial:
        nonlocal count
        count += 1
        path = tmp_path / (folder or f"async-{count}")
        summary = async_rl_loop.main(
            async_config(path, **changes),
            rollout_fn_factory=make or make_rollouts(),
            rows=rows,
            dynamic_filter_fn=accepts,
            eval_rows=held_out,
        )
        return Trial(path, summary)

    return run


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """The first shipped rows."""
    return load_rows(str(TRAIN_ROWS), 12)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """`hearth serve` for many tests, none of which leaves a worker behind."""
    platform = Served(tmp_path_factory.mktemp("platform"), trainer_threads=1, deployment_threads=1)
    yield platform
    platform.stop()
    assert platform.processes() == []


@pytest.fixture(scope="session")
def recipes():
    return share_recipes()
