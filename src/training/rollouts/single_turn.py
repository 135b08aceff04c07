"""The completions of a row whose ``messages`` are the whole prompt."""

from __future__ import annotations

from hearth.errors import NotFoundError, RequestError, TransportError
from training.config.single_turn import SingleTurnConfig
from training.data.rows import IndexedRow, prompt_messages
from training.data.seeds import row_seed
from training.platform.run_infra import RunInfra
from training.rollouts.router_replay import routing_options
from training.samples.scoring import SampledRow

RECOVERABLE = (TransportError, NotFoundError, RequestError, TimeoutError)
"""Errors of the platform for which a row is dropped."""


async def sample_row(config: SingleTurnConfig, infra: RunInfra, row: IndexedRow) -> SampledRow:
    """``completions_per_prompt`` completions of a row, each with the sampler's logprobs."""
    try:
        completions = await infra.sampler.sample_with_tokens(
            prompt_messages(row.row),
            n=config.completions_per_prompt,
            max_tokens=config.max_completion_tokens,
            temperature=config.temperature,
            max_seq_len=config.max_seq_len,
            seed=row_seed(config.seed, row.index),
            **routing_options(config.replay, has_experts=infra.has_experts),
        )
    except RECOVERABLE as error:
        return SampledRow(row, dropped="failed", error=error)
    return SampledRow(row, completions, dropped=None if completions else "overlong_prompt")
