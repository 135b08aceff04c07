"""The deployment as the ``openai`` client meets it: over HTTP, with nothing of ours between."""

import asyncio
import copy
import socket
import threading
import time
from collections import defaultdict
from dataclasses import replace

import httpx
import openai
import pytest
import torch
import uvicorn
from tests.waiting import wait_until

from hearth.inference.backend import SampleRequest
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.service import create_app
from hearth.sync.store import MemorySnapshotStore

NAME = "accounts/me/deployments/d"
IDS = [17, 10, 18, 28]
"""The text 2+3= in the test tokenizer."""
OPTIONS = {"max_tokens": 12, "seed": 7, "extra_body": {"ignore_eos": True}}


class Served:
    """An engine behind uvicorn on 127.0.0.1, and a client of it."""

    def __init__(self, engine):
        self.engine = engine
        self.app = create_app(engine, model_name=NAME, snapshots=MemorySnapshotStore())
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0)

    def close(self):
        self.openai.close()
        self._server.should_exit = True
        self._thread.join()

    def complete(self, **fields):
        return self.openai.completions.create(**{"model": NAME, "prompt": IDS} | fields)

    def chat(self, **fields):
        hi = [{"role": "user", "content": "hi"}]
        return self.openai.chat.completions.create(**{"model": NAME, "messages": hi} | fields)

    def sample(self, prompt=IDS, **options):
        """What the engine samples for the same request."""
        options = {"max_tokens": 12, "seed": 7, "ignore_eos": True} | options
        return self.engine.submit(SampleRequest(prompt=prompt, **options)).result()


@pytest.fixture
def serve(start):
    made = []

    def run(**options):
        made.append(Served(start(**options)))
        return made[-1]

    yield run
    for item in made:
        item.close()


@pytest.fixture(scope="module")
def served(originals, tokenizer):
    """One for all tests that leave it as it is."""
    loaded = replace(originals["qwen"], module=copy.deepcopy(originals["qwen"].module))
    options = EngineOptions(max_seq_len=512)
    served = Served(InferenceEngine(loaded, tokenizer=tokenizer, options=options))
    yield served
    served.close()
    served.engine.close()


def joined(chunks) -> dict[int, str]:
    """The whole text of each choice of a streamed completion."""
    texts = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return dict(texts)


def test_a_prompt_of_ids_is_completed_as_the_engine_samples_it(served):
    answer = served.complete(logprobs=0, **OPTIONS)

    sampled = served.sample()
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (sampled.text, "length")
    assert choice.logprobs.token_logprobs == sampled.logprobs
    assert choice.logprobs.top_logprobs is None
    assert (answer.model, answer.object) == (NAME, "text_completion")
    assert answer.usage.total_tokens == 16


ASKS_IDS = {"max_tokens": 12, "seed": 7}
WITH_IDS = {"ignore_eos": True, "return_token_ids": True}


@pytest.mark.slow
def test_token_ids_are_told_where_vllm_tells_them(served):
    sampled = served.sample()

    answer = served.complete(**ASKS_IDS, extra_body=WITH_IDS)
    (choice,) = answer.choices
    assert (choice.token_ids, choice.prompt_token_ids) == (sampled.token_ids, IDS)
    plain = served.complete(**OPTIONS)
    assert not hasattr(plain.choices[0], "token_ids")

    long = {"max_tokens": 200, "seed": 7}  # Tokens that come together are one piece.
    chunks = list(served.complete(**long, stream=True, extra_body=WITH_IDS))
    pieces = [chunk.choices[0] for chunk in chunks]
    streamed = [token for piece in pieces for token in piece.token_ids]
    assert streamed == served.sample(max_tokens=200).token_ids
    assert pieces[0].prompt_token_ids == IDS
    assert not any(hasattr(piece, "prompt_token_ids") for piece in pieces[1:])


@pytest.mark.slow
def test_texts_and_conversations_are_tokenized_as_they_are_for_completions(served, tokenizer):
    hi = [{"role": "user", "content": "hi"}]

    def ask(path="/tokenize", **body):
        return httpx.post(f"{served.url}{path}", json=body, timeout=60)

    text = ask(prompt="2+3=", return_token_strs=True).json()
    chat = ask("/v1/tokenize", messages=hi, add_special_tokens=False).json()

    assert text == {
        "count": 4,
        "max_model_len": 512,
        "tokens": IDS,
        "token_strs": [tokenizer.decode([token]) for token in IDS],
    }
    assert served.chat(max_tokens=1).usage.prompt_tokens == chat["count"] == len(chat["tokens"])
    for body, message in (
        ({}, "prompt or messages must be given"),
        ({"prompt": "a", "messages": hi}, "prompt or messages must be given"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens must be absent or true"),
        ({"messages": hi, "add_generation_prompt": False}, "add_generation_prompt must be true"),
        ({"prompt": "a" * 10**6}, "this model's maximum context length is less"),
    ):
        answer = ask(**body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_text_offsets_say_where_each_token_begins_in_a_stream_too(served):
    whole = served.complete(logprobs=0, echo=True, **OPTIONS).choices[0]
    tokens, offsets = whole.logprobs.tokens, whole.logprobs.text_offset

    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    chunks = served.complete(logprobs=0, echo=True, stream=True, **OPTIONS)
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for piece in pieces for offset in piece.text_offset] == offsets


def test_a_chat_tells_the_ids_of_its_prompt_and_its_answers(served):
    answer = served.chat(**ASKS_IDS, n=2, extra_body=WITH_IDS)
    raw = served.chat(**ASKS_IDS, n=2, extra_body={"ignore_eos": True, "raw_output": True})

    ids = [choice.token_ids for choice in answer.choices]
    assert ids == [choice.raw_output["completion_token_ids"] for choice in raw.choices]
    assert answer.prompt_token_ids == raw.choices[0].raw_output["prompt_token_ids"]

    streamed = defaultdict(list)
    prompts = []
    for chunk in served.chat(**ASKS_IDS, n=2, stream=True, extra_body=WITH_IDS):
        prompts.append(getattr(chunk, "prompt_token_ids", None))
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert [streamed[0], streamed[1]] == ids
    assert [prompt for prompt in prompts if prompt] == [answer.prompt_token_ids] * 2


@pytest.mark.slow
def test_scoring_a_prompt_gives_one_logprob_per_token_the_first_null(served):
    fields = {"max_tokens": 1, "echo": True, "logprobs": 1}
    body = {"model": NAME, "prompt": IDS, "prompt_cache_max_len": 0} | fields

    by_client = served.complete(extra_body={"prompt_cache_max_len": 0}, **fields)
    by_hand = httpx.post(f"{served.url}/inference/v1/completions", json=body, timeout=30).json()

    expected = served.sample(max_tokens=1, prompt_logprobs=True).prompt_logprobs
    for logprobs in (
        by_client.choices[0].logprobs.token_logprobs,
        by_hand["choices"][0]["logprobs"]["token_logprobs"],
    ):
        assert len(logprobs) == len(IDS) + 1
        assert logprobs[0] is None
        assert logprobs[:-1] == expected
        assert logprobs[-1] < 0


def test_max_tokens_0_with_echo_scores_the_prompt_and_samples_nothing(served, tokenizer):
    answer = served.complete(max_tokens=0, echo=True, logprobs=1)

    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(IDS)
    assert len(choice.logprobs.token_logprobs) == len(IDS)
    assert answer.usage.completion_tokens == 0


@pytest.mark.slow
def test_several_prompts_are_sampled_as_each_alone_and_numbered_prompt_by_prompt(served, tokenizer):
    prompts = [IDS, [1, 2], [9] * 5]
    texts = [tokenizer.decode(prompt) for prompt in prompts]

    together = served.complete(prompt=prompts, n=2, **OPTIONS)
    by_text = served.complete(prompt=texts[:1], n=2, **OPTIONS)
    alone = [served.complete(prompt=prompt, n=2, **OPTIONS) for prompt in prompts]

    assert [choice.index for choice in together.choices] == [0, 1, 2, 3, 4, 5]
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in together.choices] == expected
    assert [choice.text for choice in by_text.choices] == expected[:2]
    assert len(set(expected)) == 6
    assert together.usage.prompt_tokens == 11
    assert together.usage.completion_tokens == 72


@pytest.mark.slow
def test_numbered_logprobs_are_those_of_the_likeliest_tokens_by_their_text(served, load, tokenizer):
    answer = served.complete(logprobs=5, max_tokens=4, seed=1, extra_body={"ignore_eos": True})

    sampled = served.sample(max_tokens=4, seed=1)
    logprobs = answer.choices[0].logprobs
    padded = [*IDS, *sampled.token_ids] + [0] * 24
    with torch.no_grad():
        plain = load().module(input_ids=torch.tensor([padded])).logits[0].float().log_softmax(-1)
    for place, (token, by_text) in enumerate(
        zip(sampled.token_ids, logprobs.top_logprobs, strict=True)
    ):
        best = plain[len(IDS) - 1 + place].topk(5)
        expected = {}
        for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            expected.setdefault(tokenizer.decode([index]), value)
        expected.setdefault(tokenizer.decode([token]), sampled.logprobs[place])
        assert by_text == pytest.approx(expected, abs=1e-5)


def test_an_echoed_prompt_has_the_likeliest_tokens_after_its_first(served, load, tokenizer):
    answer = served.complete(max_tokens=1, echo=True, logprobs=2)

    logprobs = answer.choices[0].logprobs
    assert logprobs.top_logprobs[0] is None
    with torch.no_grad():
        plain = load().module(input_ids=torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    for place, by_text in enumerate(logprobs.top_logprobs[1:-1]):
        best = plain[place].topk(2)
        expected = {}
        for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            expected.setdefault(tokenizer.decode([index]), value)
        token = IDS[place + 1]
        expected.setdefault(tokenizer.decode([token]), plain[place, token].item())
        assert by_text == pytest.approx(expected, abs=1e-4)
    assert 2 <= len(logprobs.top_logprobs[-1]) <= 3


def test_top_logprobs_of_the_training_protocol_are_lists_of_ids(served):
    body = {"prompt": IDS, "max_tokens": 3, "logprobs": True, "top_logprobs": 8, "raw_output": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body | {"n": 2}, timeout=30).json()

    for choice in answer["choices"]:
        for row in choice["logprobs"]["content"]:
            values = [top["logprob"] for top in row["top_logprobs"]]
            assert len({top["token_id"] for top in row["top_logprobs"]}) == 8
            assert values == sorted(values, reverse=True)
            # Two sums of one distribution.
            assert row["logprob"] <= values[0] + 1e-5


def test_asking_for_top_logprobs_does_not_change_the_sample(served):
    plain, mixed = (
        served.sample(max_tokens=40),
        [
            served.engine.submit(
                SampleRequest(
                    prompt=IDS, max_tokens=40, seed=7, ignore_eos=True, top_logprobs=count
                )
            )
            for count in (0, 3, 20)
        ],
    )

    for count, future in zip((0, 3, 20), mixed, strict=True):
        sampled = future.result()
        assert (sampled.token_ids, sampled.logprobs) == (plain.token_ids, plain.logprobs)
        assert [len(logprob) for logprob in sampled.top_logprobs or []] == (
            [count] * 40 if count else []
        )


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/v1", "/inference/v1"])
def test_the_deployment_is_the_one_model(served, prefix):
    client = served.openai.with_options(base_url=served.url + prefix)

    (listed,) = client.models.list().data
    model = client.models.retrieve(NAME)

    assert listed == model
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "hearth")
    assert abs(model.created - time.time()) < 60
    with pytest.raises(openai.NotFoundError, match=f"model must be '{NAME}'"):
        client.models.retrieve("accounts/me/deployments/other")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/v1", "/inference/v1"])
def test_chat_answers_the_conversation_as_the_template_renders_it(served, tokenizer, prefix):
    client = served.openai.with_options(base_url=served.url + prefix)
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "?"}],
        },
    ]

    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_completion_tokens=12,
        seed=7,
        n=2,
        extra_body={"ignore_eos": True, "raw_output": True},
    )

    prompt = tokenizer.encode("<tag>system:be brief<tag>user:2 ?<tag>")
    assert [choice.index for choice in answer.choices] == [0, 1]
    alone = served.complete(prompt=prompt, n=2, **OPTIONS)
    for choice, other in zip(answer.choices, alone.choices, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == other.text
        assert choice.finish_reason == "length"
        assert choice.raw_output["prompt_token_ids"] == prompt
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 24


def test_chat_logprobs_come_with_bytes_and_the_likeliest_tokens(served):
    answer = served.chat(logprobs=True, top_logprobs=3, **OPTIONS)

    rows = answer.choices[0].logprobs.content
    assert len(rows) == 12
    for row in rows:
        assert [logprob.logprob for logprob in row.top_logprobs] == sorted(
            (logprob.logprob for logprob in row.top_logprobs), reverse=True
        )
        assert len(row.top_logprobs) == 3
        for token in (row, *row.top_logprobs):
            assert token.bytes == (None if "\ufffd" in token.token else list(token.token.encode()))


@pytest.mark.slow
def test_chat_logprobs_as_arrays_are_those_of_the_objects(served):
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 12}
    body |= {"seed": 7, "ignore_eos": True}

    def choice(**fields):
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body | fields, timeout=30)
        return answer.json()["choices"][0]

    objects, arrays = choice(), choice(logprob_format="arrays")
    rows, raw = objects["logprobs"]["content"], arrays["raw_output"]

    assert raw["logprobs"] == [row["logprob"] for row in rows]
    assert raw["sampling_logprobs"] == [row["sampling_logprob"] for row in rows]
    assert raw["completion_token_ids"] == [row["token_id"] for row in rows]
    assert "logprobs" not in arrays
    assert "raw_output" not in objects


def test_tools_and_template_arguments_reach_the_template(served, tokenizer):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    call = {"function": {"name": "add", "arguments": '{"a": 5}'}, "id": "1", "type": "function"}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    body = {"raw_output": True, "chat_template_kwargs": {"style": "dry"}}

    def rendered(**options):
        answer = served.chat(
            messages=messages, tools=tools, max_tokens=1, extra_body=body, **options
        )
        return tokenizer.decode(answer.choices[0].raw_output["prompt_token_ids"])

    conversation = "<tag>user:go<tag>assistant:5[dry]<tag>"
    assert rendered() == "add,sub|" + conversation
    assert rendered(tool_choice="none") == conversation


@pytest.mark.slow
def test_an_answer_without_a_limit_may_fill_the_context(serve):
    served = serve(max_seq_len=64)

    answer = served.chat(extra_body={"ignore_eos": True})

    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


REFUSED = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 1},
    "logit_bias": {"logit_bias": {"5": 1}},
    "best_of": {"n": 2, "extra_body": {"best_of": 3}},
    "suffix": {"suffix": "x"},
    "min_p": {"extra_body": {"min_p": 0.1}},
    "logprobs": {"logprobs": 6},
    "top_logprobs": {"logprobs": 1, "extra_body": {"top_logprobs": 21}},
    "n": {"n": 2000},
    "prompt 1 of 2: prompt": {"prompt": [[1], [2, 264]]},
}


@pytest.mark.parametrize(("name", "fields"), REFUSED.items(), ids=REFUSED.keys())
def test_what_would_change_the_sample_and_is_not_supported_is_refused(served, name, fields):
    with pytest.raises(openai.BadRequestError, match=f"{name} must be") as refused:
        served.complete(**fields)

    assert refused.value.body["type"] == "invalid_argument"
    assert refused.value.request_id == refused.value.body["request_id"]


REFUSED_CHATS = {
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required"},
    "reasoning_effort": {"reasoning_effort": "low"},
    "max_tokens": {"max_tokens": 1, "max_completion_tokens": 2},
    "logprobs": {"top_logprobs": 2},
    "top_logprobs": {
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"logprob_format": "arrays"},
    },
    "messages": {"messages": []},
    "messages.0.content": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "messages.0.role": {"messages": [{"content": "hi"}]},
    "no robots": {"messages": [{"role": "robot", "content": "hi"}]},
    "stop must be at most 64 texts, got 65": {"stop": ["x"] * 65},
}
# What apply_chat_template would take as its own argument, or its renderer.
REFUSED_CHATS |= {
    f"chat_template_kwargs.{name} must be absent": {
        "extra_body": {"chat_template_kwargs": {name: value}}
    }
    for name, value in {
        "chat_template": "{{ 'x' * 9 }}",
        "tokenize": False,
        "padding": "max_length",
        "max_length": 9,
        "truncation": True,
        "return_tensors": "pt",
        "return_dict": True,
        "tokenizer_kwargs": {"padding": "max_length"},
        "continue_final_message": True,
        "add_generation_prompt": False,
        "tools": [],
        "messages": [],
    }.items()
}


@pytest.mark.parametrize(("name", "fields"), REFUSED_CHATS.items(), ids=REFUSED_CHATS.keys())
@pytest.mark.slow
def test_a_chat_that_cannot_be_had_is_refused_by_its_field(served, name, fields):
    with pytest.raises(openai.BadRequestError, match=name):
        served.chat(**fields)


def test_a_conversation_longer_than_any_of_the_context_is_refused_before_it_is_tokenized(served):
    # 512 tokens of 7 bytes, which is the length of the longest, <|pad|>.
    fits = {"role": "user", "content": "a" * (512 * 7 - len("<tag>user:<tag>"))}
    longer = fits | {"content": fits["content"] + "a"}

    with pytest.raises(openai.BadRequestError, match="prompt must be <= 511 tokens"):
        served.chat(messages=[fits])
    rule = "messages must be at most 3584 bytes of text, got 3585"
    with pytest.raises(openai.BadRequestError, match=rule):
        served.chat(messages=[longer])


def test_documents_reach_the_template(served, tokenizer):
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% for d in documents %}{{ d.text }}{% endfor %}"
    try:
        body = {"chat_template_kwargs": {"documents": [{"text": "abc"}]}, "raw_output": True}
        answer = served.chat(max_tokens=1, extra_body=body)
    finally:
        tokenizer.chat_template = template

    assert tokenizer.decode(answer.choices[0].raw_output["prompt_token_ids"]) == "abc"


@pytest.mark.slow
def test_values_that_change_nothing_are_taken(served):
    answer = served.complete(
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        best_of=1,
        stop=None,
        user="me",
        **OPTIONS,
    )
    chat = served.chat(
        tool_choice="auto",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        max_tokens=1,
    )

    assert answer.choices[0].text == served.sample().text
    assert chat.usage.completion_tokens == 1


@pytest.mark.slow
def test_a_model_without_a_chat_template_says_so(serve, tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(openai.BadRequestError, match="must fit the model's chat template"):
            serve().chat()
    finally:
        tokenizer.chat_template = template


@pytest.mark.slow
def test_a_stream_brings_text_while_it_is_sampled(served):
    chunks = served.complete(stream=True, seed=7, max_tokens=250, extra_body={"ignore_eos": True})

    first = next(chunks)
    running = served.engine.stats().running
    rest = list(chunks)

    assert running == 1
    assert first.choices[0].finish_reason is None
    assert len(rest) > 20
    assert joined([first, *rest]) == {0: served.sample(max_tokens=250).text}
    assert [chunk.choices[0].finish_reason for chunk in rest[:-1]] == [None] * (len(rest) - 1)
    assert rest[-1].choices[0].finish_reason == "length"
    assert rest[-1].weight_version == 0
    assert {chunk.id for chunk in rest} == {first.id}


def test_n_streams_are_told_apart_by_index_and_counted_at_the_end(served):
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}

    chunks = list(served.complete(**options, **OPTIONS))

    whole = served.complete(n=3, **OPTIONS)
    assert joined(chunks) == {choice.index: choice.text for choice in whole.choices}
    order = [chunk.choices[0].index for chunk in chunks[:-1]]
    assert order != sorted(order)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streamed_logprobs_are_those_of_the_whole_answer(served):
    fields = {"echo": True, "logprobs": 2}

    chunks = list(served.complete(**fields, stream=True, **OPTIONS))

    whole = served.complete(**fields, **OPTIONS).choices[0]
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert joined(chunks) == {0: whole.text}
    for name in ("tokens", "token_logprobs"):
        reported = [row for part in parts for row in getattr(part, name)]
        assert reported == getattr(whole.logprobs, name)
    top = [row for part in parts for row in part.top_logprobs or []]
    assert top[-12:] == whole.logprobs.top_logprobs[-12:]


def test_a_streamed_chat_tells_role_text_and_reason(served):
    fields = {"n": 2, "logprobs": True}

    chunks = list(
        served.chat(**fields, stream=True, stream_options={"include_usage": True}, **OPTIONS)
    )

    whole = served.chat(**fields, **OPTIONS)
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert [part.delta.role for part in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["length"]
        assert [row for part in own for row in part.logprobs.content] == choice.logprobs.content


@pytest.mark.slow
def test_a_stream_ends_before_its_stop_string_as_the_whole_answer_does(served):
    sampled = served.sample(max_tokens=200)
    stop = next(
        sampled.text[at : at + 3] for at in range(30, 200) if sampled.text[at : at + 3].isascii()
    )
    fields = {"stop": ["never there", stop], "seed": 7}
    fields |= {"max_tokens": 200, "extra_body": {"ignore_eos": True}}

    chunks = list(served.complete(**fields, stream=True))

    whole = served.complete(**fields).choices[0]
    assert joined(chunks) == {0: whole.text}
    assert whole.text == sampled.text[: sampled.text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"


def test_a_client_that_leaves_amid_a_stream_frees_its_rows(serve):
    served = serve()
    chunks = served.complete(n=3, stream=True, max_tokens=500, extra_body={"ignore_eos": True})
    next(chunks)
    wait_until(lambda: served.engine.stats().running == 3)

    chunks.close()

    wait_until(lambda: served.engine.stats().running == 0)
    assert served.engine.stats().cancelled == 3
    assert served.engine.stats().generated_tokens < 3 * 500


@pytest.mark.slow
def test_what_fails_before_the_first_token_has_its_own_status_also_in_a_stream(serve):
    served = serve()
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        served.complete(temperature=-1, stream=True)
    served.engine.close()
    with pytest.raises(openai.APIStatusError) as closed:
        served.complete(stream=True)

    assert closed.value.status_code == 410


@pytest.mark.slow
def test_what_fails_amid_a_stream_ends_it_with_an_error_event(serve):
    served = serve()
    chunks = served.complete(stream=True, max_tokens=500, extra_body={"ignore_eos": True})
    next(chunks)

    served.engine.close()

    with pytest.raises(openai.APIError, match="deployment must be open"):
        list(chunks)


def test_the_warm_up_probe_is_answered(served):
    body = {"model": NAME, "prompt": [1, 2], "max_tokens": 4, "temperature": 0.0}

    answer = httpx.post(f"{served.url}/inference/v1/completions", json=body, timeout=30)

    assert answer.status_code == 200


@pytest.mark.slow
async def test_the_asynchronous_client_streams_many_requests_at_once(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="key") as client:

        async def stream_text(seed):
            fields = OPTIONS | {"seed": seed}
            stream = await client.completions.create(model=NAME, prompt=IDS, stream=True, **fields)
            return joined([chunk async for chunk in stream])[0]

        texts = await asyncio.gather(*map(stream_text, range(20)))

    assert texts == [served.sample(seed=seed).text for seed in range(20)]
