"""Router replay (R3): the trainer sends tokens to the experts that the sampler sent them to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hearth.sdk import SampledCompletion
from training.config.parts import Replay

logger = logging.getLogger(__name__)

ROUTING_OPTIONS = ("include_routing_matrix", "include_prompt_routing")
"""Options of a sampler that ask for the experts of each token."""


def routing_options(replay: Replay, *, has_experts: bool) -> dict[str, bool]:
    """What a sampler is asked for; nothing where the policy has no experts to replay."""
    if replay == "none" or not has_experts:
        return {}
    options = {"include_routing_matrix": True}
    return options | {"include_prompt_routing": True} if replay == "all" else options


def warn_dense_policy(replay: Replay, base_model: str, *, has_experts: bool) -> None:
    """Say that there is nothing to replay, where replay was asked for."""
    if replay != "none" and not has_experts:
        logger.warning(
            "router_replay does nothing: %s has no experts that can be recorded and replayed",
            base_model,
        )


def find_routing(
    tokens: Sequence[int], loss_mask: Sequence[int], seen: Sequence[SampledCompletion]
) -> list[str] | None:
    """The experts of a sample's tokens, looked up in completions; None when there are none.

    One text per input token (N - 1 for N tokens), empty where nothing is known. Sampled
    tokens take the experts of the completion whose prompt is everything before them: after another
    prompt the same tokens may use other experts. Tokens that stand in the prompt of a later turn
    keep the experts that they were sampled with.
    """
    routed = [completion for completion in seen if completion.routing_matrices is not None]
    if not routed:
        return None
    texts = [""] * (len(tokens) - 1)
    place = 1
    while place < len(tokens):
        completion = (
            _find_completion(place, tokens, loss_mask, routed) if loss_mask[place] else None
        )
        place += 1 if completion is None else _write_routing(texts, completion, place, loss_mask)
    return texts if any(texts) else None


def _find_completion(
    place: int, tokens: Sequence[int], loss_mask: Sequence[int], seen: Sequence[SampledCompletion]
) -> SampledCompletion | None:
    """The completion that was sampled at ``place`` of a sample."""
    for completion in seen:
        if completion.prompt_len != place or not completion.completion_len:
            continue
        stop = place + _count_overlap(completion, place, loss_mask)
        if completion.full_tokens[:stop] == list(tokens[:stop]):
            return completion
    return None


def _count_overlap(completion: SampledCompletion, place: int, loss_mask: Sequence[int]) -> int:
    """How many of a completion's tokens the sample may have from ``place`` on."""
    sampled_mask = loss_mask[place : place + completion.completion_len]
    return len(sampled_mask) if all(sampled_mask) else list(sampled_mask).index(0)


def _write_routing(
    texts: list[str], completion: SampledCompletion, place: int, loss_mask: Sequence[int]
) -> int:
    """Write a completion's experts into ``rows``; the number of its tokens in the sample."""
    matrices = completion.routing_matrices or []
    prompt, own = matrices[: -completion.completion_len], matrices[-completion.completion_len :]
    count = _count_overlap(completion, place, loss_mask)
    texts[place - 1 : place - 1 + count] = own[:count]
    for at, text in enumerate(prompt):
        texts[at] = texts[at] or text
    return count
