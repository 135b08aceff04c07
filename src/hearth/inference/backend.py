"""What a deployment's service needs of its engine, and the records between the two.

Owns the request and the result. Knows neither HTTP nor an engine.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hearth.errors import EngineError
from hearth.inference.sync_tracker import ServingState, SyncTracker
from hearth.wire.completions import FinishReason, RunningRequests
from hearth.wire.routing import Choice

if TYPE_CHECKING:
    from hearth.sync.store import Snapshot

logger = logging.getLogger(__name__)

Phase = Literal["idle", "sampling", "load_snapshot"]
TopLogprobs = list[tuple[int, float]]
"""Token ids with the model's own logprobs, the most probable first."""


@dataclass(frozen=True)
class SampledToken:
    """One token of a completion; the logprobs are those of ``SampledSequence``."""

    token_id: int
    logprob: float
    sampling_logprob: float
    top: TopLogprobs | None = None
    routing: Choice | None = None


@dataclass(frozen=True)
class TokenListener:
    """Callbacks of a running completion, called on the backend's own thread: return at once."""

    on_prefill: Callable[[list[float | None] | None], None]
    """Called before the first token, with the prompt's logprobs if the request asks for them."""
    on_token: Callable[[SampledToken], None]
    """Called with each token, a matched stop token included."""

    def notify_prefill(self, prompt_logprobs: list[float | None] | None) -> None:
        """Call ``on_prefill``; its errors are logged."""
        try:
            self.on_prefill(prompt_logprobs)
        except Exception:
            logger.exception("a listener failed; its completion goes on")

    def notify_token(self, token: SampledToken) -> None:
        """Call ``on_token``; its errors are logged."""
        try:
            self.on_token(token)
        except Exception:
            logger.exception("a listener failed; its completion goes on")


@dataclass(frozen=True)
class AdapterSource:
    """A LoRA adapter's snapshot, and how to read it; an identity never changes its weights."""

    identity: str
    fetch: Callable[[], Snapshot]


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One completion of one prompt.

    Example: ``SampleRequest(prompt=[1, 2, 3], max_tokens=16, temperature=1.0, seed=7)``
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    """0 samples nothing: with ``prompt_logprobs`` the prompt is scored."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the most probable tokens, before ``top_p``; 0 keeps all."""
    seed: int | None = None
    """Fixes the random numbers; None takes a new seed."""
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    prompt_logprobs_last: int | None = None
    """Of how many of the prompt's last tokens; None of all."""
    top_logprobs: int = 0
    """How many of the most probable tokens are listed beside each sampled one."""
    prompt_top_logprobs: int = 0
    """The same beside each prompt token that ``prompt_logprobs`` scores."""
    adapter: AdapterSource | None = None
    """Sample with this adapter on the base weights; None with the weights that are served."""
    routing: bool = False
    """Record the experts that were chosen; a dense model has none."""
    visible_tokens: Sequence[str] = ()
    """Special tokens that the text contains; all others are left out."""
    client: str = ""
    """Whose request it is: clients take turns."""
    listener: TokenListener | None = None
    """Called with each token; None costs nothing."""


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One completion. Lists have one entry per sampled token, a matched stop token included.

    ``logprobs`` are the model's own (log-softmax of its logits, float32). ``sampling_logprobs`` are
    those of the distribution that was sampled: after temperature, top_k and top_p, renormalized;
    a greedy choice has 0. ``prompt_logprobs`` are the model's, one per requested prompt token, the
    prompt's first None.
    """

    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    prompt_logprobs: list[float | None] | None
    top_logprobs: list[TopLogprobs] | None = None
    """One list per sampled token; None without a request for them."""
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    """One list per entry of ``prompt_logprobs``, the prompt's first None; None without a request
    for them."""
    routing: Sequence[Choice] | None = None
    """Experts with which each token was sampled: those of the position before it. None without a
    request for them, or of a dense model."""
    prompt_routing: Sequence[Choice] | None = None
    """The same of the prompt's tokens after the first."""
    text: str
    """Without special tokens (except ``visible_tokens``), cut before a stop string; empty without a
    tokenizer."""
    finish_reason: FinishReason
    weight_version: int
    """The oldest version that sampled one of the tokens."""
    snapshot_identity: str | None
    """The snapshot of ``weight_version``, or the request's adapter."""
    versions: list[list[int]]
    """Run lengths ``[weight version, sampled tokens]`` in the order of the tokens."""
    seed: int
    queue_s: float
    """Seconds between submission and admission to the batch."""
    generation_s: float
    """Seconds between admission and the last token, prefill included."""
    cached_prompt_tokens: int
    """Prompt tokens whose prefill was taken from another request."""
    num_concurrent: int
    """Completions that were in the batch when this one joined, itself included."""


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here.

    A protocol, since the methods of transformers' own class return wider types.
    """

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id; special ones say so."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Ids of all tokens by their texts."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """A conversation as token ids (``return_dict=False``) or text (``tokenize=False``)."""
        ...


class InferenceBackend(ABC):
    """Samples completions and loads new weights. Every method may be called from any thread.

    ``tokenizer`` is for text prompts, stop strings and texts; None serves token ids only.
    ``max_seq_len`` is the longest sequence, prompt included.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.failed: Future[EngineError] = Future()
        """Resolved when it cannot go on."""
        self._tracker = SyncTracker()
        self._phase: Phase = "idle"
        self._on_phase: Callable[[Phase], None] | None = None

    @abstractmethod
    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """Queue one completion. Cancelling the future ends it.

        Raises:
            RequestError: a field breaks its rule.
            ClosedError: the backend was closed.
        """

    @abstractmethod
    def hot_load(
        self,
        identity: str,
        fetch: Callable[[], Snapshot],
        *,
        weight_version: int | None = None,
        running_requests: RunningRequests = "drain",
    ) -> Future[ServingState]:
        """Serve the snapshot that ``fetch`` returns, without dropping a request.

        A snapshot that is served or under way is not loaded again, even with other arguments.
        ``weight_version`` is the number that these weights had before a restart; None takes the
        next one. ``running_requests`` is that of ``HotLoadRequest``.

        Raises:
            ClosedError: the backend was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop; requests that are left fail with ``ClosedError``."""

    def state(self) -> ServingState:
        """What is served now."""
        return self._tracker.state()

    def watch_sync(self, identity: str) -> Future[ServingState]:
        """The state as soon as ``identity`` is served or could not be loaded."""
        return self._tracker.watch_sync(identity)

    def watch_phase(self, on_phase: Callable[[Phase], None]) -> None:
        """Call ``on_phase`` at every change of phase, from any thread; replaces an earlier one.

        ``load_snapshot`` while weights are swapped, ``sampling`` while requests run, else
        ``load_snapshot`` while a snapshot is read, else ``idle``, as at the start.
        """
        self._on_phase = on_phase

    def _report_phase(self, phase: Phase) -> None:
        """Call ``on_phase`` if the phase has changed."""
        if phase == self._phase:
            return
        self._phase = phase
        if self._on_phase is None:
            return
        try:
            self._on_phase(phase)
        except Exception:  # a failing callback must not end a request
            logger.exception("the phase callback failed; the deployment goes on")
