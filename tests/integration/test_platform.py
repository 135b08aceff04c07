import asyncio

import pytest
import tinker
import torch
from tests.integration.stacks import BASE, PROMPT, PlatformStack

from hearth.errors import (
    ClosedError,
    ConfigError,
    EngineError,
    ForwardOnlyError,
    NotFoundError,
    RequestError,
    RequestFailedError,
)
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentSampler, TrainerJobConfig, TrainerJobManager, WeightSyncer
from training.utils.rl import build_grpo_datums, make_grpo_loss_fn

ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


class Stack(PlatformStack):
    """The same, which samples and trains."""

    def sample(self, **options):
        options = {"n": 6, "max_tokens": 24, "seed": 3} | options
        return asyncio.run(self.sampler.sample_with_prompt_tokens(PROMPT, **options))

    def step(self, completions):
        rewards = [float(index % 3) for index in range(len(completions))]
        datums = build_grpo_datums(completions)
        zeros = [[0.0] * datum.model_input.length for datum in datums]
        loss_fn = make_grpo_loss_fn(rewards, zeros, kl_beta=0.0)
        result = self.policy.forward_backward_custom(datums, loss_fn).result()
        self.policy.optim_step(ADAM).result()
        return result


@pytest.fixture
def stack(tmp_path):
    made = []

    def make(**options):
        made.append(Stack(tmp_path, **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


def read_logprobs(completions):
    return [completion.inference_logprobs for completion in completions]


@pytest.fixture
def platform(stack):
    return stack()


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_sampler_and_trainer_agree_on_logprobs_before_and_after_training(stack, lora_rank):
    platform = stack(lora_rank=lora_rank)

    for version in (0, 1, 2):
        completions = platform.sample()
        scored = platform.policy.forward(build_grpo_datums(completions)).result()
        for completion, output in zip(completions, scored.loss_fn_outputs, strict=True):
            trained = torch.tensor(output["logprobs"].data)[completion.prompt_len - 1 :]
            sampled = torch.tensor(completion.inference_logprobs)
            assert completion.weight_version == version
            assert (trained - sampled).abs().max() < 1e-5
        platform.step(completions)
        platform.syncer.save_and_hotload(f"step-{version + 1:05d}")


def test_training_moves_the_served_distribution_only_after_the_weight_sync(platform):
    before = platform.sample()
    platform.step(before)

    unsynced = platform.sample()
    platform.syncer.save_and_hotload("step-00001")
    synced = platform.sample()

    assert read_logprobs(unsynced) == read_logprobs(before)
    assert read_logprobs(synced) != read_logprobs(before)
    assert synced[0].snapshot_identity.startswith("step-00001-")


def test_a_completion_depends_on_its_seed_only(platform):
    together = platform.sample(n=8)
    alone = platform.sample(n=2)

    assert [completion.full_tokens for completion in together[:2]] == [
        completion.full_tokens for completion in alone
    ]
    assert read_logprobs(together[:2]) == read_logprobs(alone)
    assert len({tuple(completion.full_tokens) for completion in together}) > 1


def test_echo_gives_target_aligned_rows_for_the_prompt_too(platform):
    (plain,) = platform.sample(n=1)
    (echoed,) = platform.sample(n=1, echo=True)

    assert echoed.full_tokens == plain.full_tokens
    assert echoed.logprobs_echoed
    assert len(echoed.inference_logprobs) == len(echoed.full_tokens) - 1
    assert echoed.inference_logprobs[len(PROMPT) - 1 :] == plain.inference_logprobs


def test_a_custom_loss_that_raises_leaves_the_client_usable(platform):
    completions = platform.sample()
    datums = build_grpo_datums(completions)

    def broken(data, logprobs):
        raise KeyError("my mistake")

    with pytest.raises(KeyError, match="my mistake"):
        platform.policy.forward_backward_custom(datums, broken).result(timeout=30)
    assert platform.step(completions).metrics["loss:sum"] is not None


def test_a_bad_datum_fails_its_own_future_and_the_next_operation_runs(platform):
    bad = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": tinker.TensorData(data=[2, 99_999], dtype="int64")},
    )

    failing = platform.policy.forward([bad])
    working = platform.policy.forward(build_grpo_datums(platform.sample()))

    with pytest.raises(RequestFailedError, match="datum 0"):
        failing.result(timeout=30)
    assert len(working.result(timeout=30).loss_fn_outputs) == 6


def test_the_shared_reference_keeps_the_base_weights_and_refuses_training(stack):
    platform = stack(lora_rank=4)
    reference = platform.service.create_base_reference(BASE)
    completions = platform.sample()
    datums = build_grpo_datums(completions)

    def score(client):
        outputs = client.forward(datums).result().loss_fn_outputs
        return torch.cat([torch.tensor(output["logprobs"].data) for output in outputs])

    before = score(reference)
    assert torch.equal(before, score(platform.policy))
    platform.step(completions)

    assert torch.equal(score(reference), before)
    assert not torch.equal(score(platform.policy), before)
    with pytest.raises(ForwardOnlyError, match="frozen"):
        reference.optim_step(ADAM)


def test_bad_sampling_values_are_refused_with_their_name(platform):
    for options in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": -1}):
        with pytest.raises(RequestError, match=next(iter(options))):
            platform.sample(**options)
    with pytest.raises(ConfigError, match="must be request fields"):
        platform.sample(temprature=1.0)


def test_a_deployment_that_does_not_exist_lists_the_known_ones(platform):
    other = DeploymentSampler(platform.platform.base_url, "accounts/me/deployments/x", "key")

    with pytest.raises(NotFoundError, match=r"must be one of \['d'\]"):
        asyncio.run(other.sample_with_prompt_tokens(PROMPT))


def test_clients_used_after_the_platform_is_closed_say_so(platform):
    platform.platform.close()

    with pytest.raises(ClosedError, match="inside the `with` block"):
        platform.sample()
    with pytest.raises(ClosedError):
        platform.policy.optim_step(ADAM).result()


def test_an_unknown_model_name_lists_the_registered_ones(tmp_path):
    with EmbeddedPlatform(work_dir=tmp_path) as platform:
        trainers = TrainerJobManager("key", base_url=platform.base_url)
        with pytest.raises(RequestError, match=r"registered are .*qwen3-8b"):
            trainers.create(TrainerJobConfig(base_model="accounts/x/models/nope"))
        assert trainers.list() == []


class RecordingPolicy:
    """A policy client that writes down which kinds of snapshot it was asked for."""

    def __init__(self, policy):
        self.policy = policy
        self.lora_rank = policy.lora_rank
        self.kinds = []

    def save_weights_for_sampler_ext(self, name, checkpoint_type="base"):
        self.kinds.append(checkpoint_type)
        return self.policy.save_weights_for_sampler_ext(name, checkpoint_type)


@pytest.mark.parametrize(
    ("lora_rank", "kinds"),
    [(0, ["base", "delta", "base", "delta"]), (4, ["base", "base", "base", "base"])],
    ids=["full", "lora"],
)
def test_a_failed_hot_load_makes_the_next_snapshot_a_base(stack, lora_rank, kinds):
    platform = stack(lora_rank=lora_rank)
    policy = RecordingPolicy(platform.policy)
    syncer = WeightSyncer(policy, platform.deployments, "d", BASE, hotload_timeout=30)

    syncer.save_and_hotload("step-00001")
    served = syncer.save_and_hotload("step-00002")
    with pytest.raises(EngineError, match="'never-saved' was refused"):
        syncer.hotload("never-saved")
    assert platform.sample(n=1)[0].snapshot_identity == served
    syncer.save_and_hotload("step-00003")
    syncer.save_and_hotload("step-00004")

    assert policy.kinds == kinds
    assert syncer.version == 4


def test_a_long_batch_goes_in_chunks_and_comes_back_as_one(stack):
    platform = stack()
    datums = build_grpo_datums(platform.sample(n=7))
    whole = platform.policy.forward_backward(datums).result()
    step_of_whole = platform.policy.optim_step(ADAM).result().metrics["grad_norm"]

    again = stack(max_chunk_datums=3)
    pieces = again.policy.forward_backward(datums).result()
    step_of_pieces = again.policy.optim_step(ADAM).result().metrics["grad_norm"]

    assert [output["logprobs"].data for output in pieces.loss_fn_outputs] == [
        output["logprobs"].data for output in whole.loss_fn_outputs
    ]
    assert pieces.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"])
    assert step_of_pieces == pytest.approx(step_of_whole, rel=1e-5)


def test_a_checkpoint_brings_weights_and_optimizer_back(platform):
    completions = platform.sample()
    platform.step(completions)
    platform.policy.save_state("kept").result()
    platform.step(completions)
    after = platform.policy.forward(build_grpo_datums(completions)).result().loss_fn_outputs

    platform.policy.load_state_with_optimizer("kept").result()
    platform.step(completions)
    again = platform.policy.forward(build_grpo_datums(completions)).result().loss_fn_outputs

    assert platform.policy.list_checkpoints() == ["kept"]
    assert [output["logprobs"].data for output in again] == [
        output["logprobs"].data for output in after
    ]
