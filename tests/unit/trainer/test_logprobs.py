from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trainer.decoders import LargestTensor

from hearth.errors import ConfigError
from hearth.models.loading import load_model
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packing import PaddedBatch

IDS = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 96, (120, 1), generator=torch.Generator().manual_seed(2))
FAMILIES = ["qwen", "gemma", "granite", "cohere", "phi", "gpt2"]


def hidden_states(scorer: TargetScorer) -> torch.Tensor:
    """Of all of ``IDS``, padded as any model takes them."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return scorer.states(PaddedBatch([], IDS, nothing, nothing))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_models_own_log_softmax(
    model_of: Callable[[str], Path], family: str, temperature: float
) -> None:
    loaded = load_model(model_of(family))
    scorer = TargetScorer(loaded)
    with torch.no_grad():
        logits = loaded.module(IDS).logits.flatten(0, 1).double() / temperature
        found = scorer.logprobs(hidden_states(scorer), TARGETS, temperature)

    expected = logits.log_softmax(-1).gather(1, TARGETS)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    assert float(expected.std()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("train_unembed", [False, True])
def test_chunks_change_neither_logprobs_nor_gradient(
    qwen_folder: Path, train_unembed: bool
) -> None:
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LoraOptions(rank=4, train_unembed=train_unembed))
    adapter = list(adapter_tensors(loaded).values())
    with torch.no_grad():
        for tensor in adapter:
            tensor.add_(0.05)

    def run(budget: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        scorer = TargetScorer(loaded, TrainerOptions(logit_budget=budget))
        found = scorer.logprobs(hidden_states(scorer), TARGETS)
        return found.detach(), list(torch.autograd.grad((found**2).sum(), adapter))

    whole, in_chunks = run(2**20), run(1)
    assert torch.equal(whole[0], in_chunks[0])
    # Some are differences of large numbers, and round as those do.
    noise = 1e-6 * max(float(gradient.abs().max()) for gradient in whole[1])
    for gradient, other in zip(whole[1], in_chunks[1], strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=noise)


@pytest.mark.slow
def test_the_logits_of_all_tokens_never_exist_at_once(qwen_folder: Path) -> None:
    loaded = load_model(qwen_folder)
    tokens, vocab_size = 2000, 96
    hidden = torch.randn(tokens, 64, requires_grad=True)
    targets = torch.zeros(tokens, 1, dtype=torch.int64)

    def largest(budget: int) -> int:
        scorer = TargetScorer(loaded, TrainerOptions(logit_budget=budget))
        with LargestTensor() as seen:
            scorer.logprobs(hidden, targets).sum().backward()
        return seen.elements

    assert largest(2**30) == tokens * vocab_size
    # Beside the chunks' logits there are only the hidden states and their gradient.
    assert largest(100 * vocab_size) == tokens * 64


def test_what_stays_for_the_backward_pass_is_not_the_logits(qwen_folder: Path) -> None:
    scorer = TargetScorer(load_model(qwen_folder), TrainerOptions(logit_budget=100 * 96))
    hidden = torch.randn(2000, 64, requires_grad=True)
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scorer.logprobs(hidden, torch.zeros(2000, 1, dtype=torch.int64))

    assert max(saved, default=0) <= 100 * 64


def test_few_rows_score_as_in_a_crowd(qwen_folder: Path) -> None:
    scorer = TargetScorer(load_model(qwen_folder))
    with torch.no_grad():
        hidden = hidden_states(scorer)
        crowd = scorer.logprobs(hidden, TARGETS)
        alone = scorer.logprobs(hidden[77:78], TARGETS[77:78])

    assert torch.equal(alone[0], crowd[77])


def test_no_rows_give_no_logprobs(qwen_folder: Path) -> None:
    scorer = TargetScorer(load_model(qwen_folder))

    assert scorer.logprobs(torch.zeros(0, 64), TARGETS[:0]).shape == (0, 1)


def test_several_targets_share_a_token(qwen_folder: Path) -> None:
    scorer = TargetScorer(load_model(qwen_folder))
    every = torch.arange(96).expand(120, 96)
    with torch.no_grad():
        hidden = hidden_states(scorer)
        found = scorer.logprobs(hidden, every)

    torch.testing.assert_close(found.exp().sum(1), torch.ones(120), rtol=0, atol=1e-5)
    expected = scorer.logprobs(hidden, TARGETS)
    torch.testing.assert_close(found.gather(1, TARGETS), expected, rtol=0, atol=1e-5)


def test_a_head_that_does_more_than_its_config_says_is_refused(qwen_folder: Path) -> None:
    loaded = load_model(qwen_folder)
    forward = loaded.module.forward

    def shifted(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * 2
        return output

    loaded.module.forward = shifted
    with pytest.raises(ConfigError, match=r"must compute logits as head\(hidden states\)"):
        TargetScorer(loaded)
