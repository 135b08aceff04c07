"""What must come out the same: split, reordered, repeated, saved, loaded, beside others."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from hearth.conformance.suite import (
    Check,
    Server,
    SkipError,
    difference,
    get,
    make_data,
    read_field,
    read_logprobs,
    score,
    train,
)

_ADAM = types.AdamParams(learning_rate=3e-3)
_ROUNDING = 1e-4
"""How far logprobs may differ that are computed in other batches."""
_PARITY = 2e-2
"""How far a sampler's logprobs may be from the trainer's, in any dtype."""
_PROMPT = [20, 21, 22, 23]
_DIFFERENT = 1e-6


def _close(first: NDArray[np.float64], second: NDArray[np.float64], most: float) -> str:
    found = difference(first, second)
    assert found <= most, f"logprobs differ by {found:.2g}, more than {most:g}"
    return f"largest difference {found:.2g}"


def _check_split(server: Server) -> str:
    data, fresh = make_data(1, count=6), make_data(2)
    whole, parts = server.begin(), server.begin()
    get(whole.forward_backward(data, "cross_entropy"))
    for part in (data[:2], data[2:]):
        get(parts.forward_backward(part, "cross_entropy"))
    for client in (whole, parts):
        get(client.optim_step(_ADAM))
    return _close(score(whole, fresh), score(parts, fresh), _ROUNDING)


def _check_order(server: Server) -> str:
    data, client = make_data(3, count=5), server.begin()
    forwards = read_logprobs(get(client.forward(data, "cross_entropy")))
    backwards = read_logprobs(get(client.forward(data[::-1], "cross_entropy")))[::-1]
    return _close(np.concatenate(forwards), np.concatenate(backwards), _ROUNDING)


def _check_forward(server: Server) -> str:
    data, client = make_data(4), server.begin()
    passed = get(client.forward_backward(data, "cross_entropy"))
    return _close(score(client, data), np.concatenate(read_logprobs(passed)), _ROUNDING)


def _check_repeat(server: Server) -> str:
    return _close(train(server.begin(), 5), train(server.begin(), 5), _ROUNDING)


def _check_custom(server: Server) -> str:
    data, fresh = make_data(6), make_data(7)
    ours, theirs = server.begin(), server.begin()

    def loss(_: Any, logprobs: Any) -> Any:
        return -sum(values.sum() for values in logprobs), {}

    get(ours.forward_backward_custom(data, loss))
    get(theirs.forward_backward(data, "cross_entropy"))
    for client in (ours, theirs):
        get(client.optim_step(_ADAM))
    return _close(score(ours, fresh), score(theirs, fresh), _ROUNDING)


def _check_step_without_gradient(server: Server) -> str:
    data, client = make_data(8), server.begin()
    before = score(client, data)
    get(client.forward_backward(data, "cross_entropy"))
    get(client.optim_step(types.AdamParams(learning_rate=0.0)))
    return _close(before, score(client, data), _ROUNDING)


def _check_training(server: Server) -> str:
    data, client = make_data(9), server.begin()
    before = score(client, data).sum()
    for _ in range(8):
        get(client.forward_backward(data, "cross_entropy"))
        get(client.optim_step(_ADAM))
    after = score(client, data).sum()
    assert after > before, f"the logprobs of trained tokens must rise, got {before} and {after}"
    return f"{before:.4g} to {after:.4g}"


def _begin_past_the_client(server: Server) -> str:
    """A run whose numbers nobody else counts."""
    session = server.post("create_session", tags=[], user_metadata=None).json()["session_id"]
    made = server.post(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=server.base_model,
        lora_config={"rank": 4, "seed": 1},
    )
    return str(_wait(server, made.raise_for_status().json()["request_id"])["model_id"])


def _wait(server: Server, request_id: str) -> dict[str, Any]:
    while True:
        answer = server.post("retrieve_future", request_id=request_id)
        if not _is_pending(answer):
            return dict(answer.raise_for_status().json())


def _is_pending(answer: httpx.Response) -> bool:
    return answer.status_code == httpx.codes.REQUEST_TIMEOUT or b"try_again" in answer.content


def _step(server: Server, model_id: str, number: int, rate: float) -> str:
    answer = server.post(
        "optim_step", model_id=model_id, seq_id=number, adam_params={"learning_rate": rate}
    )
    return str(answer.raise_for_status().json()["request_id"])


def _check_numbers_out_of_order(server: Server) -> None:
    model_id = _begin_past_the_client(server)
    later = [_step(server, model_id, number, 1e-3) for number in (3, 2)]
    for request_id in later:
        try:
            answer = server.post("retrieve_future", timeout_s=1.0, request_id=request_id)
        except httpx.TimeoutException:
            continue  # it is held
        assert _is_pending(answer), "numbers 2 and 3 must wait for number 1"
    for request_id in (_step(server, model_id, 1, 1e-3), *later):
        _wait(server, request_id)


def _check_retry(server: Server) -> None:
    model_id = _begin_past_the_client(server)
    requests = [_step(server, model_id, 1, 1e-3) for _ in range(2)]
    answers = [_wait(server, each) for each in requests]
    assert answers[0] == answers[1], "the same number must be executed once"
    assert _wait(server, requests[0]) == answers[0], "a result must be there to be read again"


def _check_snapshot(server: Server) -> str:
    client, prompt = server.begin(), types.ModelInput.from_ints(_PROMPT)
    train(client, 10)
    saved = get(client.save_weights_for_sampler("first")).path
    sampler = server.sampler(saved)
    before = np.asarray(get(sampler.compute_logprobs(prompt))[1:])
    train(client, 11)
    newer = server.sampler(get(client.save_weights_for_sampler("second")).path)
    moved = difference(before, np.asarray(get(newer.compute_logprobs(prompt))[1:]))
    assert moved > _DIFFERENT, "newer weights must be other weights"
    return _close(before, np.asarray(get(sampler.compute_logprobs(prompt))[1:]), _DIFFERENT)


def _check_resume(server: Server) -> str:
    client = server.begin()
    train(client, 12)
    path = get(client.save_state("middle")).path
    unbroken = train(client, 13)
    service = server.service
    resumed = get(service.create_training_client_from_state_with_optimizer(path))
    return _close(unbroken, train(resumed, 13), _ROUNDING)


def _check_load(server: Server) -> str:
    client, data = server.begin(), make_data(14)
    train(client, 14)
    path, before = get(client.save_state("here")).path, score(client, data)
    train(client, 15)
    get(client.load_state(path))
    return _close(before, score(client, data), _ROUNDING)


def _check_parity(server: Server) -> str:
    client = server.begin()
    train(client, 16)
    sampler = server.sampler(get(client.save_weights_for_sampler("parity")).path)
    params = types.SamplingParams(max_tokens=12, seed=9, stop=[])
    answer = get(sampler.sample(types.ModelInput.from_ints(_PROMPT), 4, params))
    worst = 0.0
    for sequence in answer.sequences:
        tokens = [*_PROMPT, *sequence.tokens]
        targets = types.TensorData.from_numpy(np.asarray(tokens[1:]))
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": targets},
        )
        own = score(client, [datum])[len(_PROMPT) - 1 :]
        worst = max(worst, difference(own, np.asarray(sequence.logprobs)))
    assert worst <= _PARITY, f"sampler and trainer differ by {worst:.2g}"
    return f"largest difference {worst:.2g}"


def _check_samples(server: Server) -> None:
    sampler, prompt = server.sampler(), types.ModelInput.from_ints(_PROMPT)

    def sample(count: int = 1, **params: Any) -> Any:
        given = types.SamplingParams(**{"max_tokens": 16, "seed": 3, "stop": []} | params)
        return get(sampler.sample(prompt, count, given)).sequences

    tokens = list(sample()[0].tokens)
    assert len(tokens) == 16, f"16 tokens are asked for, got {len(tokens)}"
    assert list(sample()[0].tokens) == tokens, "a seed must give the same tokens again"
    assert list(sample(seed=4)[0].tokens) != tokens, "another seed must give others"
    assert len({tuple(each.tokens) for each in sample(4)}) > 1, "samples of a call must differ"
    stopped = sample(stop=[tokens[5]])[0]
    assert list(stopped.tokens) == tokens[: tokens.index(tokens[5]) + 1], "it must end at the stop"
    assert stopped.stop_reason == "stop", f"stop_reason must be 'stop', got {stopped.stop_reason}"
    greedy = [list(sample(temperature=0.0, seed=seed)[0].tokens) for seed in (1, 2)]
    assert greedy[0] == greedy[1], "temperature 0 must not depend on the seed"
    assert list(sample(top_k=1)[0].tokens) == greedy[0], "top_k 1 must be greedy"


def _check_prompt_logprobs(server: Server) -> None:
    sampler, prompt = server.sampler(), types.ModelInput.from_ints(_PROMPT)
    params = types.SamplingParams(max_tokens=1, seed=1, stop=[])
    answer = get(
        sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    )
    own = answer.prompt_logprobs
    assert own is not None, "prompt logprobs are asked for"
    assert own[0] is None, "the first token has none"
    assert list(own) == list(get(sampler.compute_logprobs(prompt))), "both ways must agree"
    tops = answer.topk_prompt_logprobs
    assert tops is not None, "top lists are asked for"
    assert [len(top) for top in tops[1:]] == [3] * (len(_PROMPT) - 1), "each has three"
    for logprob, top in zip(own[1:], tops[1:], strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True), "the best comes first"
        assert values[0] >= logprob - _ROUNDING, "nothing is above the best"


def _check_target_logprobs(server: Server) -> str:
    sampler = server.sampler()
    if "target_prompt_logprobs" not in inspect.signature(sampler.sample).parameters:
        raise SkipError("needs a client that has target_prompt_logprobs")
    prompt, params = types.ModelInput.from_ints(_PROMPT), types.SamplingParams(max_tokens=1)
    expected = np.asarray(get(sampler.compute_logprobs(prompt))[1:])
    # The prompt's own tokens, one cell that asks nothing, and a token of its own.
    dense = np.array([[token, -1] for token in _PROMPT[1:]])
    dense[1] = 30, _PROMPT[2]
    answer = get(
        sampler.sample(prompt, 1, params, target_prompt_logprobs=types.TensorData.from_numpy(dense))
    )
    assert answer.target_prompt_logprobs is not None, "they are asked for"
    found = np.asarray(answer.target_prompt_logprobs.to_numpy())
    assert found.shape == dense.shape, f"they must have the shape asked for, got {found.shape}"
    assert found[1][0] < 0, f"a logprob is below 0, got {found[1][0]}"
    return _close(expected, np.array([found[0][0], found[1][1], found[2][0]]), _ROUNDING)


def _check_runs_together(server: Server) -> str:
    count = 4
    alone = [train(server.begin(seed=seed), seed) for seed in range(count)]
    clients = [server.begin(seed=seed) for seed in range(count)]
    together: dict[int, NDArray[np.float64]] = {}
    threads = [
        threading.Thread(
            target=lambda seed=seed: together.update({seed: train(clients[seed], seed)})
        )
        for seed in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == count, "each run must end"
    worst = max(difference(alone[seed], together[seed]) for seed in range(count))
    assert worst <= _ROUNDING, f"a run beside others differs by {worst:.2g}"
    return f"largest difference {worst:.2g}"


def _check_tenants(server: Server) -> None:
    if server.other_key is None:
        raise SkipError("needs --other-key")
    client = server.begin()
    model_id = client.get_info().model_id
    path = get(client.save_state("mine")).path
    own = server.post("get_info", model_id=model_id).status_code
    theirs = server.post("get_info", key=server.other_key, model_id=model_id).status_code
    unknown = server.post("get_info", key=server.other_key, model_id=f"{model_id}0").status_code
    assert own == 200, f"the owner must see it, got {own}"
    assert theirs == unknown >= 400, f"to others it must not exist, got {theirs} and {unknown}"
    other = server.connect(server.other_key)
    paths = [each.tinker_path for each in get(_list_checkpoints(other)).checkpoints]
    assert path not in paths, "what another saved must not be listed"


def _list_checkpoints(service: tinker.ServiceClient) -> Any:
    return service.create_rest_client().list_user_checkpoints()


def _fails(future: Callable[[], Any]) -> str:
    try:
        get(future())
    except (tinker.RequestFailedError, tinker.APIStatusError) as error:
        return str(error)
    raise AssertionError("it must fail, and was accepted")


def _check_bad_requests(server: Server) -> None:
    client, good = server.begin(), make_data(17)
    before = score(client, good)
    one_target, two_targets = (types.TensorData.from_numpy(np.arange(1, n + 1)) for n in (1, 2))

    def datum(tokens: list[int], targets: types.TensorData) -> types.Datum:
        prompt = types.ModelInput.from_ints(tokens)
        return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets})

    _fails(lambda: client.forward_backward([datum([1, 10**7], two_targets)], "cross_entropy"))
    _fails(lambda: client.forward_backward([datum([1, 2], one_target)], "cross_entropy"))
    _fails(lambda: client.forward_backward(good, "importance_sampling"))
    _fails(lambda: client.load_state("tinker://nobody:train:0/weights/x"))
    _close(before, score(client, good), _ROUNDING)


def _check_unknown_model(server: Server) -> None:
    _fails(lambda: server.service.create_lora_training_client(base_model="no/such-model", rank=4))


_LOSSES: dict[types.LossFnType, tuple[dict[str, float] | None, Callable[..., Any]]] = {
    "importance_sampling": (None, lambda p, q, a: -np.exp(p - q) * a),
    "ppo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        lambda p, q, a: -np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.7, 1.1) * a),
    ),
    "cispo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        lambda p, q, a: -np.clip(np.exp(p - q), 0.7, 1.1) * p * a,
    ),
    "dro": ({"beta": 0.1}, lambda p, q, a: -(p * a - 0.05 * (p - q) ** 2)),
}


def _make_nearby(client: tinker.TrainingClient, **inputs: Any) -> list[types.Datum]:
    """Datums whose sampler is near the trainer, where a ratio is neither 0 nor endless."""
    current = iter(read_logprobs(get(client.forward(make_data(18), "cross_entropy"))))
    return make_data(
        18, logprobs=lambda rng, length: next(current) + 0.3 * np.cos(np.arange(length)), **inputs
    )


def _compare_loss(result: types.ForwardBackwardOutput, expected: float) -> str:
    found = float(result.metrics["loss:sum"])
    assert abs(found - expected) <= 1e-4 * max(1.0, abs(expected)), (
        f"loss:sum must be {expected:.6g}, got {found:.6g}"
    )
    return f"{found:.6g}"


def _check_loss(name: types.LossFnType) -> Callable[[Server], str]:
    config, formula = _LOSSES[name]

    def check(server: Server) -> str:
        client = server.begin()
        data = _make_nearby(client, advantages=lambda rng, length: np.sin(1 + np.arange(length)))
        result = get(client.forward_backward(data, name, config))
        expected = 0.0
        for datum, own in zip(data, read_logprobs(result), strict=True):
            given = read_field(datum, "logprobs"), read_field(datum, "advantages")
            expected += float(formula(own, *given).sum())
        return _compare_loss(result, expected)

    return check


def _check_gspo(server: Server) -> str:
    """One ratio per sequence, of the tokens in its mask (arXiv:2507.18071)."""
    low, high = 0.97, 1.03
    client = server.begin()
    data = _make_nearby(
        client,
        advantages=lambda rng, length: np.sin(length) * (np.arange(length) >= 2),
        sequence_ratio_mask=lambda rng, length: np.arange(length) >= 2,
    )
    config = {"clip_low_threshold": low, "clip_high_threshold": high}
    result = get(client.forward_backward(data, "gspo", config))
    expected = 0.0
    for datum, own in zip(data, read_logprobs(result), strict=True):
        mask = read_field(datum, "sequence_ratio_mask") != 0
        ratio = np.exp((own - read_field(datum, "logprobs"))[mask].mean())
        gains = read_field(datum, "advantages") * ratio
        clipped = read_field(datum, "advantages") * np.clip(ratio, low, high)
        expected -= float(np.minimum(gains, clipped).sum())
    return _compare_loss(result, expected)


CHECKS = [
    Check("identities", name, run)
    for name, run in (
        ("gradients of several calls add up", _check_split),
        ("the order of datums changes nothing", _check_order),
        ("forward gives what forward_backward gives", _check_forward),
        ("the same run again gives the same numbers", _check_repeat),
        ("a custom loss trains as the built-in one", _check_custom),
        ("a learning rate of 0 changes nothing", _check_step_without_gradient),
        ("training raises what is trained", _check_training),
        ("numbers that come out of order run in order", _check_numbers_out_of_order),
        ("a request that comes twice runs once", _check_retry),
        ("saved sampler weights stay what they were", _check_snapshot),
        ("a saved state goes on as the unbroken run", _check_resume),
        ("a loaded state is the saved one", _check_load),
        ("sampler and trainer agree", _check_parity),
        ("seeds, stops, temperature 0 and top_k", _check_samples),
        ("prompt logprobs and their top lists", _check_prompt_logprobs),
        ("logprobs of named tokens of a prompt", _check_target_logprobs),
        ("runs at one time are each as alone", _check_runs_together),
        ("another key sees nothing", _check_tenants),
        ("what is wrong fails alone", _check_bad_requests),
        ("an unknown model is refused", _check_unknown_model),
    )
]
CHECKS += [
    Check("numbers", f"{name} is its formula, summed", _check_loss(name)) for name in _LOSSES
]
CHECKS.append(Check("numbers", "gspo is its formula, summed", _check_gspo))
