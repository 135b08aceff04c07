"""Router replay (T171) through whole runs: on a mixture of experts, and on a dense model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from safetensors import safe_open
from tests.integration.conftest import async_config
from tests.integration.rollouts import make_rollouts, make_two_turns, spread
from tests.integration.runs import Trial
from tests.unit.moe import moe_config, tie_routers

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.inference.engine.runner import ModelRunner
from hearth.local import EmbeddedPlatform
from hearth.sdk.transport import mount, unmount
from hearth.wire.routing import RoutingShape, decode_routing
from hearth.wire.tinker import DatumRecord, ForwardInput
from training.data.rows import prompt_messages
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import MODEL
from training.recipes import igpo_loop
from training.rollouts.agents import build_agent_server
from training.samples.rollout import RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from training.utils import DeployConfig

SHAPE = RoutingShape(layers=2, experts=8, top_k=2)
URL = "http://recorded.hearth.internal"

Sent = list[tuple[bool, DatumRecord]]
"""Datums that reached a trainer, and whether they went to a frozen model."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts with the shipped model's tokenizer."""
    return write_model(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose routers hardly tell its experts apart: what rounding decides, they follow."""
    return write_model(tmp_path_factory.mktemp("undecided"), tied=True)


def write_model(folder: Path, *, tied: bool = False) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    transformers.set_seed(0)
    sizes = {"vocab_size": len(tokenizer), "num_experts": 6 if tied else 8}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    module = transformers.Qwen3MoeForCausalLM(moe_config(**sizes, **ids))
    if tied:
        tie_routers(module)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding rounds what routers see otherwise than training does, as other engines do."""
    chance = torch.Generator().manual_seed(2)
    decode = ModelRunner.decode

    def blur(_router: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states, *rest = given
        return (states * (1 + 1e-7 * torch.randn(states.shape, generator=chance)), *rest)

    def decode_blurred(runner: ModelRunner, *given: Any, **named: Any) -> Any:
        module: Any = runner.loaded.module
        with contextlib.ExitStack() as hooks:
            for layer in module.model.layers:
                hooks.enter_context(layer.mlp.gate.register_forward_pre_hook(blur))
            return decode(runner, *given, **named)

    monkeypatch.setattr(ModelRunner, "decode", decode_blurred)


@pytest.fixture
def requests() -> list[dict[str, Any]]:
    """What the deployment of ``sent`` is asked for."""
    return []


@pytest.fixture
def sent(
    requests: list[dict[str, Any]],
    named_platform: EmbeddedPlatform,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sent]:
    """What reaches the trainers of a platform that runs behind an app which writes it down."""
    sent: Sent = []
    gateway = create_gateway(named_platform.plane, Access(is_local=False))
    mount(URL, record_requests(gateway, sent, requests))
    monkeypatch.setenv("FIREWORKS_BASE_URL", URL)
    yield sent
    unmount(URL)


def record_requests(app: Any, sent: Sent, requests: list[dict[str, Any]]) -> Any:
    async def record(scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def receive_and_keep() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        await app(scope, receive_and_keep, send)
        operation = scope["path"].rpartition("/")[2]
        if operation == "completions":
            requests.append(orjson.loads(body))
        if operation in ("forward", "forward_backward"):
            content = orjson.loads(body)
            given = ForwardInput.from_dict(content[f"{operation}_input"])
            sent.extend(
                (content["model_id"].startswith("frozen"), datum) for datum in given.datums()
            )

    return record


def moe_fields(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two steps of two groups on the mixture of experts."""
    fields: dict[str, Any] = {
        "base_model": str(folder),
        "deployment": DeployConfig(tokenizer_model=str(folder)),
        "max_rows": 4,
        "router_replay": True,
        "kl_beta": 0.001,
        "output_model_id": None,
    }
    return fields | changes


def read_tokens(datum: DatumRecord) -> tuple[int, ...]:
    return tuple(token for chunk in datum.model_input.chunks for token in chunk.tokens or [])


def read_blanks(datum: DatumRecord) -> list[bool]:
    """At which input tokens the router is free; the others name experts that are there."""
    rows = datum.model_input.routing_matrices
    assert rows is not None
    assert len(rows) == len(read_tokens(datum))
    decode_routing(rows, SHAPE)
    return [not row for row in rows]


def check_sent(sent: Sent) -> None:
    """The policy gets the experts of sampled tokens, N - 1 rows with the prompt blank (T171)."""
    policy = [datum for is_frozen, datum in sent if not is_frozen]
    reference = [datum for is_frozen, datum in sent if is_frozen]
    # Of the policy a forward pass and a backward pass.
    assert len(policy) == 2 * len(reference) > 0
    assert all(datum.model_input.routing_matrices is None for datum in reference)
    # The reference's weights say which tokens were sampled.
    weights = {read_tokens(datum): datum.loss_fn_inputs["weights"] for datum in reference}
    for datum in policy:
        rows = weights[read_tokens(datum)].to_numpy().tolist()
        assert read_blanks(datum) == [weight == 0.0 for weight in rows]


def test_rl_loop_replays_what_was_sampled_in_policy_passes_alone(moe, trial, sent, requests):
    run = trial(reward_fn=spread, **moe_fields(moe))

    first, second = run.records()
    assert (run.summary.steps, run.summary.version) == (2, 2)
    assert [record["rollout/router_replay_ratio"] for record in (first, second)] == [1.0, 1.0]
    assert first["train/mean_kl"] != second["train/mean_kl"]
    assert all(request["include_routing_matrix"] for request in requests)
    check_sent(sent)


def test_async_rl_loop_replays_what_a_rollout_function_of_the_documents_form_samples(
    moe, async_trial, sent
):
    def make(setup: RolloutSetup) -> RolloutFn:
        """As the documents have it: nothing is said of experts."""
        sampler = build_deployment_sampler(setup)

        async def rollout_fn(row: dict[str, Any]) -> RolloutSample:
            (completion,) = await sampler.sample_with_tokens(
                prompt_messages(row), n=1, max_tokens=12, temperature=1.0
            )
            assert completion.inference_logprobs is not None
            return RolloutSample(
                tokens=completion.full_tokens,
                logprobs=[0.0] * completion.prompt_len + completion.inference_logprobs,
                loss_mask=[0] * completion.prompt_len + [1] * completion.completion_len,
                reward=spread(completion.text, row),
            )

        return rollout_fn

    run = async_trial(make=make, **moe_fields(moe))

    assert run.summary.steps == 2
    assert [record["rollout/router_replay_ratio"] for record in run.records()] == [1.0, 1.0]
    check_sent(sent)


def test_what_an_agent_samples_through_openais_api_is_replayed(moe, async_trial, sent):
    def make(setup: RolloutSetup) -> RolloutFn:
        agents = build_agent_server(setup)

        async def rollout_fn(row: dict[str, Any]) -> RolloutRun | None:
            with agents.session() as session:
                client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
                messages: list[Any] = prompt_messages(row)
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, logprobs=True
                )
                await client.close()
            text = answer.choices[0].message.content or ""
            assert "routing_matrix" not in answer.model_dump_json()
            return session.run(reward=spread(text, row))

        return rollout_fn

    run = async_trial(make=make, **moe_fields(moe, max_rows=2))

    assert run.records()[0]["rollout/router_replay_ratio"] == 1.0
    check_sent(sent)


def test_prompts_are_replayed_too_where_that_is_asked_for(moe, async_trial, trial, sent):
    settings = moe_fields(moe, router_replay_completion_only=False, max_rows=2, kl_beta=0.0)

    trial(reward_fn=spread, **settings)
    async_trial(make=make_rollouts(), **settings)

    # Two recipes, a forward and a backward pass, two groups of four.
    assert len(sent) == 2 * 2 * 8
    assert not any(any(read_blanks(datum)) for _, datum in sent)


def test_the_built_in_losses_replay_as_well(moe, trial, sent):
    trial(reward_fn=spread, **moe_fields(moe, loss_path="builtin", kl_beta=0.0, max_rows=2))

    # Old logprobs are the policy's, and go by the same experts.
    assert len(sent) == 2 * 8
    assert all(any(read_blanks(datum)) and not all(read_blanks(datum)) for _, datum in sent)


def test_without_router_replay_nothing_is_asked_for_or_sent(moe, trial, sent, requests):
    run = trial(reward_fn=spread, **moe_fields(moe, router_replay=False, max_rows=2))

    assert len(requests) == 2 * 4
    assert not any(request["include_routing_matrix"] for request in requests)
    assert all(datum.model_input.routing_matrices is None for _, datum in sent)
    assert "rollout/router_replay_ratio" not in run.records()[0]


# Adapters leave the routers as undecided as they were.
CLOSED = {
    "async": {},
    "off-policy": {"max_head_offpolicy_versions": 1},
    "in flight": {"max_head_offpolicy_versions": 1, "in_flight_weight_updates": True},
    "minibatches": {"ppo_n_minibatches": 2},
    "prompts too": {"router_replay_completion_only": False},
    "all parameters": {"lora_rank": 0},
}


@pytest.mark.parametrize("changes", CLOSED.values(), ids=CLOSED.keys())
@pytest.mark.usefixtures("rounds_otherwise")
def test_a_run_with_replay_has_the_samplers_logprobs_where_one_without_has_others(
    undecided, async_trial, changes
):
    fields = moe_fields(undecided, kl_beta=0.0, max_rows=8, **{"lora_rank": 4, **changes})

    replayed, free = (
        async_trial(make=make_rollouts(), **fields | {"router_replay": on}).records()
        for on in (True, False)
    )

    assert free[0]["parity/max"] > 0.1
    assert "parity/max" in replayed[0]
    assert all(record.get("parity/max", 0.0) <= 1e-5 for record in replayed)


@pytest.mark.parametrize("loss_path", ["client", "builtin"])
@pytest.mark.usefixtures("rounds_otherwise")
def test_both_loss_paths_close_the_gap_in_rl_loop(undecided, trial, loss_path):
    fields = moe_fields(undecided, kl_beta=0.0, lora_rank=4, loss_path=loss_path)

    replayed, free = (
        trial(reward_fn=spread, **fields | {"router_replay": on}).records() for on in (True, False)
    )

    assert free[0]["parity/max"] > 0.1
    assert all(record["parity/max"] <= 1e-5 for record in replayed)


two_turns = make_two_turns(max_tokens=5)


def test_every_turn_is_replayed_and_what_the_tool_said_is_not(moe, async_trial, sent):
    async_trial(make=two_turns, **moe_fields(moe, max_rows=2))

    check_sent(sent)


def test_with_prompts_what_the_tool_said_is_replayed_too(moe, async_trial, sent):
    settings = moe_fields(moe, router_replay_completion_only=False, max_rows=2, kl_beta=0.0)

    async_trial(make=two_turns, **settings)

    assert len(sent) == 2 * 8
    assert not any(any(read_blanks(datum)) for _, datum in sent)


def test_igpo_replays_what_it_trains_and_not_what_it_scores(moe, tmp_path, sent):
    fields = moe_fields(moe, max_rows=2, kl_beta=0.0)

    igpo_loop.main(
        igpo_loop.Config(**vars(async_config(tmp_path / "igpo", **fields)), ig_scorer="trainer"),
        rollout_fn_factory=two_turns,
    )

    trained = [datum for _, datum in sent if datum.model_input.routing_matrices is not None]
    scored = [datum for _, datum in sent if datum.model_input.routing_matrices is None]
    assert len(trained) == 2 * 8
    assert not any(all(read_blanks(datum)) for datum in trained)
    longest = min(len(read_tokens(datum)) for datum in trained)
    assert scored
    assert all(len(read_tokens(datum)) < longest + 5 for datum in scored)


def test_experts_and_scores_cross_a_served_platform(undecided, served, tmp_path, monkeypatch):
    monkeypatch.setenv("FIREWORKS_BASE_URL", served.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "x")
    fields = moe_fields(undecided, kl_beta=0.0, lora_rank=4)

    done = igpo_loop.main(
        igpo_loop.Config(**vars(async_config(tmp_path / "igpo", **fields))),
        rollout_fn_factory=make_rollouts(),
    )

    records = Trial(tmp_path / "igpo", done).records()
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["rollout/router_replay_ratio"] == 1.0
        assert record["parity/max"] <= 1e-5
        assert record["igpo/baseline_logp"] < 0


def test_a_trained_mixture_of_experts_is_exported_as_it_was_found(moe, trial):
    run = trial(reward_fn=spread, **moe_fields(moe, max_rows=2, output_model_id="out"))

    shapes = read_shapes(moe)
    assert any("experts" in name for name in shapes)
    assert read_shapes(run.folder / "models" / "out") == shapes


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict


def test_a_dense_model_trains_as_ever_and_one_line_says_so(trial, caplog):
    with caplog.at_level(logging.WARNING):
        replayed = trial(reward_fn=spread, max_rows=4, router_replay=True)
    messages = [
        record.getMessage() for record in caplog.records if "experts" in record.getMessage()
    ]
    plain = trial(reward_fn=spread, max_rows=4)

    assert [message.partition(":")[0] for message in messages] == ["router_replay does nothing"]
    assert replayed.records() == plain.records()
