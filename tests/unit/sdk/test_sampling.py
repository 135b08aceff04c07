import asyncio
import gc
import warnings
from dataclasses import replace

import pytest

from hearth.errors import ConfigError, NotFoundError, NotReadyError, RequestError, TransportError
from hearth.sdk import (
    AdaptiveConcurrencyController,
    DeploymentManager,
    DeploymentSampler,
    FixedConcurrencyController,
    SamplingRetryPolicy,
)
from hearth.sdk.transport import RetryPolicy

MODEL = "accounts/me/deployments/d"
COMPLETIONS = ("POST", "/inference/v1/completions")
QUICK = SamplingRetryPolicy(
    retries=RetryPolicy(attempts=7, base_s=0.001, longest_s=0.002), boot_pause_s=0.002, boot_s=0.05
)


class Tokenizer:
    """A token per message, plus the turn to come."""

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, return_dict):
        assert tokenize
        assert add_generation_prompt
        assert not return_dict
        return [len(message["content"]) for message in conversation] + [1]


@pytest.fixture
def sampler(peer):
    def make(**options) -> DeploymentSampler:
        options = {"retry_policy": QUICK, "tokenizer": Tokenizer(), **options}
        return DeploymentSampler(inference_url=peer.url, model=MODEL, api_key="key", **options)

    return make


@pytest.fixture
def two_tokens(peer, answer, completion_body):
    """Every request gets two tokens."""
    peer.on(*COMPLETIONS, answer(completion_body(), delay_s=0.005))


MESSAGES = [{"role": "user", "content": "abc"}]


def test_n_completions_are_n_overlapping_requests_of_one(peer, sampler, two_tokens):
    completions = asyncio.run(sampler().sample_with_tokens(messages=MESSAGES, n=4, max_tokens=512))

    sent = peer.requests(*COMPLETIONS)
    assert len(sent) == len(completions) == 4
    assert peer.most_in_flight == 4
    assert {request.body["n"] for request in sent} == {1}
    assert {(request.body["top_p"], request.body["top_k"]) for request in sent} == {(1.0, 0)}
    assert sent[0].body["prompt"] == [3, 1]
    assert sent[0].body["max_tokens"] == 512
    assert len({request.headers["x-request-id"] for request in sent}) == 4
    assert completions[0].full_tokens == [3, 1, 5, 6]
    assert completions[0].prompt_len == 2
    assert completions[0].inference_logprobs == [-0.25, -0.25]


def test_a_script_may_use_asyncio_run_again_and_again(sampler, two_tokens):
    limited = sampler(concurrency_controller=FixedConcurrencyController(2))

    lengths = [len(asyncio.run(limited.sample_with_tokens(MESSAGES, n=4))) for _ in range(2)]

    assert lengths == [4, 4]


def test_a_script_without_an_event_loop_uses_the_call_as_a_list(peer, sampler, two_tokens):
    completions = sampler().sample_with_tokens(messages=MESSAGES, n=4, max_tokens=512)
    assert peer.requests(*COMPLETIONS) == []

    assert [completion.text for completion in completions] == ["hi"] * 4
    assert len(completions) == 4
    assert completions[0].text == "hi"
    assert len(completions[1:]) == 3
    assert completions.result() == list(completions)
    assert len(peer.requests(*COMPLETIONS)) == 4


def test_a_call_may_be_awaited_gathered_and_made_a_task(sampler, two_tokens):
    async def run() -> list[int]:
        own_sampler = sampler()
        first = await own_sampler.sample_with_prompt_tokens([1, 2], n=2)
        call = own_sampler.sample_with_prompt_tokens([1, 2])
        task = asyncio.create_task(call)
        both = await asyncio.gather(own_sampler.sample_with_prompt_tokens([1, 2]), task)
        again = await call
        return [len(first), len(both[0]), len(both[1]), len(again)]

    assert asyncio.run(run()) == [2, 1, 1, 1]


def test_using_a_call_as_a_list_inside_an_event_loop_says_to_await_it(sampler, two_tokens):
    async def run() -> int:
        call = sampler().sample_with_prompt_tokens([1, 2])
        with pytest.raises(RuntimeError, match="await sampler"):
            list(call)
        await call
        return len(call)

    assert asyncio.run(run()) == 1


@pytest.mark.slow
def test_a_call_that_nobody_uses_sends_nothing_and_warns_of_nothing(peer, sampler, two_tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = sampler().sample_with_tokens(MESSAGES)
        assert repr(call) == "<CompletionsCall not started>"
        del call
        gc.collect()
    assert peer.seen == []


def test_cancelling_the_task_ends_the_requests(peer, answer, completion_body, sampler):
    peer.on(*COMPLETIONS, answer(completion_body(), delay_s=30))
    own_sampler = sampler()

    async def run() -> None:
        task = asyncio.create_task(own_sampler.sample_with_prompt_tokens([1, 2], n=3))
        while peer.in_flight < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while peer.in_flight:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert own_sampler.concurrency.in_flight == 0


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_statuses_are_tried_again_under_one_request_id(
    peer, answer, completion_body, sampler, status
):
    peer.on(*COMPLETIONS, *[answer(status=status)] * 6, answer(completion_body()))

    assert len(asyncio.run(sampler().sample_with_prompt_tokens([1, 2]))) == 1
    assert len(peer.requests(*COMPLETIONS)) == 7
    assert len({request.headers["x-request-id"] for request in peer.seen}) == 1


def test_the_seventh_failure_is_final_and_says_what_was_tried(peer, answer, sampler):
    peer.on(*COMPLETIONS, answer({"error": {"message": "no room"}}, status=503))

    with pytest.raises(
        TransportError, match=r"no room .*HTTP 503.*request \w+-\w+, attempt 7, .* s, 0 in flight"
    ):
        asyncio.run(sampler().sample_with_prompt_tokens([1, 2]))
    assert len(peer.requests(*COMPLETIONS)) == 7


def test_an_unreachable_deployment_is_tried_seven_times():
    sampler = DeploymentSampler("http://127.0.0.1:9", MODEL, "key", retry_policy=QUICK)

    with pytest.raises(TransportError, match=r"ConnectError.*attempt 7"):
        sampler.sample_with_prompt_tokens([1]).result()


@pytest.mark.slow
def test_retry_after_is_the_shortest_wait(peer, answer, completion_body, sampler):
    retry_policy = SamplingRetryPolicy(retries=RetryPolicy(attempts=2, base_s=0.001, longest_s=1.0))
    peer.on(
        *COMPLETIONS, answer(status=429, headers={"retry-after": "1"}), answer(completion_body())
    )

    async def run() -> float:
        begun = asyncio.get_running_loop().time()
        await sampler(retry_policy=retry_policy).sample_with_prompt_tokens([1])
        return asyncio.get_running_loop().time() - begun

    assert asyncio.run(run()) >= 1.0


def test_a_refused_request_is_not_tried_again(peer, answer, sampler):
    peer.on(*COMPLETIONS, answer({"error": {"message": "top_p must be <= 1"}}, status=400))

    with pytest.raises(RequestError, match="top_p must be"):
        sampler().sample_with_prompt_tokens([1, 2]).result()
    assert len(peer.seen) == 1


@pytest.mark.parametrize("status", [404, 425])
def test_a_deployment_that_boots_is_waited_for(peer, answer, completion_body, sampler, status):
    peer.on("GET", f"/v1/{MODEL}", answer({"baseModel": "b", "state": "CREATING"}))
    peer.on(*COMPLETIONS, *[answer(status=status)] * 10, answer(completion_body()))

    patient = sampler(retry_policy=replace(QUICK, boot_s=60.0))
    assert len(asyncio.run(patient.sample_with_prompt_tokens([1, 2]))) == 1
    assert len(peer.requests(*COMPLETIONS)) == 11


def test_a_boot_is_not_waited_for_without_end(peer, answer, sampler):
    peer.on(*COMPLETIONS, answer({"error": {"message": "loading"}}, status=425))

    with pytest.raises(NotReadyError, match=r"loading .*: request .* in flight"):
        sampler().sample_with_prompt_tokens([1, 2]).result(timeout=10)


def test_a_deployment_that_does_not_exist_is_not_waited_for(peer, answer, sampler):
    peer.on(*COMPLETIONS, answer({"error": {"message": "unknown"}}, status=404))

    with pytest.raises(NotFoundError, match="unknown"):
        sampler().sample_with_prompt_tokens([1, 2]).result()
    assert len(peer.requests(*COMPLETIONS)) == 1


@pytest.mark.parametrize("place", ["body", "headers"])
def test_the_controller_learns_the_queue_time_of_each_completion(
    peer, answer, completion_body, sampler, place
):
    metrics = {"prefill-queue-duration": "0.9"}
    body = completion_body(perf_metrics=metrics) if place == "body" else completion_body()
    headers = {f"fireworks-{name}": text for name, text in metrics.items()}
    peer.on(*COMPLETIONS, answer(body, headers=headers if place == "headers" else {}))
    controller = AdaptiveConcurrencyController(initial_window=16)

    asyncio.run(sampler(concurrency_controller=controller).sample_with_prompt_tokens([1], n=32))

    assert controller.window == 8
    assert peer.seen[0].body["perf_metrics_in_response"] is True


def test_the_controller_learns_of_failures_and_their_attempts(
    peer, answer, completion_body, sampler
):
    peer.on(*COMPLETIONS, *[answer(status=503)] * 3, answer(completion_body()))
    controller = AdaptiveConcurrencyController(initial_window=16, shrink_cooldown_s=0.0)

    asyncio.run(sampler(concurrency_controller=controller).sample_with_prompt_tokens([1]))

    assert controller.window == 1, "16 halved twice is 4, and the third attempt quarters it"
    assert controller.step_completed()["congested"] == 3.0


def test_a_sampler_without_a_controller_adapts_from_8_requests_on(peer, sampler, two_tokens):
    asyncio.run(sampler().sample_with_prompt_tokens([1], n=20))

    assert peer.most_in_flight == 8


def test_the_managers_inference_url_is_where_samples_go(peer, two_tokens, quick):
    quick |= {"account_id": "me", "inference_url": f"{peer.url}/"}
    manager = DeploymentManager("key", "http://control.test", **quick)
    sampler = DeploymentSampler(manager.inference_url, MODEL, "key", retry_policy=QUICK)

    assert len(asyncio.run(sampler.sample_with_prompt_tokens([1]))) == 1
    assert peer.requests(*COMPLETIONS)[0].body["model"] == MODEL


def test_a_prompt_as_long_as_the_limit_gives_nothing_and_asks_nothing(peer, sampler, two_tokens):
    assert asyncio.run(sampler().sample_with_prompt_tokens([1, 2], max_seq_len=2)) == []
    assert peer.seen == []


def test_a_completion_beyond_the_limit_is_left_out(sampler, two_tokens):
    assert asyncio.run(sampler().sample_with_prompt_tokens([1, 2], max_seq_len=3)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n": 0}, "n must be >= 1"), ({"temprature": 1.0}, "must be request fields")],
)
def test_arguments_that_break_their_rule_are_refused_before_anything_is_sent(
    peer, sampler, options, message
):
    with pytest.raises(ConfigError, match=message):
        sampler().sample_with_prompt_tokens([1], **options).result()
    assert peer.seen == []


def test_messages_need_a_tokenizer(sampler):
    with pytest.raises(ConfigError, match="sample_with_prompt_tokens"):
        asyncio.run(sampler(tokenizer=None).sample_with_tokens(MESSAGES))


def test_echo_keeps_the_prompts_logprobs_but_the_first_tokens(
    peer, answer, completion_body, sampler
):
    body = completion_body(tokens=[1, 100, 200, 400, 500])
    raw = body["choices"][0]["raw_output"]
    raw["logprobs"] = [None, -1.0, -2.0, -3.0, -4.0]
    raw["sampling_logprobs"] = [None, None, None, -3.5, -4.5]
    peer.on(*COMPLETIONS, answer(body))

    (echoed,) = sampler().sample_with_prompt_tokens([1, 100, 200], echo=True)

    assert echoed.full_tokens == [1, 100, 200, 400, 500]
    assert echoed.prompt_len == 3
    assert echoed.inference_logprobs == [-1.0, -2.0, -3.5, -4.5]
    assert echoed.logprobs_echoed


def test_an_echo_of_another_prompt_is_refused(peer, answer, completion_body, sampler):
    peer.on(*COMPLETIONS, answer(completion_body(tokens=[9, 9, 9])))

    with pytest.raises(TransportError, match="begin with its prompt"):
        sampler().sample_with_prompt_tokens([1, 2], echo=True).result()


def test_a_deployment_without_raw_output_is_refused(peer, answer, completion_body, sampler):
    body = completion_body()
    del body["choices"][0]["raw_output"]
    peer.on(*COMPLETIONS, answer(body))

    with pytest.raises(TransportError, match="raw_output"):
        sampler().sample_with_prompt_tokens([1, 2]).result()


def test_a_boot_is_timed_from_its_own_beginning(peer, answer, completion_body, sampler):
    """A replica that dies later under the same request has the whole time to come back again."""
    boots, died = answer(status=425), answer(status=503, delay_s=0.06)
    peer.on(*COMPLETIONS, boots, died, boots, answer(completion_body()))

    assert len(sampler().sample_with_prompt_tokens([1, 2])) == 1
