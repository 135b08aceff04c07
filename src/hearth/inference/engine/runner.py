"""Forward passes of the engine: prompts into the KV cache, and one token for each slot.

Legend: P prompts, L padded prompt length, T prompt tokens, B slots, R rows of logits, V vocabulary,
N layers, H kv heads, D head size.

On the CPU in float32 the logits of a sequence do not depend on what else is in its forward, to the
bit, while the hidden size is small (measured between batches, at any length; a plain forward of
transformers gives the same bits on some CPUs, and on others some that round differently). For this,
prompts of one padded length run together, decoding pads to ``MIN_ROWS`` slots, and attention reads
``key_span`` keys.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import ConfigError, EngineError
from hearth.inference.engine.adapters import Adapter, AdapterLayers, AdapterRows
from hearth.inference.engine.cache import MIN_ROWS, CacheShape, SlotCache, key_span
from hearth.inference.engine.fused import FusedDecoder
from hearth.inference.engine.graphs import CudaRecorder, DecodeGraphs
from hearth.inference.engine.options import DecoderKind
from hearth.inference.engine.plain_step import PlainStep
from hearth.inference.engine.prefill import PackedPrefill
from hearth.inference.engine.prompts import Extras, Prompt
from hearth.inference.engine.sampler import TopTokens, find_top, split_top
from hearth.models.loading import LoadedModel
from hearth.models.routing import Recording, find_routers
from hearth.wire.routing import FREE

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)

_PROMPT_STEP = 32
_MAX_LOGITS = 2**27
"""Most logits of one forward (512 MiB in float32); a longer scoring takes several forwards."""


def pad_length(tokens: int) -> int:
    """The length that a prompt runs at: the next multiple of 32."""
    return -(-tokens // _PROMPT_STEP) * _PROMPT_STEP


class ModelRunner:
    """Runs one causal LM for the engine. Used by one thread at a time.

    ``decoder`` is that of ``EngineOptions``. With a ``recorder`` the decoding steps of a dense
    model are recorded and replayed. ``adapters`` are its layers where requests may name adapters.

    Raises:
        ConfigError: the model's cache is not plain keys and values, or its attention looks back
            less far than ``max_seq_len``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_seq_len: int,
        recorder: CudaRecorder | None = None,
        decoder: DecoderKind | None = None,
        adapters: AdapterLayers | None = None,
    ) -> None:
        # Importing transformers takes seconds; a process that has loaded a model has done it.
        from hearth.inference.engine import attention

        self.loaded = loaded
        self.device = torch.device(loaded.device)
        self._attention: ModuleType = attention
        _check_attention_span(loaded, max_seq_len)
        attention.install(loaded.module)
        self._selects_rows = True
        self._adapters = adapters
        has_kernels = decoder in (None, "fused")
        self._fused = FusedDecoder.for_model(loaded, positions=max_seq_len) if has_kernels else None
        self._packed = PackedPrefill.for_model(loaded) if has_kernels else None
        self._graphs: DecodeGraphs | None = None
        self.routers = find_routers(loaded)
        """None for a dense model."""
        self._plain: PlainStep | None = None
        self.cache_shape = self._probe()
        is_plain = decoder == "plain" or recorder is not None or self.device.type == "cuda"
        if self._fused is None and (is_plain or self.packs) and decoder != "module":
            self._plain = PlainStep.for_model(loaded, positions=max_seq_len)
            if self._plain is not None and not self._is_sound():
                self._plain = None
        # The sizes of the experts' batches are read back from the device: no graph can record that.
        if recorder is not None and self.routers is None and self._fused is None:
            self._graphs = DecodeGraphs(loaded, self._step, recorder)

    @property
    def packs(self) -> bool:
        """Whether prompts of any lengths are prefilled together."""
        return self._packed is not None

    @property
    def reads_masked_keys(self) -> bool:
        """Whether a decoding step reads keys behind a sequence's end, where no NaN may be."""
        return self._fused is None

    @property
    def least_rows(self) -> int:
        """Slots that a decoding step needs, so that a row has the same bits in any batch."""
        return MIN_ROWS if self._fused is None else 1

    def weights_changed(self) -> None:
        """Compute with the weights that the module has now."""
        if self._fused is not None:
            self._fused.refresh()
        if self._plain is not None:
            self._plain.weights_changed()
        if self._graphs is not None:
            self._graphs.weights_changed()

    def recording(self, wanted: bool) -> contextlib.AbstractContextManager[Recording]:
        """Record the experts of what is computed inside the ``with``, if ``wanted``."""
        if wanted and self.routers is not None:
            return self.routers.recording()
        return contextlib.nullcontext(Recording())

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[tuple[int, ...]], extras: Extras, adapter: Adapter | None = None
    ) -> tuple[list[Prompt], int]:
        """Prefilled prompts with their ``extras``, and how many tokens were computed.

        All must have one padded length, unless the runner ``packs``.
        """
        serial = 0 if adapter is None else adapter.serial
        with self._computing([] if adapter is None else [AdapterRows(adapter)]):
            if self._packed is not None:
                return self._packed.run(prompts, extras, serial)
            with self.recording(extras.routed) as record:
                keys, values, logits, scores = self._run_prompts(prompts, extras)
        choices = record.choices()
        width = pad_length(len(prompts[0]))
        done: list[Prompt] = []
        for index, tokens in enumerate(prompts):
            length = len(tokens)
            done.append(
                Prompt(
                    tokens=tokens,
                    keys=keys[:, index, :, :length].clone(),
                    values=values[:, index, :, :length].clone(),
                    logits=logits[index].clone(),
                    logprobs=scores[index][0] if extras.scored else None,
                    routing=None if choices is None else choices[index * width :][:length].copy(),
                    top=scores[index][1],
                    adapter=serial,
                )
            )
        return done, len(prompts) * width

    @torch.inference_mode()
    def decode(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache: SlotCache,
        adapters: Sequence[Adapter | None] = (),
    ) -> Tensor:
        """Logits [B, V] (float32) after ``tokens`` at ``positions`` [B], which enter the cache.

        ``adapters`` are those of the first rows. Where steps are recorded the logits are in a
        buffer that the next step overwrites; a step with adapters is not recorded.
        """
        if self._fused is not None:
            return self._fused.decode(tokens, positions, cache, adapters)
        if self._graphs is not None and not adapters:
            return self._graphs.decode(tokens, positions, cache)
        span = key_span(int(positions.max()) + 1)
        at = torch.from_numpy(positions).to(self.device)
        with self._computing(self._adapters.group(adapters) if self._adapters else []):
            return self._step(torch.from_numpy(tokens).to(self.device), at, span, cache).float()

    def _computing(self, rows: Sequence[AdapterRows]) -> contextlib.AbstractContextManager[None]:
        return self._adapters.computing(rows) if self._adapters else contextlib.nullcontext()

    def _step(self, tokens: Tensor, at: Tensor, span: int, cache: SlotCache) -> Tensor:
        """Logits [B, V] after ``tokens`` at positions ``at`` [B]; attention sees ``span`` keys."""
        if self._plain is not None:
            return self._plain(tokens, at, span, cache)
        seen = torch.arange(span, device=self.device) <= at[:, None]
        mask = torch.zeros(seen.shape, dtype=cache.shape.dtype, device=self.device)
        mask.masked_fill_(~seen, -torch.inf)
        output = self.loaded.module(
            input_ids=tokens[:, None],
            position_ids=at[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self._attention.DecodeCache(cache, at, span),
            use_cache=True,
        )
        return output.logits[:, -1]

    def _run_prompts(
        self, prompts: Sequence[tuple[int, ...]], extras: Extras
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[list[float], TopTokens | None]]]:
        """Keys and values [N, P, H, L, D], last logits [P, V], and of each prompt's last
        ``extras.scored`` tokens the logprobs, and the most probable tokens there."""
        scored = extras.scored
        tokens = np.zeros((len(prompts), pad_length(len(prompts[0]))), np.int64)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = prompt
        input_ids = torch.from_numpy(tokens).to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = input_ids.shape[1]
        ends = torch.arange(len(prompts), device=self.device) * width + lengths - 1
        at, before = torch.arange(width, device=self.device), (lengths - 1)[:, None]
        counted = (at < before) & (at >= before - scored)
        places = torch.cat([ends, counted.flatten().nonzero().squeeze(1)])
        targets = input_ids.roll(-1, dims=1).flatten()
        filled = self._attention.PrefillCache()
        first, parts = None, []
        tops: list[TopTokens] = []
        for chunk in places.split(max(len(prompts), _MAX_LOGITS // self.loaded.vocab_size)):
            cache = filled if first is None else self._attention.PrefillCache()
            logits = self._forward(input_ids, chunk, cache)
            first = logits if first is None else first
            if scored:
                rows = torch.log_softmax(logits, dim=-1).gather(1, targets[chunk][:, None])
                parts.append(rows.squeeze(1).cpu())
                if extras.top:
                    tops.append(find_top(logits, extras.top))
        assert first is not None
        layers = range(len(filled.keys))
        keys = torch.stack([filled.keys[layer] for layer in layers])
        values = torch.stack([filled.values[layer] for layer in layers])
        flat = torch.cat(parts)[len(prompts) :] if scored else torch.zeros(0)
        counts = [min(scored, len(prompt) - 1) for prompt in prompts]
        logprobs = [part.tolist() for part in flat.split(counts)]
        listed: list[TopTokens | None] = [None] * len(prompts)
        if tops:
            # Those of the last tokens stand before them.
            listed = [*split_top(tops, [len(prompts), *counts])[1:]]
        scores = list(zip(logprobs, listed, strict=True))
        return keys, values, first[: len(prompts)], scores

    def _forward(self, input_ids: Tensor, places: Tensor, cache: Any) -> Tensor:
        """Logits [R, V] (float32) at flat ``places`` of right-padded prompts [P, L]."""
        positions = torch.arange(input_ids.shape[1], device=self.device)[None]
        inputs = {"input_ids": input_ids, "position_ids": positions, "past_key_values": cache}
        if not self._selects_rows:
            logits = self.loaded.module(**inputs, use_cache=True).logits
            return logits.flatten(0, 1)[places].float()
        keep = torch.zeros(input_ids.shape, dtype=torch.bool, device=self.device)
        keep.view(-1)[places] = True
        # The head's rounding depends on the number of rows, while they are few.
        keep[0, :MIN_ROWS] = True
        logits = self.loaded.module(**inputs, use_cache=True, logits_to_keep=keep).logits
        row_of = keep.view(-1).cumsum(0) - 1
        return logits[row_of[places]].float()

    @torch.inference_mode()
    def _probe(self) -> CacheShape:
        """Try prefill and decoding against a plain forward; returns what a cached token holds."""
        prompt = tuple(token % self.loaded.vocab_size for token in (1, 2, 0, 1, 2))
        try:
            input_ids = torch.tensor([prompt], device=self.device)
            with self.recording(wanted=True) as record:
                plain = self.loaded.module(input_ids=input_ids, use_cache=False).logits[0].float()
            # Where two experts are as good as equal, rounding chooses: all passes take the same.
            experts = record.choices()
            self._selects_rows = self._can_select(prompt)
            with self._sending(experts, pad_length(len(prompt) - 1)):
                (prefilled,), _ = self.prefill([prompt[:-1]], Extras())
            keys, values = prefilled.keys, prefilled.values
            shape = CacheShape(
                layers=keys.shape[0],
                heads=keys.shape[1],
                key_dim=keys.shape[3],
                value_dim=values.shape[3],
                dtype=keys.dtype,
                device=self.device,
            )
            with self._sending(None if experts is None else experts[-1:], MIN_ROWS):
                decoded = self._decode_once(prompt, shape, prefilled)
        except EngineError:
            raise
        except Exception as error:
            raise ConfigError(
                f"model must run with the engine's KV cache, got {self.loaded.name!r} "
                f"({type(self.loaded.module).__name__}): {error}"
            ) from error
        actual, expected = torch.stack([prefilled.logits, decoded]), plain[-2:]
        is_exact = self.loaded.dtype == torch.float32
        tolerance = (1e-4 if is_exact else 0.1) * (1 + expected.abs().max())
        if not bool((actual - expected).abs().max() <= tolerance):
            raise ConfigError(
                f"model must run with the engine's KV cache, got {self.loaded.name!r} "
                f"({type(self.loaded.module).__name__}): decoding differs from a plain forward"
            )
        return shape

    def _sending(
        self, experts: NDArray[np.unsignedinteger] | None, tokens: int
    ) -> contextlib.AbstractContextManager[None]:
        """Send the first of a forward's ``tokens`` to ``experts`` [T, N, K]."""
        if experts is None or self.routers is None:
            return contextlib.nullcontext()
        choices = torch.full((tokens, *experts.shape[1:]), FREE)
        known = min(tokens, len(experts))
        choices[:known] = torch.from_numpy(experts[:known].astype(np.int64))
        return self.routers.replaying(choices)

    def _is_sound(self) -> bool:
        """Whether decoding with ``PlainStep`` passes the probe as well."""
        try:
            self._probe()
        except ConfigError as error:
            logger.warning("decoding runs the whole module: %s", error)
            return False
        return True

    def _can_select(self, prompt: tuple[int, ...]) -> bool:
        """Whether the module computes logits at chosen places only (a 2-D ``logits_to_keep``)."""
        input_ids = torch.tensor([prompt], device=self.device)
        keep = input_ids >= 0
        keep[0, 0] = False
        try:
            logits = self.loaded.module(
                input_ids=input_ids, use_cache=False, logits_to_keep=keep
            ).logits
        except (TypeError, IndexError, RuntimeError, ValueError):
            return False
        return logits.shape[:-1] == (len(prompt) - 1,)

    def _decode_once(self, prompt: tuple[int, ...], shape: CacheShape, prefilled: Prompt) -> Tensor:
        """Logits [V] after the last token of ``prompt``, the others being ``prefilled``."""
        cache = SlotCache(shape, budget_bytes=2**62, max_slots=MIN_ROWS)
        cache.reserve(MIN_ROWS, len(prompt), active=0)
        before = len(prompt) - 1
        cache.fill([0], prefilled.keys, prefilled.values)
        tokens = np.zeros(MIN_ROWS, np.int64)
        positions = np.zeros(MIN_ROWS, np.int64)
        tokens[0], positions[0] = prompt[-1], before
        return self.decode(tokens, positions, cache)[0]


def _check_attention_span(loaded: LoadedModel, max_seq_len: int) -> None:
    """Refuse layers whose attention reaches back less far than the longest sequence."""
    config = loaded.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if window and slides and window < max_seq_len:
        raise ConfigError(
            f"max_seq_len must be <= {window} for {loaded.name!r}, got {max_seq_len}: its layers "
            "attend no further back, and the embedded engine has no sliding windows"
        )
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        raise ConfigError(
            f"model must have attention layers only, got {loaded.name!r} with {sorted(other)}: "
            "the embedded engine keeps plain keys and values per token"
        )
