"""Rollout functions in processes of a Ray cluster, for environments that need cores.

    Rollouts -> rollout function (here) -> actor: event loop, the user's function -> deployment

Each actor makes the user's rollout function once, with the factory and the set-up that the recipe
has, and runs many rollouts on its own event loop. The rollout's context (seeds, completions) is
sent along and comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from hearth.errors import ConfigError, TransportError
from hearth.sdk import FixedConcurrencyController
from training.rewards.cluster import connect_to_ray, require_ray
from training.rewards.processes import make_portable
from training.rollouts.sampler import RolloutContext, current_rollout
from training.samples.rollout import RolloutFn, RolloutFnFactory, RolloutSetup

START_TIMEOUT_S = 300.0
"""Seconds in which the cluster must have room for the actors, and the functions be made there."""
_REACH_TIMEOUT_S = 30.0
_DRAWS_AT_ONCE = 1000


def run_on_cluster(factory: RolloutFnFactory, count: int) -> RolloutFnFactory:
    """A factory whose rollout function runs in ``count`` actors of one CPU each.

    Raises:
        ConfigError: Ray is not installed, or the factory cannot be sent to another process.
    """
    require_ray("rollout_workers")
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(factory)
    except Exception as error:  # noqa: BLE001 - pickling an object may run anything
        raise ConfigError(
            f"rollout_fn_factory must be picklable with rollout_workers='ray', got {factory!r} "
            f"({error}): define it at the top of a module"
        ) from None

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        actors = _RolloutActors(pickled, setup, count)
        setup.closing.callback(actors.close)
        return actors.rollout_fn

    return make_rollout_fn


@dataclass(frozen=True)
class _RolloutResult:
    """The result of a rollout in an actor."""

    value: Any
    error: Exception | None
    context: RolloutContext | None


class _RolloutActor:
    """The actor: the user's rollout function, and an event loop for its rollouts."""

    def __init__(self, factory: bytes, setup: RolloutSetup) -> None:
        from ray import cloudpickle

        from training.rollouts.runner import find_declared_arguments

        self._deployment_url = setup.inference_base_url
        self._fn: Callable[..., Awaitable[Any]] = cloudpickle.loads(factory)(setup)
        self._declared = find_declared_arguments(self._fn)

    async def find_problem(self) -> str | None:
        """Why the deployment cannot be reached from here, or None."""
        import ray

        try:
            async with httpx.AsyncClient(timeout=_REACH_TIMEOUT_S) as client:
                await client.get(self._deployment_url)  # any answer will do
        except httpx.TransportError as error:
            return f"the node at {ray.util.get_node_ip_address()} does not: {error}"
        return None

    async def run(
        self, row: dict[str, Any], arguments: dict[str, Any], context: RolloutContext | None
    ) -> _RolloutResult:
        """One call of the function."""
        current_rollout.set(context)
        declared = {name: value for name, value in arguments.items() if name in self._declared}
        try:
            return _RolloutResult(await self._fn(row, **declared), None, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            return _RolloutResult(None, make_portable(error), context)


class _RolloutActors:
    """The actors of one run; each rollout goes to the next."""

    def __init__(self, factory: bytes, setup: RolloutSetup, count: int) -> None:
        import ray
        from ray.exceptions import RayError

        self._is_ours = connect_to_ray()
        made: Any = ray.remote(_RolloutActor).options(
            num_cpus=1, max_restarts=-1, max_concurrency=_DRAWS_AT_ONCE
        )
        share = None
        if isinstance(setup.concurrency, FixedConcurrencyController):
            # Processes cannot share one count of requests, so each gets its part of the limit.
            share = FixedConcurrencyController(max(1, setup.concurrency.max_concurrent // count))
        sent = replace(setup, closing=contextlib.ExitStack(), concurrency=share)
        self._actors: list[Any] = [made.remote(factory, sent) for _ in range(count)]
        self._turns = itertools.cycle(self._actors)
        try:
            problems: list[str | None] = ray.get(
                [actor.find_problem.remote() for actor in self._actors], timeout=START_TIMEOUT_S
            )
        except RayError as error:
            self.close()
            raise ConfigError(
                f"rollout_fn_factory must make its function on {count} CPUs of the cluster within "
                f"{START_TIMEOUT_S:g} s, got: {str(error).strip()}"
            ) from None
        if problem := next(filter(None, problems), None):
            self.close()
            raise ConfigError(
                "HEARTH_URL must be an address that every node of the cluster reaches, got "
                f"{setup.inference_base_url!r}: {problem}; `hearth serve --host ADDRESS` listens "
                "where others reach it"
            )

    async def rollout_fn(self, row: dict[str, Any], **arguments: Any) -> Any:
        """What the user's function returns for a row."""
        import ray
        from ray.exceptions import RayActorError

        context = current_rollout.get()
        reference = next(self._turns).run.remote(row, arguments, context)
        try:
            returned: _RolloutResult = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayActorError as error:
            # The actor comes back by itself, elsewhere if need be: the rollout may be tried again.
            raise TransportError(
                f"rollout must end where it began, got its process lost: {str(error).strip()}"
            ) from None
        if context is not None and returned.context is not None:
            context.calls, context.seen[:] = returned.context.calls, returned.context.seen
        if returned.error is not None:
            raise returned.error
        return returned.value

    def close(self) -> None:
        """End the actors, and the connection to the cluster if nobody else had it."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._is_ours:
            ray.shutdown()
