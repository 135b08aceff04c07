"""Samples, groups and rows by hand, for the tests of what ``async_rl_loop`` does with them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.unit.virtual_time import run_virtual

from training.data.rows import IndexedRow
from training.recipes.async_rl_loop import Config, make_group
from training.rollouts.runner import Rollouts, Submission
from training.rollouts.sampler import current_rollout
from training.samples.groups import PromptGroup, RowOutcome
from training.samples.rollout import RolloutFn, RolloutRun, RolloutSample
from training.utils import DeployConfig


def sample_of(reward: float = 1.0, *, length: int = 2, **changes: Any) -> RolloutSample:
    """Two prompt tokens, then ``length`` sampled ones."""
    usual: dict[str, Any] = {
        "tokens": [5, 6, *range(7, 7 + length)],
        "logprobs": [0.0, 0.0, *[-0.5] * length],
        "loss_mask": [0, 0, *[1] * length],
        "reward": reward,
    }
    return RolloutSample(**(usual | changes))


def row_of(index: int, **changes: Any) -> IndexedRow:
    """Row ``index`` of the only epoch."""
    return IndexedRow(index, **({"epoch": 0, "row": {"number": index}, "source": index} | changes))


def group_of(
    index: int = 0, rewards: Sequence[float] = (1.0, 0.0), *, submit_version: int = 0
) -> PromptGroup:
    """A group of one-turn trajectories that earned ``rewards``."""
    return group_from(
        row_of(index), [[sample_of(reward)] for reward in rewards], submit_version=submit_version
    )


def group_from(
    row: IndexedRow,
    trajectories: Sequence[Sequence[RolloutSample]],
    row_meta: dict[str, Any] | None = None,
    submit_version: int = 0,
) -> PromptGroup:
    """The group that ``async_rl_loop`` makes of a row's trajectories."""
    runs = [RolloutRun(list(samples)) for samples in trajectories]
    submission = Submission(row, submit_version, weight_version=submit_version)
    return make_group(config_of(), submission, runs, row_meta)


def config_of(**changes: Any) -> Config:
    """A valid config with groups of two and steps of two, without a reference."""
    usual: dict[str, Any] = {
        "deployment": DeployConfig(tokenizer_model="Qwen/Qwen3-8B"),
        "completions_per_prompt": 2,
        "prompt_groups_per_step": 2,
        "kl_beta": 0.0,
    }
    return Config(**(usual | changes))


def rollouts_of(fn: RolloutFn, *, num_rows: int = 10, **options: Any) -> Rollouts:
    """Rollouts with ``fn``; ``options`` are the config's fields, ``accepts`` and ``breaker``."""
    own = {name: options.pop(name, None) for name in ("accepts", "credit")}
    breaker = options.pop("breaker", None)
    config = config_of(**options)
    rollouts = Rollouts(
        fn, config, num_rows=num_rows, make_group=partial(make_group, config), **own
    )
    rollouts.breaker = breaker or rollouts.breaker
    return rollouts


def run_row(fn: RolloutFn, row: IndexedRow, **options: Any) -> RowOutcome:
    """The outcome of one row, submitted at version 2 while the deployment served version 5."""
    rollouts = rollouts_of(fn, **options)
    done = run_virtual(lambda: rollouts.run_row(Submission(row, version=2, weight_version=5)))
    assert rollouts.sampled_trajectories == {}
    return done


def rollout_number() -> int:
    """The index of the running rollout in its group."""
    context = current_rollout.get()
    return context.sample
