"""The completions of a row whose ``messages`` are the whole prompt."""

from __future__ import annotations

from typing import Any

from hearth.errors import ConfigError, NotFoundError, RequestError, TransportError
from hearth.sdk.sampling import tokenize_messages
from training.config.single_turn import SingleTurnConfig
from training.data.rows import IndexedRow, Row, prompt_messages
from training.data.seeds import row_seed
from training.platform.run_infra import RunInfra
from training.rollouts.router_replay import routing_options
from training.samples.scoring import SampledRow

RECOVERABLE = (TransportError, NotFoundError, RequestError, TimeoutError)
"""Errors of the platform for which a row is dropped."""


def check_prompt(config: SingleTurnConfig, tokenizer: Any, row: Row) -> None:
    """Render a row's messages, as its completions will need it.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template refuses the messages.
    """
    name = config.merged_deployment.tokenizer_model
    try:
        tokenize_messages(tokenizer, prompt_messages(row))
    except ConfigError:
        raise ConfigError(
            f"deployment.tokenizer_model must have a chat template for the rows' messages, got "
            f"{name!r}, which has none: take the tokenizer of the model's instruction-tuned "
            "version, or save one with tokenizer.chat_template set; to train on prompts of token "
            "ids use async_rl_loop"
        ) from None
    except Exception as error:  # a template is a program of the model's, and may raise any
        raise ConfigError(
            f"rows[0].messages must be what the chat template of {name!r} takes, got "
            f"{type(error).__name__}: {error}"
        ) from error


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
