"""Document 002: its classes, whose indentation was lost, run once they have it again.

Ours of the same names (``training.grpo``) go through the same tests, and agree with them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random

import pytest
from tests.documents import extraction

import training.grpo
from hearth.sdk import DeploymentSampler
from training.quickstart import MODEL
from training.utils import DeployConfig, setup_deployment

USAGE, EXAMPLES, TIPS = "Basic Usage", "Real-World Examples", "Advanced Tips"
BASE = "accounts/fireworks/models/qwen3-8b"


CLASSES = ("GRPOConfig", "GroupSample", "GRPOTrainer", "TrainingMetrics", "GRPOPipeline")


@pytest.fixture(scope="module")
def documented(document):
    """The namespace behind both snippets."""
    text = document("002").text
    names = {"__name__": "library"}
    for first, last in ((USAGE, EXAMPLES), (EXAMPLES, TIPS)):
        extraction.execute(extraction.reindented(extraction.between(text, first, last)), names)
    return names


@pytest.fixture(scope="module", params=["documented", "ours"])
def library(request, documented):
    """The document's classes, then ours."""
    return documented if request.param == "documented" else vars(training.grpo)


def test_ours_has_every_class_with_the_documents_fields_first(documented):
    for name in CLASSES:
        theirs, ours = documented[name], vars(training.grpo)[name]
        if not dataclasses.is_dataclass(theirs):
            continue
        made = [kind("p") if name == "GroupSample" else kind() for kind in (theirs, ours)]
        expected = list(vars(made[0]).items())
        assert list(vars(made[1]).items())[: len(expected)] == expected


def test_ours_takes_what_the_documents_methods_take(documented):
    for name in CLASSES[2::2]:
        for method, function in inspect.getmembers(documented[name], inspect.isfunction):
            ours = inspect.signature(vars(vars(training.grpo)[name])[method])
            wanted = list(inspect.signature(function).parameters)
            assert list(ours.parameters)[: len(wanted)] == wanted
            ours.bind(*wanted)


def test_ours_computes_the_documents_numbers(documented):
    rng = random.Random(2)
    theirs, ours = (
        namespace["GRPOTrainer"](namespace["GRPOConfig"](kl_coeff=0.3))
        for namespace in (documented, vars(training.grpo))
    )
    for size in range(1, 9):
        rewards = [rng.choice([0.0, 0.3, 1.0]) for _ in range(size)]
        numbers = [[-3 * rng.random() for _ in range(size)] for _ in range(2)]
        left = theirs.compute_advantages(documented["GroupSample"]("p", rewards=rewards))
        right = ours.compute_advantages(training.grpo.GroupSample("p", rewards=rewards))
        losses = [module.compute_loss(*numbers, left.advantages) for module in (theirs, ours)]

        assert right.advantages == pytest.approx(left.advantages, abs=1e-7)
        assert losses[1] == pytest.approx(losses[0])


def test_the_config_has_the_documents_defaults(library):
    config = library["GRPOConfig"]()

    values = (config.group_size, config.kl_coeff, config.learning_rate, config.clip_range)
    assert (*values, config.max_grad_norm) == (4, 0.1, 1e-6, 0.2, 1.0)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1, 0, 0, 1], [1, -1, -1, 1]),
        ([1, 0, 0, 0], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ([1, 2, 3, 4], [-1.3416408, -0.4472136, 0.4472136, 1.3416408]),
        ([2, 2, 2], [0, 0, 0]),
        ([5], [0]),
    ],
)
def test_advantages_are_centered_and_divided_by_the_population_deviation(
    library, rewards, advantages
):
    trainer = library["GRPOTrainer"](library["GRPOConfig"]())
    sample = library["GroupSample"]("a prompt", rewards=rewards)

    assert trainer.compute_advantages(sample) is sample
    assert sample.advantages == pytest.approx(advantages, abs=1e-6)


def test_the_loss_is_the_policy_term_plus_the_weighted_kl(library):
    trainer = library["GRPOTrainer"](library["GRPOConfig"](kl_coeff=0.5))

    loss = trainer.compute_loss([-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0])

    assert loss == pytest.approx((1.0 - 2.0) / 2 + 0.5 * (0.5 - 1.0) / 2)


def test_samples_and_metrics_share_no_lists(library):
    for make in (lambda: library["GroupSample"]("p"), library["TrainingMetrics"]):
        first, other = make(), make()
        lists = [name for name, value in vars(first).items() if isinstance(value, list)]
        assert len(lists) >= 3
        assert all(getattr(first, name) is not getattr(other, name) for name in lists)


def test_a_training_step_samples_groups_and_records_their_mean_reward(library):
    calls = []
    texts = iter(["aa", "b", "cc", "d", "ee", "ff", "gg", "hh"])
    pipeline = library["GRPOPipeline"](
        library["GRPOConfig"](), lambda prompt, text: float(len(text) == 2)
    )

    mean = pipeline.train_step(["p", "q"], lambda prompt: calls.append(prompt) or next(texts), 7)

    assert calls == ["p"] * 4 + ["q"] * 4
    assert mean == pytest.approx((0.5 + 1.0) / 2)
    assert (pipeline.metrics.steps, pipeline.metrics.rewards) == ([7], [mean])


def test_its_pipeline_samples_from_a_deployment(library, platform):
    import transformers

    deployments = platform.deployments()
    config = DeployConfig(deployment_id="pipeline", tokenizer_model=str(MODEL))
    info = setup_deployment(deployments, config, BASE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    sampler = DeploymentSampler(deployments.inference_url, info.inference_model, "x", tokenizer)

    def generate(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return sampler.sample_with_tokens(messages, max_tokens=16)[0].text

    pipeline = library["GRPOPipeline"](library["GRPOConfig"](), lambda _, text: float(len(text)))
    group = pipeline.generate_group("What is 20 + 22?", generate)
    sampler.close()
    deployments.close()

    assert len(group.completions) == 4
    assert all(text for text in group.completions)
    assert math.isclose(sum(group.advantages), 0.0, abs_tol=1e-9)
