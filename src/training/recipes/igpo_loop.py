"""IGPO: turns are rewarded for what they add to the policy's belief in the right answer.

``async_rl_loop`` with another credit assignment (arXiv:2510.14967), for trajectories of several
turns. One reward at the end says little about the turns before it, and nothing where all
trajectories of a row earn the same. Between steps 1 and 2 of that recipe a group therefore gets:

1. beliefs: the logprob of the row's right answer after the prompt and after each turn, scored on
   token ids without gradient, all prefixes of the group in one batch, while other rows are sampled
   (the model's own logprobs, at whatever temperature the run samples);
2. gains: the differences; the last turn, which answers, has the outcome instead;
3. advantages: gains and outcomes, each normalized over the group, summed backward over the turns
   and given to every token of its turn (``training.samples.turn_advantages``).

A turn is a stretch of 1s in ``loss_mask``; the segments of a run follow each other, and what stands
after the last turn of one is the beginning of the next. Groups with equal outcomes stay, as their
gains differ. ``ig_weight=0`` is ``async_rl_loop``, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.errors import ConfigError
from training.config.turn_credit import ScorerName, TurnCreditConfig, turn_credit_problems
from training.config.validation import validate
from training.data.rows import Row
from training.environments.choose import Given, GivenEnvironment, choose_rolled_out_rows
from training.platform.run_infra import RunInfra
from training.recipes import async_rl_loop
from training.recipes.async_rl_loop import run_rows
from training.rollouts.runner import GroupCredit, GroupFilter
from training.rollouts.validation import rollout_problems
from training.run.command import recipe, run_command
from training.run.state import RunSummary
from training.samples.rollout import RolloutFnFactory, RolloutSetup
from training.update.information_gain import (
    AnswerFn,
    InformationGain,
    Scorer,
    deployment_scorer,
    ground_truth_tokens,
    trainer_scorer,
)


@dataclass(kw_only=True)
class Config(TurnCreditConfig, async_rl_loop.Config):
    """Settings of ``igpo_loop``."""

    log_path: str = "runs/igpo_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        validate(self, [*rollout_problems(self), *turn_credit_problems(self)])


@recipe
def main(
    config: Config,
    *,
    rollout_fn_factory: RolloutFnFactory | None = None,
    rows: Sequence[Row] | None = None,
    eval_rows: Sequence[Row] | None = None,
    environment: GivenEnvironment | None = None,
    dynamic_filter_fn: GroupFilter | None = None,
    answer_fn: AnswerFn | None = None,
) -> RunSummary:
    """Train until the rows run out, as ``async_rl_loop.main``.

    ``answer_fn(row)`` gives the token ids of the row's right answer, in the form in which the
    policy would write it; without it they are those of the text ``row["ground_truth"]``. The filter
    sees a group with its ``credit``, which has each turn's gain and advantage.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started. Or, later, a right
            answer has no token.
        StalledError: no step was finished within ``stall_timeout_s``.
        RolloutsFailingError: too many rollouts failed.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        NumericsError: a right answer's logprob is not finite.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
        Exception: what a rollout function raised that no second try mends.
    """
    config.validate()
    given = Given(environment, rows, eval_rows)
    rows, eval_rows, rollout_fn_factory = choose_rolled_out_rows(
        config, given, rollout_fn_factory, needs_truth=True
    )
    if config.ig_weight == 0:
        return run_rows(config, rows, rollout_fn_factory, dynamic_filter_fn, eval_rows=eval_rows)
    if answer_fn is None:
        _check_answers(rows)

    def credit(setup: RolloutSetup, infra: RunInfra) -> GroupCredit:
        return information_gain(config, setup, infra, answer_fn)

    return run_rows(
        config, rows, rollout_fn_factory, dynamic_filter_fn, credit, eval_rows=eval_rows
    )


def information_gain(
    config: Config, setup: RolloutSetup, infra: RunInfra, answer_fn: AnswerFn | None
) -> InformationGain:
    """What gives a group's turns their credit, on the run's own platform."""
    opening: list[int] = setup.tokenizer.encode(config.ig_answer_prefix, add_special_tokens=False)
    answer_of = answer_fn or ground_truth_tokens(setup.tokenizer)
    return InformationGain(config, scorer(config.ig_scorer, infra), answer_of, opening)


def scorer(name: ScorerName, infra: RunInfra) -> Scorer:
    """Who scores the right answer."""
    return (
        deployment_scorer(infra.sampler)
        if name == "deployment"
        else trainer_scorer(infra.policy_client)
    )


def _check_answers(rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        truth = row.get("ground_truth")
        # The text of a list or of a mapping is nothing that a policy would write.
        if not isinstance(truth, str | int | float) or truth == "":
            raise ConfigError(
                f"rows[{place}] must have a ground_truth, a text or a number, got {truth!r}: it is "
                "what turns gain information about; or give main an answer_fn"
            )


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
