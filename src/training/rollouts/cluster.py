"""Rollout functions in processes of a Ray cluster, for environments that need cores.

    Rollouts -> rollout function (here) -> actor: event loop, the user's function -> deployment

Each actor makes the user's rollout function once, with the factory and the set-up that the recipe
has, and runs many draws of it on an event loop of its own. What a draw needs to repeat, and what
it has drawn, goes there and back.
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
from training.rewards.cluster import connect_to_ray, ray_is_there
from training.rewards.processes import portable
from training.rollouts.sampler import DrawContext, current_draw
from training.samples.rollout import RolloutFn, RolloutFnFactory, RolloutSetup

START_TIMEOUT_S = 300.0
"""Seconds in which the cluster must have room for the actors, and the functions be made there."""
_REACH_TIMEOUT_S = 30.0
_DRAWS_AT_ONCE = 1000


def on_cluster(factory: RolloutFnFactory, count: int) -> RolloutFnFactory:
    """A factory whose rollout function runs in ``count`` actors of one CPU each.

    Raises:
        ConfigError: Ray is not installed, or the factory cannot be sent to another process.
    """
    ray_is_there("rollout_workers")
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(factory)
    except Exception as error:  # noqa: BLE001 - pickling an object may run anything
        raise ConfigError(
            f"rollout_fn_factory must be picklable with rollout_workers='ray', got {factory!r} "
            f"({error}): define it at the top of a module"
        ) from None

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        hosts = _Hosts(pickled, setup, count)
        setup.closing.callback(hosts.close)
        return hosts.rollout_fn

    return make_rollout_fn


@dataclass(frozen=True)
class _Returned:
    """What a draw came to, elsewhere."""

    value: Any
    error: Exception | None
    draw: DrawContext | None


class _Host:
    """The actor: the user's rollout function, and an event loop for its draws."""

    def __init__(self, factory: bytes, setup: RolloutSetup) -> None:
        from ray import cloudpickle

        from training.rollouts.runner import declared_arguments

        self._deployment_url = setup.inference_base_url
        self._fn: Callable[..., Awaitable[Any]] = cloudpickle.loads(factory)(setup)
        self._declared = declared_arguments(self._fn)

    async def problem(self) -> str | None:
        """Why nothing can be drawn from here; None once the function is made, and can."""
        import ray

        try:
            async with httpx.AsyncClient(timeout=_REACH_TIMEOUT_S) as client:
                await client.get(self._deployment_url)  # any answer will do
        except httpx.TransportError as error:
            return f"the node at {ray.util.get_node_ip_address()} does not: {error}"
        return None

    async def draw(
        self, row: dict[str, Any], given: dict[str, Any], draw: DrawContext | None
    ) -> _Returned:
        """One call of the function."""
        current_draw.set(draw)
        arguments = {name: value for name, value in given.items() if name in self._declared}
        try:
            return _Returned(await self._fn(row, **arguments), None, draw)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            return _Returned(None, portable(error), draw)


class _Hosts:
    """The actors of one run; each draw goes to the next."""

    def __init__(self, factory: bytes, setup: RolloutSetup, count: int) -> None:
        import ray
        from ray.exceptions import RayError

        self._is_ours = connect_to_ray()
        made: Any = ray.remote(_Host).options(
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
                [actor.problem.remote() for actor in self._actors], timeout=START_TIMEOUT_S
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
                "FIREWORKS_BASE_URL must be an address that every node of the cluster reaches, got "
                f"{setup.inference_base_url!r}: {problem}; `hearth serve --host ADDRESS` listens "
                "where others reach it"
            )

    async def rollout_fn(self, row: dict[str, Any], **given: Any) -> Any:
        """What the user's function returns for a row."""
        import ray
        from ray.exceptions import RayActorError

        own = current_draw.get()
        reference = next(self._turns).draw.remote(row, given, own)
        try:
            returned: _Returned = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayActorError as error:
            # The actor comes back by itself, elsewhere if need be: the draw may be tried again.
            raise TransportError(
                f"rollout must end where it began, got its process lost: {str(error).strip()}"
            ) from None
        if own is not None and returned.draw is not None:
            own.calls, own.seen[:] = returned.draw.calls, returned.draw.seen
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
