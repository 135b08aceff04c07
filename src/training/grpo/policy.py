"""A torch model as the small GRPO library sees it: a module, and how it scores a completion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hearth.errors import ConfigError

TokenLogprobs = Callable[[nn.Module, str, str], Tensor]
"""``(module, prompt, completion)`` to the logprob of each token of the completion, [T], with a
gradient in the module's parameters; [0] for an empty completion."""


class TextEncoder(Protocol):
    """The one method of a transformers tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...


@dataclass(frozen=True)
class TorchPolicy:
    """A module with the function that scores a completion under it.

    Example: ``TorchPolicy(model, causal_lm_logprobs(tokenizer))``. Dropout should be off
    (``model.eval()``): otherwise old and new logprobs differ by more than the update.
    """

    module: nn.Module
    token_logprobs: TokenLogprobs

    def logprobs(self, prompt: str, completion: str) -> Tensor:
        """The logprob of each token of the completion, [T].

        Raises:
            ConfigError: the function gave no one-dimensional tensor.
        """
        row = self.token_logprobs(self.module, prompt, completion)
        if row.dim() != 1:
            raise ConfigError(
                f"token_logprobs must give one value per token, [T], got shape {list(row.shape)}"
            )
        return row

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that an update moves."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def frozen(self) -> TorchPolicy:
        """A copy as it is now, which no update moves: the reference."""
        module = copy.deepcopy(self.module).eval().requires_grad_(False)
        return TorchPolicy(module, self.token_logprobs)


def causal_lm_logprobs(tokenizer: TextEncoder, *, add_special_tokens: bool = True) -> TokenLogprobs:
    """How a causal language model of transformers scores a completion.

    Prompt and completion are encoded one by one, so that a token never spans both. Only the
    completion's text is scored, no end token. ``add_special_tokens`` is about the prompt: False
    where a chat template has written them into it. Logprobs are float32.
    """

    def token_logprobs(module: nn.Module, prompt: str, completion: str) -> Tensor:
        start = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        encoded = tokenizer.encode(completion, add_special_tokens=False)
        if not start:
            raise ConfigError(
                f"prompt must have at least one token, got {prompt!r}: the first token of the "
                "completion would have nothing to follow"
            )
        device = next(module.parameters()).device
        if not encoded:
            return torch.zeros(0, device=device)
        tokens = torch.tensor([start + encoded], device=device)
        logits: Tensor = module(input_ids=tokens).logits[0, len(start) - 1 : -1]
        scored = torch.log_softmax(logits.float(), dim=-1)
        return scored.gather(1, tokens[0, len(start) :, None])[:, 0]

    return token_logprobs
