"""A training client whose calls wait for their result, and that outlives its trainer's restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import tinker

from hearth.errors import ClosedError
from hearth.sdk import (
    APIFuture,
    FiretitanServiceClient,
    FiretitanTrainingClient,
    SaveResult,
    TrainerEndpoint,
    TrainerJobManager,
)
from training.platform.spec import DCP_TIMEOUT_S, STEP_TIMEOUT_S

T = TypeVar("T")

_ENDED_ON_PURPOSE = frozenset(
    {
        "JOB_STATE_CANCELLED",
        "JOB_STATE_CANCELLING",
        "JOB_STATE_COMPLETED",
        "JOB_STATE_DELETED",
        "JOB_STATE_DELETING",
    }
)


def open_session(
    trainers: TrainerJobManager, endpoint: TrainerEndpoint, api_key: str
) -> FiretitanServiceClient:
    """A session with a running trainer, which resumes its job when the trainer is lost."""

    def revive() -> Awaitable[object]:
        return trainers.reconnect_and_wait_async(endpoint.job_id, unless=_ENDED_ON_PURPOSE)

    return FiretitanServiceClient(endpoint.base_url, api_key, revive=revive)


def close_session(session: FiretitanServiceClient) -> None:
    """Close a session; it may be closed already, or its platform."""
    with contextlib.suppress(ClosedError):
        session.close()


class ReconnectableClient:
    """Blocking calls on one model; ``inner`` is the SDK's client, whose calls return futures.

    When the trainer is lost, ``inner`` waits until it runs again (resuming a job that failed),
    loads the last checkpoint and repeats the operations that changed the model since, so the
    weights see each of them exactly once. The waiting call takes longer. Jobs that were cancelled
    or deleted are not resumed: calls then raise ``ClosedError``.
    """

    def __init__(
        self,
        inner: FiretitanTrainingClient,
        *,
        endpoint: TrainerEndpoint | None = None,
        session: FiretitanServiceClient | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
        dcp_timeout_s: float = DCP_TIMEOUT_S,
    ) -> None:
        self.inner = inner
        self.endpoint = endpoint
        self._session = session
        self._timeout_s = timeout_s
        self._dcp_timeout_s = dcp_timeout_s
        self._is_closed = False

    def __enter__(self) -> ReconnectableClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def job_id(self) -> str | None:
        """The trainer job that holds the model."""
        return self.endpoint.job_id if self.endpoint is not None else None

    def forward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
    ) -> tinker.ForwardBackwardOutput:
        """Logprobs of every datum's targets, no gradient."""
        return self._wait(lambda: self.inner.forward(data, loss_fn, loss_fn_config))

    def forward_backward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
    ) -> tinker.ForwardBackwardOutput:
        """Run a built-in objective and add its gradient to what has accumulated."""
        return self._wait(lambda: self.inner.forward_backward(data, loss_fn, loss_fn_config))

    def forward_backward_custom(
        self, data: Sequence[tinker.Datum], loss_fn: Any, *, temperature: float = 1.0
    ) -> tinker.ForwardBackwardOutput:
        """Run a loss of your own, ``loss_fn(data, logprobs) -> (loss, metrics)``."""
        return self._wait(
            lambda: self.inner.forward_backward_custom(data, loss_fn, temperature=temperature)
        )

    def optim_step(
        self,
        adam_params: tinker.AdamParams,
        grad_accumulation_normalization: Any = None,
        *,
        skip_zero_gradient: bool = False,
    ) -> tinker.OptimStepResponse:
        """One AdamW step on the accumulated gradient."""
        return self._wait(
            lambda: self.inner.optim_step(
                adam_params, grad_accumulation_normalization, skip_zero_gradient=skip_zero_gradient
            )
        )

    def save_state(
        self, name: str, *, overwrite: bool = False, metadata: dict[str, Any] | None = None
    ) -> SaveResult:
        """Write a resumable checkpoint."""
        return self._wait(
            lambda: self.inner.save_state(name, overwrite=overwrite, metadata=metadata),
            self._dcp_timeout_s,
        )

    def load_state(self, path: str) -> SaveResult:
        """Read a checkpoint's weights and start with a fresh optimizer."""
        return self._wait(lambda: self.inner.load_state(path), self._dcp_timeout_s)

    def load_state_with_optimizer(self, path: str) -> SaveResult:
        """Read a checkpoint's weights and its optimizer."""
        return self._wait(lambda: self.inner.load_state_with_optimizer(path), self._dcp_timeout_s)

    def load_adapter(self, adapter_path: str) -> SaveResult:
        """Start this LoRA model from a PEFT adapter."""
        return self._wait(lambda: self.inner.load_adapter(adapter_path), self._dcp_timeout_s)

    def save_weights_for_sampler_ext(self, name: str, checkpoint_type: Any = "base") -> SaveResult:
        """Save a snapshot for a deployment."""
        return self._wait(
            lambda: self.inner.save_weights_for_sampler(name, checkpoint_type), self._dcp_timeout_s
        )

    def list_checkpoints(self) -> list[str]:
        """Names of the trainer's resumable checkpoints, oldest first."""
        self._check_open()
        return self.inner.list_checkpoints()

    def unload(self) -> None:
        """Free the model on the trainer."""
        self._check_open()
        self.inner.unload()

    def close(self) -> None:
        """Refuse further calls. Clients that share a session close it with its owner."""
        if not self._is_closed and self._session is not None:
            close_session(self._session)
        self._is_closed = True

    def _wait(self, call: Callable[[], APIFuture[T]], timeout_s: float | None = None) -> T:
        self._check_open()
        allowed_s = timeout_s or self._timeout_s
        running = call()
        try:
            return running.result(allowed_s)
        except TimeoutError:
            if running.done():
                raise  # the loss function's own
            raise TimeoutError(
                f"a call to trainer job {self.job_id!r} must end within {allowed_s:g} s, it still "
                "runs: raise the step or DCP timeout, or look at the trainer's log"
            ) from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(
                f"the client of trainer job {self.job_id!r} must be used before it is closed: keep "
                "the training loop inside the `with` block that provisioned it"
            )
