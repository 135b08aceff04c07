"""Weight syncs of a mixture of experts, whose experts are one tensor in a snapshot."""

from __future__ import annotations

from pathlib import Path

from tests.unit.architectures import make_config
from tests.unit.tiny import make_decoder
from tests.vllm.stack import TOLERANCE, Deployment, Trainer


def test_a_mixtures_new_weights_are_served(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_decoder(make_config("qwen3_moe")).save_pretrained(model)
    deployment = Deployment(tmp_path / "deployment", model=model)
    trainers = {
        "base": Trainer(deployment, tmp_path / "full", model=model),
        "merged_base": Trainer(deployment, tmp_path / "adapter", lora_rank=4, model=model),
    }

    for kind, trainer in trainers.items():
        for step in (1, 2):
            trainer.step(learning_rate=1e-2)
            identity = trainer.save(f"{kind}-{step}", kind)
            state = deployment.hot_load(identity)
            assert state["current_snapshot_identity"] == identity, state
            for choice in deployment.complete(n=2):
                assert trainer.gap(choice) < TOLERANCE
        trainer.close()

    deployment.close()
