"""What a rollout function gets and what it gives: the contract of ``async_rl_loop`` (document 004).

A rollout function samples one trajectory and returns it as a ``RolloutSample``: parallel per-token
lists and one reward. One whose turns do not extend each other token by token returns a
``RolloutRun`` of several samples with one reward; one that plays several parts returns a
``Rollout`` of several runs, each with a reward of its own. None drops the rollout.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from hearth.errors import ConfigError
from hearth.losses.batch import LOGPROB_TOLERANCE
from hearth.sdk import ConcurrencyController


@dataclass(frozen=True)
class SampleArrays:
    """The lists of a sample of N tokens as arrays."""

    tokens: NDArray[np.int64]
    """[N]."""
    is_sampled: NDArray[np.bool_]
    """Where the mask is 1; [N]."""
    logprobs: NDArray[np.float64]
    """The sampler's, as they were given; [N]."""
    prompt_len: int
    completion_len: int


@dataclass
class RolloutSample:
    """One token sequence to train on. ``tokens``, ``logprobs`` and ``loss_mask`` are parallel.

    Several turns flatten into one sample: a turn begins where ``loss_mask`` goes from 0 to 1.

    Example: ``RolloutSample(tokens=[5, 6, 7, 8], logprobs=[0.0, 0.0, -0.3, -1.2],
    loss_mask=[0, 0, 1, 1], reward=1.0)``
    """

    tokens: list[int]
    """Everything that the model saw and sampled, in order; at least 2 ids."""
    logprobs: list[float]
    """The sampler's logprob of each sampled token; 0.0 elsewhere."""
    loss_mask: list[int]
    """1 on tokens that the policy sampled, 0 on prompts, tool results and feedback."""
    reward: float
    """What the whole trajectory is worth."""
    finish_reason: str = "stop"
    """Why the last turn ended; ``length`` counts as truncated."""
    text: str = ""
    """What the policy wrote, for logs."""
    versions: list[list[int]] | None = None
    """Run lengths ``[weight version, tokens]`` over the sampled tokens; None takes what the sampler
    of ``build_deployment_sampler`` has seen, else the version at submission."""
    routing_matrices: list[str] | None = None
    """Experts that a mixture-of-experts model took, for ``router_replay``: one text per token but
    the last, empty where unknown, or one per token from the first sampled one on, as
    ``SampledCompletion`` has them; None takes what the same sampler has seen."""
    parsed: bool | None = None
    """Whether the reward found the answer that it looks for, as ``Score.parsed``; None: unknown."""
    seeds: list[int] | None = None
    """Seed of each request, one a turn; None takes what the sampler of
    ``build_deployment_sampler`` has seen. On record only."""
    reward_parts: Mapping[str, float] | None = None
    """What the reward is made of, by name, as ``Score.parts``. On record only."""

    @property
    def prompt_len(self) -> int:
        """Tokens before the first sampled one."""
        if (arrays := self._read_arrays()) is not None:
            return arrays.prompt_len
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.tokens)

    @property
    def completion_len(self) -> int:
        """Number of sampled tokens."""
        if (arrays := self._read_arrays()) is not None:
            return arrays.completion_len
        return sum(self.loss_mask)

    @cached_property
    def arrays(self) -> SampleArrays:
        """The lists as arrays. From its first use on the lists must not change."""
        return _make_arrays(pack("q", self.tokens), bytes(self.loss_mask), pack("d", self.logprobs))

    def _read_arrays(self) -> SampleArrays | None:
        """The arrays if there are some; a rollout function may still write into the lists."""
        return self.__dict__.get("arrays")


@dataclass
class RolloutRun:
    """One trajectory in several samples, all with the same reward: they share its advantage."""

    segments: list[RolloutSample]
    run_id: str = ""
    """Names the trajectory in logs."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever belongs to it; not looked at."""

    @property
    def reward(self) -> float:
        """The reward of every segment."""
        return self.segments[0].reward

    @property
    def parsed(self) -> bool | None:
        """Whether an answer was found in any segment; None where none says."""
        said = [segment.parsed for segment in self.segments if segment.parsed is not None]
        return any(said) if said else None


@dataclass
class Rollout:
    """Several trajectories of one rollout, each with a reward of its own."""

    runs: list[RolloutRun]
    row_meta: dict[str, Any] | None = None
    """Whatever belongs to the row; the group's filter sees it."""


RolloutResult = RolloutSample | RolloutRun | Rollout | None
RolloutFn = Callable[..., Awaitable[RolloutResult]]
"""``async def rollout_fn(sample_prompt, ...)``; see ``OPTIONAL_ARGUMENTS`` for the rest."""


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout function may use; the recipe hands it to the factory once, at the start."""

    tokenizer: Any
    """The client's tokenizer, of ``deployment.tokenizer_model``."""
    tokenizer_id: str
    """Folder or hub id it was loaded from."""
    sample_kwargs: dict[str, Any]
    """Keyword arguments of the sampler: ``max_tokens``, ``temperature``, ``top_p``, ``top_k``,
    ``max_seq_len``, ``http_timeout`` (seconds) and ``logprobs``. The distribution is the trainer's,
    and is to be left as it is."""
    inference_base_url: str
    """Where the deployment answers; an address in memory while the platform is embedded."""
    api_key: str
    """Its key."""
    model: str
    """What a request calls the deployment."""
    completions_per_prompt: int
    """How often the function is called for each row."""
    extras: dict[str, Any] = field(default_factory=dict[str, Any])
    """``config.rollout_extras``, for whatever the function needs."""
    boot_timeout_s: float = 50.0
    """Seconds that a request waits for a deployment that is started again."""
    concurrency: ConcurrencyController | None = None
    """The run's limit of sampling requests in flight, which captured agents share with the run's
    sampler; None: they have a limit of their own, which adapts."""
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    """Closed at the end of the run, after the last rollout."""


RolloutFnFactory = Callable[[RolloutSetup], RolloutFn]

OPTIONAL_ARGUMENTS = (
    "cursor_index",
    "row_index",
    "epoch",
    "rollout_idx",
    "sample_index",
    "end_of_epoch",
)
"""Keyword arguments that a rollout function gets when it declares them: the row's place in the run
and in the dataset, the epoch, the rollout's number within its group (under two names), and whether
this is the epoch's last row."""


def collect_runs(returned: object, where: str) -> list[RolloutRun]:
    """The trajectories that a rollout function returned, judged; [] for None.

    Arrays, tensors and their scalars become plain lists and numbers; what was returned stays as it
    is. A sample without a sampled token has nothing to train and is left out.

    Raises:
        TypeError: it is none of the types that a rollout function may return.
        ConfigError: a list breaks the contract; the message begins with ``where``.
    """
    match returned:
        case None:
            return []
        case RolloutSample():
            runs = [RolloutRun([returned])]
        case RolloutRun():
            runs = [returned]
        case Rollout():
            runs = returned.runs
        case _:
            raise TypeError(
                f"{where}: a rollout function must return RolloutSample, RolloutRun, Rollout or "
                f"None, got {type(returned).__name__}: {str(returned)[:80]}"
            )
    if not runs:
        raise ConfigError(f"{where}: runs must hold at least 1 run, got []: return None to drop it")
    judged = [
        _check_run(run, where if len(runs) == 1 else f"{where}, run {number}")
        for number, run in enumerate(runs)
    ]
    return [run for run in judged if run.segments]


def _check_run(run: object, where: str) -> RolloutRun:
    """The run with those of its samples, judged, that have a sampled token."""
    if not isinstance(run, RolloutRun):
        raise TypeError(f"{where}: runs must hold RolloutRun, got {type(run).__name__}")
    if not run.segments:
        raise ConfigError(
            f"{where}: segments must hold at least 1 sample, got []: return None to drop it"
        )
    samples = [
        check_sample(segment, where if len(run.segments) == 1 else f"{where}, segment {number}")
        for number, segment in enumerate(run.segments)
    ]
    rewards = [sample.reward for sample in samples]
    if len(set(rewards)) > 1:
        raise ConfigError(
            f"{where}: reward must be the same in all segments of a run, got {rewards}: give each "
            "part with a reward of its own a RolloutRun"
        )
    return replace(run, segments=[sample for sample in samples if sample.completion_len])


def check_sample(sample: object, where: str) -> RolloutSample:
    """A sample as plain lists and numbers, once it is sure to train what was sampled.

    Raises:
        TypeError: it is no ``RolloutSample``.
        ConfigError: lengths differ, fewer than 2 tokens, a token that is no id, a mask that is not
            0 or 1 or is 1 on the first token, a NaN, infinite or positive logprob, a reward that is
            not finite, versions or routing matrices that do not add up, a ``parsed`` that is no
            truth value. The message begins with ``where`` and names field and values.
    """
    if not isinstance(sample, RolloutSample):
        raise TypeError(f"{where}: segments must hold RolloutSample, got {type(sample).__name__}")
    tokens = _to_list("tokens", sample.tokens, where)
    logprobs = _to_list("logprobs", sample.logprobs, where)
    mask = _to_list("loss_mask", sample.loss_mask, where)
    lengths = (len(tokens), len(logprobs), len(mask))
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"{where}: tokens, logprobs and loss_mask must be of one length, got "
            f"{lengths[0]} tokens, {lengths[1]} logprobs and {lengths[2]} loss_mask"
        )
    if lengths[0] < 2:
        raise ConfigError(f"{where}: tokens must hold at least 2 ids, got {tokens}")
    tokens, ids = _read_tokens(tokens, where)
    mask = _read_mask(mask, where)
    logprobs, values = _read_logprobs(logprobs, where)
    arrays = _make_arrays(ids, mask, values)
    reward = _plain(sample.reward)
    if not _is_finite(reward):
        raise ConfigError(
            f"{where}: reward must be a finite number, got {reward!r}: return None to drop "
            "the rollout"
        )
    versions = _check_versions(sample.versions, arrays.completion_len, where)
    _check_routing(sample, len(tokens), where)
    parsed = _plain(sample.parsed)
    if not isinstance(parsed, bool | None):
        raise ConfigError(f"{where}: parsed must be True, False or None, got {parsed!r}")
    judged = replace(
        sample,
        tokens=tokens,
        logprobs=logprobs,
        loss_mask=list(mask),
        reward=float(reward),
        versions=versions,
        parsed=parsed,
        reward_parts=_check_parts(sample.reward_parts, where),
    )
    judged.arrays = arrays
    return judged


def pack(kind: Literal["q", "d"], values: Sequence[float]) -> NDArray[Any]:
    """A list of numbers as an int64 or float64 array; numpy would take four times as long.

    Raises:
        struct.error: a value is none, or too large.
    """
    packed = bytearray(8 * len(values))
    struct.pack_into(f"{len(values)}{kind}", packed, 0, *values)
    return np.frombuffer(packed, np.int64 if kind == "q" else np.float64)


def _make_arrays(
    tokens: NDArray[np.int64], mask: bytes, logprobs: NDArray[np.float64]
) -> SampleArrays:
    first = mask.find(1)
    return SampleArrays(
        tokens,
        np.frombuffer(mask, np.bool_),
        logprobs,
        prompt_len=len(mask) if first < 0 else first,
        completion_len=mask.count(1),
    )


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as plain lists and numbers, all else as it is."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def _to_list(name: str, values: object, where: str) -> list[Any]:
    listed = _plain(values)
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"{where}: {name} must be a list, got {str(values)[:80]}")
    return list(cast("Sequence[Any]", listed))


# Samples have thousands of tokens, so each list is read by a loop in C first, and looked at one by
# one only to say what is wrong with it.
def _read_tokens(given: list[Any], where: str) -> tuple[list[int], NDArray[np.int64]]:
    if not _are_all(int, given):
        given = [_plain_integer(value) for value in given]
        if not _are_all(int, given):
            _refuse_tokens(given, where)
    try:
        ids = pack("q", given)
    except struct.error:
        _refuse_tokens(given, where)
    if ids.min() < 0:
        _refuse_tokens(given, where)
    return given, ids


def _refuse_tokens(given: list[Any], where: str) -> NoReturn:
    wrong = {
        place: value
        for place, value in enumerate(given)
        if type(value) is not int or not 0 <= value < 2**63
    }
    raise ConfigError(f"{where}: tokens must be integers >= 0 and < 2**63, got {_first(wrong)}")


def _read_mask(given: list[Any], where: str) -> bytes:
    try:
        flags: Sequence[Any] = bytes(given)
    except (TypeError, ValueError):
        flags = [_plain(value) for value in given]
    if flags.count(0) + flags.count(1) < len(flags):
        wrong = {place: flag for place, flag in enumerate(flags) if flag not in (0, 1)}
        raise ConfigError(f"{where}: loss_mask must be 0 or 1 everywhere, got {_first(wrong)}")
    if flags[0] == 1:
        raise ConfigError(
            f"{where}: loss_mask must be 0 at index 0, got 1: nothing stands before the first "
            "token that could predict it"
        )
    return bytes(map(int, flags)) if isinstance(flags, list) else bytes(flags)


def _read_logprobs(given: list[Any], where: str) -> tuple[list[float], NDArray[np.float64]]:
    try:
        values = pack("d", given)
    except (struct.error, OverflowError, TypeError, ValueError, RuntimeError):
        # What is no number, or a tensor of several.
        given = [_plain(value) for value in given]
        values = np.full(1, np.nan)
    if np.isfinite(values).all() and values.max() <= LOGPROB_TOLERANCE:
        return given if _are_all(float, given) else values.tolist(), values
    wrong = {
        place: value
        for place, value in enumerate(map(_plain, given))
        if not _is_finite(value) or value > LOGPROB_TOLERANCE
    }
    raise ConfigError(
        f"{where}: logprobs must be finite and <= 0, got {_first(wrong)}: 0.0 stands where "
        "nothing was sampled"
    )


def _are_all(kind: type, values: list[Any]) -> bool:
    """Whether all values are of the type itself."""
    return list(map(type, values)).count(kind) == len(values)


def _plain_integer(value: Any) -> Any:
    plain = _plain(value)
    return int(plain) if isinstance(plain, int) and not isinstance(plain, bool) else plain


def _check_versions(
    versions: list[list[int]] | None, num_sampled: int, where: str
) -> list[list[int]] | None:
    if versions is None:
        return None
    pairs = [_plain(pair) for pair in _to_list("versions", versions, where)]
    if not all(map(_is_pair, pairs)) or sum(count for _, count in pairs) != num_sampled:
        raise ConfigError(
            f"{where}: versions must be pairs [weight version, tokens] that cover the "
            f"{num_sampled} sampled tokens, got {versions}"
        )
    return [list(pair) for pair in pairs]


def _check_parts(parts: Mapping[str, Any] | None, where: str) -> dict[str, float] | None:
    if parts is None:
        return None
    plain = {name: _plain(value) for name, value in parts.items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise ConfigError(
                f"{where}: reward_parts must be numbers by name, got {name!r}: {value!r}"
            )
    return {name: float(value) for name, value in plain.items()}


def _check_routing(sample: RolloutSample, num_tokens: int, where: str) -> None:
    matrices = sample.routing_matrices
    if matrices is None:
        return
    from_first_sampled = num_tokens - sample.prompt_len
    if len(matrices) not in (num_tokens - 1, from_first_sampled):
        raise ConfigError(
            f"{where}: routing_matrices must be {num_tokens - 1}, one per token but the last, or "
            f"{from_first_sampled}, one per token from the first sampled one on, got "
            f"{len(matrices)}"
        )
    wrong = {place: matrix for place, matrix in enumerate(matrices) if not isinstance(matrix, str)}
    if wrong:
        raise ConfigError(f"{where}: routing_matrices must be texts, got {_first(wrong)}")


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    numbers = cast("Sequence[Any]", value)
    return len(numbers) == 2 and all(isinstance(number, int) and number >= 0 for number in numbers)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _first(wrong: Mapping[int, object]) -> str:
    """The first few of the wrong values, with their places."""
    shown = [f"{value!r} at index {place}" for place, value in list(wrong.items())[:3]]
    more = len(wrong) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
