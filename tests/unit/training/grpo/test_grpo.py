"""The small library of document 002, row by row of the semantics reference (T179 to T200)."""

import dataclasses
import itertools
import math

import pytest
import torch
import transformers
from torch import nn

from hearth.errors import ConfigError, NumericsError
from training.grpo import (
    GroupRewards,
    GroupSample,
    GRPOConfig,
    GRPOPipeline,
    GRPOTrainer,
    TorchPolicy,
    TrainingMetrics,
    causal_lm_logprobs,
)
from training.quickstart import MODEL
from training.rewards import RewardEnsemble

LETTERS = "abcd"


def letter_policy(logits=(0.0, 0.0, 0.0, 0.0)) -> TorchPolicy:
    """Samples each letter alone, whatever stands before it: four logits are all of it."""
    module = nn.Module()
    module.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def token_logprobs(module: nn.Module, prompt: str, completion: str) -> torch.Tensor:
        sampled = torch.tensor([LETTERS.index(token) for token in completion], dtype=torch.int64)
        return torch.log_softmax(module.logits, dim=0)[sampled]

    return TorchPolicy(module, token_logprobs)


def probabilities(policy: TorchPolicy) -> list[float]:
    return torch.softmax(policy.module.logits, dim=0).tolist()


def group(*completions: str, rewards=(1.0, 0.0)) -> GroupSample:
    return GRPOTrainer(GRPOConfig()).compute_advantages(
        GroupSample("p", list(completions), list(rewards))
    )


def trainer(policy: TorchPolicy | None = None, reference=None, **changes) -> GRPOTrainer:
    return GRPOTrainer(GRPOConfig(**changes), policy, reference)


# The config and the samples.


def test_t179_the_config_has_the_documents_defaults_first():
    first = itertools.islice(dataclasses.astuple(GRPOConfig()), 5)

    assert list(first) == [4, 0.1, 1e-6, 0.2, 1.0]
    assert GRPOConfig(8, 0.2, 1e-5, 0.1, 0.5).group_size == 8


def test_t179_every_problem_of_a_config_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        trainer(group_size=0, kl_coeff=-1.0, learning_rate=math.nan, updates_per_batch=0)

    assert str(refused.value).splitlines() == [
        "group_size must be >= 1, got 0",
        "updates_per_batch must be >= 1, got 0",
        "kl_coeff must be finite and >= 0, got -1.0",
        "learning_rate must be finite and >= 0, got nan",
    ]


def test_t180_samples_share_no_lists():
    first, other = GroupSample("p"), GroupSample("p")

    first.completions.append("c")
    first.rewards.append(1.0)
    first.advantages.append(1.0)

    assert (other.prompt, other.completions, other.rewards, other.advantages) == ("p", [], [], [])


# Advantages and the loss on numbers.


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1, 0, 0, 1], [1, -1, -1, 1]),
        ([1, 0, 0, 0], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ([1, 2, 3, 4], [-1.3416408, -0.4472136, 0.4472136, 1.3416408]),
        ([2, 2, 2], [0, 0, 0]),
        ([0.3] * 7, [0] * 7),
        ([5], [0]),
    ],
    ids=["t181", "t181-one-of-four", "t182", "t183-uniform", "t183-noise", "t183-single"],
)
def test_t181_to_t183_advantages_are_in_population_deviations(rewards, advantages):
    sample = GroupSample("p", rewards=rewards)

    assert trainer().compute_advantages(sample) is sample
    assert sample.advantages == pytest.approx(advantages, abs=1e-7)


@pytest.mark.parametrize("rewards", [[], [math.nan], [1.0, math.inf]])
def test_t184_rewards_that_give_no_advantage_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards"):
        trainer().compute_advantages(GroupSample("p", rewards=rewards))


@pytest.mark.parametrize(
    ("log_probs", "references", "advantages", "loss"),
    [
        ([-1, -2], [-1.5, -1.5], [1, -1], -0.5),
        ([-1, -2, -0.5], [-1.2, -1.9, -0.5], [1, -1, 0], -0.33),
    ],
)
def test_t185_the_loss_is_the_policy_term_plus_the_weighted_kl(
    log_probs, references, advantages, loss
):
    assert trainer().compute_loss(log_probs, references, advantages) == pytest.approx(loss)


def test_t186_the_kl_grows_with_its_coefficient_and_0_removes_it():
    arguments = ([-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0])
    losses = [trainer(kl_coeff=kl_coeff).compute_loss(*arguments) for kl_coeff in (0.1, 0.2, 0.4)]
    with pytest.warns(UserWarning, match="kl_coeff is 0"):
        without = trainer(kl_coeff=0.0).compute_loss(*arguments)

    assert losses == pytest.approx([without - 0.25 * kl_coeff for kl_coeff in (0.1, 0.2, 0.4)])
    assert without == pytest.approx((1.0 - 2.0) / 2)


@pytest.mark.parametrize("lengths", [(2, 2, 1), (2, 1, 2), (1, 2, 2), (0, 0, 0)])
def test_t187_lists_of_different_lengths_are_refused(lengths):
    with pytest.raises(ConfigError, match=", ".join(map(str, lengths[:2]))):
        trainer().compute_loss(*([-1.0] * length for length in lengths))


# The pipeline.


def pipeline(reward=lambda prompt, text: float(len(text)), **changes) -> GRPOPipeline:
    return GRPOPipeline(GRPOConfig(**changes), reward)


def test_t188_a_pipeline_has_its_trainer_and_empty_metrics():
    made = pipeline()

    assert isinstance(made.trainer, GRPOTrainer)
    assert made.trainer.config is made.config
    assert made.metrics == TrainingMetrics()


def test_t189_metrics_begin_empty_and_share_no_lists():
    first, other = TrainingMetrics(), TrainingMetrics()
    lists = [(vars(first)[name], vars(other)[name]) for name in vars(first)]

    assert len(lists) == 5
    assert all(left == [] and left is not right for left, right in lists)


def test_t190_and_t191_a_group_is_sampled_scored_and_has_advantages():
    texts = iter(["aa", "b", "cc", "d"])
    sampled, scored = [], []

    def generate(prompt: str) -> str:
        sampled.append(prompt)
        return next(texts)

    def reward(prompt: str, text: str) -> int:
        scored.append((prompt, text))
        return len(text)

    sample = pipeline(reward).generate_group("p", generate)

    assert sampled == ["p"] * 4
    assert scored == [("p", "aa"), ("p", "b"), ("p", "cc"), ("p", "d")]
    assert sample.rewards == [2.0, 1.0, 2.0, 1.0]
    assert sample.advantages == [1.0, -1.0, 1.0, -1.0]


def test_t192_and_t193_a_step_appends_itself_and_the_mean_of_the_groups_means():
    texts = itertools.cycle(["", "a"])
    made = pipeline(lambda prompt, text: len(text) if prompt == "mixed" else 1.0)

    means = [made.train_step(["mixed", "even"], lambda _: next(texts), step) for step in (3, 4)]

    assert means == [0.75, 0.75]
    assert (made.metrics.steps, made.metrics.rewards) == ([3, 4], means)
    # Nobody says what the logprobs are.
    assert (made.metrics.losses, made.metrics.kl_values) == ([], [])


def test_t193_with_functions_for_logprobs_a_step_has_loss_and_kl():
    made = GRPOPipeline(
        GRPOConfig(group_size=2),
        lambda prompt, text: float(text == "a"),
        log_prob_fn=lambda prompt, text: -1.0 if text == "a" else -2.0,
        ref_log_prob_fn=lambda prompt, text: -1.5,
    )
    texts = iter("ab")

    made.train_step(["p"], lambda _: next(texts), 1)

    assert made.metrics.losses == pytest.approx([-0.5])
    assert made.metrics.kl_values == pytest.approx([0.0])


def test_t193_a_step_that_fails_leaves_no_metrics():
    made = pipeline(lambda prompt, text: math.nan if text == "z" else 1.0)
    texts = iter("aaaaaaaz")

    with pytest.raises(ConfigError, match="finite"):
        made.train_step(["p", "q"], lambda _: next(texts), 1)

    assert made.metrics == TrainingMetrics()


def test_t194_a_step_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="prompts must hold at least one"):
        pipeline().train_step([], lambda prompt: "a", 1)


def test_t198_the_rewards_of_every_group_are_kept():
    texts = iter(["", "a", "", "a", "bb", "bb", "bb", "bb"])
    made = pipeline()

    made.train_step(["p", "q"], lambda _: next(texts), 7)

    assert made.metrics.groups == [
        GroupRewards(7, "p", (0.0, 1.0, 0.0, 1.0)),
        GroupRewards(7, "q", (2.0,) * 4),
    ]
    assert [(group.mean, group.std) for group in made.metrics.groups] == [(0.5, 0.5), (2.0, 0.0)]


def test_t198_what_an_ensembles_members_disagree_by_is_kept_beside_the_rewards():
    rows = {"p": {"ground_truth": "aa"}}
    ensemble = RewardEnsemble(
        [lambda text, row: float(text == row["ground_truth"]), lambda text, row: len(text) / 2]
    )
    made = GRPOPipeline(
        GRPOConfig(group_size=2), lambda prompt, text: ensemble.score(text, rows[prompt])
    )
    texts = iter(["aa", "bb"])

    made.train_step(["p"], lambda _: next(texts), 1)

    assert made.metrics.groups == [GroupRewards(1, "p", (1.0, 0.5), (0.0, 0.5))]


@pytest.mark.parametrize(("prompts", "size"), [(1, 2), (3, 4), (2, 16)])
def test_t199_generation_calls_are_prompts_times_group_size(prompts, size):
    calls = []

    pipeline(group_size=size).train_step(["p"] * prompts, lambda p: calls.append(p) or "a", 1)

    assert len(calls) == prompts * size


def test_t200_advantages_that_are_only_centered_warn():
    with pytest.warns(UserWarning, match="normalize_advantages is False"):
        centering = trainer(normalize_advantages=False)

    sample = centering.compute_advantages(GroupSample("p", rewards=[1, 2, 3, 6]))
    assert sample.advantages == [-2.0, -1.0, 0.0, 3.0]


# T195: updates of a torch model.


def test_t195_the_first_update_has_the_gradient_of_the_documents_loss():
    policy = letter_policy((0.3, -0.2, 0.0, 0.1))
    # k1, because the document's KL is; where policy and reference agree its value is 0.
    made = trainer(policy, learning_rate=0.0, kl_estimator="k1", max_grad_norm=0.0)
    two = group("a", "b")

    result = made.update([two])

    rows = torch.stack([policy.logprobs("p", completion)[0] for completion in two.completions])
    literal = (-torch.tensor(two.advantages) * rows).mean() + 0.1 * rows.mean()
    (expected,) = torch.autograd.grad(literal, policy.module.logits)
    assert policy.module.logits.grad.tolist() == pytest.approx(expected.tolist())
    assert result.grad_norm == pytest.approx(float(expected.norm()))
    assert (result.loss, result.kl, result.clip_fraction) == (pytest.approx(0.0), 0.0, 0.0)


@pytest.mark.slow
def test_t195_the_clip_stops_what_has_moved_far_enough():
    def after(clip_range: float) -> tuple[float, float]:
        policy = letter_policy()
        made = trainer(
            policy, clip_range=clip_range, learning_rate=0.1, kl_coeff=1e-9, updates_per_batch=20
        )
        result = made.update([group("a", "b")])
        return probabilities(policy)[0] / 0.25, result.clip_fraction

    near, wide = after(0.2), after(10.0)

    # The ratio coasts on Adam's momentum once the clip has taken the gradient.
    assert 1.2 < near[0] < 1.8
    assert near[1] == 1.0
    assert wide[0] > 2.0
    assert wide[1] == 0.0


def test_t195_gradients_are_clipped_to_max_grad_norm():
    def gradient(most: float) -> tuple[float, float]:
        policy = letter_policy()
        result = trainer(policy, max_grad_norm=most, learning_rate=0.0).update([group("a", "b")])
        return float(policy.module.logits.grad.norm()), result.grad_norm

    free, clipped = gradient(0.0), gradient(0.01)

    assert free[0] == pytest.approx(free[1])
    assert clipped == (pytest.approx(0.01, rel=1e-3), free[1])


def test_t195_every_completion_weighs_the_same_whatever_its_length():
    policy = letter_policy()
    made = trainer(policy, learning_rate=0.0, max_grad_norm=0.0)

    made.update([group("aaaa", "b")])

    assert policy.module.logits.grad.tolist() == pytest.approx([-0.5, 0.5, 0.0, 0.0])


def test_t195_groups_one_by_one_give_the_gradient_of_all_together():
    policy = letter_policy((0.3, -0.2, 0.0, 0.1))
    made = trainer(policy, learning_rate=0.0, max_grad_norm=0.0)
    groups = [group("a", "b"), group("cc", "ad", "b", rewards=(0.0, 0.5, 1.0))]

    made.update(groups)
    both = policy.module.logits.grad.clone()
    parts = []
    for part in groups:
        made.update([part])
        parts.append(policy.module.logits.grad.clone())

    made.update([*groups, GroupSample("nothing sampled")])

    assert policy.module.logits.grad.tolist() == both.tolist()
    assert both.tolist() == pytest.approx((2 / 5 * parts[0] + 3 / 5 * parts[1]).tolist())


@pytest.mark.slow
def test_t195_a_policy_learns_what_is_rewarded():
    torch.manual_seed(0)
    policy = letter_policy()
    made = GRPOPipeline(
        GRPOConfig(group_size=8, learning_rate=0.1, kl_coeff=0.01),
        lambda prompt, text: float(text == "c"),
        policy=policy,
    )

    def generate(prompt: str) -> str:
        return LETTERS[int(torch.multinomial(torch.softmax(policy.module.logits, 0), 1))]

    rewards = [made.train_step(["p", "q"], generate, step) for step in range(40)]

    assert sum(rewards[:5]) / 5 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.9
    assert len(made.metrics.losses) == len(made.metrics.kl_values) == 40
    assert made.metrics.kl_values[0] == 0.0
    assert made.metrics.kl_values[-1] > 0.5


def test_t195_empty_completions_train_nothing():
    policy = letter_policy()

    result = trainer(policy).update([group("", "")])

    assert (result.loss, result.kl, result.grad_norm) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": []}, "at least one completion"),
        ({"groups": [GroupSample("p", ["a"], [1.0])]}, "call compute_advantages"),
    ],
)
def test_t195_groups_that_cannot_be_trained_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        trainer(letter_policy()).update(**change)


def test_t195_a_trainer_without_a_policy_updates_nothing():
    with pytest.raises(ConfigError, match="policy must be given to update"):
        trainer().update([group("a", "b")])
    with pytest.raises(ConfigError, match="policy must be given with a reference"):
        trainer(None, letter_policy())


def test_t195_a_gradient_that_is_not_finite_takes_no_step():
    policy = letter_policy((1.0, 2.0, 3.0, 4.0))
    policy.module.logits.register_hook(lambda gradient: gradient * math.inf)

    with pytest.raises(NumericsError, match="gradient norm must be finite"):
        trainer(policy, learning_rate=0.1).update([group("a", "b")])

    assert policy.module.logits.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert policy.module.logits.grad is None


# T196 and T197: the reference.


def test_t196_a_kl_coefficient_of_0_warns_and_trains_without_a_reference():
    policy = letter_policy()
    with pytest.warns(UserWarning, match="kl_coeff is 0"):
        made = trainer(policy, kl_coeff=0.0, learning_rate=0.1)

    result = made.update([group("a", "b")])

    assert made.reference is None
    assert result.kl == 0.0
    assert probabilities(policy)[0] > 0.25


def test_t197_the_reference_stays_as_it_was():
    policy = letter_policy()
    made = trainer(policy, learning_rate=0.1, kl_coeff=0.5)
    before = probabilities(made.reference)

    for _ in range(5):
        made.update([group("a", "b")])

    assert probabilities(made.reference) == before != probabilities(policy)
    assert made.reference.trainable() == []


def test_t197_the_kl_pulls_the_policy_toward_a_given_reference():
    policy, reference = letter_policy((0.0, 0.0, 1.0, 0.0)), letter_policy()
    made = trainer(policy, reference, learning_rate=0.05, kl_coeff=1.0)
    even = group("c", "c", rewards=(1.0, 1.0))
    before = probabilities(policy)[2]

    made.update([even])

    assert 0.25 < probabilities(policy)[2] < before
    assert probabilities(reference) == [0.25] * 4


def test_t197_a_reference_that_would_move_along_is_refused():
    policy = letter_policy()

    with pytest.raises(ConfigError, match="reference must share no trained parameter"):
        trainer(policy, policy)
    with pytest.raises(ConfigError, match="requires a gradient, got none"):
        trainer(policy.frozen())


# A target for the KL.


def drift(kl_target: float | None) -> tuple[float, float]:
    """Of a policy rewarded for one letter: its probability at the end, and the weight of the KL."""
    policy = letter_policy()
    made = trainer(policy, learning_rate=0.05, kl_coeff=0.01, kl_target=kl_target)
    for _ in range(60):
        made.update([group("a", "b")])
    return probabilities(policy)[0], made.kl_coeff


@pytest.mark.slow
def test_a_kl_above_its_target_raises_the_weight_of_the_kl_and_holds_the_policy_back():
    free, fixed = drift(None)
    held, raised = drift(0.05)

    assert fixed == 0.01 < 0.02 < raised
    assert 0.25 < held < free


def test_a_kl_below_its_target_lowers_the_weight_of_the_kl_where_others_train_too():
    made = GRPOPipeline(
        GRPOConfig(group_size=2, kl_target=0.1),
        lambda prompt, text: float(text == "a"),
        log_prob_fn=lambda prompt, text: -1.5,
        ref_log_prob_fn=lambda prompt, text: -1.5,
    )
    texts = itertools.cycle("ab")

    losses = [made.train_step(["p"], lambda _: next(texts), step) for step in range(2)]

    assert losses == [0.5, 0.5]
    assert made.trainer.kl_coeff == pytest.approx(0.1 * 0.98**2)
    assert made.trainer.compute_loss([-1.0], [-2.0], [0.0]) == pytest.approx(0.1 * 0.98**2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_target": 0.0}, "kl_target must be finite and > 0 or None, got 0.0"),
        ({"kl_target": math.nan}, "kl_target must be finite and > 0 or None, got nan"),
        ({"kl_target": 1.0, "kl_coeff": 0.0}, "kl_coeff must be > 0 with a kl_target"),
    ],
)
def test_a_target_that_nothing_can_follow_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**changes)


# A causal language model.


@pytest.fixture(scope="module")
def language_model() -> TorchPolicy:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return TorchPolicy(model, causal_lm_logprobs(tokenizer, add_special_tokens=False))


def test_a_causal_models_logprobs_are_those_of_the_completions_tokens(language_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    start = tokenizer.encode("20 + 22", add_special_tokens=False)
    sampled = tokenizer.encode(" = 42", add_special_tokens=False)

    row = language_model.logprobs("20 + 22", " = 42")

    logits = language_model.module(input_ids=torch.tensor([start + sampled])).logits[0].detach()
    expected = [
        float(logits[len(start) - 1 + place].log_softmax(0)[token])
        for place, token in enumerate(sampled)
    ]
    assert row.tolist() == pytest.approx(expected, abs=1e-5)
    assert language_model.logprobs("20 + 22", "").shape == (0,)
    with pytest.raises(ConfigError, match="prompt must have at least one token"):
        language_model.logprobs("", "a")


@pytest.mark.slow
def test_t195_and_t197_a_causal_model_moves_toward_its_reward_and_its_reference_does_not(
    language_model,
):
    policy = TorchPolicy(
        language_model.frozen().module.requires_grad_(True), language_model.token_logprobs
    )
    made = GRPOPipeline(
        GRPOConfig(group_size=2, learning_rate=1e-3),
        lambda prompt, text: float(text == "42"),
        policy=policy,
    )
    texts = itertools.cycle(["42", "17"])
    before = [
        float(policy.logprobs("20 + 22 = ", answer).sum().detach()) for answer in ("42", "17")
    ]

    made.train_step(["20 + 22 = "], lambda _: next(texts), 1)

    after = [float(policy.logprobs("20 + 22 = ", answer).sum().detach()) for answer in ("42", "17")]
    assert after[0] - after[1] > before[0] - before[1]
    started = language_model.module.state_dict()
    kept = made.trainer.reference.module.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in started.items())


def test_rows_that_are_not_one_value_per_token_are_refused():
    policy = TorchPolicy(letter_policy().module, lambda module, prompt, text: module.logits.sum())

    with pytest.raises(ConfigError, match=r"one value per token, \[T\], got shape \[\]"):
        policy.logprobs("p", "a")


def test_functions_for_logprobs_come_in_pairs_and_without_a_policy():
    with pytest.raises(ConfigError, match="must be given both"):
        GRPOPipeline(GRPOConfig(), lambda *_: 1.0, log_prob_fn=lambda *_: -1.0)
    with pytest.raises(ConfigError, match="log_prob_fn must be None with a policy"):
        GRPOPipeline(
            GRPOConfig(),
            lambda *_: 1.0,
            policy=letter_policy(),
            log_prob_fn=lambda *_: -1.0,
            ref_log_prob_fn=lambda *_: -1.0,
        )
