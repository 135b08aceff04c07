"""Logprobs of given targets, without the logits of all tokens in memory at one time.

Legend: B datums of a padded batch, L its padded length, H hidden size, V vocabulary, R tokens that
are scored, K targets per token; N layers with experts, E experts that a token goes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hearth.errors import ConfigError
from hearth.kernels.training import score, score_frozen
from hearth.models.loading import LoadedModel
from hearth.models.packed import PackedDecoder
from hearth.models.recompute import recomputing
from hearth.models.routing import find_routers
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packed_module import PackedModule
from hearth.trainer.packing import (
    Example,
    Limits,
    MicroBatch,
    PackedBatch,
    split_packed,
    split_padded,
)
from hearth.trainer.segments import Kernel

# Below 16 rows the CPU's matrix product takes another path, which rounds differently.
_MIN_ROWS = 16


class TargetScorer:
    """Scores targets under a model, in chunks of at most ``options.logit_budget`` logits.

    Works for any head (tied, biased, adapted by LoRA) and the known ways of shaping logits after
    it; a head that does more is refused. Large batches recompute activations in the backward pass
    (``options.should_recompute``); ``kernel`` computes ``PackedModule``'s attention.

    Raises:
        ConfigError: the model's logits are not its head on its last hidden states, or the budget
            is too small for 32 rows of the vocabulary.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: TrainerOptions | None = None,
        *,
        kernel: Kernel | None = None,
    ) -> None:
        self._options = options or TrainerOptions()
        self._module: Any = loaded.module
        self._backbone: Any = self._module.base_model
        self._shape = _read_logit_transform(loaded.config.get_text_config())
        self._chunk_rows = max(2 * _MIN_ROWS, self._options.logit_budget // loaded.vocab_size)
        self._device = loaded.device
        self._packed = self._find_packed(loaded, kernel)
        self._check(loaded)
        self._routers = find_routers(loaded)
        self.routing = None if self._routers is None else self._routers.shape
        """Its routers' layers and experts; None for a dense model."""

    def _find_packed(
        self, loaded: LoadedModel, kernel: Kernel | None
    ) -> PackedDecoder | PackedModule | None:
        """The packed form of the model; None where it must be padded."""
        return PackedDecoder.from_model(loaded) or PackedModule.from_model(loaded, kernel)

    def replaying(self, routing: Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Send tokens to given experts, backward passes included, inside the ``with``.

        ``routing`` [B * L, N, E] is of the tokens that ``states`` gets.
        """
        if routing is None or self._routers is None:
            return contextlib.nullcontext()
        return self._routers.replaying(routing)

    def batches(
        self, examples: Sequence[Example], token_budget: int, limits: Limits
    ) -> Sequence[MicroBatch]:
        """Examples in batches of at most ``token_budget`` tokens, padding included.

        Raises:
            ConfigError: the budget is below 1.
        """
        is_single = all(example.targets.shape[1] == 1 for example in examples)
        if self._packed is not None and is_single:
            return split_packed(examples, token_budget)
        return split_padded(examples, token_budget, limits)

    def states(self, batch: MicroBatch) -> Tensor:
        """Last hidden states of a batch, flat; its examples' tokens are at ``batch.token_places``.

        Padding is on the right and needs no mask: attention is causal, so a token never sees the
        padding behind it.
        """
        recompute = self._options.should_recompute(batch.num_tokens)
        if isinstance(batch, PackedBatch):
            assert self._packed is not None, "only a scorer with a packed form makes packed batches"
            return self._packed.states(
                batch.tokens, batch.positions, batch.tree, recompute=recompute
            )
        with recomputing(self._module) if recompute else contextlib.nullcontext():
            return self._run_padded(batch.input_ids)

    def _run_padded(self, input_ids: Tensor) -> Tensor:
        output = self._backbone(input_ids=input_ids.to(self._device), use_cache=False)
        return output.last_hidden_state.flatten(0, 1)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Logprobs [R, K] (float32) of ``targets`` [R, K] after ``hidden`` [R, H].

        They are those of ``softmax(logits / temperature)``. Above the budget each chunk drops its
        logits. It computes them again in the backward pass, or, under a frozen head, keeps the
        gradient of its states.
        """
        rows = hidden.shape[0]
        chunks = max(1, -(-rows // self._chunk_rows))
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, max(0, _MIN_ROWS - rows)))
        targets = torch.nn.functional.pad(targets, (0, 0, 0, max(0, _MIN_ROWS - rows)))
        parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        is_kept = chunks == 1 or not torch.is_grad_enabled()
        run = self._score_chunk if is_kept else self._score_chunk_again
        if not is_kept and self._has_frozen_head() and targets.shape[1] == 1:
            run = self._score_chunk_once
        return torch.cat([run(states, wanted, temperature) for states, wanted in parts])[:rows]

    def _has_frozen_head(self) -> bool:
        """Whether logits are one product, with a weight that is not trained."""
        head = self._module.get_output_embeddings()
        is_plain = isinstance(self._packed, PackedDecoder) and type(head) is torch.nn.Linear
        return is_plain and head.bias is None and not head.weight.requires_grad

    def _score_chunk_once(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        weight = self._module.get_output_embeddings().weight
        return score_frozen(hidden, weight, targets[:, 0].contiguous(), temperature)[:, None]

    def _score_chunk_again(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        scored = checkpoint(
            self._score_chunk,
            hidden,
            targets,
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        assert isinstance(scored, Tensor)
        return scored

    def _score_chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logits = self._compute_logits(hidden)
        if isinstance(self._packed, PackedDecoder) and targets.shape[1] == 1:
            return score(logits, targets[:, 0].contiguous(), temperature)[:, None]
        if temperature != 1.0:
            logits = logits / temperature
        return torch.log_softmax(logits, dim=-1).gather(1, targets.to(logits.device))

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        if isinstance(self._packed, PackedDecoder):
            return self._shape(self._packed.logits(hidden.float()))
        # Read at each call: an adapter may have replaced the head.
        head = self._module.get_output_embeddings()
        return self._shape(head(hidden)).float()

    @torch.no_grad()
    def _check(self, loaded: LoadedModel) -> None:
        """Compare with the model's own logits once; a difference would train on wrong logprobs."""
        ids = torch.arange(_MIN_ROWS, device=self._device)[None] % loaded.vocab_size
        try:
            own = self._compute_logits(self._run_padded(ids))
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"base_model must have hidden states and an output head, got {loaded.name!r} "
                f"({type(self._module).__name__}): {error}"
            ) from None
        expected = self._module(input_ids=ids, use_cache=False).logits[0].float()
        tolerance = 1e-4 if loaded.dtype == torch.float32 else 2e-2
        if not torch.allclose(own, expected, rtol=tolerance, atol=tolerance):
            raise ConfigError(
                "base_model must compute logits as head(hidden states), scaled or soft-capped as "
                f"its config says, got {loaded.name!r} ({type(self._module).__name__}), which "
                f"differs by up to {float((own - expected).abs().max()):.2g}"
            )


def _read_logit_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """How a model family changes its logits after the head, from its text config."""
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = getattr(config, "logit_scale", None)  # Cohere
    multiplier = getattr(config, "lm_head_multiplier", None)  # Falcon-H1
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = (scale or 1.0) * (multiplier or 1.0)

    def shape(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        if divisor:
            logits = logits / divisor
        return torch.tanh(logits / cap) * cap if cap else logits

    return shape
