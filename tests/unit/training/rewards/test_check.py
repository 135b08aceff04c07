"""What of a reward function is found before a run begins."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from hearth.errors import ConfigError
from training.recipes.rl_loop import Config
from training.rewards import (
    RewardEnsemble,
    Score,
    ScoringReward,
    answer_reward,
    check_reward,
    exact_match,
    guard_reward,
    guarded,
)
from training.utils import DeployConfig

ROWS = [{"messages": [], "ground_truth": "42"}, {"messages": []}]
CALLS: list[tuple[str, Mapping[str, Any]]] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def check(reward_fn: Any, rows: Any = ROWS, **changes: Any) -> None:
    """Guard the function as a recipe does, and check it."""
    config = Config(deployment=DeployConfig(tokenizer_model="x"), kl_beta=0.0, **changes)
    check_reward(config, guard_reward(config, reward_fn), rows, [])


def noting(text: str, row: Mapping[str, Any]) -> float:
    CALLS.append((text, row))
    return 1.0


def misspelled(text: str, row: Mapping[str, Any]) -> float:
    return float(text == row["answer"])


def forgetful(text: str, row: Mapping[str, Any]) -> Any:
    len(text)


def wordy(text: str, row: Mapping[str, Any]) -> Any:
    return "good"


def endless(text: str, row: Mapping[str, Any]) -> float:
    time.sleep(0.5)
    return 1.0


async def later(text: str, row: Mapping[str, Any]) -> float:
    return noting(text, row)


def handed_on(text: str, row: Mapping[str, Any]) -> Any:
    CALLS.append((text, row))
    return later(text, row)


@dataclass(frozen=True)
class Client(ScoringReward):
    """A judge somewhere else."""

    url: str

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        return Score(noting(completion, row))


def capturing() -> Any:
    count = 0

    def reward(text: str, row: Mapping[str, Any]) -> float:
        nonlocal count
        count += 1
        return noting(text, row)

    return reward


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        (misspelled, r"reward_fn must score any text, got KeyError: 'answer' for 'The answer is"),
        (forgetful, r"reward_fn must return a number or a Score, got None for 'The answer is"),
        (wordy, r"reward_fn must return a number or a Score, got 'good' for"),
    ],
)
@pytest.mark.parametrize("limit_s", [None, 9.0])
def test_a_function_that_fails_on_its_first_row_is_refused(reward_fn, message, limit_s):
    with pytest.raises(ConfigError, match=message) as refused:
        check(reward_fn, reward_timeout_s=limit_s)

    assert "rows[0], a row of ['ground_truth', 'messages']: mend" in str(refused.value)
    assert "try_reward=False" in str(refused.value)


def test_what_the_function_raised_is_told_with_its_place():
    with pytest.raises(ConfigError) as refused:
        check(misspelled)

    cause = refused.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__traceback__.tb_next.tb_next.tb_next.tb_frame.f_code.co_name == "misspelled"


def test_the_first_call_has_the_runs_time_limit():
    began = time.monotonic()

    with pytest.raises(ConfigError, match=r"got RewardTimeoutError: .* within 0\.05 s"):
        check(endless, reward_timeout_s=0.05)

    assert time.monotonic() - began < 0.4


@pytest.mark.slow
def test_a_function_with_processes_is_tried_in_one_of_them(tmp_path, monkeypatch):
    module = tmp_path / "deadly_reward.py"
    module.write_text("import os\n\n\ndef deadly(text, row):\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)  # where the process finds it, too
    deadly = importlib.import_module(module.stem).deadly

    with pytest.raises(ConfigError, match=r"got RewardDiedError: .* got exit code 3"):
        check(deadly, reward_workers="process", reward_timeout_s=60.0)


def test_where_failures_are_dropped_a_first_one_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check(misspelled, reward_errors="drop")

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("reward_fn must score any text, got KeyError: 'answer' for")
    assert line.endswith("with reward_errors='drop' such completions are left out")


@pytest.mark.parametrize(
    "reward_fn", [noting, guarded(noting, timeout_s=9.0), lambda text, row: noting(text, row)]
)
def test_a_plain_function_is_called_once_with_the_first_row(reward_fn):
    check(reward_fn)

    ((text, row),) = CALLS
    assert row is ROWS[0]
    assert answer_reward(text, row) == 1.0


@pytest.mark.parametrize(
    ("reward_fn", "changes"),
    [
        (noting, {"try_reward": False}),
        (noting, {"reward_workers": "ray", "reward_timeout_s": 9.0}),
        (later, {}),
        (later, {"reward_timeout_s": 9.0}),
        (capturing(), {}),
        (Client("http://judge"), {}),
        (RewardEnsemble([noting, noting]), {}),
    ],
    ids=["switched off", "Ray", "async", "async guarded", "capturing", "object", "ensemble"],
)
@pytest.mark.slow
def test_what_may_leave_something_behind_is_not_called(reward_fn, changes):
    check(reward_fn, **changes)

    assert CALLS == []


def test_a_function_that_returns_an_awaitable_is_not_awaited():
    check(handed_on)

    assert len(CALLS) == 1  # its own call, and not that of the coroutine


def test_without_rows_nothing_is_tried():
    check(noting, rows=[])

    assert CALLS == []


@pytest.mark.parametrize("reward_fn", [answer_reward, guarded(answer_reward, timeout_s=9.0)])
def test_a_row_without_truth_is_refused_however_the_default_reward_is_guarded(reward_fn):
    with pytest.raises(ConfigError, match=r"rows\[1\]\.ground_truth must be given"):
        check(reward_fn)

    check(reward_fn, rows=ROWS[:1])
    check(exact_match)


def test_no_event_loop_is_left_behind():
    check(noting, reward_timeout_s=9.0)

    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
