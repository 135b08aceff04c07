"""The golden numbers of the semantics reference: those of the forms we decided for are reproduced,
those of the forms we rejected are listed with the reason.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import torch

from hearth.errors import ConfigError
from hearth.losses import (
    DAPO,
    GRPO,
    GSPO,
    GSPO_PRESETS,
    TIS,
    TokenBatch,
    policy_loss_per_token,
    reduce_loss,
    resolve_objective,
)
from training.samples.advantages import batch_advantages
from training.utils.rl import group_advantages, make_grpo_loss_fn, make_offpolicy_grpo_loss_fn

ROW = [-0.5, -1.0, -1.5]
NEAR = [-0.9, -1.0, -0.9]
NO_KL = GRPO(kl_beta=0.0)


@dataclass(frozen=True)
class Golden:
    """A loss and its gradient of one sample whose old logprobs are -1 everywhere."""

    name: str
    loss: float
    gradients: list[float]
    config: object = None
    policy: Sequence[float] = tuple(ROW)
    advantage: int = 1
    mask: list[int] | None = None
    reduction: str = "sum"


PAPER, COOKBOOK = GSPO_PRESETS["paper"], GSPO_PRESETS["cookbook"]
LOSSES = {
    "grpo_clip_.2 A=1.0": Golden("grpo", -2.8065307, [0, -1, -0.6065307], NO_KL),
    "grpo_clip_.2 A=-1.0": Golden("grpo", 3.4487213, [1.6487213, 1, 0], NO_KL, advantage=-1),
    "dapo A=1.0": Golden("dapo", -2.8865307, [0, -1, -0.6065307]),
    "dapo A=-1.0": Golden("dapo", 3.4487213, [1.6487213, 1, 0], advantage=-1),
    "dapo dual c=3 A=-1 pi=[1,-1,-1.5]": Golden(
        "dapo", 4.8, [0, 1, 0], DAPO(eps_clip_c=3.0), policy=[1, -1, -1.5], advantage=-1
    ),
    "is A=1.0": Golden("importance_sampling", -3.2552519, [-1.6487213, -1, -0.6065307]),
    "is A=-1.0": Golden("importance_sampling", 3.2552519, [1.6487213, 1, 0.6065307], advantage=-1),
    "cispo A=1.0": Golden("cispo", 2.84, [-1.28, -1, -0.8]),
    "cispo A=-1.0": Golden("cispo", -2.84, [1.28, 1, 0.8], advantage=-1),
    "cispo_mask A=1.0": Golden("cispo_mask", -1.6065307, [0, -1, -0.6065307]),
    "cispo_mask A=-1.0": Golden("cispo_mask", 2.6487213, [1.6487213, 1, 0], advantage=-1),
    "dro A=1.0": Golden("dro", 3.0125, [-0.975, -1, -1.025]),
    "dro A=-1.0": Golden("dro", -2.9875, [1.025, 1, 0.975], advantage=-1),
    "gspo A=1.0": Golden("gspo", -3, [-1, -1, -1]),
    "gspo A=-1.0": Golden("gspo", 3, [1, 1, 1], advantage=-1),
    "gspo A=1 pi=[-.9,-1,-.9] ": Golden(
        "gspo", -3.2068173, [-1.0689391] * 3, COOKBOOK, policy=NEAR
    ),
    # The paper has one term per sequence: the mean over its tokens.
    "gspo paper A=1 pi=[-.9,-1,-.9]": Golden(
        "gspo", -1.0004, [0, 0, 0], PAPER, policy=NEAR, reduction="sequence_mean"
    ),
    "gspo masked mid big, mask[1,0,1] pi=[-1,2,-1] correct": Golden(
        "gspo", -2, [-1, 0, -1], policy=[-1, 2, -1], mask=[1, 0, 1]
    ),
}

# name -> (policy, behavior, advantage, loss, gradients)
REINFORCE = {
    "reinforce on-policy mu=pi A=2": (ROW, ROW, 2, -6, [-2, -2, -2]),
    "reinforce off mu=-1 A=1": (ROW, [-1] * 3, 1, -3.2552519, [-1.6487213, -1, -0.6065307]),
}

TIS_WEIGHTS = {
    "tis token o=-1 mu=[-1,-3,-1.2] cap5": (TIS(cap=5), [1, 5, 1.2214028]),
    "tis token cap2": (TIS(), [1, 2, 1.2214028]),
    "tis seq geo": (TIS(cap=10, level="sequence", sequence_mean="geometric"), 2.0820091),
    "tis seq product": (TIS(cap=10, level="sequence"), 9.0250135),
    "tis icepop thr2": (TIS(icepop_threshold=2), [1, 0, 1.2214028]),
}

# name -> (beta, advantage, loss, gradients)
KL = {
    "k3 beta1": (1.0, 0, 0.3892822, [0.6321206, -0.2214028]),
    "k3 beta.2": (0.2, 0, 0.0778564, [0.1264241, -0.0442806]),
}
KL_AND_ADVANTAGE = {"the reference's text": (0.2, 1, -1.9221436, [-0.8735759, -1.0442806])}

DOCUMENT_003 = {
    "003 on": [0.5353301, 0.05, [[0, -0.303553, -0.303553], [0, 0.403553, 0.403553]]],
    "003 off": [0.8463138, 0.05, [[0, 0.190179, 0.190179], [0, 0.226777, 0.226777]]],
}

ADVANTAGES = {
    "adv [1.0, 0, 0, 0]": ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    "adv [1.0, 2.0]": ([1, 2], [-0.7071068, 0.7071068]),
    "adv [1.0, 0, 1, 0]": ([1, 0, 1, 0], [0.8660254, -0.8660254, 0.8660254, -0.8660254]),
    "adv [0.0, 0, 0, 1]": ([0, 0, 0, 1], [-0.5, -0.5, -0.5, 1.5]),
    "adv [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]": ([0.5] * 8, [0] * 8),
    "adv [1.0, 1.0, 1.0, 1.0]": ([1] * 4, [0] * 4),
}
POOLED = {
    "adv [1.0, 0, 1, 0, 0, 0, 0, 1]": [1.2076148, -0.7245688, 1.2076148]
    + [-0.7245688] * 4
    + [1.2076148]
}

ROUNDING = "float32 rounding of a uniform group; ours is exactly 0"
REJECTED = {
    "gspo masked mid big, cookbook": "its mean includes masked tokens; ours is over active ones",
    "adv [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]": ROUNDING,
    "adv [0.9, 0.9, 0.9]": ROUNDING,
    "adv [0.6, 0.6, 0.6, 0.6, 0.6, 0.6]": ROUNDING,
    "adv [5.0]": "one completion has no spread: ours is an error, not NaN",
}


def close(expected):
    return pytest.approx(expected, abs=6e-7)


def batch_with(policy, advantage, mask=None, **rows):
    leaf = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    batch = TokenBatch.concat(
        [leaf],
        advantages=[float(advantage)],
        mask=[torch.ones(len(policy)) if mask is None else torch.tensor(mask)],
        **{name: [torch.tensor(row, dtype=torch.float64)] for name, row in rows.items()},
    )
    return batch, leaf


@pytest.mark.parametrize("golden", LOSSES.values(), ids=LOSSES)
def test_objectives_reproduce_their_goldens(golden):
    batch, leaf = batch_with(golden.policy, golden.advantage, golden.mask, old_logprobs=[-1] * 3)

    # The goldens with a logprob above 0 show the arithmetic; validate() would refuse them.
    objective = resolve_objective(golden.name, golden.config)
    value = reduce_loss(objective.policy_term(batch), batch, golden.reduction)
    (gradient,) = torch.autograd.grad(value, leaf)

    assert value.item() == close(golden.loss)
    assert gradient.tolist() == close(golden.gradients)


@pytest.mark.parametrize(
    ("policy", "behavior", "advantage", "loss", "gradients"), REINFORCE.values(), ids=REINFORCE
)
def test_reinforce_reproduces_its_goldens(policy, behavior, advantage, loss, gradients):
    batch, leaf = batch_with(policy, advantage, behavior_logprobs=behavior)

    value = policy_loss_per_token("reinforce", batch).per_token.sum()
    (gradient,) = torch.autograd.grad(value, leaf)

    assert value.item() == close(loss)
    assert gradient.tolist() == close(gradients)


@pytest.mark.parametrize(("tis", "weights"), TIS_WEIGHTS.values(), ids=TIS_WEIGHTS)
def test_tis_reproduces_its_goldens(tis, weights):
    batch, _ = batch_with(ROW, 1, old_logprobs=[-1.0] * 3, behavior_logprobs=[-1.0, -3.0, -1.2])

    expected = weights if isinstance(weights, list) else [weights] * 3
    assert tis.weights(batch).tolist() == close(expected)


@pytest.mark.parametrize(
    ("beta", "advantage", "loss", "gradients"),
    [*KL.values(), *KL_AND_ADVANTAGE.values()],
    ids=[*KL, *KL_AND_ADVANTAGE],
)
def test_grpo_with_the_k3_penalty_reproduces_its_goldens(beta, advantage, loss, gradients):
    batch, leaf = batch_with([-1.0, -0.7], advantage, ref_logprobs=[-2.0, -0.5])

    value = policy_loss_per_token("grpo", batch, GRPO(kl_beta=beta)).per_token.sum()
    (gradient,) = torch.autograd.grad(value, leaf)

    assert value.item() == close(loss)
    assert gradient.tolist() == close(gradients)


@pytest.mark.parametrize("name", DOCUMENT_003)
def test_the_closures_of_document_003_reproduce_their_goldens(name):
    # Inputs solved from the goldens: response sums -2.5 and -1, KL 0.1 and 0, log rho 0.3 and 0.
    policy = [torch.tensor([-3.0, -1.0, -1.5]), torch.tensor([-2.0, -0.4, -0.6])]
    rows = [tensor.requires_grad_(True) for tensor in policy]
    reference = [[-1.0, -1.0, -1.6], [-1.0, -0.4, -0.6]]
    behavior = [[-2.0, -1.2, -1.9], [-3.0, -0.4, -0.6]]
    weights = tinker.TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3])
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"weights": weights}
    )
    loss_fn = (
        make_grpo_loss_fn([1.0, 0.0], reference, kl_beta=0.1)
        if name == "003 on"
        else make_offpolicy_grpo_loss_fn([1.0, 0.0], reference, behavior, kl_beta=0.1)
    )

    value, metrics = loss_fn([datum, datum], rows)
    gradients = torch.autograd.grad(value, rows)

    loss, mean_kl, expected = DOCUMENT_003[name]
    assert value.item() == close(loss)
    assert metrics["grpo_loss"] == value.item()
    assert metrics["mean_kl"] == close(mean_kl)
    assert [gradient.tolist() for gradient in gradients] == [close(row) for row in expected]


@pytest.mark.parametrize(("rewards", "advantages"), ADVANTAGES.values(), ids=ADVANTAGES)
def test_group_advantages_reproduce_their_goldens(rewards, advantages):
    assert group_advantages(rewards) == close(advantages)


def test_pooled_advantages_reproduce_their_golden():
    groups = batch_advantages([[1, 0, 1, 0], [0, 0, 0, 1]], scope="batch")
    assert [advantage for group in groups for advantage in group] == close(*POOLED.values())


def test_rejected_goldens_are_not_what_we_compute():
    batch, _ = batch_with([-1, 2, -1], 1, [1, 0, 1], old_logprobs=[-1] * 3)
    assert GSPO().policy_term(batch).sum().item() == -2.0 != -2.4
    for rewards in ([0.3] * 7, [0.9] * 3, [0.6] * 6):
        assert group_advantages(rewards) == [0.0] * len(rewards)
    with pytest.raises(ConfigError, match="at least 2 values, got 1"):
        group_advantages([5.0])


def test_every_golden_of_the_reference_is_reproduced_or_rejected_with_a_reason():
    path = Path(__file__).parents[5] / "shared" / "reference" / "goldens.json"
    if not path.exists():
        pytest.skip(f"the reference numbers are not in {path.parent}")
    goldens = json.loads(path.read_text())
    written = {
        **{name: [golden.loss, golden.gradients] for name, golden in LOSSES.items()},
        **{name: list(row[-2:]) for name, row in REINFORCE.items()},
        **{name: row[1] for name, row in (TIS_WEIGHTS | ADVANTAGES).items()},
        **{name: list(row[2:]) for name, row in KL.items()},
        **DOCUMENT_003,
        **POOLED,
    }

    ours = {name: value for name, value in goldens.items() if not name.startswith("igpo ")}
    assert set(ours) == set(written) | set(REJECTED)
    for name, value in written.items():
        assert flat(goldens[name]) == flat(value), name


def flat(value):
    if isinstance(value, list | tuple):
        return [sample for part in value for sample in flat(part)]
    assert math.isfinite(value)
    return [float(value)]
