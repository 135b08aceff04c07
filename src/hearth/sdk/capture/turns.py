"""Captured answers, and how they chain: by token ids, never by texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CapturedTurn:
    """One answer as it was sampled. ``logprobs`` are one per completion token.

    They are those of the distribution that it was sampled from. ``versions`` are run lengths
    ``[weight version, tokens]`` over the completion. ``routing_matrices`` are the experts of each
    completion token, where they were requested.
    """

    prompt_tokens: list[int]
    """Everything that the deployment was given, as its chat template rendered it."""
    completion_tokens: list[int]
    logprobs: list[float]
    versions: list[list[int]]
    finish_reason: str
    """``stop``, ``tool_calls`` (a stop after calls) or ``length`` (cut)."""
    text: str
    """The answer's content; tool calls are not in it."""
    snapshot_identity: str | None = None
    routing_matrices: list[str] | None = None
    seed: int | None = None
    """What it was sampled with."""


@dataclass(frozen=True)
class TurnChain:
    """Turns that extend each other, as one sequence. The first three lists are parallel.

    Example: ``TurnChain(tokens=[5, 6, 7, 8, 9], logprobs=[0.0, -0.3, -0.1, 0.0, -0.7],
    loss_mask=[0, 1, 1, 0, 1], versions=[[4, 3]], finish_reason="stop", text="8", turns=2)``
    """

    tokens: list[int]
    logprobs: list[float]
    """The sampler's logprob of each sampled token; 0.0 elsewhere."""
    loss_mask: list[int]
    """1 on sampled tokens, 0 on the context between them."""
    versions: list[list[int]]
    """Run lengths ``[weight version, tokens]`` over the sampled tokens."""
    finish_reason: str
    """Of the last turn."""
    text: str
    """Of the last turn."""
    turns: int
    routing_matrices: list[str] | None = None
    """The experts of each sampled token, empty elsewhere; None where no turn has any."""
    seeds: tuple[int, ...] = ()
    """Of each turn that has one."""


def build_chains(turns: Iterable[CapturedTurn]) -> list[TurnChain]:
    """The turns as chains, in the order in which these ended: the last turn is in the last one.

    A turn extends a chain whose tokens its prompt begins with, all of them: the longest such
    chain. Every other turn begins a chain of its own, so a history that was rendered differently,
    shortened or branched is never trained as something that was not sampled. A turn without a
    sampled token is left out.
    """
    chains: list[TurnChain] = []
    for turn in turns:
        if not turn.completion_tokens:
            continue
        place = _find_extended(chains, turn.prompt_tokens)
        chains.append(_join(_EMPTY if place is None else chains.pop(place), turn))
    return chains


_EMPTY = TurnChain([], [], [], [], "", "", 0)


def _find_extended(chains: Sequence[TurnChain], prompt: list[int]) -> int | None:
    """The place of the longest chain that ``prompt`` begins with."""
    fitting = [
        (len(chain.tokens), -place)
        for place, chain in enumerate(chains)
        if prompt[: len(chain.tokens)] == chain.tokens
    ]
    return -max(fitting)[1] if fitting else None


def _join(chain: TurnChain, turn: CapturedTurn) -> TurnChain:
    context = turn.prompt_tokens[len(chain.tokens) :]
    return TurnChain(
        tokens=chain.tokens + context + turn.completion_tokens,
        logprobs=chain.logprobs + [0.0] * len(context) + turn.logprobs,
        loss_mask=chain.loss_mask + [0] * len(context) + [1] * len(turn.completion_tokens),
        versions=_join_runs(chain.versions, turn.versions),
        finish_reason=turn.finish_reason,
        text=turn.text,
        turns=chain.turns + 1,
        routing_matrices=_join_routing(chain, turn),
        seeds=chain.seeds if turn.seed is None else (*chain.seeds, turn.seed),
    )


def _join_routing(chain: TurnChain, turn: CapturedTurn) -> list[str] | None:
    before, own = chain.routing_matrices, turn.routing_matrices
    if before is None and own is None:
        return None
    known = before or [""] * len(chain.tokens)
    between = [""] * (len(turn.prompt_tokens) - len(chain.tokens))
    return known + between + (own or [""] * len(turn.completion_tokens))


def _join_runs(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Run lengths one after the other; neighbors of one version are one run."""
    if first and second and first[-1][0] == second[0][0]:
        middle = [first[-1][0], first[-1][1] + second[0][1]]
        return [*first[:-1], middle, *second[1:]]
    return first + second
