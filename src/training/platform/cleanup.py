"""Takes down what a loop has asked the platform for, however the loop ends."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from hearth.errors import ConfigError, HearthError
from hearth.exit_codes import ExitCode
from hearth.sdk import DeploymentManager, TrainerJobManager
from training.platform.managers import own_deployments, own_trainers

logger = logging.getLogger(__name__)

DeploymentAction = Literal["scale_to_zero", "delete"]


class ResourceCleanup:
    """Takes down what was registered when its scope ends, in reverse order.

    First whatever was given to ``callback``, then the trainers (cancelled), then the deployments
    (scaled to zero or deleted). It does so however the body ends, by SIGTERM and Ctrl-C too; a step
    that fails is logged, the others still run, and the body's own exception goes on. A second
    Ctrl-C gives up the step that it interrupts, a second SIGTERM waits for the end.
    """

    def __init__(
        self, rlor_mgr: TrainerJobManager, deploy_mgr: DeploymentManager | None = None
    ) -> None:
        self._trainers = own_trainers(rlor_mgr)
        self._deployments = None if deploy_mgr is None else own_deployments(deploy_mgr)
        self._callbacks: list[tuple[str, Callable[[], None]]] = []
        self._jobs: list[str] = []
        self._actions: dict[str, DeploymentAction] = {}
        self._before: Any = None
        self._is_handling = False
        self._is_ending = False
        self._is_terminated = False

    def __enter__(self) -> ResourceCleanup:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            if before in (signal.SIG_DFL, None):
                self._before = before
                signal.signal(signal.SIGTERM, self._on_sigterm)
                self._is_handling = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._is_ending = True
        try:
            self.close()
        except KeyboardInterrupt:
            if error is None:
                raise
        finally:
            if self._is_handling:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
                self._is_handling = False
        if self._is_terminated and error is None:
            raise SystemExit(ExitCode.TERMINATED)

    def trainer(self, job_id: str) -> None:
        """Cancel this job when the scope ends."""
        if job_id not in self._jobs:
            self._jobs.append(job_id)

    def deployment(self, deployment_id: str, action: DeploymentAction = "scale_to_zero") -> None:
        """Scale this deployment to zero, or delete it, when the scope ends.

        Raises:
            ConfigError: there is no manager of deployments, or no such action.
        """
        if self._deployments is None:
            raise ConfigError("deploy_mgr must be given to clean up deployments, got None")
        if action not in ("scale_to_zero", "delete"):
            raise ConfigError(f"action must be 'scale_to_zero' or 'delete', got {action!r}")
        self._actions[deployment_id] = action

    def callback(self, name: str, close: Callable[[], None]) -> None:
        """Call ``close`` when the scope ends; ``name`` is for the log."""
        self._callbacks.append((name, close))

    def close(self) -> None:
        """Take everything down now; what is taken down once is not again.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile; the other steps were still taken.
        """
        interrupt: KeyboardInterrupt | None = None
        while (step := self._next_step()) is not None:
            name, end = step
            try:
                end()
            except KeyboardInterrupt as error:
                logger.warning("%s may still run: interrupted", name)
                interrupt = error
            except (HearthError, OSError) as error:
                logger.warning("%s could not be taken down: %s", name, error)
            except Exception:
                logger.exception("%s could not be taken down", name)
        if interrupt is not None:
            raise interrupt

    def _next_step(self) -> tuple[str, Callable[[], None]] | None:
        if self._callbacks:
            return self._callbacks.pop()
        if self._jobs:
            job_id = self._jobs.pop()
            return f"trainer job {job_id}", lambda: self._trainers.cancel(job_id)
        if self._actions:
            deployment_id, action = self._actions.popitem()
            manager = self._deployments
            assert manager is not None, "checked when it was registered"
            end = manager.delete if action == "delete" else manager.scale_to_zero
            return f"deployment {deployment_id}", lambda: end(deployment_id)
        return None

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            self._is_terminated = True
            return
        raise SystemExit(ExitCode.TERMINATED)
