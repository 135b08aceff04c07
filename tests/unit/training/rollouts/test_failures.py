import asyncio
import logging

import httpx
import httpx2
import openai
import pytest
import requests

from hearth.errors import (
    AuthError,
    ClosedError,
    ConfigError,
    ConflictError,
    EngineError,
    HearthError,
    NotFoundError,
    NotReadyError,
    NumericsError,
    RequestError,
    RequestFailedError,
    TransportError,
)
from training.rollouts.failures import (
    CircuitBreaker,
    RecoverableRolloutError,
    RetryLimits,
    RolloutsFailingError,
    is_recoverable,
    with_retries,
)

URL = "http://deployment/v1/completions"


def answered(status: int) -> httpx.HTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", URL))
    return httpx.HTTPStatusError("refused", request=response.request, response=response)


def openai_answered(status: int) -> openai.APIStatusError:
    response = httpx2.Response(status, request=httpx2.Request("POST", URL))
    return openai.APIStatusError("refused", response=response, body=None)


def requests_answered(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("refused", response=response)


def aiohttp_error(name: str, *bases: type, **fields) -> Exception:
    """An error as aiohttp would raise it; the package itself is not installed with Hearth."""
    kind = type(name, bases or (Exception,), {"__module__": "aiohttp.client_exceptions", **fields})
    return kind("aiohttp failed")


OPENAI_REQUEST = httpx2.Request("POST", URL)

RECOVERABLE = [
    TimeoutError(),
    asyncio.TimeoutError(),  # noqa: UP041 the spelling that older rollouts use
    ConnectionResetError("peer"),
    httpx.ReadTimeout("slow"),
    httpx.ConnectError("refused"),
    httpx.RemoteProtocolError("left"),
    TransportError("no answer"),
    NotReadyError("it starts"),
    EngineError("it failed"),
    RequestFailedError("out of memory", category="server"),
    RecoverableRolloutError("the sandbox is full"),
    *(answered(status) for status in (408, 425, 429, 500, 503, 599)),
    *(openai_answered(status) for status in (408, 425, 429, 500, 529)),
    openai.APITimeoutError(OPENAI_REQUEST),
    openai.APIConnectionError(request=OPENAI_REQUEST),
    httpx2.ReadTimeout("slow"),
    requests.ConnectTimeout("slow"),
    requests.ConnectionError("refused"),
    requests_answered(429),
    aiohttp_error("ServerDisconnectedError", type(aiohttp_error("ClientConnectionError"))),
    aiohttp_error("ClientPayloadError"),
    aiohttp_error("ClientResponseError", status=502),
    ExceptionGroup("both", [TimeoutError(), ExceptionGroup("inner", [answered(429)])]),
]

FATAL = [
    AssertionError(),
    TypeError("no"),
    ValueError("no"),
    KeyError("ground_truth"),
    RuntimeError("unknown"),
    OSError("disk full"),
    HearthError("unknown"),
    ConfigError("no"),
    RequestError("no"),
    NumericsError("nan"),
    ConflictError("taken"),
    NotFoundError("no such deployment"),
    AuthError("key"),
    ClosedError("after its end"),
    RequestFailedError("too long", category="user"),
    RequestFailedError("who knows", category="unknown"),
    *(answered(status) for status in (400, 401, 403, 404, 409, 410, 413, 422, 302)),
    *(openai_answered(status) for status in (400, 401, 403, 404, 409, 422)),
    openai.OpenAIError("unknown"),
    httpx.UnsupportedProtocol("no scheme"),
    requests_answered(404),
    requests.HTTPError("without a response"),
    aiohttp_error("ClientResponseError", status=404),
    aiohttp_error("InvalidURL", ValueError),
    ExceptionGroup("mixed", [TimeoutError(), ValueError("no")]),
    BaseExceptionGroup("cancelled", [TimeoutError(), asyncio.CancelledError()]),
    asyncio.CancelledError(),
    KeyboardInterrupt(),
    SystemExit(1),
]


@pytest.mark.parametrize("error", RECOVERABLE, ids=repr)
def test_time_outs_connections_and_busy_servers_are_worth_another_try(error):
    assert is_recoverable(error)


@pytest.mark.parametrize("error", FATAL, ids=repr)
def test_everything_else_is_fatal(error):
    assert not is_recoverable(error)


def test_an_error_raised_from_a_time_out_is_judged_by_its_own_class():
    error = RuntimeError("the judge failed")
    error.__cause__ = TimeoutError()

    assert not is_recoverable(error)


def test_a_class_of_the_same_name_from_elsewhere_is_unknown():
    error = type("APIConnectionError", (Exception,), {"__module__": "openai_fork"})()

    assert not is_recoverable(error)


def observe(breaker: CircuitBreaker, outcomes: str) -> CircuitBreaker:
    """A breaker after outcomes: f failed, s succeeded."""
    for number, outcome in enumerate(outcomes):
        if outcome == "f":
            breaker.record_failure(TimeoutError(f"rollout {number}"))
        else:
            breaker.record_success()
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ("ffff", False),
        ("fffff", True),
        ("ffffsffff", False),
        ("fsfsfsfsf", False),
        ("fsfsfsfsfs", True),
        ("fssfssfssf", False),
        ("ffffsfsss", False),
        ("ffffsfssss", True),
        ("s" * 10 + "fs" * 9, False),
        ("s" * 10 + "fs" * 10, True),
        ("s" * 100 + "ffffsffffsff", True),
        ("fffffssssssssssssssssssss", True),
    ],
)
def test_the_breaker_opens_at_five_in_a_row_or_half_of_the_last_twenty(outcomes, is_open):
    assert observe(CircuitBreaker(), outcomes).is_open is is_open


def test_what_opens_the_breaker_is_for_the_caller_to_choose():
    assert observe(CircuitBreaker(max_in_a_row=2), "sff").is_open
    assert not observe(CircuitBreaker(min_observed=20), "fs" * 9).is_open
    assert observe(CircuitBreaker(max_ratio=0.25, window=8, min_observed=8), "ssssssff").is_open


def test_a_closed_breaker_lets_the_run_go_on():
    observe(CircuitBreaker(), "ffffs").check()


def test_an_open_breaker_says_how_often_and_with_what_rollouts_failed():
    with pytest.raises(RolloutsFailingError) as in_a_row:
        observe(CircuitBreaker(), "fffff").check()
    with pytest.raises(RolloutsFailingError) as of_many:
        observe(CircuitBreaker(), "fsfsfsfsfs").check()

    assert "5 failures in a row, last with TimeoutError: rollout 4" in str(in_a_row.value)
    assert "5 failures among the last 10 outcomes" in str(of_many.value)
    assert repr(in_a_row.value.__cause__) == "TimeoutError('rollout 4')"


class ScriptedRollout:
    """Fails with the given errors, one per attempt, then returns 7."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.calls = 0
        self.failures: list[tuple[BaseException, int]] = []
        self.pauses: list[float] = []

    async def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return 7

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def run(self, attempts: int = 3, **limits) -> int:
        return await with_retries(
            self,
            RetryLimits(attempts, 5.0, **limits),
            sleep=self.pause,
            on_failure=lambda error, attempt: self.failures.append((error, attempt)),
        )


async def test_a_rollout_is_tried_until_it_works():
    errors = [TimeoutError("one"), ConnectionError("two")]
    rollout = ScriptedRollout(*errors)

    assert await rollout.run() == 7
    assert rollout.failures == [(errors[0], 1), (errors[1], 2)]


async def test_after_the_last_attempt_its_error_is_raised():
    rollout = ScriptedRollout(TimeoutError("one"), TimeoutError("two"), TimeoutError("three"))

    with pytest.raises(TimeoutError, match="two"):
        await rollout.run(attempts=2)
    assert [attempt for _, attempt in rollout.failures] == [1, 2]
    assert len(rollout.pauses) == 1


async def test_a_fatal_error_is_raised_at_once_and_is_no_failure_of_a_rollout():
    rollout = ScriptedRollout(ValueError("a bug"))

    with pytest.raises(ValueError, match="a bug"):
        await rollout.run()
    assert rollout.calls == 1
    assert rollout.failures == []


async def test_pauses_double_up_to_the_longest_and_are_jittered_by_half():
    rollout = ScriptedRollout(*(TimeoutError() for _ in range(5)))

    await rollout.run(attempts=6, backoff_s=1.0, longest_backoff_s=4.0)

    for pause, longest in zip(rollout.pauses, [1.0, 2.0, 4.0, 4.0, 4.0], strict=True):
        assert longest / 2 <= pause <= longest


async def test_what_on_failure_raises_ends_the_trying():
    breaker = CircuitBreaker(max_in_a_row=2)
    rollout = ScriptedRollout(*(TimeoutError(str(number)) for number in range(9)))

    def note(error: BaseException, _attempt: int) -> None:
        breaker.record_failure(error)
        breaker.check()

    with pytest.raises(RolloutsFailingError, match="2 failures in a row"):
        await with_retries(rollout, RetryLimits(9, None), on_failure=note, sleep=rollout.pause)
    assert rollout.calls == 2


async def test_no_attempt_at_all_is_refused():
    with pytest.raises(ConfigError, match="attempts must be >= 1, got 0"):
        await ScriptedRollout().run(attempts=0)


def nothing(_error: BaseException, _attempt: int) -> None:
    """Not told."""


async def test_an_attempt_that_takes_too_long_is_cancelled_and_named():
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError, match=r"within rollout_timeout_s=0\.01 s"):
        await with_retries(slow, RetryLimits(2, 0.01, backoff_s=0), on_failure=nothing)
    assert ended == [True, True]


async def test_a_rollout_that_swallows_its_cancellation_is_left_to_itself(caplog):
    may_end = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await may_end.wait()
            raise ValueError("of which nobody hears") from None

    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await with_retries(stubborn, RetryLimits(1, 0.01, grace_s=0.02), on_failure=nothing)
    may_end.set()
    await asyncio.sleep(0.01)

    assert "left to itself" in caplog.text


async def test_cancelling_ends_the_rollout_before_it_is_passed_on():
    events = []
    has_begun = asyncio.Event()

    async def rollout() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            events.append("the rollout ended")

    task = asyncio.ensure_future(with_retries(rollout, RetryLimits(3, 60.0), on_failure=nothing))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert events == ["the rollout ended"]


async def test_a_rollout_that_cancels_itself_is_an_error_and_not_a_quiet_end():
    async def rollout() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled by something other than the recipe"):
        await with_retries(rollout, RetryLimits(3, 1.0), on_failure=nothing)
