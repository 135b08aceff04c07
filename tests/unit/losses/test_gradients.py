"""Every objective against a slow float64 reference: plain loops, derivatives taken by hand."""

import math

import pytest
import torch

from hearth.losses import (
    CISPO,
    DAPO,
    DRO,
    GRPO,
    GSPO,
    GSPO_PRESETS,
    TIS,
    CISPOMask,
    CrossEntropy,
    ImportanceSampling,
    Reinforce,
    TokenBatch,
    policy_loss_per_token,
)

pytestmark = pytest.mark.slow

CASES = {
    "grpo": ("grpo", GRPO(kl_beta=0.0)),
    "grpo-k1": ("grpo", GRPO(kl_beta=0.3, kl_estimator="k1")),
    "grpo-k2": ("grpo", GRPO(kl_beta=0.3, kl_estimator="k2", eps_clip_high=0.4)),
    "grpo-k3": ("grpo", GRPO(kl_beta=0.3, eps_clip=0.1)),
    "importance_sampling": ("importance_sampling", ImportanceSampling()),
    "importance_sampling-clipped": (
        "importance_sampling",
        ImportanceSampling(ratio_min=0.7, ratio_max=1.2),
    ),
    "reinforce": ("reinforce", Reinforce()),
    "reinforce-k3": ("reinforce", Reinforce(kl_beta=0.2)),
    "dapo": ("dapo", DAPO()),
    "dapo-dual": ("dapo", DAPO(eps_clip_c=1.4)),
    "dro": ("dro", DRO(beta=0.7)),
    "dro-gated": ("dro", DRO(beta=0.7, gated=True)),
    "gspo": ("gspo", GSPO()),
    "gspo-paper": ("gspo", GSPO_PRESETS["paper"]),
    "cispo": ("cispo", CISPO()),
    "cispo_mask": ("cispo_mask", CISPOMask()),
    "cross_entropy": ("cross_entropy", CrossEntropy()),
}
TIS_CASES = {
    "no-tis": None,
    "token": TIS(cap=1.3),
    "icepop": TIS(icepop_threshold=1.5),
    "product": TIS(level="sequence"),
    "geometric": TIS(cap=1.1, level="sequence", sequence_mean="geometric"),
}


def clip(value, low, high):
    return min(max(value, low), high)


def surrogate(ratio, advantage, low, high, dual=None):
    """Loss and its derivative in the log of the ratio."""
    free, clipped = -ratio * advantage, -clip(ratio, 1 - low, 1 + high) * advantage
    loss, slope = (free, free) if free >= clipped else (clipped, 0.0)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        return -dual * advantage, 0.0
    return loss, slope


def term(config, t, sample, weight):
    """Policy term of token ``t``, times its weight, and the derivative in its policy logprob."""
    policy, old, advantage = sample["policy"][t], sample["old"][t], sample["advantages"][t]
    ratio = math.exp(policy - old)
    match config:
        case GRPO():
            high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
            loss, slope = surrogate(ratio, advantage, config.eps_clip, high)
        case DAPO():
            loss, slope = surrogate(
                ratio, advantage, config.eps_clip, config.eps_clip_high, config.eps_clip_c
            )
        case ImportanceSampling():
            low = 0.0 if config.ratio_min is None else config.ratio_min
            high = math.inf if config.ratio_max is None else config.ratio_max
            loss = -clip(ratio, low, high) * advantage
            slope = -ratio * advantage if low <= ratio <= high else 0.0
        case Reinforce():
            loss = slope = -math.exp(policy - sample["behavior"][t]) * advantage
        case DRO():
            beta = 0.0 if config.gated and advantage == 0 else config.beta
            loss = -weight * policy * advantage + 0.5 * beta * (policy - old) ** 2
            return loss, -weight * advantage + beta * (policy - old)
        case GSPO():
            active = [i for i, is_active in enumerate(sample["mask"]) if is_active]
            logs = [sample["policy"][i] - sample["old"][i] for i in active]
            loss, slope = surrogate(
                math.exp(sum(logs) / len(logs)),
                advantage,
                config.clip_ratio_low,
                config.clip_ratio_high,
            )
        case CISPOMask():
            beyond = ratio > 1.28 if advantage > 0 else ratio < 0.8 and advantage < 0
            loss = slope = 0.0 if beyond else -ratio * advantage
        case CISPO():
            slope = -clip(ratio, 0.8, 1.28) * advantage
            loss = slope * policy
        case CrossEntropy():
            loss, slope = -advantage * policy, -advantage
    return weight * loss, weight * slope


def kl(config, policy, ref):
    match config.kl_estimator:
        case "k1":
            return policy - ref, 1.0
        case "k2":
            return 0.5 * (policy - ref) ** 2, policy - ref
    return math.exp(ref - policy) - (ref - policy) - 1, 1 - math.exp(ref - policy)


def tis_weight(tis, t, sample):
    if tis is None:
        return 1.0
    logs = [old - mu for old, mu in zip(sample["old"], sample["behavior"], strict=True)]
    if tis.level == "token":
        ratio = math.exp(logs[t])
    else:
        active = [log for log, is_active in zip(logs, sample["mask"], strict=True) if is_active]
        count = len(active) if tis.sequence_mean == "geometric" else 1
        ratio = math.exp(sum(active) / count)
    if tis.icepop_threshold is not None:
        threshold = tis.icepop_threshold
        return ratio if 1 / threshold <= ratio <= threshold else 0.0
    return min(ratio, tis.cap)


def slow_reference(config, tis, samples):
    losses, slopes = [], []
    for sample in samples:
        for t, is_active in enumerate(sample["mask"]):
            loss = slope = 0.0
            if is_active:
                loss, slope = term(config, t, sample, tis_weight(tis, t, sample))
                if getattr(config, "kl_beta", 0.0):
                    value, pull = kl(config, sample["policy"][t], sample["ref"][t])
                    loss, slope = loss + config.kl_beta * value, slope + config.kl_beta * pull
            losses.append(loss)
            slopes.append(slope)
    return losses, slopes


@pytest.mark.parametrize("tis", TIS_CASES.values(), ids=TIS_CASES)
@pytest.mark.parametrize(("name", "config"), CASES.values(), ids=CASES)
def test_loss_and_gradient_equal_the_slow_reference(name, config, tis, random_samples, batch_of):
    for seed in range(12):
        samples = random_samples(seed)
        batch, leaf = batch_of(samples)

        per_token = policy_loss_per_token(name, batch, config, tis).per_token
        (gradient,) = torch.autograd.grad(per_token.sum(), leaf)

        losses, slopes = slow_reference(config, tis, samples)
        assert per_token.tolist() == pytest.approx(losses, rel=1e-11, abs=1e-12)
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize(("name", "config"), CASES.values(), ids=CASES)
def test_float32_agrees_with_the_float64_reference_to_float32_precision(
    name, config, random_samples, batch_of
):
    for seed in range(12, 18):
        samples = random_samples(seed)
        batch, leaf = batch_of(samples, torch.float32)

        output = policy_loss_per_token(name, batch, config)
        (gradient,) = torch.autograd.grad(output.per_token.sum(), leaf)

        _, slopes = slow_reference(config, None, samples)
        assert output.per_token.dtype == gradient.dtype == torch.float32
        assert gradient.tolist() == pytest.approx(slopes, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize(("name", "config"), CASES.values(), ids=CASES)
def test_without_old_logprobs_the_ratio_is_exactly_one(name, config, random_samples, batch_of):
    samples = random_samples(3)
    on_policy = [{**sample, "old": sample["policy"]} for sample in samples]
    batch, leaf = batch_of(samples, without=["old"])

    per_token = policy_loss_per_token(name, batch, config).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf)

    losses, slopes = slow_reference(config, None, on_policy)
    assert per_token.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-13)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-13)


def test_reinforce_without_behavior_logprobs_is_plain(random_samples, batch_of):
    samples = random_samples(5)
    batch, leaf = batch_of(samples, without=["behavior"])

    per_token = policy_loss_per_token("reinforce", batch).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf)

    slopes = [
        -advantage * is_active
        for sample in samples
        for advantage, is_active in zip(sample["advantages"], sample["mask"], strict=True)
    ]
    expected = [slope * row for slope, row in zip(slopes, leaf.tolist(), strict=True)]
    assert per_token.tolist() == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["grpo", "reinforce", "dro"])
def test_tis_scales_the_policy_term_and_leaves_kl_and_pull_alone(
    name, level, random_samples, batch_of
):
    config = {"grpo": GRPO(kl_beta=0.5), "reinforce": Reinforce(kl_beta=0.5), "dro": DRO(beta=0.5)}
    zero_weight = TIS(cap=0.0, level=level)
    samples = random_samples(7)
    idle = [{**sample, "advantages": [0.0] * len(sample["mask"])} for sample in samples]
    batch, idle_batch = batch_of(samples)[0], batch_of(idle)[0]

    switched_off = policy_loss_per_token(name, batch, config[name], zero_weight).per_token
    penalty_only = policy_loss_per_token(name, idle_batch, config[name]).per_token

    assert float(penalty_only.detach().abs().sum()) > 0
    assert torch.allclose(switched_off, penalty_only, atol=1e-15)


@pytest.mark.parametrize("name", ["importance_sampling", "gspo", "reinforce"])
def test_ratios_far_beyond_the_guard_stay_finite_and_stop_moving(name, batch_of):
    sample = {"policy": [-1.0, -1.0], "ref": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    sample |= {"old": [-900.0, -1.0], "behavior": [-900.0, -1.0], "mask": [1.0, 1.0]}
    batch, leaf = batch_of([sample], torch.float32)

    per_token = policy_loss_per_token(name, batch).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf)

    assert torch.isfinite(per_token).all()
    assert gradient[0] == 0


@pytest.mark.parametrize(("log_ratio", "value", "moves"), [(5.0, 5.0, True), (12.0, 10.0, False)])
def test_the_sequence_ratio_is_guarded_at_ten_and_stops_moving_there(
    log_ratio, value, moves, batch_of
):
    old = [-1.0 - log_ratio] * 2
    sample = {"policy": [-1.0, -1.0], "old": old, "advantages": [-1.0, -1.0], "mask": [1.0, 1.0]}
    batch, leaf = batch_of([sample], without=["behavior", "ref"])

    per_token = policy_loss_per_token("gspo", batch).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf)

    assert per_token.tolist() == pytest.approx([math.exp(value)] * 2)
    assert gradient.tolist() == pytest.approx([math.exp(value) if moves else 0.0] * 2)


def test_only_policy_logprobs_carry_a_gradient():
    row = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = TokenBatch.concat(
        [row],
        advantages=[row * 2],
        mask=[torch.ones(2)],
        old_logprobs=[row],
        behavior_logprobs=[row],
        ref_logprobs=[row - 1],
    )

    per_token = policy_loss_per_token("grpo", batch, GRPO(kl_beta=0.5), TIS()).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), row)

    push = 0.5 * (1 - math.exp(-1))
    assert gradient.tolist() == pytest.approx([2 + push, 4 + push])
