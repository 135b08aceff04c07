import asyncio
import json
import threading

import pytest
from tests.unit.inference.conftest import AppClient, ask, until
from tests.unit.wire.routes import list_routes

from hearth.inference.service import create_app
from hearth.models.lora import LoraOptions
from hearth.sdk.sampling import completion_seed
from hearth.sync.store import MemorySnapshotStore
from hearth.wire.completions import CompletionResponse, RawOutput
from hearth.wire.openapi import DEPLOYMENT_ROUTES

PATH = "/inference/v1/completions"
HOT_LOAD = "/hot_load/v1/models/hot_load"
NAME = "accounts/me/deployments/d"


class Site(AppClient):
    """A deployment's app with its engine and its snapshots."""

    def __init__(self, engine):
        self.engine = engine
        self.snapshots = MemorySnapshotStore()
        super().__init__(create_app(engine, model_name=NAME, snapshots=self.snapshots))

    async def complete(self, path=PATH, **fields) -> dict:
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 7, "ignore_eos": True} | fields
        answer = await self.call("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def load(self, identity, **order) -> dict:
        """The replica's state once a snapshot is served, or cannot be."""
        await self.call("POST", HOT_LOAD, json={"identity": identity} | order)
        question = {"wait_for": identity, "timeout_s": "20"}
        return (await self.call("GET", HOT_LOAD, params=question)).json()["replicas"][0]


@pytest.fixture
def site(start):
    return Site(start())


@pytest.fixture
def sampled(site):
    """What the engine samples for the service's default request."""
    return site.engine.submit(ask(max_tokens=8, prompt_logprobs=True)).result()


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_a_completion_tells_text_reason_usage_and_version(site, sampled, path):
    answer = await site.complete(path, model=NAME)

    assert CompletionResponse.model_validate(answer).weight_version == 0
    assert answer["object"] == "text_completion"
    assert answer["model"] == NAME
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": sampled.text, "finish_reason": "length"}


async def test_a_number_that_no_column_holds_fails_neither_its_request_nor_others(site):
    everything, *others = await asyncio.gather(
        *(site.complete(top_k=top_k, raw_output=True) for top_k in (2**63, 2**31 - 1, 0))
    )

    assert [other["choices"] for other in others] == [everything["choices"]] * 2


async def test_raw_output_holds_the_sampled_ids_and_their_versions(site, sampled):
    (choice,) = (await site.complete(raw_output=True))["choices"]

    assert choice["raw_output"] == {"completion_token_ids": sampled.token_ids, "versions": [[0, 8]]}


async def test_logprob_objects_hold_both_logprobs_of_each_sampled_token(site, tokenizer):
    answer = await site.complete(logprobs=True, raw_output=True, temperature=0.5)

    sampled = site.engine.submit(ask(max_tokens=8, temperature=0.5)).result()
    (choice,) = answer["choices"]
    texts = [tokenizer.decode([token]) for token in sampled.token_ids]
    assert choice["logprobs"]["tokens"] == texts
    assert choice["logprobs"]["token_logprobs"] == sampled.logprobs
    assert choice["logprobs"]["content"] == [
        {"token": text, "token_id": token, "logprob": own, "sampling_logprob": sampling}
        for text, token, own, sampling in zip(
            texts, sampled.token_ids, sampled.logprobs, sampled.sampling_logprobs, strict=True
        )
    ]
    assert "logprobs" not in choice["raw_output"]


async def test_logprob_arrays_stand_in_raw_output_and_leave_the_objects_out(site, sampled):
    answer = await site.complete(logprobs=True, logprob_format="arrays")

    (choice,) = answer["choices"]
    assert "logprobs" not in choice
    assert choice["raw_output"]["logprobs"] == sampled.logprobs
    assert choice["raw_output"]["sampling_logprobs"] == sampled.sampling_logprobs


async def test_echoed_arrays_begin_with_the_prompt(site, sampled):
    answer = await site.complete(logprobs=True, logprob_format="arrays", echo=True)

    raw = answer["choices"][0]["raw_output"]
    assert raw["completion_token_ids"] == [1, 2, 3, *sampled.token_ids]
    assert raw["logprobs"] == [*sampled.prompt_logprobs, *sampled.logprobs]
    assert raw["logprobs"][0] is None
    assert raw["sampling_logprobs"] == [None, None, None, *sampled.sampling_logprobs]


@pytest.mark.parametrize("echo", [False, True])
async def test_base64_has_the_ids_and_logprobs_of_the_lists_bit_for_bit(site, echo):
    asked = {"logprobs": True, "logprob_format": "arrays", "echo": echo, "seed": 1}

    plain, packed = [
        (await site.complete(encoding=encoding, **asked))["choices"][0]["raw_output"]
        for encoding in ("list", "base64")
    ]

    names = ("completion_token_ids", "logprobs", "sampling_logprobs")
    assert all(isinstance(packed[name], str) for name in names)
    assert len(plain["logprobs"]) == 8 + 3 * echo
    assert RawOutput.from_dict(packed).as_dict() == RawOutput.from_dict(plain).as_dict() == plain


async def test_echoed_objects_have_a_number_in_every_row_for_the_official_client(site, sampled):
    answer = await site.complete(logprobs=True, raw_output=True, echo=True)

    logprobs = answer["choices"][0]["logprobs"]
    rows = [row["logprob"] for row in logprobs["content"]]
    assert rows == [0.0, *sampled.prompt_logprobs[1:], *sampled.logprobs]
    assert logprobs["token_logprobs"] == [*sampled.prompt_logprobs, *sampled.logprobs]
    assert ["sampling_logprob" in row for row in logprobs["content"]] == [False] * 3 + [True] * 8


@pytest.mark.parametrize("echo", [{"echo": True}, {"echo_last": 2}])
async def test_an_echoed_prompt_has_its_most_probable_tokens(site, echo):
    answer = await site.complete(logprobs=True, top_logprobs=3, **echo)

    logprobs = answer["choices"][0]["logprobs"]
    scored = logprobs["content"] if "echo_last" in echo else logprobs["content"][1:]
    assert [len(row["top_logprobs"]) for row in scored] == [3] * len(scored)
    assert [row.get("top_logprobs") for row in logprobs["content"]].count(None) == int(
        "echo" in echo
    )
    for row in scored:
        listed = {top["token_id"]: top["logprob"] for top in row["top_logprobs"]}
        assert sorted(listed.values(), reverse=True) == list(listed.values())
        assert listed.get(row["token_id"], row["logprob"]) == pytest.approx(row["logprob"])
        assert row["logprob"] <= max(listed.values()) + 1e-6
    assert all(logprobs["top_logprobs"][-len(scored) :])


async def test_max_tokens_0_with_echo_scores_the_prompt(site, sampled):
    answer = await site.complete(max_tokens=0, echo=True, logprobs=True, logprob_format="arrays")

    (choice,) = answer["choices"]
    assert choice["raw_output"]["completion_token_ids"] == [1, 2, 3]
    assert choice["raw_output"]["logprobs"] == sampled.prompt_logprobs
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)


async def test_echo_last_echoes_and_scores_the_end_of_the_prompt_alone(site, sampled, tokenizer):
    arrays = {"logprobs": True, "logprob_format": "arrays"}

    (choice,) = (await site.complete(echo_last=2, **arrays))["choices"]
    (scored,) = (await site.complete(echo_last=2, max_tokens=0, **arrays))["choices"]
    (whole,) = (await site.complete(echo_last=9, max_tokens=0, **arrays))["choices"]

    raw = choice["raw_output"]
    assert raw["completion_token_ids"] == [2, 3, *sampled.token_ids]
    assert raw["logprobs"] == pytest.approx(
        [*sampled.prompt_logprobs[1:], *sampled.logprobs], abs=1e-5
    )
    assert raw["sampling_logprobs"] == [None, None, *sampled.sampling_logprobs]
    assert choice["text"] == tokenizer.decode([2, 3]) + sampled.text
    assert scored["raw_output"]["completion_token_ids"] == [2, 3]
    assert scored["raw_output"]["logprobs"] == raw["logprobs"][:2]
    assert whole["raw_output"]["completion_token_ids"] == [1, 2, 3]
    assert whole["raw_output"]["logprobs"][0] is None


async def test_a_text_prompt_is_tokenized_and_its_ids_are_told(site, tokenizer):
    by_text = await site.complete(prompt="2 + 3 =", raw_output=True, echo=True)
    by_ids = await site.complete(prompt=tokenizer.encode("2 + 3 ="), raw_output=True)

    (text_choice,), (id_choice,) = by_text["choices"], by_ids["choices"]
    assert text_choice["raw_output"]["prompt_token_ids"] == tokenizer.encode("2 + 3 =")
    assert (
        text_choice["raw_output"]["completion_token_ids"][7:]
        == (id_choice["raw_output"]["completion_token_ids"])
    )
    assert text_choice["text"] == "2 + 3 =" + id_choice["text"]


async def test_n_completions_are_those_of_n_requests_of_the_sdk(site):
    together = await site.complete(n=5, raw_output=True)
    single = [
        await site.complete(seed=completion_seed(7, index), raw_output=True) for index in range(5)
    ]

    ids = [choice["raw_output"]["completion_token_ids"] for choice in together["choices"]]
    assert ids == [answer["choices"][0]["raw_output"]["completion_token_ids"] for answer in single]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3, 4]
    assert together["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(
    "fields",
    [
        {"raw_output": True, "logprobs": True, "n": 2, "perf_metrics_in_response": True},
        {"logprobs": True, "logprob_format": "arrays"},
    ],
    ids=["raw_output", "arrays"],
)
async def test_the_training_clients_stream_is_the_whole_answer_in_one_event(site, fields):
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 7, "ignore_eos": True} | fields

    answer = await site.call("POST", PATH, json=body | {"stream": True})

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert float(answer.headers["fireworks-prefill-queue-duration"]) >= 0
    event, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    streamed = json.loads(event.removeprefix("data: "))
    plain = await site.complete(**fields)
    assert streamed["choices"] == plain["choices"]
    assert streamed["usage"] == plain["usage"]
    assert ("perf_metrics" in streamed) == ("perf_metrics_in_response" in fields)


async def test_perf_metrics_are_headers_and_on_demand_in_the_body(site):
    plain = await site.call("POST", PATH, json={"prompt": [1, 2], "max_tokens": 2})
    asked = await site.complete(perf_metrics_in_response=True)

    assert "perf_metrics" not in plain.json()
    assert plain.headers["fireworks-prompt-tokens"] == "2"
    assert float(plain.headers["fireworks-prefill-queue-duration"]) >= 0
    metrics = asked["perf_metrics"]
    assert metrics["num-concurrent-requests"] == "1"
    assert metrics["prompt-tokens"] == "3"
    assert 0 <= float(metrics["prefill-queue-duration"]) < float(metrics["server-processing-time"])


REFUSED = {
    "echo_last": ({"echo_last": -1}, "echo_last must be >= 0, got -1"),
    "echo both": ({"echo_last": 1, "echo": True}, "echo must be false with echo_last, got true"),
    "echo_last stream": (
        {"echo_last": 1, "stream": True},
        "stream must be false with echo_last, got true",
    ),
    "prompt": ({"prompt": []}, "prompt must be at least 1 token"),
    "ids": ({"prompt": [1, 9999]}, "prompt must be token ids in 0..263, got 9999"),
    "long": ({"prompt": [1] * 600}, "prompt must be <= 511 tokens, got 600"),
    "temperature": ({"temperature": -1}, "temperature must be a number >= 0, got -1.0"),
    "n": ({"n": 0}, "n must be in 1..1024, got 0"),
    "position": ({"prompt": [1, 264, 3]}, "got 264 at position 1"),
    "type": ({"max_tokens": "many"}, "max_tokens must be valid, got 'many'"),
    "text": ({"prompt": "é" * 1793}, "prompt must be at most 3584 bytes of text, got 3586"),
    "texts": ({"prompt": ["a", "b" * 3585]}, "prompt must be at most 3584 bytes of text, got 3585"),
    "many texts": ({"prompt": ["a"] * 600, "n": 2}, "prompt must be at most 512 prompts for n=2"),
    "stops": ({"stop": ["x"] * 65}, "stop must be at most 64 texts, got 65"),
    "long stop": (
        {"stop": ["x", "y" * 1025]},
        "stop must be texts of at most 1024 characters, got one of 1025",
    ),
    "stop ids": ({"stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024 ids"),
    "second of n": ({"n": 2, "top_p": 2}, "top_p must be in (0, 1], got 2.0"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_bad_request_is_answered_400_with_its_rule(site, fields, message):
    headers = {"x-request-id": "mine"}

    answer = await site.call("POST", PATH, json={"prompt": [1]} | fields, headers=headers)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["code"], error["request_id"]) == ("invalid_argument", 3, "mine")
    assert answer.headers["x-request-id"] == "mine"


async def test_a_body_that_is_no_json_is_answered_400(site):
    answer = await site.call("POST", PATH, content=b"prompt=1")

    assert answer.status_code == 400
    assert "body must be JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"prompt": "a" * 500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 400}]}),
        ("/v1/tokenize", {"prompt": "a" * 400}),
    ],
    ids=["completion", "chat", "tokenize"],
)
async def test_texts_are_tokenized_beside_the_event_loop(start, tokenizer, path, fields):
    threads = []

    class Noted:
        """The tokenizer, which notes the threads that it tokenizes on."""

        def __getattr__(self, name):
            if name in ("encode", "apply_chat_template"):
                threads.append(threading.get_ident())
            return getattr(tokenizer, name)

    engine = start()
    engine.tokenizer = Noted()

    answer = await Site(engine).call("POST", path, json={"max_tokens": 1} | fields)

    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.get_ident() not in threads


async def test_a_text_for_a_deployment_without_tokenizer_is_answered_400(start):
    site = Site(start(with_tokenizer=False))

    refused = await site.call("POST", PATH, json={"prompt": "hello", "seed": 1})
    served = await site.complete(logprobs=True)

    assert refused.status_code == 400
    assert "has no tokenizer" in refused.json()["error"]["message"]
    content = served["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == f"token_id:{content[0]['token_id']}"


async def test_a_closed_deployment_answers_410(site):
    site.engine.close()

    answer = await site.call("POST", PATH, json={"prompt": [1]})

    assert answer.status_code == 410


async def test_a_failing_engine_is_answered_500_with_its_message(start, load):
    loaded = load()
    site = Site(start(loaded))

    def fail(*_):
        raise RuntimeError("out of luck")

    loaded.module.get_input_embeddings().register_forward_pre_hook(fail)
    answer = await site.call("POST", PATH, json={"prompt": [1]})

    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "out of luck"


async def test_health_tells_the_version(site):
    answer = await site.call("GET", "/healthz")

    assert answer.json() == {"status": "ok", "weight_version": 0}


@pytest.mark.parametrize("question", [{"wait_for": "step-1", "timeout_s": "20"}, {}])
async def test_a_hot_load_is_answered_at_once_and_waited_for(site, trained, question):
    site.snapshots.put(trained()[1])
    before = await site.call("GET", HOT_LOAD)

    posted = await site.call("POST", HOT_LOAD, json={"identity": "step-1"})
    after = await site.call("GET", HOT_LOAD, params=question)

    assert before.json() == {
        "replicas": [
            {
                "current_snapshot_identity": None,
                "readiness": True,
                "loading_state": {"stage": "idle"},
                "loaded_adapters": [],
                "weight_version": 0,
            }
        ]
    }
    loading = posted.json()["replicas"][0]["loading_state"]
    assert loading["target_snapshot_identity"] == "step-1"
    (replica,) = after.json()["replicas"]
    assert replica["current_snapshot_identity"] == "step-1"
    assert replica["loading_state"]["stage"] == "done"
    assert (replica["readiness"], replica["weight_version"]) == (True, 1)
    assert (await site.complete())["snapshot_identity"] == "step-1"


async def test_a_hot_load_of_an_unknown_snapshot_ends_in_the_error_stage(site):
    loading = (await site.load("gone"))["loading_state"]

    assert (loading["stage"], loading["target_snapshot_identity"]) == ("error", "gone")
    assert "never saved here" in loading["error_message"]


async def test_waiting_for_a_snapshot_that_does_not_come_ends_in_time(site):
    answer = await site.call("GET", HOT_LOAD, params={"wait_for": "step-9", "timeout_s": "0.05"})

    assert answer.json()["replicas"][0]["loading_state"]["stage"] == "idle"


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
async def test_a_bad_wait_is_answered_400(site, text):
    answer = await site.call("GET", HOT_LOAD, params={"wait_for": "x", "timeout_s": text})

    assert answer.status_code == 400
    assert "timeout_s must be a number of seconds >= 0" in answer.json()["error"]["message"]


@pytest.mark.slow
async def test_a_hot_load_amid_requests_drops_none(site, trained):
    site.snapshots.put(trained()[1])
    early = [asyncio.ensure_future(site.complete(seed=i, max_tokens=100)) for i in range(8)]
    await until(lambda: site.engine.stats().running == 8)

    await site.load("step-1")
    late = await asyncio.gather(*(site.complete(seed=i, max_tokens=100) for i in range(8)))

    assert {answer["weight_version"] for answer in late} == {1}
    for answer in await asyncio.gather(*early):
        assert (answer["weight_version"], answer["usage"]["completion_tokens"]) == (0, 100)


@pytest.mark.slow
async def test_an_adapter_is_listed_as_loaded(site, trained):
    site.snapshots.put(trained("a-1", lora=LoraOptions(rank=2))[1])

    replica = await site.load("a-1", reset_prompt_cache=True)

    assert replica["loaded_adapters"] == [{"identity": "a-1", "status": "loaded"}]


async def test_a_client_that_leaves_frees_its_rows(site):
    body = json.dumps({"prompt": [1], "max_tokens": 400, "n": 3, "ignore_eos": True}).encode()
    messages = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body})
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
    running = asyncio.ensure_future(site.app(scope, messages.get, send))
    await until(lambda: site.engine.stats().running == 3)
    messages.put_nowait({"type": "http.disconnect"})
    await running

    await until(lambda: site.engine.stats().running == 0)
    assert site.engine.stats().cancelled == 3
    assert sent[0]["status"] == 499


async def test_a_call_that_is_cancelled_frees_its_row(site):
    call = asyncio.ensure_future(site.complete(max_tokens=400))
    await until(lambda: site.engine.stats().running == 1)

    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: site.engine.stats().running == 0)
    assert site.engine.stats().cancelled == 1


def sample_as(site, client, **fields):
    body = {"prompt": [1, 2, 3], "ignore_eos": True} | fields
    return asyncio.ensure_future(
        site.call("POST", PATH, json=body, headers={"x-hearth-client": client})
    )


@pytest.mark.slow
async def test_clients_take_turns(start):
    site = Site(start(max_slots=4))
    flood = sample_as(site, "a", n=100, max_tokens=20)
    await until(lambda: site.engine.stats().waiting > 80)

    answer = await sample_as(site, "b", max_tokens=4)

    assert answer.status_code == 200
    assert site.engine.stats().finished < 30, "b waited behind many of a's"
    assert len((await flood).json()["choices"]) == 100


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_completions_that_run_and_wait_are_bounded_and_others_find_room(site, stream):
    flood = [sample_as(site, "a", n=1024, max_tokens=500, stream=stream) for _ in range(17)]

    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = [call.result() for call in flood if call.done()]
    other = sample_as(site, "b", max_tokens=1)
    await until(lambda: site.engine.stats().waiting >= 16 * 1024 - 256)
    for call in flood:
        call.cancel()

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("resource_exhausted", 8)
    rule = "completions in flight of one client must be at most 16384 now, got 17408"
    assert rule in error["message"]
    assert (await other).status_code == 200
    await asyncio.gather(*flood, return_exceptions=True)
    assert (await sample_as(site, "a", n=1024, max_tokens=0)).status_code == 200


@pytest.mark.slow
async def test_a_refused_request_leaves_the_room_that_it_took(site):
    for _ in range(40):
        answer = await sample_as(site, "a", n=1024, prompt=[1, 999])
        assert answer.status_code == 400


def test_several_event_loops_at_once_and_after_each_other_are_served(site):
    results = {}

    def run(name):
        async def many():
            return await asyncio.gather(
                *(site.complete(seed=seed, raw_output=True) for seed in range(6))
            )

        results[name] = [
            answer["choices"][0]["raw_output"]["completion_token_ids"]
            for answer in asyncio.run(many())
        ]

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run("c")

    assert results["a"] == results["b"] == results["c"]
    assert len({tuple(ids) for ids in results["a"]}) > 1


def test_every_route_is_in_the_published_description(site):
    # Of the platform, outside.
    own = {"GET /healthz", "GET /stats", "GET /v1/models", "GET /v1/models/{name}"}

    assert list_routes(site.app) - own == set(DEPLOYMENT_ROUTES)
