"""OpenAI's client against a capture server, and behind it a whole platform."""

import asyncio
import contextlib
import logging

import httpx
import openai
import orjson
import pytest
from tests.unit.reciter import END, write_reciter

from hearth.errors import ClosedError, ConfigError
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager, DeploymentSampler
from hearth.sdk.capture import CaptureServer
from hearth.sdk.capture.policy import request_seed
from hearth.sdk.sampling import completion_seed
from training.quickstart import MODEL

MESSAGES = [{"role": "user", "content": "What is 20 + 22?"}]
ADDED = [{"role": "user", "content": "2 + 3?"}]
CALL = [
    "So:",
    "\n",
    "<tool_call>",
    '\n{"name": "add", "arguments": {',
    '"a": 2}}',
    "\n</tool_call>",
]
ANSWER = ["It", " is", " five", "."]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}
EXACT = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not m.tool_calls %}<|again|>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
    "{% if messages[-1].role == 'tool' %}<|again|>{% endif %}"
)
"""Renders what was sampled as it was sampled; an answer to a tool's result begins with a cue."""
FORGETFUL = EXACT.replace("{{ m.content }}", "{{ m.content | upper }}")
"""Renders earlier turns differently from how they were sampled."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    """Deployments of the shipped model, and of one that recites, with either template."""
    models = {"chat": MODEL}
    for name, template in (("exact", EXACT), ("forgetful", FORGETFUL)):
        models[name] = write_reciter(
            tmp_path_factory.mktemp(name),
            {"<|assistant|>": CALL, "<|again|>": ANSWER},
            chat_template=template,
        )
    with EmbeddedPlatform(work_dir=tmp_path_factory.mktemp("platform")) as platform:
        deployments = DeploymentManager("key", platform.base_url)
        for name, model in models.items():
            deployments.create_or_get(
                DeploymentConfig(
                    deployment_id=name, base_model=str(model), tokenizer_model=str(model)
                )
            )
        for name in models:
            deployments.wait_for_ready(name)
        yield platform


@pytest.fixture(scope="module")
def capture(platform):
    """Open capture servers of the platform's deployments."""
    with contextlib.ExitStack() as stack:

        def run(name="chat", **options):
            model = f"accounts/me/deployments/{name}"
            sampler = DeploymentSampler(platform.base_url, model, "key")
            return stack.enter_context(CaptureServer(sampler, **options))

        yield run


@pytest.fixture(scope="module")
def server(capture):
    """One for all tests that need no sampling of their own."""
    return capture(sampling={"temperature": 0.9, "max_completion_tokens": 12})


@pytest.fixture
async def connect():
    """Make OpenAI clients of sessions; they know the address and the key, and nothing else."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(session, **options):
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, **options
            )
            return await stack.enter_async_context(client)

        yield run


async def ask(client, messages=MESSAGES, **fields):
    return await client.chat.completions.create(**{"model": "gpt", "messages": messages} | fields)


async def test_what_is_captured_is_what_the_sampler_samples_with_the_same_seed(
    platform, server, connect
):
    with server.session() as session:
        answer = await ask(await connect(session), seed=completion_seed(7, 0))

    (turn,) = session.turns
    sampler = DeploymentSampler(platform.base_url, "accounts/me/deployments/chat", "key")
    (completion,) = await sampler.sample_with_prompt_tokens(
        turn.prompt_tokens, max_tokens=12, temperature=0.9, seed=7
    )
    assert turn.prompt_tokens + turn.completion_tokens == completion.full_tokens
    assert turn.logprobs == completion.inference_logprobs
    assert any(logprob < -0.01 for logprob in turn.logprobs)
    assert turn.versions == [[0, completion.completion_len]]
    assert turn.text == answer.choices[0].message.content == completion.text
    assert turn.finish_reason == answer.choices[0].finish_reason == completion.finish_reason
    (chain,) = session.chains()
    assert chain.tokens == completion.full_tokens
    assert chain.loss_mask == [0] * completion.prompt_len + [1] * completion.completion_len
    assert chain.logprobs[completion.prompt_len :] == completion.inference_logprobs
    sampler.close()


async def test_the_client_sees_an_ordinary_answer(server, connect):
    with server.session(seed=1) as session:
        answer = await ask(await connect(session))

    fields = answer.model_dump(exclude_unset=True)
    assert fields.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert fields["choices"][0].keys() == {"index", "message", "finish_reason"}
    assert fields["choices"][0]["message"].keys() == {"role", "content"}
    assert answer.usage.prompt_tokens == len(session.turns[0].prompt_tokens)


async def test_the_client_gets_logprobs_and_token_ids_if_it_asks_for_them(server, connect):
    with server.session() as session:
        client = await connect(session)
        rows = await ask(client, logprobs=True, top_logprobs=2)
        raw = await ask(client, extra_body={"raw_output": True})

    first, second = session.turns
    content = rows.choices[0].logprobs.content
    assert len(content) == len(first.completion_tokens)
    assert {len(token.top_logprobs) for token in content} == {2}
    assert content[0].model_extra == content[0].top_logprobs[0].model_extra == {}
    choice = raw.choices[0].model_dump(exclude_unset=True)
    assert choice["raw_output"]["completion_token_ids"] == second.completion_tokens
    assert "logprobs" not in choice
    assert raw.model_extra["weight_version"] == 0


async def test_a_stream_says_what_the_whole_answer_says(server, connect):
    with server.session() as session:
        client = await connect(session)
        whole = await ask(client, seed=4)
        stream = await ask(client, seed=4, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]

    first, second = session.turns
    assert first == second
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == first.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, first.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


async def solve(client, **fields):
    """A program with a tool, as it would be written against OpenAI's API."""
    first = await ask(client, ADDED, tools=TOOLS, **fields)
    message = first.choices[0].message
    called = {**RESULT, "tool_call_id": message.tool_calls[0].id}
    return await ask(client, [*ADDED, message, called], tools=TOOLS, **fields)


async def test_turns_that_the_template_renders_as_sampled_are_one_chain(capture, connect):
    with capture("exact").session() as session:
        answer = await solve(await connect(session))

    assert answer.choices[0].message.content == "It is five."
    (chain,) = session.chains()
    first, second = session.turns
    assert first.finish_reason == "tool_calls"
    assert (chain.turns, chain.text, chain.finish_reason) == (2, "It is five.", "stop")
    assert chain.tokens == second.prompt_tokens + second.completion_tokens
    between = len(second.prompt_tokens) - len(first.prompt_tokens) - len(first.completion_tokens)
    assert between > 0
    assert chain.loss_mask == (
        [0] * len(first.prompt_tokens)
        + [1] * (len(CALL) + 1)
        + [0] * between
        + [1] * (len(ANSWER) + 1)
    )
    assert chain.versions == [[0, len(CALL) + len(ANSWER) + 2]]


async def test_turns_that_the_template_renders_differently_are_two_chains(capture, connect):
    with capture("forgetful").session() as session:
        await solve(await connect(session))

    chains = session.chains()
    turns = session.turns
    assert [chain.turns for chain in chains] == [1, 1]
    assert [chain.tokens for chain in chains] == [
        turn.prompt_tokens + turn.completion_tokens for turn in turns
    ]
    assert [sum(chain.loss_mask) for chain in chains] == [len(CALL) + 1, len(ANSWER) + 1]


async def test_a_streamed_call_comes_whole(capture, connect):
    with capture("exact").session() as session:
        stream = await ask(await connect(session), ADDED, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]

    (call,) = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 2}')
    assert chunks[0].choices[0].delta.content == "So:"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len(session.turns[0].completion_tokens) == len([*CALL, END])


async def sample_turns(session, client, count):
    for _ in range(count):
        await ask(client)
    return [turn.completion_tokens for turn in session.turns]


async def test_a_sessions_seed_fixes_its_samples_by_the_number_of_the_request(server, connect):
    turns = []
    for seed in (5, 5, 6):
        with server.session(seed=seed) as session:
            turns.append(await sample_turns(session, await connect(session), 3))
    with server.session(seed=6) as session:
        client = await connect(session)
        for number in range(3):
            await ask(client, seed=request_seed(5, number))

    assert turns[0] == turns[1] == [turn.completion_tokens for turn in session.turns]
    assert turns[0] != turns[2]
    assert turns[0][0] != turns[0][1]


async def test_the_recipes_temperature_wins_and_one_warning_says_so(server, connect, caplog):
    turns = []
    for fields in ({}, {"temperature": 0.1, "top_p": 0.5}):
        with server.session() as session, caplog.at_level(logging.WARNING, "hearth.sdk.capture"):
            client = await connect(session)
            for seed in range(4):
                await ask(client, seed=seed, **fields)
        turns.append(session.turns)

    assert turns[0] == turns[1]
    (record,) = caplog.records
    assert "temperature=0.1 instead of 0.9, top_p=0.5 instead of 1.0" in record.getMessage()


@pytest.mark.parametrize(
    ("fields", "count"), [({}, 3), ({"max_tokens": 2}, 2), ({"max_completion_tokens": 9}, 3)]
)
async def test_the_smaller_limit_holds(capture, connect, fields, count):
    with capture("exact", sampling={"max_completion_tokens": 3}).session() as session:
        await ask(await connect(session), **fields)

    assert len(session.turns[0].completion_tokens) == count
    assert session.turns[0].finish_reason == "length"


async def test_many_sessions_at_once_each_keep_their_own(server, connect):
    def conversation(number):
        return [{"role": "user", "content": f"What is {number} + 1?"}]

    sessions = [server.session(seed=number) for number in range(32)]
    clients = [await connect(session) for session in sessions]

    await asyncio.gather(
        *(ask(client, conversation(number)) for number, client in enumerate(clients))
    )

    for number in (0, 9, 31):
        with server.session(seed=number) as alone:
            await ask(await connect(alone), conversation(number))
        assert alone.turns == sessions[number].turns
    prompts = {tuple(turn.prompt_tokens) for session in sessions for turn in session.turns}
    assert [len(session.turns) for session in sessions] == [1] * 32
    assert len(prompts) == 32
    for session in sessions:
        session.close()


async def test_branches_of_one_session_are_sampled_at_once_and_become_chains(server, connect):
    with server.session(seed=3) as session:
        client = await connect(session)
        await asyncio.gather(*(ask(client) for _ in range(8)))

    assert len(session.turns) == len(session.chains()) == 8
    with server.session(seed=3) as again:
        expected = await sample_turns(again, await connect(again), 8)
    assert sorted(turn.completion_tokens for turn in session.turns) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("messages.0.role", {"messages": [{"content": "hi"}]}),
        ("frequency_penalty", {"frequency_penalty": 1}),
    ],
)
async def test_the_deployments_refusals_reach_the_client(server, connect, name, fields):
    with server.session() as session:
        client = await connect(session)
        with pytest.raises(openai.BadRequestError, match=name) as refused:
            await ask(client, **fields)

    assert refused.value.body["message"].startswith(f"{name} must be")
    assert refused.value.body["status"] == "INVALID_ARGUMENT"
    assert session.turns == []


async def post(session, body):
    headers = {"authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    async with httpx.AsyncClient() as client:
        return await client.post(url, content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "n must be 1, got 2"),
        ({"stream": "perhaps"}, "stream must be valid"),
        ({"stream_options": "usage"}, "stream_options must be valid"),
        (b"{", "body must be"),
        (b"[1]", "body must be"),
        (b'"text"', "body must be"),
    ],
    ids=str,
)
async def test_what_a_session_cannot_do_is_refused_by_its_field(server, body, message):
    if isinstance(body, dict):
        body = orjson.dumps({"model": "m", "messages": MESSAGES} | body)
    with server.session() as session:
        answer = await post(session, body)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


async def test_a_body_that_is_too_long_is_refused(capture, connect):
    with capture(max_body_bytes=10_000).session() as session:
        client = await connect(session)
        with pytest.raises(openai.APIStatusError, match="body must be at most 10000") as refused:
            await ask(client, [{"role": "user", "content": "x" * 2_000_000}])
        await ask(client)

    assert refused.value.status_code == 413
    assert len(session.turns) == 1


async def test_the_models_are_the_one_that_is_trained(server, connect):
    with server.session() as session:
        listed = [model.id async for model in (await connect(session)).models.list()]

    assert listed == ["accounts/me/deployments/chat"]


async def test_a_key_opens_its_own_session_only(server, connect):
    with server.session() as session, server.session() as other:
        client = (await connect(session)).with_options(api_key=other.api_key)
        with pytest.raises(openai.AuthenticationError, match="must be that of session"):
            await ask(client)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()

    assert session.turns == other.turns == []


async def test_paths_of_other_apis_say_which_there_are(server, connect):
    with server.session() as session:
        client = await connect(session)
        with pytest.raises(openai.NotFoundError, match="path must be POST chat/completions"):
            await client.responses.create(model="m", input="hi")


async def test_a_closed_session_refuses_requests_and_keeps_its_turns(server, connect):
    with server.session() as session:
        client = await connect(session)
        await ask(client)

    with pytest.raises(openai.NotFoundError, match="session must be open"):
        await ask(client)
    session.close()
    assert len(session.turns) == len(session.chains()) == 1


async def test_a_closed_server_refuses_sessions_and_ends_the_open_ones(platform):
    sampler = DeploymentSampler(platform.base_url, "accounts/me/deployments/chat", "key")
    server = CaptureServer(sampler)
    session = server.session()
    server.close()

    with pytest.raises(ClosedError, match="capture server must be open"):
        server.session()
    with pytest.raises(httpx.ConnectError):
        await post(session, b"{}")
    server.close()


def test_wrong_sampling_is_told_before_anything_is_opened(platform):
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be"):
        CaptureServer(
            DeploymentSampler(platform.base_url, "m", "key"), sampling={"temperature": -1}
        )
