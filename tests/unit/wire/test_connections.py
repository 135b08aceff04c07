"""Connections that are kept, against a server that says exactly what a test gives it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from hearth.wire.connections import KeptConnections

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Counts its connections; ``serve`` is what each one gets."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.opened = self.closed = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            await self._serve(reader, writer)
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def connected(
    tmp_path: Path, serve: Serve, *, timeout_s: float = 5.0
) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    server = Server(serve)
    path = str(tmp_path / "socket")
    async with await asyncio.start_unix_server(server.answer, path):
        transport = KeptConnections(path)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=timeout_s
        ) as client:
            yield client, server


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """A request's head."""
    return await reader.readuntil(b"\r\n\r\n")


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Any number of requests without a body; b"" ends it."""
    try:
        while True:
            await read_request(reader)
            writer.write(OK)
    except asyncio.IncompleteReadError:
        pass


async def test_one_connection_serves_one_request_after_the_other(tmp_path):
    async with connected(tmp_path, answer_all) as (client, server):
        for _ in range(3):
            response = await client.get("/")
            assert (response.status_code, response.content) == (200, b"ok")
        await asyncio.gather(*(client.get("/") for _ in range(5)))
        await asyncio.gather(*(client.get("/") for _ in range(5)))

    assert server.opened == 5


async def test_no_more_than_256_are_kept(tmp_path):
    async with connected(tmp_path, answer_all) as (client, server):
        await asyncio.gather(*(client.get("/") for _ in range(300)))
        await asyncio.sleep(0.05)
        assert (server.opened, server.closed) == (300, 44)


async def test_a_body_goes_with_its_head_and_comes_back_in_pieces(tmp_path):
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_request(reader)
        assert head.startswith(b"POST /a%3Fb?c=d HTTP/1.1\r\n")
        body = await reader.readexactly(2**20)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 2**18):
            piece = body[start : start + 2**18]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        await reader.read()

    sent = bytes(range(256)) * 2**12
    async with connected(tmp_path, echo) as (client, _):
        response = await client.post("/a%3Fb?c=d", content=sent)

    assert response.content == sent


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", httpx.RemoteProtocolError),
        (b"220 mail\r\n\r\n", httpx.RemoteProtocolError),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error_and_its_connection_is_closed(
    tmp_path, said, error
):
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)

    async with connected(tmp_path, say) as (client, server):
        for _ in range(2):
            with pytest.raises(error):
                await client.get("/")

    assert server.opened == 2


async def test_an_answer_that_comes_too_late_is_a_timeout(tmp_path):
    async def wait(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(tmp_path, wait, timeout_s=0.05) as (client, server):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/")
        await asyncio.sleep(0.05)
        assert server.opened == 1


async def test_a_request_that_is_cancelled_closes_its_connection(tmp_path):
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        assert await reader.read() == b""
        gone.set()

    async with connected(tmp_path, wait) as (client, _):
        asking = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait_for(gone.wait(), 5)


async def test_a_connection_that_the_server_has_closed_takes_no_request(tmp_path):
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with connected(tmp_path, answer_once) as (client, server):
        for number in range(1, 4):
            assert (await client.get("/")).content == b"ok"
            while server.closed < number:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the end of the connection reaches the client
            assert server.opened == number


async def test_an_answer_amid_the_body_is_read(tmp_path):
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with connected(tmp_path, refuse) as (client, _):
        response = await client.post("/", content=b"x" * 2**22)

    assert response.status_code == 413


async def test_a_server_must_have_a_trusted_certificate(tmp_path, monkeypatch):
    files = make_certificate(tmp_path)
    secure = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secure.load_cert_chain(*files)
    server = Server(answer_all)
    async with await asyncio.start_server(server.answer, "localhost", 0, ssl=secure) as listening:
        port = listening.sockets[0].getsockname()[1]

        async with httpx.AsyncClient(transport=KeptConnections()) as client:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await client.get(f"https://localhost:{port}/")

        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        async with httpx.AsyncClient(transport=KeptConnections()) as client:
            response = await client.get(f"https://localhost:{port}/")

    assert response.content == b"ok"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(tz=UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


async def test_nobody_there_is_a_connect_error(tmp_path):
    async with httpx.AsyncClient(transport=KeptConnections(str(tmp_path / "none"))) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://server/")
