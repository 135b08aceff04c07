"""Deltas through the whole path: trainer, folder of snapshots, deployment, and the SDK between."""

import asyncio
import json
import re
import shutil

import pytest
import tinker
import torch
from safetensors.torch import load_file

from hearth.errors import EngineError
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.service import create_app as deployment_app
from hearth.models.loading import load_model, load_tokenizer
from hearth.sdk import DeploymentManager, DeploymentSampler, FiretitanServiceClient, WeightSyncer
from hearth.sdk.transport import mount, unmount
from hearth.sync.chain import resolve
from hearth.sync.manifest import read_manifest
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.trainer.service import create_app as trainer_app
from hearth.wire.completions import DeltaMetadata
from training.quickstart import MODEL
from training.utils.rl import build_grpo_datums, make_grpo_loss_fn

BASE = str(MODEL)
NAME = "accounts/me/deployments/d"
PROMPT = [5, 17, 40, 41, 9]


class Stack:
    """A trainer and a deployment that share nothing but a store, and clients of both."""

    def __init__(self, store, work_dir, lora_rank=0):
        self.store = store
        options = TrainerOptions(dtype="bfloat16", max_seq_len=128)
        self.trainer = TrainerEngine(
            BASE, snapshots=store, checkpoint_dir=work_dir / "checkpoints", options=options
        )
        self.engine = InferenceEngine(
            load_model(BASE, dtype="bfloat16"),
            tokenizer=load_tokenizer(BASE),
            options=EngineOptions(max_seq_len=128),
        )
        self.urls = ["http://trainer.delta.internal", "http://deployment.delta.internal"]
        mount(self.urls[0], trainer_app(self.trainer))
        mount(self.urls[1], deployment_app(self.engine, model_name=NAME, snapshots=store))
        service = FiretitanServiceClient(self.urls[0], "key")
        self.policy = service.create_training_client(BASE, lora_rank, seed=1)
        self.deployments = DeploymentManager("key", self.urls[1], account_id="me")
        self.syncer = WeightSyncer(self.policy, self.deployments, "d", BASE, hotload_timeout=30)
        self.sampler = DeploymentSampler(self.urls[1], NAME, "key")

    def sample(self, n=4):
        call = self.sampler.sample_with_prompt_tokens(PROMPT, n=n, max_tokens=16, seed=3)
        return asyncio.run(call)

    def step(self, learning_rate=1e-6):
        completions = self.sample()
        datums = build_grpo_datums(completions)
        zeros = [[0.0] * datum.model_input.length for datum in datums]
        loss_fn = make_grpo_loss_fn([0.0, 1.0, 2.0, 3.0], zeros, kl_beta=0.0)
        self.policy.forward_backward_custom(datums, loss_fn).result()
        adam = tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.999, eps=1e-8)
        self.policy.optim_step(adam).result()

    def kinds(self):
        if isinstance(self.store, MemorySnapshotStore):
            return [snapshot.kind for snapshot in self.store.snapshots()]
        return [read_manifest(self.store.folder(name))["kind"] for name in self.store.names()]

    def agrees(self):
        """Whether sampler and trainer give the sampled tokens the same logprobs."""
        completions = self.sample()
        scored = self.policy.forward(build_grpo_datums(completions)).result().loss_fn_outputs
        return all(
            torch.allclose(
                torch.tensor(output["logprobs"].data)[completion.prompt_len - 1 :],
                torch.tensor(completion.inference_logprobs),
                atol=0.05,
            )
            for completion, output in zip(completions, scored, strict=True)
        )

    def close(self):
        for url in self.urls:
            unmount(url)
        self.engine.close()
        self.trainer.close()


@pytest.fixture
def stack(tmp_path):
    made = []

    def make(store=None, **options):
        store = store or FolderSnapshotStore(tmp_path / "snapshots")
        made.append(Stack(store, tmp_path, **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.fixture
def deployment(stack):
    return stack()


def read_served_bits(deployment):
    module = deployment.engine._loaded.module  # what it computes with, and nobody else tells
    return {name: tensor.detach().view(torch.int16) for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_base_then_deltas_serve_the_trainers_bits(stack, kind, tmp_path):
    deployment = stack(MemorySnapshotStore() if kind == "memory" else None)

    for version in (1, 2, 3):
        identity = deployment.syncer.save_and_hotload(f"step-{version}")
        deployment.trainer.export(deployment.policy.model_id, tmp_path / "exported")
        expected = load_file(tmp_path / "exported" / "model.safetensors")
        bits = read_served_bits(deployment)
        assert bits.keys() == expected.keys()
        assert all(torch.equal(bits[name], expected[name].view(torch.int16)) for name in expected)
        assert deployment.sample(n=1)[0].snapshot_identity == identity
        assert deployment.agrees()
        deployment.step()

    assert deployment.syncer.version == 3
    assert deployment.kinds() == ["base", "delta", "delta"]


def test_one_step_at_a_small_learning_rate_makes_a_small_delta(deployment, tmp_path):
    base = deployment.syncer.save_and_hotload("step-1")
    deployment.step(1e-6)
    delta = deployment.syncer.save_and_hotload("step-2")

    assert deployment.kinds() == ["base", "delta"]
    sizes = [
        (tmp_path / "snapshots" / name / "weights.safetensors").stat().st_size
        for name in (base, delta)
    ]
    assert sizes[1] * 10 < sizes[0]
    manifest = json.loads((tmp_path / "snapshots" / delta / "manifest.json").read_text())
    assert (manifest["kind"], manifest["parent"]) == ("delta", base)
    assert manifest["weights"].keys() == deployment.store.get(base).tensors.keys()


def test_a_truncated_delta_is_refused_served_on_and_mended_by_a_base(deployment, tmp_path):
    first = deployment.syncer.save_and_hotload("step-1")
    before = deployment.sample()
    deployment.step(1e-2)
    damaged = deployment.syncer.save_only("step-2")
    path = tmp_path / "snapshots" / damaged / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(EngineError, match=r"must be readable and hold \d+ bytes.*got \d+ bytes"):
        deployment.syncer.hotload(damaged, "delta")

    after = deployment.sample()
    assert {o.snapshot_identity for o in after} == {first}
    assert [o.inference_logprobs for o in after] == [o.inference_logprobs for o in before]
    deployment.syncer.save_and_hotload("step-3")
    assert deployment.kinds() == ["base", "delta", "base"]
    assert deployment.syncer.version == 2
    assert deployment.agrees()
    deployment.step()
    deployment.syncer.save_and_hotload("step-4")
    assert deployment.kinds()[-1] == "delta"
    assert deployment.agrees()


def test_a_stale_attachment_is_refused_with_expected_and_found(deployment):
    first = deployment.syncer.save_and_hotload("step-1")
    deployment.step()
    delta = deployment.syncer.save_only("step-2")
    stale = DeltaMetadata(previous_snapshot_identity="step-0-dead")

    message = f"expected '{first}', found 'step-0-dead'"
    with pytest.raises(EngineError, match=re.escape(message)):
        deployment.deployments.hotload_and_wait("d", BASE, delta, incremental=stale, timeout_s=30)

    assert deployment.sample(n=1)[0].snapshot_identity == first
    right = DeltaMetadata(previous_snapshot_identity=first)
    state = deployment.deployments.hotload_and_wait(
        "d", BASE, delta, incremental=right, timeout_s=30
    )
    assert (state.current_snapshot_identity, state.weight_version) == (delta, 2)


def test_a_missing_link_is_refused_with_expected_and_found(deployment, tmp_path):
    first = deployment.syncer.save_and_hotload("step-1")
    deployment.step()
    middle = deployment.syncer.save_only("step-2")
    deployment.step()
    last = deployment.syncer.save_only("step-3", "delta")
    shutil.rmtree(tmp_path / "snapshots" / middle)

    message = f"expected parent '{middle}', found '{first}'"
    with pytest.raises(EngineError, match=re.escape(message)):
        deployment.deployments.hotload_and_wait("d", BASE, last, timeout_s=30)

    assert deployment.sample(n=1)[0].snapshot_identity == first


def test_after_loading_a_checkpoint_the_next_sync_is_a_base_by_itself(deployment):
    deployment.policy.save_state("kept").result()
    deployment.syncer.save_and_hotload("step-1")
    deployment.step(1e-2)
    deployment.syncer.save_and_hotload("step-2")

    deployment.policy.load_state_with_optimizer("kept").result()
    identity = deployment.syncer.save_and_hotload("step-3")

    assert deployment.kinds() == ["base", "delta", "base"]
    assert deployment.sample(n=1)[0].snapshot_identity == identity
    assert deployment.agrees()


def test_an_adapter_is_always_whole(stack):
    deployment = stack(lora_rank=4)

    for version in (1, 2):
        deployment.syncer.save_and_hotload(f"step-{version}")
        assert deployment.agrees()
        deployment.step(1e-3)
    deployment.policy.save_weights_for_sampler_ext("asked", "delta")

    assert deployment.kinds() == ["lora", "lora", "lora"]


def test_a_deployment_that_starts_later_takes_the_whole_chain(deployment, tmp_path):
    for version in (1, 2, 3):
        last = deployment.syncer.save_and_hotload(f"step-{version}")
        deployment.step()
    other = InferenceEngine(load_model(BASE, dtype="bfloat16"))

    state = other.hot_load(last, lambda: deployment.store.get(last)).result(timeout=30)
    other.close()

    assert (state.stage, state.current_identity) == ("done", last)
    assert deployment.kinds() == ["base", "delta", "delta"]
    expected = resolve(deployment.store, last).tensors
    bits = read_served_bits(deployment)
    assert all(torch.equal(bits[name], expected[name].view(torch.int16)) for name in expected)
