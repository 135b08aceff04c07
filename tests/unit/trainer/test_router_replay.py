"""The trainer sends tokens to the experts that it is given (T171), forward and backward."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.moe import LAYERS, TOP_K, moe_config, plain_logprobs, write_moe, write_tied_moe
from tests.unit.tiny import LATENT_ATTENTION, write_qwen

from hearth.errors import RequestError
from hearth.inference.backend import SampleRequest
from hearth.inference.engine.engine import InferenceEngine
from hearth.losses import builtin_objective
from hearth.models.loading import LoadedModel, load_model
from hearth.models.lora import LoraOptions
from hearth.models.routing import find_routers
from hearth.trainer.datums import read_datums
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packing import Limits, split_padded
from hearth.trainer.passes import Pass
from hearth.wire.routing import RoutingShape, encode_routing
from hearth.wire.tinker import ModelInputRecord

pytestmark = pytest.mark.slow

SHAPE = RoutingShape(LAYERS, 8, TOP_K)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


@pytest.fixture
def policy(make_policy, folder):
    return make_policy(source=folder)


def random_experts(rng, count) -> np.ndarray:
    """Any two experts of each layer for ``count`` tokens, uint8 [T, N, K]."""
    picked = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (count, LAYERS, 1)), axis=-1)
    return np.ascontiguousarray(picked[..., :TOP_K])


def routed(datum, rows):
    """The datum with texts of experts, one per input token."""
    given = ModelInputRecord(chunks=datum.model_input.chunks, routing_matrices=rows)
    return datum.model_copy(update={"model_input": given})


@pytest.fixture
def routed_data(datum):
    """Datums with random experts and weights, the first tokens of each free, as prompts are."""

    def make(lengths=(5, 33, 12, 70), seed=0):
        rng = np.random.default_rng(seed)
        plain, forced, experts = [], [], []
        for length in lengths:
            tokens = rng.integers(4, 64, length + 1).tolist()
            free = length // 3
            own = random_experts(rng, length)
            plain.append(datum(tokens, weights=rng.normal(size=length)))
            forced.append(routed(plain[-1], [""] * free + encode_routing(own[free:])))
            # The last token has no input; where it would go is nobody's concern.
            wanted = torch.from_numpy(own.astype(np.int64))
            wanted[:free] = -1
            experts.append((tokens, torch.cat([wanted, torch.full_like(wanted[:1], -1)])))
        return plain, forced, experts

    return make


def rows_of(result) -> np.ndarray:
    return np.concatenate([row.reshape(-1) for row in result.logprobs])


def test_logprobs_are_those_of_a_plain_computation_with_these_experts(policy, loaded, routed_data):
    plain, forced, experts = routed_data()
    exact = {name: tensor.double() for name, tensor in loaded.module.state_dict().items()}

    for data, choices in (
        (forced, [choice for _, choice in experts]),
        (plain, [None] * len(plain)),
    ):
        expected = [
            plain_logprobs(exact, tokens, choice)[0].numpy()
            for (tokens, _), choice in zip(experts, choices, strict=True)
        ]
        got = rows_of(policy.forward(data))
        assert np.abs(got - np.concatenate(expected)).max() <= 1e-5

    apart = np.abs(rows_of(policy.forward(forced)) - rows_of(policy.forward(plain)))
    assert apart.max() > 0.5


def test_gradients_are_those_of_a_plain_computation_in_float64(policy, loaded, routed_data):
    _, forced, experts = routed_data()
    exact = {
        name: tensor.double().requires_grad_()
        for name, tensor in loaded.module.state_dict().items()
        if name != "lm_head.weight"
    }
    total = torch.zeros((), dtype=torch.float64)
    for datum, (tokens, choice) in zip(forced, experts, strict=True):
        weights = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy().copy()).double()
        total = total - (weights * plain_logprobs(exact, tokens, choice)[0]).sum()
    total.backward()

    policy.forward_backward(forced)
    found = policy.read_gradient()

    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert tensor.grad is not None
        error = (found[name] - tensor.grad).abs().max() / tensor.grad.abs().max()
        assert error <= 2e-5, name
    # The router learns of the experts that were forced on it.
    for layer in range(LAYERS):
        assert found[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-3


def test_what_shares_a_pass_and_how_it_is_cut_changes_nothing(make_policy, folder, routed_data):
    plain, forced, _ = routed_data(lengths=(5, 33, 12, 70, 12, 1))
    mixed = [*forced[:3], plain[3], *forced[4:]]
    logprobs, gradients = [], []
    for order, options in (
        (slice(None), {}),
        (slice(None), {"micro_batch_tokens": 32}),
        (slice(None, None, -1), {"micro_batch_tokens": 128, "logit_budget": 40 * 64}),
    ):
        policy = make_policy(source=folder, **options)
        result = policy.forward_backward(mixed[order])
        logprobs.append(np.concatenate([row.reshape(-1) for row in result.logprobs[order]]))
        gradients.append(policy.read_gradient())

    for other, found in zip(logprobs[1:], gradients[1:], strict=True):
        assert np.abs(other - logprobs[0]).max() <= 1e-5
        for name, gradient in gradients[0].items():
            assert (found[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


def test_own_choices_given_back_change_no_bit(policy, loaded, datum):
    tokens = np.random.default_rng(3).integers(4, 64, 33).tolist()
    routers = find_routers(loaded)
    assert routers is not None
    assert routers.shape == SHAPE
    with torch.no_grad(), routers.recording() as record:
        loaded.module(input_ids=torch.tensor([tokens[:-1]]))
    choices = record.choices()
    assert choices is not None
    free = datum(tokens)

    kept = policy.forward([routed(free, encode_routing(choices))])

    assert np.array_equal(rows_of(kept), rows_of(policy.forward([free])))


def test_layers_that_are_computed_once_more_go_to_the_same_experts(folder, routed_data):
    # Gradient checkpointing runs the routers a second time, in the backward pass.
    _, forced, _ = routed_data()
    objective = builtin_objective("cross_entropy", {})
    limits = Limits(64, 512, 512, routing=SHAPE)
    gradients = []
    for forgets in (False, True):
        loaded = load_model(folder)
        module: Any = loaded.module
        if forgets:
            module.activation_checkpointing_enable()
            # transformers forgets activations of a module in training mode only.
            module.train()
        passes = Pass(
            scorer=TargetScorer(loaded),
            objective=objective,
            limits=limits,
            token_budget=128,
            examples=read_datums(forced, objective, limits),
        )
        calls = []
        gate = module.model.layers[0].mlp.gate
        gate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        passes.forward_backward()
        gradients.append({n: p.grad for n, p in module.named_parameters()})
        assert len(calls) == len(split_padded(passes.examples, 128, limits)) * (1 + forgets)

    for name, gradient in gradients[0].items():
        assert torch.allclose(
            gradients[1][name], gradient, rtol=0, atol=1e-6 * gradient.abs().max()
        ), name


# What it is for: a router that is off by next to nothing.


@pytest.fixture(scope="module")
def off_by_a_little(tmp_path_factory):
    """A sampler's model, and the trainer's with other noise on its routers."""
    make = tmp_path_factory.mktemp
    return write_tied_moe(make("a"), noise=0.0), write_tied_moe(make("b"), noise=1e-7)


@pytest.mark.parametrize(
    ("prompt", "whole"), [([7], False), ([*range(4, 24)], True)], ids=["sampled", "prompt too"]
)
def test_replay_closes_the_gap_that_a_perturbed_router_opens(
    make_policy, off_by_a_little, datum, prompt, whole
):
    sampled_by, trained = off_by_a_little
    sampler = InferenceEngine(load_model(sampled_by))
    asked = SampleRequest(prompt=prompt, max_tokens=40, seed=5, ignore_eos=True, routing=True)
    sampled = sampler.submit(asked).result()
    sampler.close()
    assert sampled.routing is not None
    assert sampled.prompt_routing is not None
    policy = make_policy(source=trained)
    free = datum(prompt + sampled.token_ids)
    before = encode_routing(sampled.prompt_routing) if whole else [""] * (len(prompt) - 1)
    replayed = routed(free, before + encode_routing(sampled.routing))

    gaps = [
        np.abs(rows_of(policy.forward([datum]))[len(prompt) - 1 :] - sampled.logprobs).max()
        for datum in (free, replayed)
    ]

    assert gaps[0] > 0.1
    assert gaps[1] <= 1e-5


# What is refused, and what is passed over.


BAD = {
    "too few": (lambda rows: rows[:-1], "routing_matrices must be one per input token, 12, got 11"),
    "too many": (lambda rows: [*rows, ""], "one per input token, 12, got 13: N tokens have N - 1"),
    "one layer": (lambda rows: ["AAE=", *rows[1:]], "must hold 4 bytes per position .2 layers"),
    "three experts": (lambda rows: ["AAECAwQF", *rows[1:]], "got 6 at position 0"),
    "an expert that is not there": (
        lambda rows: ["AAECCA==", *rows[1:]],
        "must name experts in 0..7, got 8 at position 0, layer 1",
    ),
    "an expert twice": (lambda rows: ["AAEBAQ==", *rows[1:]], "must name an expert once"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_experts_that_do_not_fit_are_an_error_that_names_the_datum(
    policy, routed_data, change, message
):
    _, forced, _ = routed_data(lengths=(5, 12))
    rows = forced[1].model_input.routing_matrices
    bad = routed(forced[1], change(rows))

    for run in (policy.forward, policy.forward_backward):
        with pytest.raises(RequestError, match=f"datum 1: .*{message}"):
            run([forced[0], bad])


@pytest.mark.parametrize("rows", [None, [], [""] * 12], ids=["absent", "empty", "all blank"])
def test_without_experts_the_router_decides(policy, datum, rows):
    free = datum(list(range(4, 17)))

    same = policy.forward([routed(free, rows)])

    assert np.array_equal(rows_of(same), rows_of(policy.forward([free])))


def test_a_dense_model_passes_experts_over_with_one_line(
    make_policy, routed_data, tmp_path, caplog
):
    policy = make_policy(source=write_qwen(tmp_path / "dense"))
    plain, forced, _ = routed_data()
    assert not policy.engine.supports_router_replay

    with caplog.at_level(logging.WARNING):
        policy.forward(plain)
        assert caplog.records == []
        results = [policy.forward(forced) for _ in range(2)]
        policy.forward_backward(forced)

    assert len(caplog.records) == 1
    assert "routing_matrices are ignored" in caplog.records[0].getMessage()
    assert np.array_equal(rows_of(results[0]), rows_of(policy.forward(plain)))


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["full", "lora"])
def test_a_reference_never_goes_where_a_sampler_went(make_engine, folder, routed_data, lora):
    engine = make_engine(folder)
    policy, reference = engine.create_model(lora), engine.create_model(is_frozen=True)
    plain, forced, _ = routed_data()

    kept = rows_of(engine.forward(reference, forced))

    assert np.array_equal(kept, rows_of(engine.forward(reference, plain)))
    # At first the policy is the reference; its adapter, where it has one, does nothing yet.
    assert np.abs(rows_of(engine.forward(policy, forced)) - kept).max() > 0.5
    assert engine.supports_router_replay


FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "moe_intermediate_size": 32}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "mixtral": ("MixtralConfig", {}),
    "olmoe": ("OlmoeConfig", {}),
    "granitemoe": ("GraniteMoeConfig", {}),
    "deepseek_v3": ("DeepseekV3Config", LATENT_ATTENTION),
}


@pytest.mark.parametrize(("name", "options"), FAMILIES.values(), ids=FAMILIES.keys())
def test_routers_of_other_families_weigh_given_experts_as_their_own(name, options):
    loaded = random_model(name, **options)
    routers = find_routers(loaded)
    assert routers is not None
    ids = torch.randint(4, 64, (2, 20), generator=torch.Generator().manual_seed(0))

    with torch.no_grad(), routers.recording() as record:
        free = loaded.module(input_ids=ids).logits
    choices = torch.from_numpy(np.asarray(record.choices(), np.int64))
    with torch.no_grad(), routers.replaying(choices):
        same = loaded.module(input_ids=ids).logits
    with torch.no_grad(), routers.replaying((choices + 1) % 4), routers.recording() as other:
        changed = loaded.module(input_ids=ids).logits

    assert torch.equal(free, same)
    went = np.asarray(other.choices(), np.int64)
    assert np.array_equal(went, (choices + 1) % 4)
    assert (free - changed).abs().max() > 0.1


def random_model(name, **options) -> LoadedModel:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_experts_per_tok": 2,
        "initializer_range": 0.1,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    experts = "num_experts" if name.startswith(("Qwen", "Olmoe")) else "num_local_experts"
    if "n_routed_experts" not in options:
        sizes[experts] = 4
    torch.manual_seed(0)
    config = getattr(transformers, name)(**sizes | options)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return LoadedModel(module, name, name, torch.float32, torch.device("cpu"), (3,), 64, 256)


def test_a_router_whose_weights_are_not_understood_is_not_replayed():
    import transformers

    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(moe_config()).eval()
    for layer in module.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _module, _args, out: (out[0], out[1] * 2, out[2])
        )
    loaded = replace(random_model("MixtralConfig"), module=module)

    assert find_routers(loaded) is None
