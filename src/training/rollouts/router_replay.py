"""Router replay (R3): the trainer sends tokens to the experts that the sampler sent them to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hearth.sdk import SampledCompletion
from training.config.parts import Replay

logger = logging.getLogger(__name__)

ROUTING_OPTIONS = ("include_routing_matrix", "include_prompt_routing")
"""Options of a sampler that ask for the experts of what it draws."""


def routing_options(replay: Replay, *, has_experts: bool) -> dict[str, bool]:
    """What a sampler is asked for; nothing where the policy has no experts to replay."""
    if replay == "none" or not has_experts:
        return {}
    options = {"include_routing_matrix": True}
    return options | {"include_prompt_routing": True} if replay == "all" else options


def mention_dense_policy(replay: Replay, base_model: str, *, has_experts: bool) -> None:
    """Say that there is nothing to replay, where replay was asked for."""
    if replay != "none" and not has_experts:
        logger.warning(
            "router_replay does nothing: %s has no experts that can be recorded and replayed",
            base_model,
        )


def seen_routing(
    tokens: Sequence[int], loss_mask: Sequence[int], seen: Sequence[SampledCompletion]
) -> list[str] | None:
    """The experts of a sample's tokens, found among what was drawn; None when nothing is.

    One text per input token (N - 1 for N tokens), empty where nothing is known. A stretch of drawn
    tokens has those of a completion that begins with it and had all tokens before it as its prompt:
    the same tokens after another prompt went elsewhere. What was drawn and then stood in the prompt
    of a later turn may have gone elsewhere the second time; it has the experts it was drawn with.
    """
    routed = [one for one in seen if one.routing_matrices is not None]
    if not routed:
        return None
    rows = [""] * (len(tokens) - 1)
    place = 1
    while place < len(tokens):
        one = _drawn_at(place, tokens, loss_mask, routed) if loss_mask[place] else None
        place += 1 if one is None else _fill(rows, one, place, loss_mask)
    return rows if any(rows) else None


def _drawn_at(
    place: int, tokens: Sequence[int], loss_mask: Sequence[int], seen: Sequence[SampledCompletion]
) -> SampledCompletion | None:
    """The completion that was drawn at ``place`` of a sample."""
    for one in seen:
        if one.prompt_len != place or not one.completion_len:
            continue
        stop = place + _overlap(one, place, loss_mask)
        if one.full_tokens[:stop] == list(tokens[:stop]):
            return one
    return None


def _overlap(one: SampledCompletion, place: int, loss_mask: Sequence[int]) -> int:
    """How many of a completion's tokens the sample may have from ``place`` on."""
    drawn = loss_mask[place : place + one.completion_len]
    return len(drawn) if all(drawn) else list(drawn).index(0)


def _fill(rows: list[str], one: SampledCompletion, place: int, loss_mask: Sequence[int]) -> int:
    """Write a completion's experts into ``rows``; the number of its tokens in the sample."""
    matrices = one.routing_matrices or []
    prompt, own = matrices[: -one.completion_len], matrices[-one.completion_len :]
    count = _overlap(one, place, loss_mask)
    rows[place - 1 : place - 1 + count] = own[:count]
    for at, row in enumerate(prompt):
        rows[at] = rows[at] or row
    return count
