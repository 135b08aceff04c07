"""``rl_loop`` as its platform sees it: what it asks for, in which order, and how much at a time."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from hearth.errors import ConfigError
from hearth.sdk.transport import mount
from hearth.wire.tinker import DatumRecord, ForwardInput
from training.data.rows import load_rows
from training.platform.run_infra import load_tokenizer
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config, main
from training.run.state import RunSummary
from training.utils import DeployConfig, InfraConfig

SAMPLE = "POST /inference/v1/completions"
SAVE = "POST .*/save_weights_for_sampler"
LOAD = "POST /hot_load/"
TRAIN = "POST .*/forward_backward$"
STEP = "POST .*/optim_step$"
PHASES = {
    "sample": SAMPLE,
    "score": "POST .*/forward$",
    "train": TRAIN,
    "step": STEP,
    "save": SAVE,
    "load": LOAD,
}
GROUP = 4
TOKENIZER = load_tokenizer(DeployConfig(tokenizer_model=str(MODEL)))
# The weights then differ by one gradient: AdamW would hide its size.
PLAIN_STEP = {"eps": 1e3, "learning_rate": 100.0, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def spread(text: str, row: Any) -> float:
    """Hardly ever the same twice, so that no group is uniform."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) % 1009 / 1009


@dataclass(frozen=True)
class Seen:
    """A finished run, and what came over the wire for it."""

    stage: Any
    folder: Path
    summary: RunSummary

    def records(self) -> list[dict[str, Any]]:
        """The metrics, every record of every type."""
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]

    def phases(self) -> list[str]:
        """What the run did before it exported its model: one name for requests of one kind that
        follow one another.
        """
        found = [
            name
            for request in self.stage.wire.seen
            for name, pattern in PHASES.items()
            if re.match(pattern, request.line)
        ]
        *phases, exported = [name for name, _ in itertools.groupby(found)]
        assert exported == "save", "a run saves its model last, to export it"
        return phases

    def published(self) -> list[str]:
        """The paths of the snapshots that were saved for the deployment, in order.

        The last one saved is the model that the run exports at its end: no deployment loads it.
        """
        *paths, exported = [body["path"] for body in self.bodies(SAVE)]
        assert exported.startswith("final-")
        return paths

    def bodies(self, pattern: str) -> list[Any]:
        """What was asked."""
        return [request.body for request in self.stage.wire.requests(pattern)]

    def drawing_at(self, pattern: str) -> list[int]:
        """How many completions were under way whenever such a request came."""
        now, counts = 0, []
        for kind, line in self.stage.wire.events:
            if re.match(SAMPLE, line):
                now += 1 if kind == "begin" else -1
            elif kind == "begin" and re.match(pattern, line):
                counts.append(now)
        return counts

    def begun_during(self, long: str, pattern: str) -> list[int]:
        """How many requests came while each one of another kind was under way, one at a time."""
        counts: list[int] = []
        is_under_way = False
        for kind, line in self.stage.wire.events:
            if re.match(long, line):
                is_under_way = kind == "begin"
                counts += [0] * is_under_way
            elif is_under_way and kind == "begin" and re.match(pattern, line):
                counts[-1] += 1
        return counts

    def trained(self) -> list[list[list[int]]]:
        """Of every forward and backward call the sequences."""
        return [
            [datum.model_input.chunks[0].tokens or [] for datum in call] for call in self.datums()
        ]

    def datums(self) -> list[list[DatumRecord]]:
        """Of every forward and backward call the data."""
        inputs = [body["forward_backward_input"] for body in self.bodies(TRAIN)]
        return [ForwardInput.from_dict(input_).datums() for input_ in inputs]

    def completions(self) -> list[list[int]]:
        """What was sampled of every sample that was trained, from its first token to its last."""
        prompts = {tuple(body["prompt"]) for body in self.bodies(SAMPLE)}
        found: list[list[int]] = []
        for sample in (sample for call in self.datums() for sample in call):
            targets = sample.loss_fn_inputs["target_tokens"].to_numpy().tolist()
            whole = [*(sample.model_input.chunks[0].tokens or []), targets[-1]]
            (prompt,) = (prompt for prompt in prompts if tuple(whole[: len(prompt)]) == prompt)
            found.append(whole[len(prompt) :])
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """The exported model."""
        assert self.summary.model_path is not None
        return load_file(self.summary.model_path / "model.safetensors")


@pytest.fixture
def run(stage, tmp_path, monkeypatch) -> Callable[..., Seen]:
    """Run the recipe on some of the shipped rows, groups of four and steps of two."""
    monkeypatch.setenv("FIREWORKS_BASE_URL", stage.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "key")
    count = itertools.count()

    def play(rows: int, *, reward_fn: Any = spread, **changes: Any) -> Seen:
        folder = tmp_path / f"run-{next(count)}"
        usual: dict[str, Any] = {
            "log_path": str(folder),
            "base_model": str(MODEL),
            "completions_per_prompt": GROUP,
            "prompt_groups_per_step": 2,
            "max_completion_tokens": 8,
            "max_seq_len": 128,
            "max_concurrent": 64,
            "learning_rate": 1e-3,
            "kl_beta": 0.0,
            "truncated_completions": "score",
            "deployment": stage.serving(),
        }
        given = load_rows(str(TRAIN_ROWS), rows)
        return Seen(stage, folder, main(Config(**(usual | changes)), given, reward_fn=reward_fn))

    return play


def hold_first_row(stage: Any, kind: str, pattern: str, count: int) -> None:
    """Its completions, the first that are asked for, wait until so many requests began or ended."""
    stage.wire.rule(SAMPLE, until=(kind, pattern, count), times=GROUP)


def first_prompt(seen: Seen) -> list[int]:
    """The prompt of the row that is asked for first, of all its completions."""
    prompts = [body["prompt"] for body in seen.bodies(SAMPLE)[:GROUP]]
    assert prompts == [prompts[0]] * GROUP
    return prompts[0]


def holds(call: list[list[int]], prompt: list[int]) -> bool:
    """Whether a call trains a completion of a prompt."""
    return any(tokens[: len(prompt)] == prompt for tokens in call)


def telling(app: Any, versions: list[int]) -> Any:
    """The app before another that notes which weights each completion was sampled by."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def noted(message: Any) -> None:
            body.extend(message.get("body", b""))
            await send(message)

        await app(scope, receive, noted)
        if re.match(SAMPLE, f"{scope['method']} {scope['path']}"):
            versions.append(orjson.loads(body)["weight_version"])

    return answer


# A step.


def test_a_step_is_sampled_scored_trained_and_published_before_the_next_one(run):
    seen = run(4, kl_beta=0.01)

    assert seen.phases() == ["sample", "score", "train", "step", "save", "load"] * 2
    assert seen.drawing_at("POST .*/(forward|forward_backward|optim_step)$") == [0] * 8
    assert (seen.drawing_at(SAVE), seen.drawing_at(LOAD)) == ([0] * 3, [0] * 2)
    saved = seen.published()
    assert [name.rsplit("-", 1)[0] for name in saved] == ["step-00001", "step-00002"]
    assert [body["identity"] for body in seen.bodies(LOAD)] == saved


def test_every_step_has_one_record_with_its_rewards_and_its_kl(run):
    records = run(4, kl_beta=0.01).records()

    assert [(record["type"], record["step"]) for record in records] == [("train", 1), ("train", 2)]
    for record in records:
        assert (
            record["rollout/reward_min"] < record["rollout/reward"] < record["rollout/reward_max"]
        )
    assert records[0]["train/mean_kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(records[1]["train/mean_kl"]) > 1e-6


def test_settings_reach_every_request(run):
    seen = run(2, temperature=0.7, max_completion_tokens=5, beta2=0.95, eps=1e-6)

    bodies_sent = seen.bodies(SAMPLE)
    assert len(bodies_sent) == 2 * GROUP
    for body in bodies_sent:
        assert (body["n"], body["temperature"], body["max_tokens"]) == (1, 0.7, 5)
        assert all(type(token) is int for token in body["prompt"])
    (step,) = seen.bodies(STEP)
    assert step["adam_params"] == {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_clip_norm": 1.0,
    }
    prompts = {tuple(body["prompt"]) for body in bodies_sent}
    (call,) = seen.trained()
    assert len(call) == len(bodies_sent)
    assert all(any(holds([tokens], list(prompt)) for prompt in prompts) for tokens in call)


def test_every_completion_that_is_sampled_is_scored_once_and_trained(run):
    scored: list[str] = []

    def noting(text: str, row: Any) -> float:
        scored.append(text)
        return spread(text, row)

    seen = run(2, reward_fn=noting)

    assert len(scored) == len(seen.bodies(SAMPLE)) == 2 * GROUP
    texts = [
        TOKENIZER.decode(completion, skip_special_tokens=True) for completion in seen.completions()
    ]
    assert sorted(texts) == sorted(scored)


def test_tokens_are_trained_as_they_were_sampled_where_no_tokenizer_would_write_them_so(run):
    seen = run(2, temperature=4.0)

    sampled = seen.completions()
    again = [TOKENIZER.encode(TOKENIZER.decode(sample)) for sample in sampled]
    assert sum(sample != other for sample, other in zip(sampled, again, strict=True)) > GROUP
    # The trainer scores these very tokens as the deployment did when it sampled them.
    assert seen.records()[0]["train/inference_diff"] < 1e-5


def test_groups_without_spread_reach_no_trainer_and_the_run_goes_on(run):
    dull = load_rows(str(TRAIN_ROWS), 2)

    seen = run(4, reward_fn=lambda text, row: 1.0 if row in dull else spread(text, row))

    assert seen.phases() == ["sample", "score", "train", "step", "save", "load"]
    assert (seen.summary.steps, seen.summary.version, seen.summary.rows) == (1, 1, 4)


# How much at a time.


@pytest.mark.parametrize(("groups", "steps"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5])])
def test_as_many_groups_as_asked_make_a_step_and_those_left_over_a_smaller_one(run, groups, steps):
    seen = run(5, prompt_groups_per_step=groups)

    assert [len(call) for call in seen.trained()] == [GROUP * count for count in steps]
    calls = [name for name in seen.phases() if name in ("train", "step")]
    assert calls == ["train", "step"] * len(steps)
    assert len(seen.bodies(STEP)) == len(steps)


def test_requests_in_flight_are_counted_one_by_one_up_to_their_limit(run, stage):
    stage.wire.rule(SAMPLE, delay_s=0.02)

    seen = run(3, max_concurrent=3, prompt_groups_per_step=3)

    assert len(seen.bodies(SAMPLE)) == 3 * GROUP
    assert stage.wire.most_in_flight(SAMPLE) == 3


CUTS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [16]),
    ({"max_samples_per_fwd_bwd": 8}, [8, 8]),
    ({"max_samples_per_fwd_bwd": 8, "min_samples_per_fwd_bwd": 8}, [8, 8]),
    ({"max_samples_per_fwd_bwd": 12}, [12, 4]),
    ({"max_samples_per_fwd_bwd": 4, "min_samples_per_fwd_bwd": 4}, [4, 4, 4, 4]),
    ({"max_samples_per_fwd_bwd": 3}, [3, 1] * 4),
]


@pytest.mark.parametrize(("options", "sizes"), CUTS, ids=[str(case) for case, _ in CUTS])
def test_a_call_has_no_more_samples_than_allowed_and_waits_for_as_many_if_not_told(
    run, options, sizes
):
    assert [len(call) for call in run(4, prompt_groups_per_step=4, **options).trained()] == sizes


@pytest.mark.parametrize("slow", [False, True], ids=["even", "slow row"])
def test_neither_pieces_nor_the_order_of_arrival_change_a_step(run, stage, slow):
    common = {"prompt_groups_per_step": 4, **PLAIN_STEP}
    whole = run(4, output_model_id="whole", **common).weights()
    base = load_file(MODEL / "model.safetensors")
    moved = max(float((whole[name] - base[name]).abs().max()) for name in whole)
    assert moved > 0

    for least in (4, 8, *(() if slow else (16,))):
        if slow:
            hold_first_row(stage, "begin", TRAIN, 1)
        seen = run(4, min_samples_per_fwd_bwd=least, output_model_id=f"at-{least}", **common)
        gap = max(
            float((value - whole[name]).abs().max()) for name, value in seen.weights().items()
        )
        assert gap < 1e-4 * moved


# What overlaps.


def test_training_begins_as_soon_as_enough_samples_are_there(run, stage):
    hold_first_row(stage, "begin", TRAIN, 1)

    seen = run(4, prompt_groups_per_step=4, min_samples_per_fwd_bwd=GROUP)

    assert seen.drawing_at(TRAIN)[0] >= GROUP
    assert seen.drawing_at(STEP) == [0]
    assert [holds(call, first_prompt(seen)) for call in seen.trained()][-1]


def test_a_window_samples_together_trains_what_arrives_and_drains_before_its_weight_sync(
    run, stage
):
    hold_first_row(stage, "end", STEP, 2)

    seen = run(8, weight_sync_interval=3)

    # All of a window's requests are made before its first step.
    events = [line for kind, line in stage.wire.events if kind == "begin"]
    first_step = next(place for place, line in enumerate(events) if re.match(STEP, line))
    assert sum(bool(re.match(SAMPLE, line)) for line in events[:first_step]) == 3 * 2 * GROUP
    # Of the first window's steps two are trained while its slow row is sampled, the third with it.
    drawing = seen.drawing_at(STEP)
    assert min(drawing[:2]) >= GROUP
    assert drawing[2:] == [0, 0]
    late = [holds(call, first_prompt(seen)) for call in seen.trained()]
    assert late == [False, False, True, False]
    trained, published = ["score", "train", "step"], ["save", "load"]
    assert seen.phases() == ["sample", *trained * 3, *published, "sample", *trained, *published]
    assert (seen.drawing_at(SAVE), seen.drawing_at(LOAD)) == ([0] * 3, [0] * 2)
    assert [record["version/sample_staleness_max"] for record in seen.records()] == [0, 1, 2, 0]


def test_a_windows_rows_are_trained_in_the_order_in_which_they_arrive(run, stage):
    # Of four rows each waits until all that were asked for after it are trained.
    for later in (3, 2, 1):
        stage.wire.rule(SAMPLE, until=("end", STEP, later), times=GROUP)

    seen = run(4, weight_sync_interval=4, prompt_groups_per_step=1)

    prompts = [body["prompt"] for body in seen.bodies(SAMPLE)[::GROUP]]
    trained = [[holds(call, prompt) for prompt in prompts].index(True) for call in seen.trained()]
    assert trained == [3, 2, 1, 0]


def test_a_window_is_sampled_under_the_version_that_the_one_before_it_has_published(run, stage):
    stage.wire.rule(LOAD, delay_s=0.05)
    versions: list[int] = []
    mount(stage.url, telling(stage.wire, versions))

    seen = run(5, weight_sync_interval=2, prompt_groups_per_step=1)

    assert versions == [0] * 2 * GROUP + [1] * 2 * GROUP + [2] * GROUP
    assert [record["version/sample_staleness_max"] for record in seen.records()] == [0, 1, 0, 1, 0]
    assert seen.begun_during(LOAD, SAMPLE) == [0] * 3


@pytest.mark.parametrize(
    ("interval", "names"), [(0, []), (2, ["step-00002", "step-00004", "step-00005"])]
)
def test_weights_are_published_every_n_steps_and_at_the_end_or_never(run, interval, names):
    seen = run(5, weight_sync_interval=interval, prompt_groups_per_step=1)

    assert len(seen.bodies(STEP)) == 5
    assert [path.rsplit("-", 1)[0] for path in seen.published()] == names
    assert len(seen.bodies(LOAD)) == len(names)


# The parts.


REFERENCE_SHAPE = "accounts/me/trainingShapes/tiny-forward"
PARTS: list[tuple[dict[str, Any], bool]] = [
    ({"kl_beta": 0.0}, False),
    ({"kl_beta": 0.001}, True),
    ({"kl_beta": 0.0, "infra": InfraConfig(ref_training_shape_id=REFERENCE_SHAPE)}, True),
]


@pytest.mark.parametrize(("options", "has_reference"), PARTS, ids=["no kl", "kl", "shape"])
def test_there_are_a_policy_a_deployment_and_a_reference_where_kl_or_a_shape_asks_for_one(
    named, run, stage, options, has_reference
):
    seen = run(4, base_model=TINY, **options)

    policy, *reference, deployment = stage.creates()
    assert (policy, reference) == ("rl-policy", ["rl-reference"] * has_reference)
    assert deployment.startswith("rl-deployment-")
    frozen = [
        request.body["forwardOnly"] for request in stage.wire.requests("POST .*/rlorTrainerJobs$")
    ]
    assert frozen == [False, True][: 1 + has_reference]
    assert (seen.summary.reference_job_id is not None) is has_reference


def test_the_policys_job_is_asked_for_with_the_lora_rank_and_a_reference_without(named, run, stage):
    infra = InfraConfig(ref_training_shape_id=REFERENCE_SHAPE)

    run(2, base_model=TINY, lora_rank=4, infra=infra)

    jobs = stage.wire.requests("POST .*/rlorTrainerJobs$")
    assert [job.body["trainingConfig"]["loraRank"] for job in jobs] == [4, 0]


def test_a_step_asks_a_reference_for_logprobs_and_never_to_train(run, stage):
    seen = run(4, kl_beta=0.001)

    calls = "(forward|forward_backward|optim_step|save_weights_for_sampler)$"
    asked = Counter(
        (seen.summary.reference_job_id in request.path, request.path.rsplit("/", 1)[1])
        for request in stage.wire.requests(f"POST /training/.*/{calls}")
    )
    assert asked == {
        (True, "forward"): 2,
        (False, "forward"): 2,
        (False, "forward_backward"): 2,
        (False, "optim_step"): 2,
        # Two are published, the last is exported.
        (False, "save_weights_for_sampler"): 3,
    }


@pytest.mark.parametrize(("loss_path", "asked"), [("client", "cross_entropy"), ("builtin", "dapo")])
def test_a_loss_runs_inside_the_trainer_only_where_that_is_asked_for(run, loss_path, asked):
    seen = run(2, loss_path=loss_path, policy_loss="dapo")

    (call,) = seen.bodies(TRAIN)
    assert call["forward_backward_input"]["loss_fn"] == asked


# The trainer's shape.


TINY = "accounts/me/models/tiny"


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A catalog in which the shipped model has a name, and so training shapes."""
    path = tmp_path / "catalog.toml"
    path.write_text(f'[models."{TINY}"]\nsource = {str(MODEL)!r}\n')
    monkeypatch.setenv("HEARTH_CATALOG", str(path))


def in_two_stages(app: Any) -> Any:
    """The app before it, whose shapes cut a model into two stages."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/trainingShapes/-/versions"):
            return await app(scope, receive, send)
        snapshot = {"baseModel": TINY, "trainerShardingScheme": {"pipelineParallelism": 2}}
        version = {"name": "accounts/me/trainingShapes/tiny/versions/1", "snapshot": snapshot}
        body = orjson.dumps({"trainingShapeVersions": [version]})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        return await send({"type": "http.response.body", "body": body})

    return answer


def test_the_built_in_losses_refuse_a_trainer_that_cuts_its_model_into_stages(named, stage, run):
    mount(stage.url, in_two_stages(stage.wire))

    with pytest.raises(ConfigError, match=r"loss_path must be 'client' on .*/tiny/versions/1, got"):
        run(2, base_model=TINY, loss_path="builtin")
    assert stage.wire.requests(SAMPLE) == []
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    assert run(2, base_model=TINY).summary.steps == 1
