"""The tool-use example: its own command, and its agent on models that recite what a test wants."""

import sys
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from tests.integration.runs import read_steps
from tests.unit.reciter import write_reciter
from transformers import AutoTokenizer

from hearth.errors import ConfigError
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager, DeploymentSampler
from hearth.sdk.capture.policy import request_seed
from hearth.sdk.sampling import completion_seed
from training.examples.rl.tool_use.agent import MAX_TURNS
from training.examples.rl.tool_use.calculator import SCHEMA
from training.examples.rl.tool_use.policy import make_policy
from training.examples.rl.tool_use.problems import problem_rows, split_problems
from training.examples.rl.tool_use.reward import tool_use_reward
from training.examples.rl.tool_use.rollout import make_rollout_fn
from training.examples.rl.tool_use.train import check_openai, command, default_config, with_policy
from training.rollouts.sampler import RolloutContext, current_rollout
from training.samples.rollout import RolloutRun, RolloutSetup, collect_runs

ROW = {"messages": [{"role": "user", "content": "2 + 3?"}], "ground_truth": "5"}
KEEPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|again|>{% else %}<|assistant|>{% endif %}"
)
"""Renders what was sampled as it was sampled."""
DROPS = KEEPS.replace("{{ m.content }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}")
"""Leaves out what stood before the calls of earlier turns, as reasoning models' templates do."""
CALLS_FOREVER = KEEPS.replace("<|again|>", "<|assistant|>")
"""Begins every answer with the cue of the first one."""
ANSWER = ["<answer>", "5", "</answer>"]


def call(body: str) -> list[str]:
    """A call as the reciter says it, after a thought."""
    return ["<think>", "a sum", "</think>", "\n", "<tool_call>", "\n" + body, "\n</tool_call>"]


RIGHT = call('{"name": "calculator", "arguments": {"expression": "2 + 3"}}')
FOLDERS = {
    "keeps": (RIGHT, KEEPS),
    "drops": (RIGHT, DROPS),
    "forever": (RIGHT, CALLS_FOREVER),
    "unreadable": (call('{"name": "calculator", "arguments": {"expression": "2 x 3"}}'), KEEPS),
    "stranger": (call('{"name": "oracle", "arguments": {}}'), KEEPS),
    "malformed": (call('{"name": "calculator", "arguments": {"expression": "2 + 3"'), KEEPS),
}
"""What is said first, and the chat template; after a tool's result follows ANSWER."""
CONTEXTS = {"no-room-for-a-result": 20, "no-room-at-all": 8}
"""Deployments of "keeps" that hold so many tokens; the first prompt has 9, the second 21."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: write_reciter(
            tmp_path_factory.mktemp(name),
            {"<|assistant|>": said, "<|again|>": ANSWER},
            chat_template=template,
        )
        for name, (said, template) in FOLDERS.items()
    }


@pytest.fixture(scope="module")
def platform(folders, tmp_path_factory):
    with EmbeddedPlatform(work_dir=tmp_path_factory.mktemp("platform")) as platform:
        deployments = DeploymentManager("key", platform.base_url)
        models = folders | dict.fromkeys(CONTEXTS, folders["keeps"])
        for name, folder in models.items():
            deployments.create_or_get(
                DeploymentConfig(
                    deployment_id=name,
                    base_model=str(folder),
                    tokenizer_model=str(folder),
                    max_context_length=CONTEXTS.get(name, 512),
                )
            )
        for name in models:
            deployments.wait_for_ready(name)
        yield platform


@pytest.fixture
def play(platform):
    """Call the example's rollout function once, on one of the deployments."""

    async def run(name: str, **options) -> RolloutRun:
        setup = RolloutSetup(
            tokenizer=None,
            tokenizer_id="",
            inference_base_url=platform.base_url,
            api_key="key",
            model=f"accounts/me/deployments/{name}",
            completions_per_prompt=1,
            sample_kwargs={
                "max_tokens": 32,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "max_seq_len": 512,
                "http_timeout": 30.0,
                "logprobs": True,
                **options,
            },
        )
        with setup.closing:
            (played,) = collect_runs(await make_rollout_fn(setup)(ROW), "a test")
            return played

    return run


@pytest.fixture
def text(folders):
    """Decode a sample's tokens, or only those that were sampled."""

    def run(name, sample, *, sampled=False):
        tokens = zip(sample.tokens, sample.loss_mask, strict=True)
        tokenizer = AutoTokenizer.from_pretrained(folders[name])
        return tokenizer.decode([token for token, mask in tokens if mask or not sampled])

    return run


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Begin and end of each stretch of ones."""
    begins = [place for place in range(1, len(mask)) if mask[place] > mask[place - 1]]
    return [(begin, [*mask, 0].index(0, begin)) for begin in begins]


async def test_a_template_that_keeps_history_gives_one_sample(play, text):
    (sample,) = (await play("keeps")).segments

    assert sample.reward == 1.0
    assert sample.parsed is True
    assert text("keeps", sample) == (
        "<|user|>2 + 3?<|end|><|assistant|>" + "".join(RIGHT) + "<|end|><|tool|>5<|end|><|again|>"
        "<answer>5</answer><|end|>"
    )
    assert text("keeps", sample, sampled=True) == (
        "".join(RIGHT) + "<|end|><answer>5</answer><|end|>"
    )
    assert sample.completion_len == len([*RIGHT, "end", *ANSWER, "end"])
    assert len(spans(sample.loss_mask)) == 2


async def test_a_template_that_drops_earlier_thoughts_gives_two_samples_of_one_run(play, text):
    first, second = (await play("drops")).segments

    assert text("drops", first) == (
        "<|user|>2 + 3?<|end|><|assistant|>" + "".join(RIGHT) + "<|end|>"
    )
    assert "<think>" not in text("drops", second)
    assert text("drops", second).endswith("<|tool|>5<|end|><|again|><answer>5</answer><|end|>")
    assert text("drops", second, sampled=True) == "<answer>5</answer><|end|>"
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert (first.completion_len, second.completion_len) == (8, 4)


async def test_what_is_captured_is_what_the_deployment_samples_at_the_same_place(platform, play):
    # At this temperature the recited token has a probability of about 0.99.
    options = {"temperature": 6.0, "max_tokens": 32}
    current_rollout.set(RolloutContext(row_seed=8, sample=0, weight_version=0))
    (sample,) = (await play("keeps", **options)).segments

    turns = spans(sample.loss_mask)
    assert len(turns) == 2
    sampler = DeploymentSampler(platform.base_url, "accounts/me/deployments/keeps", "key")
    for number, (begin, end) in enumerate(turns):
        # The sampler counts on from its seed by one stride; this one stands a stride before.
        seed = completion_seed(request_seed(8, number), -2)
        (sampled,) = await sampler.sample_with_prompt_tokens(
            sample.tokens[:begin], seed=seed, **options
        )
        assert sampled.full_tokens == sample.tokens[:end]
        assert sampled.inference_logprobs == sample.logprobs[begin:end]
        assert max(sampled.inference_logprobs) < -0.001
    assert sample.versions == [[0, sample.completion_len]]
    sampler.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unreadable", "error: expression must be like (2 + 3) * 4, got '2 x 3'"),
        ("stranger", "error: tool must be one of calculator, got 'oracle'"),
    ],
)
async def test_a_failed_call_goes_back_to_the_model_and_costs(play, text, name, message):
    (sample,) = (await play(name)).segments

    assert f"<|tool|>{message}<|end|>" in text(name, sample)
    assert message not in text(name, sample, sampled=True)
    assert sample.reward == pytest.approx(0.9)


async def test_a_malformed_call_is_a_wrong_answer(play, text):
    (sample,) = (await play("malformed")).segments

    assert (sample.reward, sample.parsed) == (0.0, False)
    assert sample.finish_reason == "stop"
    assert text("malformed", sample).endswith("\n</tool_call><|end|>")


async def test_a_model_that_only_calls_is_ended_and_trained_with_no_reward(play):
    (sample,) = (await play("forever")).segments

    assert len(spans(sample.loss_mask)) == MAX_TURNS
    assert sample.reward == 0.0
    assert sample.finish_reason == "tool_calls"


async def test_a_conversation_that_outgrows_the_context_is_trained_with_no_reward(play):
    (sample,) = (await play("no-room-for-a-result")).segments

    assert sample.reward == 0.0
    assert sample.completion_len == 8


async def test_a_deployment_that_refuses_the_first_request_ends_the_rollout_with_its_reason(play):
    with pytest.raises(openai.BadRequestError, match="8 tokens"):
        await play("no-room-at-all")


def test_failed_calls_cost_a_right_answer_at_most_half():
    right = "<answer>5</answer>"

    rewards = [tool_use_reward(right, failed, ROW) for failed in (0, 1, 9)]

    assert rewards == [1.0, 0.9, 0.5]
    assert tool_use_reward("<answer>6</answer>", 0, ROW) == 0.0


def test_the_policys_template_renders_a_call_as_the_policy_samples_it(tmp_path):
    make_policy(tmp_path / "policy", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    asked = problem_rows(1)[0]["messages"]
    function = {"name": "calculator", "arguments": {"expression": "21 * 32"}}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    sampled = tokenizer.encode(
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "21 * 32"}}\n</tool_call>'
        "<|im_end|>"
    )

    first, second = (
        tokenizer.apply_chat_template(
            messages, tools=[SCHEMA], add_generation_prompt=True, return_dict=False
        )
        for messages in (asked, [*asked, said, {"role": "tool", "content": "672"}])
    )

    assert second[: len(first) + len(sampled)] == first + sampled
    assert len(sampled) == 14


def test_the_policy_is_made_once_and_not_before_the_settings_are_judged(tmp_path):
    config = replace(default_config(), log_path=str(tmp_path), warm_up_steps=1)

    with pytest.raises(ConfigError, match="completions_per_prompt must"):
        with_policy(replace(config, completions_per_prompt=0))
    with pytest.raises(ConfigError, match="warm_up_steps must be >= 0, got -1"):
        with_policy(replace(config, warm_up_steps=-1))
    assert list(tmp_path.iterdir()) == []

    weights = Path(with_policy(config).base_model) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert with_policy(config).deployment.tokenizer_model == str(weights.parent)
    assert weights.stat().st_mtime_ns == made


def test_the_policy_is_trained_on_problems_that_it_was_not_warmed_up_on():
    train, warm_up = split_problems()

    assert not set(train) & set(warm_up)
    assert [row["ground_truth"] for row in problem_rows(2)] == [str(p.answer) for p in train[:2]]
    with pytest.raises(ConfigError, match=r"max_rows must be in 1\.\.1024, got 1025"):
        problem_rows(1025)


def test_the_example_trains_from_its_command_with_nothing_set_up(tmp_path, capfd):
    flags = {
        "log-path": tmp_path,
        "warm-up-steps": 1,
        "max-rows": 4,
        "completions-per-prompt": 2,
        "prompt-groups-per-step": 2,
        "max-completion-tokens": 12,
    }

    assert (
        command([part for name, value in flags.items() for part in (f"--{name}", str(value))]) == 0
    )

    steps = read_steps(tmp_path)
    assert [record["rollout/samples_completed"] for record in steps] == [4.0, 4.0]
    said = capfd.readouterr().out
    assert "in the first quarter of 2 steps" in said
    assert "in the first quarter of 8 conversations" in said


def test_a_machine_without_the_client_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)

    with pytest.raises(ConfigError, match=r"pip install 'hearth-rl\[agents\]'"):
        check_openai()
