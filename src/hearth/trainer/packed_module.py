"""Packed tokens through a plain decoder's own module, with attention within segments."""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor

from hearth.kernels.training import Tree
from hearth.models.decoder import Decoder, read_decoder
from hearth.models.loading import LoadedModel
from hearth.models.recompute import recomputing
from hearth.trainer.segments import (
    LARGEST_DIM,
    Kernel,
    attend_in_turn,
    check_kernel,
    find_segments,
    find_torch_kernel,
)

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "hearth_packed"
"""The attention's name in transformers."""


class PackedModule:
    """Runs texts without padding and common prefixes once. ``from_model`` makes it where possible.

    It never makes an attention mask of all tokens, however many texts there are.
    """

    def __init__(self, loaded: LoadedModel, kernel: Kernel) -> None:
        # Importing transformers takes seconds; loading a model has imported it already.
        from hearth.trainer import packed_attention

        packed_attention.install(loaded.module, PACKED_ATTENTION)
        self._loaded = loaded
        self._kernel = kernel
        self._states = packed_attention.run_packed

    @classmethod
    def from_model(cls, loaded: LoadedModel, kernel: Kernel | None = None) -> PackedModule | None:
        """The packed form of a plain decoder; None for other models, or where the kernel is wrong.

        ``kernel`` computes the attention; None takes torch's: on a CPU segment by segment, on a GPU
        of all segments in one call, which is for bfloat16.
        """
        decoder = read_decoder(loaded)
        # A policy and the frozen model beside it may be one module, which has our attention then.
        is_sdpa = loaded.config._attn_implementation in ("sdpa", PACKED_ATTENTION)
        if decoder is None or not is_sdpa:
            return None
        kernel = kernel or _choose_kernel(loaded, decoder)
        if kernel is None:
            return None
        try:
            check_kernel(
                kernel,
                heads=decoder.heads,
                kv_heads=decoder.kv_heads,
                dim=decoder.dim,
                dtype=loaded.dtype,
                device=torch.device(loaded.device),
            )
        except Exception as error:
            logger.warning(
                "training of %s pads its texts and computes common prefixes once per text: %s: %s",
                loaded.name,
                type(error).__name__,
                error,
                exc_info=True,
            )
            return None
        return cls(loaded, kernel)

    def states(
        self, tokens: Tensor, positions: Tensor, tree: Tree, *, recompute: bool = False
    ) -> Tensor:
        """Last hidden states [S, H] of packed tokens and their positions [S].

        With ``recompute`` layers keep their inputs only, and the backward pass computes the rest
        again.
        """
        device = torch.device(self._loaded.device)
        module = self._loaded.module
        with recomputing(module) if recompute else contextlib.nullcontext():
            return self._states(
                module.base_model,
                tokens.to(device),
                positions.to(device),
                find_segments(tree, device),
                self._kernel,
            )


def _choose_kernel(loaded: LoadedModel, decoder: Decoder) -> Kernel | None:
    if torch.device(loaded.device).type == "cpu":
        return attend_in_turn
    is_on_gpu = torch.device(loaded.device).type == "cuda"
    fits = decoder.dim <= LARGEST_DIM and decoder.dim % 8 == 0
    return find_torch_kernel() if is_on_gpu and loaded.dtype == torch.bfloat16 and fits else None
