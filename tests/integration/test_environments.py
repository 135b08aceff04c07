"""Environments in whole runs: equal in both recipes, dropped where they fail, resumed."""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
from tests.integration.conftest import async_config, config
from tests.integration.rollouts import spread
from tests.integration.runs import Trial, count_steps, read_samples, same_weights
from tests.unit.reciter import write_reciter
from tests.waiting import wait_until
from transformers import AutoTokenizer

from hearth.local import EmbeddedPlatform
from hearth.records.reading import iterate_tables, to_records
from hearth.sdk import DeploymentConfig, DeploymentManager
from training.environments import HELD_OUT, Environment, Step
from training.environments.episodes import episode_rollouts
from training.quickstart import MODEL
from training.recipes import async_rl_loop, igpo_loop, rl_loop
from training.rollouts.failures import DroppedRolloutError
from training.samples.rollout import RolloutSetup

SETTINGS = {"max_rows": 6, "eval_rows": 4}


class Sums(Environment):
    """Questions that the shipped model knows; every answer earns something else."""

    timeout_s = 1.0

    def reset(self, seed):
        rng = random.Random(seed)
        self.seed = seed
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        self.ground_truth = f"<answer>{a + b}</answer>"
        return f"What is {a} + {b}?"

    def step(self, answer):
        reward = spread(answer, {})
        return Step(reward=reward, done=True, parts={"spread": reward, "bonus": 0.0})


def fields(folder: Path, make=config, **changes):
    """A config without a dataset."""
    usual = vars(make(folder, **SETTINGS | changes))
    del usual["dataset"]
    return type(make(folder))(**usual)


@pytest.fixture
def run_sync(tmp_path):
    def run(environment, **changes) -> Trial:
        folder = tmp_path / "sync"
        settings = fields(folder, **changes)
        return Trial(folder, rl_loop.main(settings, environment=environment))

    return run


@pytest.fixture
def run_async(tmp_path):
    def run(given, recipe=async_rl_loop, **changes) -> Trial:
        folder = tmp_path / "async"
        usual = vars(fields(folder, async_config, **changes))
        return Trial(folder, recipe.main(recipe.Config(**usual), environment=given))

    return run


def test_both_recipes_train_the_same_on_an_environment_of_one_turn(run_sync, run_async):
    sync, other = run_sync(Sums), run_async(Sums)

    assert len(sync.records()) == 3
    for mine, theirs in zip(other.records(), sync.records(), strict=True):
        assert {name: mine[name] for name in theirs} == theirs
    assert other.has_weights_of(sync)
    assert [record["eval/samples"] for record in sync.records("eval")] == [4.0, 4.0]
    assert [record["eval/reward"] for record in sync.records("eval")] == [
        record["eval/reward"] for record in other.records("eval")
    ]
    for trial in (sync, other):
        parts = [sample["reward_parts"] for sample in read_samples(trial.folder)]
        assert len(parts) == 6 * 4 + 2 * 4
        assert all(dict(part).keys() == {"spread", "bonus"} for part in parts)


def test_igpo_takes_the_right_answers_of_an_environment(run_async):
    trial = run_async(Sums, igpo_loop)

    assert len(trial.records()) == 3


class Moody(Sums):
    """Fails in one way or another in every second row, in all of its rollouts or in some."""

    forever = threading.Event()

    def step(self, answer):
        step = super().step(answer)
        if self.seed >= HELD_OUT:
            return step
        match self.seed:
            case 1:
                raise KeyError("no such tile")
            case 2:
                return Step(reward=float("nan"))
            case 3 if step.reward < 0.7:
                self.forever.wait(60)
            case 4:
                sys.exit(1)
        return step


@pytest.mark.parametrize("recipe", ["sync", "async"])
def test_what_an_environment_does_wrong_drops_rollouts_and_ends_no_run(recipe, run_sync, run_async):
    trial = (run_sync if recipe == "sync" else run_async)(Moody, max_rows=8)
    Moody.forever.set()
    Moody.forever = threading.Event()

    samples = [
        sample for table in iterate_tables(trial.folder, "train") for sample in to_records(table)
    ]
    reasons: dict[int, set[str]] = {}
    for sample in samples:
        if sample["outcome"] == "failed":
            reasons.setdefault(sample["row"], set()).add(sample["reason"].partition(": ")[2])
    assert reasons[1] == {"step raised KeyError: 'no such tile'"}
    assert reasons[2] == {"step must return a finite reward, got reward=nan"}
    assert reasons[3] == {"step must return within 1 s, got nothing"}
    assert reasons[4] == {"step raised SystemExit: 1"}
    assert sorted(reasons) == [1, 2, 3, 4]
    assert trial.summary.steps >= 2


# Several turns and tools, on a model that recites.

CUE = (
    "{% if AT > 0 and messages[AT - 1].role == 'tool' %}<|again|>"
    "{% elif AT > 1 %}<|system|>{% else %}<|assistant|>{% endif %}"
)
"""What stands before an answer: another token after a tool's result and in a later turn."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + CUE.replace("AT", "loop.index0")
    + "{% else %}<|{{ m.role }}|>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}"
    + CUE.replace("AT", "(messages | length)")
)


def call(body: str) -> list[str]:
    return ["<tool_call>", "\n" + body, "\n</tool_call>"]


@pytest.fixture(scope="module")
def reciter(tmp_path_factory):
    said = {
        "<|assistant|>": call('{"name": "look_up", "arguments": {"word": "sun"}}'),
        "<|again|>": ["a star"],
        "<|system|>": ["moon"],
    }
    return write_reciter(tmp_path_factory.mktemp("reciter"), said, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def platform(reciter, tmp_path_factory):
    with EmbeddedPlatform(work_dir=tmp_path_factory.mktemp("platform")) as platform:
        deployments = DeploymentManager("key", platform.base_url)
        deployments.create_or_get(
            DeploymentConfig(
                deployment_id="reciter",
                base_model=str(reciter),
                tokenizer_model=str(reciter),
                max_context_length=64,
            )
        )
        deployments.wait_for_ready("reciter")
        yield platform


class Words(Environment):
    """A word is to be looked up; then the policy answers twice."""

    max_turns = 4
    look_up_failure: Exception | None = None
    observation = "2"

    def __init__(self):
        self.tools = [self.look_up]
        self.looked_up = []

    def reset(self, seed):
        return "sun?"

    def look_up(self, word: str) -> str:
        """The meaning of a word.

        Args:
            word: What to look up.
        """
        if self.look_up_failure is not None:
            raise self.look_up_failure
        self.looked_up.append(word)
        return "star"

    def step(self, answer):
        right = float("star" in answer)
        if not right:
            return Step(reward=0.25, done=True, parsed=True, parts={"second": 0.25})
        return Step(self.observation, reward=right, parsed=False, parts={"first": right})


@pytest.fixture
def play(platform, reciter):
    """Play one episode of a class, and decode what the policy saw."""

    async def run(kind, *, seed: int = 0):
        setup = RolloutSetup(
            tokenizer=AutoTokenizer.from_pretrained(reciter),
            tokenizer_id="",
            inference_base_url=platform.base_url,
            api_key="key",
            model="accounts/me/deployments/reciter",
            completions_per_prompt=1,
            sample_kwargs={
                "max_tokens": 32,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "max_seq_len": 64,
                "http_timeout": 30.0,
                "logprobs": True,
            },
        )
        with setup.closing:
            rollout_fn = episode_rollouts(kind, 5.0, setup)
            played = await rollout_fn({"seed": seed})
        (sample,) = played.segments
        return sample, setup.tokenizer.decode(sample.tokens)

    return run


CALLED = '\n{"name": "look_up", "arguments": {"word": "sun"}}\n</tool_call>'


async def test_tools_and_turns_are_one_sample_with_the_sum_of_rewards(play):
    sample, text = await play(Words)

    assert text == (
        "<|user|>sun?<|end|><|assistant|><tool_call>"
        + CALLED
        + "<|end|><|tool|>star<|end|><|again|>a star<|end|>"
        "<|user|>2<|end|><|system|>moon<|end|>"
    )
    assert (sample.reward, sample.parsed) == (1.25, True)
    assert sample.reward_parts == {"first": 1.0, "second": 0.25}
    turns = sum(
        after > before
        for before, after in zip(sample.loss_mask, sample.loss_mask[1:], strict=False)
    )
    assert turns == 3


async def test_a_tools_value_error_is_told_and_its_other_errors_drop_the_rollout(play):
    told = type("Told", (Words,), {"look_up_failure": ValueError("no sun")})
    broken = type("Broken", (Words,), {"look_up_failure": OSError("no disk")})

    _, text = await play(told)

    assert "<|tool|>error: no sun<|end|>" in text
    with pytest.raises(DroppedRolloutError, match="look_up raised OSError: no disk"):
        await play(broken)


async def test_a_lost_connection_may_pass_and_is_raised_as_it_is(play):
    with pytest.raises(ConnectionResetError):
        await play(type("Lost", (Words,), {"look_up_failure": ConnectionResetError("gone")}))


async def test_an_observation_that_outgrows_the_context_ends_the_episode_with_its_reward(play):
    sample, text = await play(type("Wordy", (Words,), {"observation": "star " * 200}))

    assert sample.reward == 1.0
    assert text.endswith("<|again|>a star<|end|>")


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ("x" * 2_000_000, "step must give at most 1,000,000 characters, got 2,000,000"),
        ("", "step must give a text or messages"),
        (None, "step must give a text or messages .*got None"),
    ],
)
async def test_an_observation_that_is_none_drops_the_rollout(play, observation, message):
    with pytest.raises(DroppedRolloutError, match=message):
        await play(type("Odd", (Words,), {"observation": observation}))


async def test_an_episode_ends_after_its_turns(play):
    sample, text = await play(type("Short", (Words,), {"max_turns": 2, "observation": None}))

    assert sample.reward == 1.0
    assert text.endswith("a star<|end|>")


class TooLong(Words):
    def reset(self, seed):
        return "star " * 300


async def test_a_task_that_leaves_no_room_drops_the_rollout(play):
    with pytest.raises(DroppedRolloutError, match="a conversation must fit the model: "):
        await play(TooLong)
    single = type("Single", (TooLong,), {"max_turns": 1, "__init__": lambda self: None})
    with pytest.raises(DroppedRolloutError, match="reset must leave room below max_seq_len"):
        await play(single)


# reasoning-gym.

ARITHMETIC = {
    "min_terms": 2,
    "max_terms": 2,
    "max_digits": 1,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "format_style": "natural",
    "system_prompt": "",
}


def trained(folder):
    """The samples of the training; a start that goes on evaluates once more."""
    return [sample for sample in read_samples(folder) if sample["kind"] == "train"]


GUESSES = """
import random
from training.environments import Environment, Step


class Guesses(Environment):
    max_turns = 2

    def reset(self, seed):
        self.a, self.b = random.Random(seed).choices(range(100), k=2)
        return f"What is {self.a} + {self.b}?"

    def step(self, answer):
        right = f"<answer>{self.a + self.b}</answer>" in answer
        return Step("Wrong, try again.", float(right) + len(answer) / 1000, right)
"""


@pytest.mark.parametrize("recipe", ["rl_loop", "async_rl_loop"])
def test_a_run_that_is_killed_goes_on_from_the_shell_and_ends_with_the_same_bits(
    recipe, recipes, tmp_path
):
    (tmp_path / "my_tasks.py").write_text(GUESSES)
    environment = ["--environment=my_tasks:Guesses"]
    if recipe == "rl_loop":
        pytest.importorskip("reasoning_gym")
        arguments = f"--environment-args={json.dumps(ARITHMETIC)}"
        environment = ["--environment=reasoning_gym:basic_arithmetic", arguments]

    flags = [
        *environment,
        f"--base-model={MODEL}",
        "--max-rows=24",
        "--eval-rows=4",
        "--completions-per-prompt=4",
        "--prompt-groups-per-step=2",
        "--max-completion-tokens=16",
        "--max-seq-len=128",
        "--learning-rate=1e-3",
        "--kl-beta=0",
        "--truncated-completions=score",
        "--rollout-timeout-s=60" if recipe == "async_rl_loop" else "--max-concurrent=64",
        "--dcp-save-interval=1",
        "--output-model-id=out",
    ]
    command = ["train", "rl" if recipe == "rl_loop" else "async", *flags]

    def start(name):
        return recipes.begin("hearth", [*command, f"--log-path={name}"], tmp_path, {})

    whole = start("whole")
    assert whole.wait(120) == 0, whole.errors
    killed = start("killed")
    wait_until(lambda: count_steps(tmp_path / "killed") >= 3, 60, "a step")
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again = start("killed")
    assert again.wait(120) == 0, again.errors
    said = again.output + again.errors

    first, second = (Trial(tmp_path / name, None) for name in ("whole", "killed"))
    assert "goes on" in said or "resum" in said
    assert same_weights(first.weights(), second.weights())
    assert first.records() == second.records()
    assert trained(first.folder) == trained(second.folder)


def test_the_shipped_model_learns_a_task_of_reasoning_gym(tmp_path):
    pytest.importorskip("reasoning_gym")
    settings = fields(
        tmp_path / "run",
        environment_args=ARITHMETIC,
        max_rows=320,
        eval_rows=96,
        completions_per_prompt=8,
        prompt_groups_per_step=16,
        learning_rate=5e-4,
        max_concurrent=256,
    )
    settings.environment = "reasoning_gym:basic_arithmetic"

    done = rl_loop.main(settings)

    (_, before), (_, after) = done.evaluations[0], done.evaluations[-1]
    assert before.accuracy < 0.4
    assert after.accuracy > before.accuracy + 0.1


def test_a_game_of_gymnasium_is_trained_in_turns(run_async):
    pytest.importorskip("gymnasium")
    args = {"is_slippery": False, "max_turns": 3, "instructions": "Walk."}

    trial = run_async(
        None,
        environment="gymnasium:FrozenLake-v1",
        environment_args=args,
        max_rows=2,
        eval_rows=0,
        max_seq_len=512,
        zero_gradient_steps="take",
    )

    samples = read_samples(trial.folder)
    assert {sample["turns"] for sample in samples} <= {1, 2, 3}
    assert max(sample["turns"] for sample in samples) > 1
    assert "[S]FFF" in samples[0]["prompt"]
    assert len(trial.records()) == 1
