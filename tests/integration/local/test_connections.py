"""Connections of a server that says little itself: too many, silent and slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest
from starlette.requests import ClientDisconnect
from tests.waiting import until

from hearth.local.connections import LEAST_BODY, make_protocol, raise_descriptor_limit
from hearth.wire.http_server import HttpServer

HEAD_S = 0.5
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
UPLOAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
MOST = 8

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"well"})


async def read_then_answer(scope, receive, send):
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    await answer(scope, receive, send)


@contextlib.asynccontextmanager
async def served(app=answer, drain_s: float = 5) -> AsyncIterator[int]:
    """The port of a server of ``app``, whose end may take ``drain_s``."""
    server = HttpServer(
        app,
        drain_s=drain_s,
        port=0,
        http=make_protocol(MOST, HEAD_S),
        lifespan="off",
        log_level="warning",
    )
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with served() as port:
        yield port


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    "head", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "], ids=len
)
async def test_a_head_that_does_not_come_ends_its_connection(port, head):
    async with connected(port) as (reader, writer):
        writer.write(head)

        assert await reader.read() == b""


async def test_one_that_comes_byte_by_byte_ends_too(port):
    async with connected(port) as (reader, writer):

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(HEAD_S / 5)

        sending = asyncio.create_task(trickle())
        with contextlib.suppress(ConnectionError):
            assert b"well" not in await reader.read()
        sending.cancel()


async def test_every_head_has_its_time_and_a_pause_between_requests_is_free(port):
    async with connected(port) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"well")
        await asyncio.sleep(2 * HEAD_S)
        writer.write(REQUEST)
        await reader.readuntil(b"well\r\n0\r\n\r\n")

        writer.write(b"GET / HT")

        assert await reader.read() == b""


async def test_more_than_there_may_be_are_told_so_and_those_there_are_go_on(port):
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(port)) for _ in range(MOST)]

        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            refusal = await reader.read()
        held[0][1].write(REQUEST)
        answer = await held[0][0].readuntil(b"well")

    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b"connections must be at most 8 at once" in refusal
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("app", [answer, read_then_answer])
@pytest.mark.parametrize(
    "request_bytes",
    [b"\x00 HTTP/1.1\r\n\r\n", CHUNKED + b"odd\r\n", CHUNKED + b"2\r\nab\r\nodd\r\n"],
    ids=["head", "body", "later body"],
)
async def test_bytes_that_are_no_http_are_refused_without_a_traceback(app, request_bytes, caplog):
    async with served(app) as port, connected(port) as (reader, writer):
        writer.write(request_bytes)
        refusal = await reader.read()

    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert b"request must be HTTP/1.1" in refusal
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_bytes_that_are_no_http_within_an_answer_end_it(caplog):
    begun = asyncio.Event()

    async def begin(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(begin) as port, connected(port) as (reader, writer):
        writer.write(CHUNKED)
        await begun.wait()
        writer.write(b"odd\r\n")
        received = await reader.read()

    assert received.endswith(b"well\r\n")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("sent", [b"", b"x" * 10], ids=["none", "ten bytes"])
async def test_a_body_that_does_not_come_is_refused(sent, caplog):
    async with served(read_then_answer) as port, connected(port) as (reader, writer):
        writer.write(UPLOAD % 1000 + sent)
        refusal = await reader.read()

    assert refusal.startswith(b"HTTP/1.1 408 ")
    assert b"body must come with 16384 bytes in 0.5 s at least" in refusal
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_that_comes_slowly_but_steadily_is_taken():
    async with served(read_then_answer) as port, connected(port) as (reader, writer):
        pieces = 6
        writer.write(UPLOAD % (pieces * 4 * LEAST_BODY))
        for _ in range(pieces):
            await asyncio.sleep(HEAD_S / 2)
            writer.write(4 * LEAST_BODY * b"x")

        assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_its_reader_holds_up_is_not_slow():
    async def wait_then_answer(scope, receive, send):
        await asyncio.sleep(3 * HEAD_S)
        await read_then_answer(scope, receive, send)

    async with served(wait_then_answer) as port, connected(port) as (reader, writer):
        size = 2**23
        writer.write(UPLOAD % size + size * b"x")

        assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")


async def test_a_request_behind_another_has_its_time_too(port):
    async with connected(port) as (reader, writer):
        writer.write(REQUEST + b"GET / HT")

        assert (await reader.read()).endswith(b"well\r\n0\r\n\r\n")


async def test_a_server_ends_although_clients_stall_and_apps_wait(caplog):
    """A body that never ends, an app that waits for nothing, and an answer that nobody reads."""
    begun = []

    async def stall(scope, receive, send):
        begun.append(scope["path"])
        if scope["path"] == "/body":
            await read_then_answer(scope, receive, send)
        elif scope["path"] == "/wait":
            await asyncio.Event().wait()
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
                await asyncio.sleep(0)

    writers = []
    async with asyncio.timeout(60), served(stall, drain_s=0.1) as port:
        for path in (b"/body", b"/wait", b"/answer"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((UPLOAD % 10).replace(b"/", path, 1))
            writers.append(writer)
        await until(lambda: len(begun) == len(writers))

    for writer in writers:
        writer.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_wait_that_is_cancelled_as_bytes_arrive_is_no_error_and_others_are(caplog):
    async def end_late(scope, receive, send):
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        waiting.cancel()
        loop.call_soon(waiting.set_result, None)
        loop.call_soon(bytes.decode, b"\xff")
        await asyncio.sleep(0)
        await answer(scope, receive, send)

    async with served(end_late) as port, connected(port) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"well")

    (error,) = [record for record in caplog.records if record.name == "asyncio"]
    assert "Exception in callback bytes.decode" in error.message


def test_connections_leave_descriptors_for_files_and_the_limit_is_raised_for_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        connections = raise_descriptor_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert raised == (hard, hard)
    assert hard - 2 * connections in (256, 257), "two for each: the client's, and one to a worker"
