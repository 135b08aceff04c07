"""Sessions by the clock: what ends when a client falls silent, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hearth.control.app import create_gateway
from hearth.errors import ClosedError, NotFoundError, RequestError
from hearth.local import EmbeddedPlatform
from hearth.tinker import records
from hearth.tinker.front import SESSION_S, Front
from hearth.wire import tinker_requests as requests
from hearth.wire.tinker import LoraSpec
from training.quickstart import MODEL

BASE = str(MODEL)
SAVED = records.SavedFacts(
    owner="alice",
    run_id="s:train:0",
    base_model=BASE,
    lora=LoraSpec(rank=4),
    kind="weights",
    name="here",
    identity="here",
)


class Clock:
    """A clock that stands until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(folder: Path, work: Callable[[Front, Clock], Awaitable[Any]]) -> None:
    with EmbeddedPlatform(work_dir=folder) as platform:
        clock = Clock()

        async def begin() -> None:
            front = Front(platform.plane, create_gateway(platform.plane), clock)
            await front.start()
            await work(front, clock)

        asyncio.run(begin())


async def open_sampler(front: Front, session_id: str) -> str:
    ask = requests.CreateSampler(session_id=session_id, sampling_session_seq_id=0, base_model=BASE)
    return await front.create_sampler("alice", ask)


def test_a_session_ends_an_hour_after_its_last_sign_of_life(tmp_path: Path) -> None:
    async def work(front: Front, clock: Clock) -> None:
        session = await front.create_session("alice", requests.CreateSessionRequest())
        sampler = await open_sampler(front, session)
        clock.now_s = SESSION_S
        await front.sweep()
        await front.beat("alice", session)
        clock.now_s = 2 * SESSION_S
        await front.sweep()
        assert front.find_sampler("alice", sampler).base_model == BASE

        clock.now_s = 2 * SESSION_S + 1
        await front.sweep()

        with pytest.raises(ClosedError, match="has ended"):
            await front.beat("alice", session)
        with pytest.raises(NotFoundError):
            front.find_sampler("alice", sampler)
        with pytest.raises(ClosedError):
            await front.end_session("alice", session)
        assert await front.list_sessions("alice") == [session]
        assert await front.list_sessions("bob") == []

    run(tmp_path, work)


def test_weights_that_others_hold_a_token_for_are_refused(tmp_path: Path) -> None:
    async def work(front: Front, _: Clock) -> None:
        front.saved.put(SAVED)
        session = await front.create_session("alice", requests.CreateSessionRequest())
        given = {"session_id": session, "path": SAVED.path}
        for number, (fields, message) in enumerate(
            (
                ({"weights_access_token": "t"}, "weights_access_token must be absent"),
                ({"optimizer_config": {"type": "dimuon"}}, "must be 'adamw'"),
            )
        ):
            ask = requests.LoadWeightsRequest.from_dict(given | fields | {"model_seq_id": number})
            run_id = await front.load_run("alice", ask)
            result = await front.retrieve("alice", f"create:{run_id}")
            assert result is not None
            assert message in result.decode()
            assert '"category":"user"' in result.decode()

    run(tmp_path, work)


def test_saved_weights_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(front: Front, _: Clock) -> None:
        front.saved.put(SAVED.model_copy(update={"expires_s": 1.0}))
        front.saved.put(SAVED.model_copy(update={"name": "kept"}))

        with pytest.raises(NotFoundError):
            front.saved.find(SAVED.path, "alice")
        await front.sweep()

        assert [each["checkpoint_id"] for each in front.saved.list_own("alice")] == ["weights/kept"]

    run(tmp_path, work)


def test_sampling_asks_its_session_what_to_sample_from(tmp_path: Path) -> None:
    async def work(front: Front, _: Clock) -> None:
        session = await front.create_session("alice", requests.CreateSessionRequest())
        sampler = await open_sampler(front, session)
        ask = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        with pytest.raises(RequestError, match="open a sampling session first"):
            await front.sample("alice", requests.AskSamples.from_dict(ask | {"base_model": BASE}))

        named = {"sampling_session_id": sampler, "seq_id": 0, "base_model": "other"}
        request_id, _ids = await front.sample("alice", requests.AskSamples.from_dict(ask | named))

        result = await front.retrieve("alice", request_id)
        assert result is not None
        assert "base_model must be absent" in result.decode()

    run(tmp_path, work)


def test_a_link_to_a_download_ends_after_an_hour_and_opens_one_folder(tmp_path: Path) -> None:
    async def work(front: Front, clock: Clock) -> None:
        saved = SAVED.model_copy(update={"kind": "external_weights"})
        front.saved.put(saved)
        folder = front.bases.find(BASE).export_folder(saved.identity)
        folder.mkdir(parents=True)
        (folder / "adapter.safetensors").touch()
        (folder.parent / "secret").touch()
        with pytest.raises(NotFoundError):
            await front.list_links("bob", saved.path)
        links, _ = await front.list_links("alice", saved.path)
        token, name = links["adapter.safetensors"].split("/")

        clock.now_s = 3600
        assert front.find_link(token, name) == folder / name
        for odd in ((token[:-1], name), ("", name), (token, "../secret"), (token, "..")):
            with pytest.raises(NotFoundError):
                front.find_link(*odd)
        clock.now_s = 3601
        with pytest.raises(NotFoundError, match="within the hour"):
            front.find_link(token, name)

    run(tmp_path, work)
