"""Completions that are on their way, for programs with and without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar, overload

from hearth.sdk.background import APIFuture

T = TypeVar("T")


class CompletionsCall(Coroutine[Any, Any, list[T]], Sequence[T]):
    """The completions of one call: to be awaited, or used as the list that they will be.

    ``await call`` and ``asyncio.run(call)`` give a list. Without an event loop, indexing, iterating
    and ``len`` block for it, and so does ``.result()``. Nothing is sent before the first use; a
    call that is never used costs nothing. Any use after the first has the same completions.

    ``begin`` starts the work; it runs in the thread of the first use.
    """

    def __init__(self, begin: Callable[[], APIFuture[list[T]]]) -> None:
        self._begin = begin
        self._future: APIFuture[list[T]] | None = None
        self._steps: Generator[Any, Any, list[T]] | None = None

    def result(self, timeout: float | None = None) -> list[T]:
        """The completions, or the error of the requests.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the requests go on.
        """
        return self.start().result(timeout)

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._future is not None and self._future.done()

    def start(self) -> APIFuture[list[T]]:
        """The future of the work, which this begins if nothing has yet."""
        if self._future is None:
            self._future = self._begin()
        return self._future

    def _items(self) -> list[T]:
        if not self.done():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return self.result()
            raise RuntimeError(
                "completions must be awaited inside a running event loop, got used as a list: "
                "write `completions = await sampler.sample_with_tokens(...)`"
            )
        return self.result()

    def __await__(self) -> Generator[Any, Any, list[T]]:
        return self.start().__await__()

    def send(self, value: Any) -> Any:
        """One step of the coroutine, for event loops."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._take_step(lambda steps: steps.send(value))

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        """Raise inside the coroutine, for event loops."""
        if self._steps is None:
            raise typ if val is None else val
        if val is None and tb is None:
            return self._take_step(lambda steps: steps.throw(typ))
        return self._take_step(lambda steps: steps.throw(typ, val, tb))

    def close(self) -> None:
        """End the coroutine, for event loops."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _take_step(self, step: Callable[[Generator[Any, Any, list[T]]], Any]) -> Any:
        """One step; after the last one the call may be awaited again."""
        assert self._steps is not None
        try:
            return step(self._steps)
        except BaseException:
            self._steps = None
            raise

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items()[index]

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items())

    def __repr__(self) -> str:
        state = "not started" if self._future is None else "done" if self.done() else "running"
        return f"<{type(self).__name__} {state}>"
