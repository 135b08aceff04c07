"""A capture server whose deployment refuses, stalls, dies, or is left by the client."""

import asyncio
from typing import Any

import openai
import pytest
from tests.unit.sdk.conftest import response
from tests.waiting import until

from hearth.sdk import DeploymentSampler, FixedConcurrencyController, SamplingRetryPolicy
from hearth.sdk.capture import CaptureServer
from hearth.sdk.transport import RetryPolicy, unmount

MODEL = "accounts/me/deployments/d"
CHAT = ("POST", "/inference/v1/chat/completions")
KNOWN = ("GET", f"/v1/{MODEL}")
ASKED = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
QUICK = SamplingRetryPolicy(
    retries=RetryPolicy(attempts=4, base_s=0.001, longest_s=0.002), boot_pause_s=0.002, boot_s=0.5
)


def chat_answer(**changes):
    """The body of a chat answer of two tokens."""
    rows = [{"token": "x", "token_id": 5, "logprob": -0.5, "sampling_logprob": -0.25}] * 2
    raw = {"completion_token_ids": [5, 6], "prompt_token_ids": [1], "versions": [[3, 2]]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "logprobs": {"content": rows},
        "raw_output": raw,
    }
    return response(choice | changes, snapshot_identity="step-4")


def fault(status, message="no"):
    return {"error": {"code": status, "message": message, "status": "X", "type": "x"}}


@pytest.fixture
def server(peer):
    with CaptureServer(DeploymentSampler(peer.url, MODEL, "key", retry_policy=QUICK)) as server:
        yield server


def connect(session):
    """A client of a session, with the retries that OpenAI's client has by default."""
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


@pytest.fixture
async def client(server):
    session = server.session(seed=1)
    async with connect(session) as client:
        client.session = session
        yield client


@pytest.fixture
def turns(client):
    return client.session.turns


async def test_the_deployment_is_asked_for_ids_and_gets_what_the_client_said(client, peer, answer):
    peer.on(*CHAT, answer(chat_answer()))

    await client.chat.completions.create(
        **ASKED,
        stream=True,
        stream_options={"include_usage": True},
        stop=["x"],
        n=1,
        extra_body={"chat_template_kwargs": {"a": 1}},
    )

    (seen,) = peer.requests(*CHAT)
    assert seen.headers["fireworks-deployment"] == MODEL
    assert seen.body.pop("seed") > 0
    assert seen.body == {
        "model": MODEL,
        "messages": ASKED["messages"],
        "stop": ["x"],
        "raw_output": True,
        "logprobs": True,
        "logprob_format": "arrays",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "chat_template_kwargs": {"a": 1},
    }


async def test_an_answer_of_several_versions_keeps_them(client, peer, answer, turns):
    raw = {"completion_token_ids": [5, 6], "prompt_token_ids": [1], "versions": [[3, 1], [4, 1]]}
    peer.on(*CHAT, answer(chat_answer(raw_output=raw)))

    await client.chat.completions.create(**ASKED)

    assert turns[0].versions == [[3, 1], [4, 1]]
    assert turns[0].logprobs == [-0.25, -0.25]
    assert turns[0].snapshot_identity == "step-4"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_deployment_that_comes_back_costs_the_client_nothing(
    client, peer, answer, turns, status
):
    peer.on(*CHAT, *[answer(fault(status), status=status)] * 3, answer(chat_answer()))

    logged = await client.chat.completions.create(**ASKED)

    sent = peer.requests(*CHAT)
    assert logged.choices[0].message.content == "hi"
    assert len(turns) == 1
    assert len(sent) == 4
    assert len({request.headers["x-request-id"] for request in sent}) == 1
    assert len({request.body["seed"] for request in sent}) == 1


@pytest.mark.parametrize("status", [404, 425])
async def test_a_deployment_that_boots_is_waited_for(client, peer, answer, turns, status):
    peer.on(*KNOWN, answer({"name": MODEL}))
    peer.on(*CHAT, *[answer(fault(status), status=status)] * 4, answer(chat_answer()))

    await client.chat.completions.create(**ASKED)

    assert len(turns) == 1


LAST = {
    "unavailable for too long": (503, 4),
    "limited for too long": (429, 4),
    "refused": (400, 1),
    "not allowed": (403, 1),
    "in conflict": (409, 1),
    "no such deployment": (404, 1),
    "booting for too long": (425, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("status", "attempts"), LAST.values(), ids=LAST.keys())
async def test_the_last_refusal_reaches_the_client_as_it_came_and_once(
    client, peer, answer, turns, status, attempts
):
    peer.on(*CHAT, answer(fault(status, "the reason"), status=status))

    with pytest.raises(openai.APIStatusError) as refused:
        await client.chat.completions.create(**ASKED)

    assert refused.value.status_code == status
    assert refused.value.body == fault(status, "the reason")["error"]
    assert attempts in (None, len(peer.requests(*CHAT)))
    assert turns == []


async def test_a_body_nested_deeper_than_json_is_written_is_the_clients_error(client, peer):
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}

    with pytest.raises(openai.BadRequestError, match="body must be less than 255 levels deep"):
        await client.chat.completions.create(**ASKED, extra_body={"metadata": deep})


async def test_a_platform_that_is_gone_is_reported(client, peer):
    unmount(peer.url)

    with pytest.raises(openai.APIStatusError, match="must be used before it is closed") as gone:
        await client.chat.completions.create(**ASKED)

    assert gone.value.status_code == 410


@pytest.mark.slow
async def test_agents_and_the_sampler_share_one_limit_of_requests_in_flight(
    peer, answer, completion_body
):
    peer.on(*CHAT, answer(chat_answer(), delay_s=0.01))
    peer.on("POST", "/inference/v1/completions", answer(completion_body(), delay_s=0.01))
    controller = FixedConcurrencyController(2)
    sampler = DeploymentSampler(peer.url, MODEL, "key", concurrency_controller=controller)
    with CaptureServer(sampler) as server:
        async with connect(session := server.session()) as client:
            completions, *_ = await asyncio.gather(
                sampler.sample_with_prompt_tokens([1, 2], n=4),
                *(client.chat.completions.create(**ASKED) for _ in range(16)),
            )

    assert len(completions) == 4
    assert len(session.turns) == 16
    assert peer.most_in_flight == 2
    assert sampler.concurrency.in_flight == 0


@pytest.mark.slow
async def test_a_retry_of_an_agents_request_waits_for_its_turn_again(peer, answer):
    peer.on(*CHAT, *[answer(fault(503), status=503)] * 3, answer(chat_answer(), delay_s=0.01))
    controller = FixedConcurrencyController(1)
    sampler = DeploymentSampler(
        peer.url, MODEL, "key", concurrency_controller=controller, retry_policy=QUICK
    )
    with CaptureServer(sampler) as server:
        async with connect(session := server.session()) as client:
            await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(4)))

    assert len(session.turns) == 4
    assert (peer.most_in_flight, controller.high_water) == (1, 1)


UNUSABLE = {
    "no ids": ({"raw_output": None}, "must answer with raw_output token ids"),
    "no prompt ids": (
        {"raw_output": {"completion_token_ids": [5, 6]}},
        "must answer with raw_output token ids",
    ),
    "no logprobs": ({"logprobs": None}, "a sampling_logprob per token, got 0 for 2"),
}


@pytest.mark.parametrize(("changes", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
async def test_an_answer_that_cannot_be_trained_is_an_error(
    client, peer, answer, turns, changes, message
):
    peer.on(*CHAT, answer(chat_answer(**changes)))

    with pytest.raises(openai.InternalServerError, match=message):
        await client.chat.completions.create(**ASKED)

    assert turns == []
    assert len(peer.requests(*CHAT)) == 1


async def test_a_client_that_leaves_ends_its_sampling_and_leaves_no_turn(
    client, peer, answer, turns
):
    peer.on(*CHAT, answer(chat_answer(), delay_s=30), answer(chat_answer()))
    left = asyncio.create_task(client.chat.completions.create(**ASKED))
    await until(lambda: peer.in_flight == 1)

    left.cancel()

    await until(lambda: peer.in_flight == 0)
    await client.chat.completions.create(**ASKED)
    assert len(turns) == 1


@pytest.mark.slow
async def test_closing_a_session_ends_its_samples_and_no_others(
    client, server, peer, answer, turns
):
    peer.on(*CHAT, answer(chat_answer(), delay_s=30), answer(chat_answer(), delay_s=0.2))
    asking = asyncio.create_task(client.chat.completions.create(**ASKED))
    await until(lambda: peer.in_flight == 1)
    other = server.session()
    async with connect(other) as another:
        also = asyncio.create_task(another.chat.completions.create(**ASKED))
        await until(lambda: peer.in_flight == 2)

        client.session.close()

        with pytest.raises(openai.APIStatusError, match="its trajectory has ended") as ended:
            await asking
        await also
    assert ended.value.status_code == 410
    assert turns == []
    assert len(other.turns) == 1


@pytest.mark.slow
async def test_closing_the_server_answers_whoever_waits(client, server, peer, answer):
    peer.on(*CHAT, answer(chat_answer(), delay_s=30))
    asking = asyncio.create_task(client.chat.completions.create(**ASKED))
    await until(lambda: peer.in_flight == 1)

    await asyncio.to_thread(server.close)

    with pytest.raises(openai.APIStatusError, match="its trajectory has ended"):
        await asking
    await until(lambda: peer.in_flight == 0)


async def ask_at(url, **options):
    """Ask a deployment that is reached over a socket."""
    server = CaptureServer(DeploymentSampler(url, MODEL, "key", retry_policy=QUICK, **options))
    session = server.session()
    async with connect(session) as client:
        try:
            return await client.chat.completions.create(**ASKED)
        finally:
            await asyncio.to_thread(server.close)


@pytest.mark.slow
async def test_an_answer_that_takes_too_long_is_reported_with_its_limit():
    async def stall(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stall, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(openai.InternalServerError, match=r"within http_timeout=0\.1 s, got"):
            await ask_at(f"http://127.0.0.1:{port}", http_timeout_s=0.1)


@pytest.mark.slow
async def test_a_deployment_that_nobody_answers_for_is_reported(unused_tcp_port):
    with pytest.raises(
        openai.InternalServerError, match="failed for good, last with ConnectError"
    ) as gone:
        await ask_at(f"http://127.0.0.1:{unused_tcp_port}")

    assert "attempt 4" in gone.value.message
