"""The examples of ``async_rl_loop``: as programs, and their rollouts with a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import transformers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.integration.runs import read_steps

from hearth.errors import ConfigError, TransportError
from hearth.sdk.transport import mount, unmount
from training.examples.rl.multi_turn_message_in.retries import Retries, num_turns
from training.examples.rl.multi_turn_message_in.reward import TURN_DISCOUNT
from training.examples.rl.multi_turn_message_in.rollout import make_rollout_fn as multi_turn
from training.examples.rl.single_turn_token_in.rollout import make_rollout_fn as single_turn
from training.examples.rl.trend import reward_trend, trend
from training.quickstart import MODEL
from training.samples.rollout import (
    RolloutFnFactory,
    RolloutResult,
    RolloutSample,
    RolloutSetup,
    collect_runs,
)

QUESTION = "What is 9 - 2?"
MESSAGES = [{"role": "user", "content": QUESTION}]
WRONG, RIGHT = "<answer>6</answer>", "<answer>7</answer>"
LOGPROB = -0.25
TOKENIZER: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
END = TOKENIZER.eos_token_id
PROMPT: list[int] = TOKENIZER.apply_chat_template(
    MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
)
ROW = {"messages": MESSAGES, "prompt_token_ids": PROMPT, "ground_truth": "7"}
BOTH = pytest.mark.parametrize("make", [single_turn, multi_turn], ids=["single", "multi"])

_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """What the scripted model samples; by default its tokens are those of the text and its end."""

    text: str
    tokens: Sequence[int] | None = None
    finish_reason: str = "stop"
    has_logprobs: bool = True

    def body(self) -> dict[str, Any]:
        """The deployment's answer to a completion request."""
        tokens = [*TOKENIZER.encode(self.text), END] if self.tokens is None else list(self.tokens)
        raw: dict[str, Any] = {"completion_token_ids": tokens}
        if self.has_logprobs:
            raw["sampling_logprobs"] = [LOGPROB] * len(tokens)
        choice = {
            "index": 0,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "raw_output": raw,
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {
            "id": "c",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "weight_version": 0,
        }


@dataclass
class Scripted:
    """A deployment that samples what the test says, in turn; ``prompts`` are those it was asked."""

    answers: Sequence[Answer]
    prompts: list[list[int]] = field(default_factory=list)

    async def complete(self, request: Request) -> JSONResponse:
        asked = orjson.loads(await request.body())
        self.prompts.append(asked["prompt"])
        return JSONResponse(self.answers[len(self.prompts) - 1].body())

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/inference/v1/completions", self.complete, methods=["POST"])]
        )


@dataclass
class Played:
    """What one call of a rollout function returned, and the prompts that it asked with."""

    returned: RolloutResult
    prompts: list[list[int]]

    @property
    def sample(self) -> RolloutSample:
        """The sample, which keeps the contract."""
        (run,) = collect_runs(self.returned, "row 0")
        (sample,) = run.segments
        return sample


Play = Callable[..., Played]


@pytest.fixture
def play() -> Iterator[Play]:
    """Call an example's rollout function once, with a model that answers as the test says."""
    url = f"http://scripted-{next(_numbers)}"

    def run(make: RolloutFnFactory, *answers: Answer, max_seq_len: int = 128) -> Played:
        deployment = Scripted(answers)
        mount(url, deployment.app())
        setup = RolloutSetup(
            tokenizer=TOKENIZER,
            tokenizer_id=str(MODEL),
            inference_base_url=url,
            api_key="key",
            sample_kwargs={"max_tokens": 16, "max_seq_len": max_seq_len, "logprobs": True},
            model="m",
            completions_per_prompt=1,
        )
        with setup.closing:
            returned = asyncio.run(_called(make, setup))
        return Played(returned, deployment.prompts)

    yield run
    unmount(url)


async def _called(make: RolloutFnFactory, setup: RolloutSetup) -> RolloutResult:
    return await make(setup)(dict(ROW))


@pytest.mark.parametrize("name", ["single_turn_token_in", "multi_turn_message_in"])
def test_an_example_trains_with_nothing_set_up(name, tmp_path, monkeypatch, capsys):
    flags = {
        "log-path": tmp_path,
        "max-rows": 4,
        "epochs": 1,
        "completions-per-prompt": 8,
        "prompt-groups-per-step": 2,
    }
    given = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    monkeypatch.setattr(sys, "argv", ["python -m", *given])

    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"training.examples.rl.{name}.train", run_name="__main__")

    assert end.value.code == 0
    steps = read_steps(tmp_path)
    assert [step["rollout/valid_prompt_groups"] for step in steps] == [2.0, 2.0]
    assert any(step["train/grad_norm"] > 0 for step in steps)
    assert reward_trend(tmp_path) in capsys.readouterr().out


def test_a_single_turn_is_the_rows_tokens_and_what_was_sampled(play):
    played = play(single_turn, Answer(RIGHT))

    sampled = [*TOKENIZER.encode(RIGHT), END]
    assert played.prompts == [PROMPT]
    assert played.sample == RolloutSample(
        tokens=PROMPT + sampled,
        logprobs=[0.0] * len(PROMPT) + [LOGPROB] * len(sampled),
        loss_mask=[0] * len(PROMPT) + [1] * len(sampled),
        reward=1.0,
        text=RIGHT,
        parsed=True,
    )


def test_a_single_turn_without_a_marked_answer_says_so(play):
    assert play(single_turn, Answer("7")).sample.parsed is False


CONVERSATIONS = [
    ([Answer(RIGHT)], 1, 1.0, True),
    ([Answer(WRONG), Answer(RIGHT)], 2, TURN_DISCOUNT, True),
    ([Answer(WRONG), Answer(WRONG)], 2, 0.0, True),
    ([Answer("7"), Answer(RIGHT)], 2, TURN_DISCOUNT, True),
    ([Answer("Let me", [40, 41], "length")], 1, 0.0, False),
]


@pytest.mark.parametrize(
    ("answers", "turns", "reward", "parsed"),
    CONVERSATIONS,
    ids=["right", "wrong right", "wrong wrong", "unmarked right", "cut"],
)
def test_a_second_attempt_follows_a_wrong_first_and_the_last_turn_earns_the_reward(
    play, answers, turns, reward, parsed
):
    played = play(multi_turn, *answers)

    assert len(played.prompts) == turns
    assert num_turns(played.sample) == turns
    assert played.sample.reward == reward
    assert played.sample.parsed is parsed
    assert played.sample.finish_reason == answers[-1].finish_reason
    assert played.sample.text == "\n".join(answer.text for answer in answers)


def test_both_answers_are_trained_and_the_feedback_between_them_is_not(play):
    sample = play(multi_turn, Answer(WRONG), Answer(RIGHT)).sample

    pieces = [
        (live, TOKENIZER.decode([token for _, token in group]))
        for live, group in itertools.groupby(
            zip(sample.loss_mask, sample.tokens, strict=True), key=lambda pair: pair[0]
        )
    ]
    assert pieces == [
        (0, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"),
        (1, f"{WRONG}<|im_end|>"),
        (0, f"\n<|im_start|>user\nWrong. {QUESTION}<|im_end|>\n<|im_start|>assistant\n"),
        (1, f"{RIGHT}<|im_end|>"),
    ]
    assert sample.logprobs == [LOGPROB * live for live in sample.loss_mask]


def test_the_second_prompt_extends_the_first_turn_token_by_token(play):
    played = play(multi_turn, Answer(WRONG), Answer(RIGHT))

    first, second = played.prompts
    feedback = {"role": "user", "content": f"Wrong. {QUESTION}"}
    rendered = TOKENIZER.apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": WRONG}, feedback],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert first == PROMPT
    assert second == rendered
    assert played.sample.tokens[: len(second)] == second


def test_an_answer_in_unusual_tokens_stays_as_it_was_sampled(play):
    letters = [token for letter in "<answer>6" for token in TOKENIZER.encode(letter)]
    sampled = [*letters, END]
    assert sampled != [*TOKENIZER.encode("<answer>6"), END]

    played = play(multi_turn, Answer("<answer>6", sampled), Answer(RIGHT))

    assert played.prompts[1][: len(PROMPT) + len(sampled)] == PROMPT + sampled
    assert played.sample.tokens[: len(played.prompts[1])] == played.prompts[1]


def test_a_turn_that_does_not_end_as_the_template_ends_it_is_refused(play):
    stopped = Answer(WRONG, TOKENIZER.encode(WRONG))

    with pytest.raises(ConfigError, match=f"must end with token {END}, .* got 385"):
        play(multi_turn, stopped, Answer(RIGHT))


def test_a_second_turn_without_room_leaves_the_first(play):
    played = play(multi_turn, Answer(WRONG), max_seq_len=len(PROMPT) + 8)

    assert len(played.prompts) == 1
    assert num_turns(played.sample) == 1
    assert played.sample.reward == 0.0


@BOTH
def test_a_prompt_without_room_for_an_answer_is_dropped(make, play):
    played = play(make, max_seq_len=len(PROMPT))

    assert played.returned is None
    assert played.prompts == []


@BOTH
def test_an_answer_without_tokens_trains_nothing(make, play):
    played = play(make, Answer("", []))

    assert collect_runs(played.returned, "row 0") == []


@BOTH
def test_an_answer_without_logprobs_is_a_failure_of_the_deployment(make, play):
    with pytest.raises(TransportError, match="must come with logprobs, got none"):
        play(make, Answer(RIGHT, has_logprobs=False))


def test_second_answers_are_counted_and_samples_pass_through(play):
    retries = Retries()
    said = {
        "first": [Answer(RIGHT)],
        "second": [Answer(WRONG), Answer(RIGHT)],
        "never": [Answer(WRONG), Answer(WRONG)],
    }

    def watched(setup: RolloutSetup) -> Any:
        return retries.watch(multi_turn(setup))

    rewards = {name: play(watched, *answers).sample.reward for name, answers in said.items()}

    assert rewards == {"first": 1.0, "second": TURN_DISCOUNT, "never": 0.0}
    assert retries.right == [True, False]
    assert retries.trend() == (
        "right second answers: 1.000 in the first quarter of 2 second answers, 0.000 in the last"
    )


def test_a_trend_compares_the_first_quarter_with_the_last():
    values = [0.0, 1.0, 9.0, 9.0, 9.0, 9.0, 2.0, 3.0]

    assert trend("x", values, "steps") == (
        "x: 0.500 in the first quarter of 8 steps, 2.500 in the last"
    )
    assert trend("x", [], "steps") == "x: no steps"
