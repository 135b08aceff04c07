"""Going on: from a run's own checkpoints and from another's, on its own platform and served."""

import itertools
import math
import os
import shutil
import signal
import threading
from collections import Counter

import orjson
import pytest
from safetensors.torch import load_file
from tests.integration.rollouts import spread
from tests.integration.runs import read_metrics, same_weights

from hearth.errors import ConfigError, HearthError, RequestFailedError
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager, TrainerJobConfig, TrainerJobManager
from hearth.viewer.timeline import RecordedTimeline
from training.quickstart import MODEL
from training.run.checkpoints import read_manifest
from training.utils import DeployConfig, ResumeConfig, TrainerConfig


def question(row) -> str:
    return row["messages"][0]["content"]


def uniform_for(*questions):
    """``spread``, but the same reward for every answer to some questions."""

    def reward(text, row):
        return 1.0 if question(row) in questions else spread(text, row)

    return reward


def failing_after(calls: int, end, reward=spread):
    """``reward``, and from one call on ``end()`` instead."""
    count = itertools.count(1)

    def scored(text, row):
        if next(count) > calls:
            end()
        return reward(text, row)

    return scored


def crash() -> None:
    raise OSError("the reward's disk is full")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Served:
    """A platform that a recipe reaches by its URL, and managers of what it runs."""

    def __init__(self, platform: EmbeddedPlatform) -> None:
        self.plane = platform.plane
        self.trainers = TrainerJobManager()
        self.deployments = DeploymentManager()

    def states(self) -> dict[str, str]:
        jobs = self.trainers.list()
        return {(job.name or "").rsplit("/", 1)[-1]: job.state or "" for job in jobs}

    def replicas(self) -> dict[str, int]:
        listed = self.deployments.list()
        return {deployment.deployment_id: deployment.max_replica_count for deployment in listed}


@pytest.fixture
def served(named_platform):
    return Served(named_platform)


@pytest.fixture
def checkpointed(trial, rows):
    """A run of two steps with a checkpoint of each, and the folder of these."""
    run = trial(rows=rows[:4], reward_fn=spread, dcp_save_interval=1)
    (job,) = (run.folder / "checkpoints").iterdir()
    return run, job


SERVING = DeployConfig(deployment_id="serving", tokenizer_model=str(MODEL))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_every_step_a_run_goes_on_to_the_same_weights(trial, rows, dtype):
    # Rows 3 and 7 are dropped: row 4 makes up for one, nothing is left for the other.
    reward = uniform_for(question(rows[3]), question(rows[7]))
    common = {"rows": rows[:8], "reward_fn": reward, "dcp_save_interval": 1, "seed": 5}
    common |= {"folder": "run", "output_model_id": "out"}
    common["trainer"] = TrainerConfig(dtype=dtype)
    whole = trial(**common)
    weights, records = whole.weights(), whole.records()
    points = read_manifest(whole.folder)
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.cursor for point in points] == [2, 5, 8]

    for point in reversed(points):
        again = trial(**common, resume=ResumeConfig(resume_from=point.name))

        unfinished = [question(row) for row in rows[point.cursor : 8]]
        assert Counter(again.rewarded) == Counter(unfinished * 4)
        assert again.records() == records
        assert same_weights(again.weights(), weights)
        assert again.summary.steps == 3
        assert [point.step for point in read_manifest(again.folder)] == [1, 2, 3]


@pytest.mark.parametrize("interval", [3, 0])
def test_a_run_that_crashes_inside_a_window_trains_each_row_once(trial, rows, tmp_path, interval):
    dropped = {question(rows[1]), question(rows[6])}
    reward = uniform_for(*dropped)
    common = {
        "rows": rows[:8],
        "dcp_save_interval": 1,
        "weight_sync_interval": interval,
        "prompt_groups_per_step": 1,
        "folder": "run",
        "learning_rate": 1e-6,
    }
    # The crash comes with the third group that could be trained.
    trainable: list[str] = []

    def crashing(text, row):
        if question(row) not in dropped and question(row) not in trainable:
            trainable.append(question(row))
        if len(trainable) > 2:
            crash()
        return reward(text, row)

    with pytest.raises(OSError, match="disk is full"):
        trial(**common, reward_fn=crashing)
    (*_, point) = read_manifest(tmp_path / "run")
    finished = point.cursor + len(point.beyond)
    resumed = trial(**common, reward_fn=reward)

    assert 0 < point.step <= 2
    assert len(resumed.rewarded) == 4 * (8 - finished)
    trained = sum(record["rollout/valid_prompt_groups"] for record in resumed.records())
    assert trained == 6
    assert [record["step"] for record in resumed.records()] == [1, 2, 3, 4, 5, 6]
    assert count_optimizer_steps(resumed.folder) == Counter(range(1, 7))
    assert resumed.summary.rows == 8


def test_a_step_that_lacks_groups_at_the_end_is_trained(trial, rows):
    run = trial(rows=rows[:5], reward_fn=spread)

    assert [record["rollout/valid_prompt_groups"] for record in run.records()] == [2.0, 2.0, 1.0]
    assert run.summary.rows == 5


def test_with_an_interval_of_0_the_same_command_starts_anew(trial):
    common = {"reward_fn": spread, "dcp_save_interval": 0, "folder": "run", "max_rows": 4}
    first = trial(**common)

    records = first.records()
    again = trial(**common)

    assert not (again.folder / "run.json").exists()
    assert not (again.folder / "checkpoints").exists()
    assert again.records() == records
    assert (again.folder.with_name("run.1") / "metrics.jsonl").exists()


def test_without_an_interval_the_embedded_platform_saves_now_and_then(trial, capsys):
    common = {"reward_fn": spread, "folder": "run", "max_rows": 12, "prompt_groups_per_step": 1}
    first = trial(**common)
    name = "perf/dcp_save_time"
    saves = [record[name] for record in read_metrics(first.folder) if name in record]

    # The first is due at once; the later ones wait fifty times as long as the one before took.
    assert len(saves) >= 1
    assert sum(saves[1:]) <= first.summary.wall_s / 50 + max(saves)
    assert read_manifest(first.folder)[0].step == 1
    capsys.readouterr()
    again = trial(**common)

    (job,) = (first.folder / "checkpoints").iterdir()
    assert f"resuming from step-00012 of trainer job {job.name}: step 12, 12 of 12 rows done" in (
        capsys.readouterr().out
    )
    assert again.rewarded == []
    assert again.summary.steps == 12


def damage(folder, kind):
    if kind == "gone":
        shutil.rmtree(folder)
    elif kind == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        data = max((folder / "data").glob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-64])


def count_optimizer_steps(folder):
    """How often each step is on the timeline that the viewer shows."""
    timeline = RecordedTimeline(folder / "timeline.jsonl")
    timeline.refresh()
    spans = timeline.spans(0, 1000)
    return Counter(span["step"] for span in spans if span["name"] == "optim_step")


@pytest.mark.parametrize("kind", ["data", "manifest", "gone"])
def test_a_damaged_newest_checkpoint_is_left_for_the_older_one(trial, rows, capsys, kind):
    common = {"rows": rows[:8], "reward_fn": spread, "dcp_save_interval": 1, "folder": "run"}
    whole = trial(**common)
    weights, records, points = whole.weights(), whole.records(), read_manifest(whole.folder)
    (job,) = (whole.folder / "checkpoints").iterdir()
    for point in points[-2:]:
        damage(job / point.name, kind)
    with pytest.raises(HearthError, match=points[-1].name):
        trial(**common, resume=ResumeConfig(resume_from=points[-1].name))

    again = trial(**common)

    assert f"going on from the older {points[-3].name}" in capsys.readouterr().out
    unfinished = [question(row) for row in rows[points[-3].cursor : 8]]
    assert Counter(again.rewarded) == Counter(unfinished * 4)
    assert again.records() == records
    assert same_weights(again.weights(), weights)
    assert count_optimizer_steps(again.folder) == Counter(range(1, len(records) + 1))
    for point in read_manifest(again.folder):
        damage(job / point.name, kind)
    with pytest.raises(HearthError, match=points[-1].name):
        trial(**common)


def test_on_a_platform_that_was_set_back_a_checkpoint_of_the_same_name_is_not_taken(
    trial, rows, capsys
):
    common = {"rows": rows[:8], "reward_fn": spread, "dcp_save_interval": 1, "folder": "run"}
    whole = trial(**common)
    weights, records, points = whole.weights(), whole.records(), read_manifest(whole.folder)
    (job,) = (whole.folder / "checkpoints").iterdir()
    newest, older = (job / point.name for point in (points[-1], points[-2]))
    # As a copy of an earlier life has it: sound, of this name, and with other weights.
    shutil.rmtree(newest)
    shutil.copytree(older, newest)

    again = trial(**common)

    assert "was the platform's data folder set back?" in capsys.readouterr().out.replace("\n", " ")
    assert again.records() == records
    assert same_weights(again.weights(), weights)


def test_the_manifest_names_only_checkpoints_that_are_kept(trial):
    run = trial(reward_fn=spread, dcp_save_interval=1, keep_checkpoints=2)

    (job,) = (run.folder / "checkpoints").iterdir()
    named = [point.name for point in read_manifest(run.folder)]
    assert named == ["step-00003", "step-00004"]
    assert sorted(path.name for path in job.iterdir() if not path.name.startswith(".")) == named


def test_a_damaged_manifest_is_an_error_and_nothing_is_lost(trial):
    first = trial(reward_fn=spread, dcp_save_interval=1, max_rows=4)
    kept = (first.folder / "metrics.jsonl").read_bytes()
    (first.folder / "run.json").write_text("{oops")

    with pytest.raises(ConfigError, match=r"run\.json must be a run's manifest, got a damaged"):
        trial(reward_fn=spread, folder=first.folder.name, max_rows=4)

    assert (first.folder / "metrics.jsonl").read_bytes() == kept
    assert not (first.folder / "metrics.1.jsonl").exists()


def test_another_seed_or_an_unknown_checkpoint_is_an_error(trial):
    first = trial(reward_fn=spread, dcp_save_interval=1, max_rows=4, seed=1)
    common = {"reward_fn": spread, "folder": first.folder.name, "max_rows": 4}

    with pytest.raises(ConfigError, match="seed: 1 then, 2 now"):
        trial(**common, seed=2)
    with pytest.raises(ConfigError, match=r"resume_from must be one of .*'step-00002'.* got 'x'"):
        trial(**common, seed=1, resume=ResumeConfig(resume_from="x"))


def test_a_folder_in_use_is_an_error_that_changes_nothing_in_it(trial):
    refusals: list[str] = []

    def attempt():
        try:
            trial(folder="run", seed=9)
        except ConfigError as error:
            refusals.append(str(error))

    def scored(text, row):
        if not refusals:
            second = threading.Thread(target=attempt)
            second.start()
            second.join()
        return spread(text, row)

    run = trial(folder="run", reward_fn=scored, max_rows=2)

    (refusal,) = refusals
    assert f"which process {os.getpid()} uses: wait for it" in refusal
    assert orjson.loads((run.folder / "config.json").read_bytes())["seed"] == 0


def test_a_checkpoint_of_another_run_is_where_a_run_may_start(trial, checkpointed, rows, capsys):
    first, job = checkpointed
    capsys.readouterr()

    second = trial(
        rows=rows[4:8],
        reward_fn=spread,
        init_from_checkpoint=str(job / "step-00002"),
        learning_rate=1e-9,
    )

    assert "starting at step 0 from checkpoint" in capsys.readouterr().out
    records = second.records()
    assert [(record["step"], record["train/step"]) for record in records] == [(1, 1.0), (2, 2.0)]
    # On-policy from the first sample on: the deployment was given the checkpoint's weights.
    assert all(record["train/inference_diff"] < 1e-5 for record in records)
    assert second.summary.version == 3
    moved, again = first.weights(), second.weights()
    base = load_file(MODEL / "model.safetensors")
    assert max((again[name] - moved[name]).abs().max() for name in moved) < 1e-6
    assert max((moved[name] - base[name]).abs().max() for name in moved) > 1e-4


def test_a_run_goes_on_from_its_own_checkpoint_before_any_other_start(trial, checkpointed, rows):
    first, job = checkpointed
    common = {"rows": rows[4:8], "reward_fn": spread, "folder": "second", "dcp_save_interval": 1}
    common |= {"init_from_checkpoint": str(job / "step-00002")}
    with pytest.raises(OSError, match="disk is full"):
        trial(**(common | {"reward_fn": failing_after(9, crash)}))
    shutil.rmtree(first.folder)

    resumed = trial(**common)

    assert [record["step"] for record in resumed.records()] == [1, 2]
    assert len(resumed.rewarded) == 8


def test_an_adapter_is_where_a_lora_run_may_start(trial, rows, capsys):
    common = {"lora_rank": 4, "reward_fn": spread}
    first = trial(rows=rows[:4], learning_rate=1e-2, **common)
    assert first.summary.model_path is not None
    assert (first.summary.model_path / "adapter_config.json").exists()

    second = trial(
        rows=rows[4:8],
        warm_start_from_adapter=str(first.summary.model_path),
        learning_rate=1e-9,
        **common,
    )

    assert "starting at step 0 from adapter" in capsys.readouterr().out
    assert all(record["train/inference_diff"] < 1e-5 for record in second.records())
    assert second.summary.version == 3
    left, right = (
        load_file(run.summary.model_path / "adapter_model.safetensors") for run in (first, second)
    )
    assert max((right[name] - left[name]).abs().max() for name in left) < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"init_from_checkpoint": "j:n", "warm_start_from_adapter": "a", "lora_rank": 4},
            "must not both be given, got 'j:n' and 'a'",
        ),
        (
            {"init_from_checkpoint": "./nowhere"},
            "init_from_checkpoint must be a checkpoint's folder",
        ),
        ({"warm_start_from_adapter": "./no", "lora_rank": 4}, r"which has no adapter_config\.json"),
        ({"output_model_id": "a" * 64}, "output_model_id must be 1 to 63 characters"),
    ],
    ids=["both", "no checkpoint", "no adapter", "64 characters"],
)
def test_a_start_or_an_end_that_cannot_be_is_refused_at_once(trial, monkeypatch, changes, message):
    """Before a platform is looked for: the one that is named here does not exist."""
    if "output_model_id" in changes:
        monkeypatch.setenv("FIREWORKS_BASE_URL", "http://127.0.0.1:9")

    with pytest.raises(ConfigError, match=message):
        trial(**changes)


def test_on_a_served_platform_a_run_is_ended_by_sigterm_and_goes_on(trial, served):
    common = {"reward_fn": spread, "dcp_save_interval": 1, "seed": 5, "deployment": SERVING}
    whole = trial(**common, output_model_id="whole")
    with pytest.raises(SystemExit) as ended:
        trial(
            **(common | {"reward_fn": failing_after(18, terminate)}),
            folder="ended",
            output_model_id="ended",
        )
    assert ended.value.code == 143
    assert set(served.states().values()) == {"JOB_STATE_CANCELLED"}
    assert served.replicas() == {"serving": 0}

    resumed = trial(**common, folder="ended", output_model_id="ended")

    assert resumed.records() == whole.records()
    models = (run.summary.model_path for run in (whole, resumed))
    assert same_weights(*(load_file(model / "model.safetensors") for model in models))
    assert set(served.states().values()) == {"JOB_STATE_CANCELLED"}
    assert len(served.states()) == 2
    assert served.replicas() == {"serving": 0}


def test_the_trained_model_is_promoted_once_after_the_last_save(trial, served):
    run = trial(reward_fn=spread, max_rows=4, deployment=SERVING, dcp_save_interval=1)

    checkpoints = served.trainers.list_checkpoints(run.summary.policy_job_id)
    names = [checkpoint.name.rsplit("/", 1)[-1] for checkpoint in checkpoints]
    assert names[-1].startswith("final-00002-")
    assert sum(name.startswith("final-") for name in names) == 1
    models = [model for model in served.plane.list_models() if "/me/" in model.name]
    assert [model.source for model in models] == [str(run.summary.model_path)]
    assert served.plane.store.operations.list_all(("running",)) == []
    assert len(served.plane.store.operations.list_all()) == 1
    assert [name.rsplit("-", 1)[0] for name in names if name.count("-") == 2] == [
        "step-00001",
        "step-00002",
        "final-00002",
    ]


def test_a_checkpoint_of_another_job_is_where_a_served_run_may_start(trial, served, rows):
    first = trial(rows=rows[:4], reward_fn=spread, dcp_save_interval=1, output_model_id=None)
    job = first.summary.policy_job_id

    second = trial(
        rows=rows[4:8],
        reward_fn=spread,
        init_from_checkpoint=f"{job}:step-00002",
        output_model_id=None,
        learning_rate=1e-9,
    )
    with pytest.raises(RequestFailedError, match=r"path must name one of .*'step-00002'"):
        trial(rows=rows[:2], init_from_checkpoint=f"{job}:step-00009", output_model_id=None)

    assert second.summary.policy_job_id != job
    assert all(record["train/inference_diff"] < 1e-5 for record in second.records())
    assert all(record["version/sample_staleness_max"] == 0.0 for record in second.records())
    metadata = {
        checkpoint.name.rsplit("/", 1)[-1]: checkpoint.metadata
        for checkpoint in served.trainers.list_checkpoints(job)
    }
    assert metadata["step-00002"] is not None
    assert metadata["step-00002"]["cursor"] == 4
    assert metadata["step-00002"]["config"]["dcp_save_interval"] == 1


@pytest.mark.parametrize("interval", [1, 0])
def test_versions_go_on_where_a_running_deployment_stands(trial, served, rows, interval):
    common = {"reward_fn": spread, "deployment": SERVING, "output_model_id": None}
    first = trial(rows=rows[:4], cleanup_on_exit=False, **common)
    assert first.summary.version == 2
    assert set(served.states().values()) == {"JOB_STATE_RUNNING"}

    second = trial(rows=rows[4:8], weight_sync_interval=interval, **common)

    records = second.records()
    ages = [0.0, 0.0 if interval else 1.0]
    assert [record["version/sample_staleness_max"] for record in records] == ages
    assert [record["version/sample_staleness_mean"] for record in records] == ages
    assert second.summary.version == {1: 2 + 1 + 2, 0: 2}[interval]
    if interval:
        assert all(record["train/inference_diff"] < 1e-5 for record in records)
    assert served.replicas() == {"serving": 1}, "another run's deployment goes on running"


def test_versions_of_a_deployment_made_anew_count_its_own_weight_syncs(trial, rows):
    common = {"rows": rows[:8], "reward_fn": spread, "dcp_save_interval": 1, "folder": "run"}
    whole = trial(**common)
    assert whole.summary.version == 4
    assert [point.version for point in read_manifest(whole.folder)] == [0, 1, 2, 3]

    resumed = trial(**common, resume=ResumeConfig(resume_from="step-00002"))

    # The restored weights, and those of two steps.
    assert resumed.summary.version == 3
    assert [record["version/sample_staleness_max"] for record in resumed.records()] == [0.0] * 4
    assert [point.version for point in read_manifest(resumed.folder)] == [0, 1, 1, 2]


def test_what_was_brought_goes_on_running(trial, served):
    served.trainers.create(
        TrainerJobConfig(base_model=str(MODEL), job_id="mine", max_context_length=128)
    )
    served.deployments.create_or_get(
        DeploymentConfig(
            deployment_id="serving",
            base_model=str(MODEL),
            max_context_length=128,
            tokenizer_model=str(MODEL),
        )
    )

    run = trial(
        reward_fn=spread, max_rows=4, deployment=SERVING, trainer=TrainerConfig(job_id="mine")
    )

    assert run.summary.policy_job_id == "mine"
    assert run.summary.steps == 2
    assert served.states() == {"mine": "JOB_STATE_RUNNING"}
    assert served.replicas() == {"serving": 1}


def test_a_run_that_fails_takes_down_what_it_asked_for(trial, served):
    with pytest.raises(OSError, match="disk is full"):
        trial(reward_fn=failing_after(6, crash), kl_beta=0.1)

    assert list(served.states().values()) == ["JOB_STATE_CANCELLED"] * 2
    assert list(served.replicas().values()) == [0]


def test_minibatch_steps_are_numbered_as_the_run_counts_them(trial):
    run = trial(ppo_n_minibatches=2, reward_fn=spread, max_rows=4)

    assert run.summary.steps == 4
    assert [(record["step"], record["train/step"]) for record in run.records()] == [
        (2, 2.0),
        (4, 4.0),
    ]
    assert all(math.isfinite(record["train/grad_norm"]) for record in run.records())


def test_a_model_of_another_job_is_not_written_over_and_that_is_said_before_training(
    trial, tmp_path, named_platform, rows
):
    trial(rows=rows[:2], reward_fn=spread, folder="first")

    with pytest.raises(ConfigError, match=r"output_model_id must be new, got 'out', which"):
        trial(rows=rows[:2], reward_fn=spread, folder="second")
    again = trial(rows=rows[:2], reward_fn=spread, folder="first")

    assert again.summary.model_path == tmp_path / "platform" / "models" / "out"
    assert not (tmp_path / "second" / "metrics.jsonl").read_bytes()
