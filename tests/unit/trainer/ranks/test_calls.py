"""Operations cross between ranks as they were called."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.models.lora import LoraOptions
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.ranks.group import decode, encode
from hearth.wire.tensors import encode as tensor
from hearth.wire.tinker import AdamParams, DatumRecord


def datum() -> DatumRecord:
    targets = tensor(np.array([2, 3]), "int64").as_dict()
    weights = tensor(np.array([0.1, np.nan], dtype=np.float32), "float32", "base64").as_dict()
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": [1, 2]}], "routing_matrices": ["", "AAE="]},
            "loss_fn_inputs": {"target_tokens": targets, "weights": weights},
        }
    )


@pytest.mark.parametrize(
    "argument",
    [
        "policy-1",
        None,
        3,
        0.1,
        True,
        [],
        {"eps_clip": 0.2},
        {"kind": "path", "content": "/"},
        [["path", "/"]],
        AdamParams(learning_rate=1e-3, grad_clip_norm=0.5),
        LoraOptions(rank=4, alpha=8.0, train_unembed=True),
        Path("/some/where"),
        [datum(), datum()],
    ],
)
def test_an_argument_arrives_as_it_was(argument: Any) -> None:
    called = ("forward", [argument], {"named": argument})

    assert decode(encode(*called)) == called


def test_a_kind_that_no_operation_takes_is_not_sent() -> None:
    with pytest.raises(TypeError):
        encode("forward", [object()], {})


def test_every_operation_of_the_engine_is_told_to_the_ranks() -> None:
    """What changes a model runs alone, and what runs alone is told."""
    announced = {
        name
        for name, member in vars(TrainerEngine).items()
        if inspect.unwrap(member) is not member and callable(member)
    }

    assert announced == {
        "create_model",
        "forward",
        "forward_backward",
        "optim_step",
        "save_state",
        "load_state",
        "load_adapter",
        "save_for_sampler",
        "export",
        "unload",
    }
