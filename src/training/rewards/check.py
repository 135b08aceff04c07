"""What of a reward function can be judged before a run begins."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hearth.errors import ConfigError
from training.rewards.answers import check_truths
from training.rewards.code import check_tests
from training.rewards.errors import WrongRewardError
from training.rewards.guard import GuardedReward
from training.rewards.score import ScoringReward, as_score
from training.rewards.scoring import AnyReward, call_reward, name_reward, note_call

if TYPE_CHECKING:  # configs import torch, which a reward's own process does without
    from training.config.single_turn import SingleTurnConfig

logger = logging.getLogger(__name__)

MADE_UP = "The answer is <answer>42</answer>, \\boxed{42}.\n#### 42"
"""A completion of no model. It has an answer in each form that reward functions often look for."""


def check_reward(
    config: SingleTurnConfig,
    reward_fn: AnyReward,
    rows: Sequence[Mapping[str, Any]],
    eval_rows: Sequence[Mapping[str, Any]],
) -> None:
    """Look for what our rewards need of rows; try the function on a text for the first of them.

    It is tried where the call seems to leave nothing behind: a plain function that captures no
    variables, or a ``ScoringReward`` without attributes, on this machine. Async functions may keep
    the event loop of their first call, and objects are often clients of a service.

    Raises:
        ConfigError: a row has no truth, or no tests; or the function failed or returned no number,
            and failures are not dropped. Where they are, it is a warning.
    """
    guard = reward_fn if isinstance(reward_fn, GuardedReward) else None
    function = reward_fn if guard is None else guard.function
    check_truths(function, [*rows, *eval_rows])
    check_tests(function, [*rows, *eval_rows])
    is_remote = guard is not None and guard.runs_on_cluster
    if is_remote or not (rows and config.try_reward and _keeps_nothing(function)):
        return
    cause = None
    try:
        problem = _describe_wrong_type(_call_once(reward_fn, rows[0]))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a function of the user may raise any
        note_call(error, function, MADE_UP, rows[0], "rows[0]")
        problem, cause = f"score any text, got {type(error).__name__}: {error}", error
    if problem is None:
        return
    message = (
        f"reward_fn must {problem} for {MADE_UP!r} and rows[0], a row of {sorted(rows[0])}: mend "
        f"{name_reward(function)} or the rows, or leave this first call out with try_reward=False"
    )
    if guard is None or not guard.drops_failures:
        raise ConfigError(message) from cause
    logger.warning("%s; with reward_errors='drop' such completions are left out", message)


def _keeps_nothing(function: object) -> bool:
    """Whether a call seems to change nothing that the next one finds."""
    if isinstance(function, ScoringReward):
        return not vars(function)
    if inspect.iscoroutinefunction(function) or not inspect.isfunction(function):
        return False
    return function.__closure__ is None


def _call_once(reward_fn: AnyReward, row: Mapping[str, Any]) -> Any:
    if isinstance(reward_fn, GuardedReward):
        return asyncio.run(reward_fn.begin(MADE_UP, row))
    return call_reward(reward_fn, MADE_UP, row)


def _describe_wrong_type(outcome: Any) -> str | None:
    """The rule that the outcome breaks; None where it is a number, or is to be awaited."""
    if inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        return None
    try:
        as_score(outcome)
    except WrongRewardError:
        return f"return a number or a Score, got {outcome!r}"
    return None
