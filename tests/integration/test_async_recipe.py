"""``async_rl_loop`` on the embedded platform: what it trains, what it says of it, how it ends."""

import asyncio
import contextlib
import itertools
import math
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter

import orjson
import pytest
from tests.integration.rollouts import make_rollouts, spread
from tests.integration.runs import find_changed, measure_difference, read_metrics, same_weights
from tests.waiting import wait_until

from hearth.errors import ClosedError, ConfigError
from hearth.losses.catalog import POLICY_LOSSES
from hearth.sdk import DeploymentManager, TrainerJobManager
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import MODEL
from training.rollouts.failures import RolloutsFailingError
from training.run.checkpoints import read_manifest
from training.run.watchdog import StalledError
from training.samples.groups import completion_sample
from training.samples.rollout import Rollout, RolloutRun, RolloutSample
from training.utils import DeployConfig, TISConfig, WandBConfig

GROUP = 4
# The weights then differ by one gradient: AdamW would hide its size.
PLAIN_STEP = {
    "eps": 1e3,
    "learning_rate": 1.0,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
    "max_rows": 2,
}


def total(run, name: str) -> float:
    return sum(record.get(name, 0.0) for record in run.records())


def delays(seed: int, longest_s: float = 0.2):
    """Before each rollout a pause of random length; now and then one is very long."""
    chance = random.Random(seed)

    async def before(row: int, _number: int) -> None:
        await asyncio.sleep(longest_s * chance.random() ** 3 * (5 if row % 5 == 0 else 1))

    return before


class Recorder:
    """Before each rollout: writes down its row, and which one of the row it is."""

    def __init__(self) -> None:
        self.rollouts: list[tuple[int, int]] = []

    async def __call__(self, row: int, number: int) -> None:
        self.rollouts.append((row, number))


def group_counts(run) -> list[float]:
    """How many groups each step had."""
    return [record["rollout/valid_prompt_groups"] for record in run.records()]


def keep_all(groups: list):
    """A filter that accepts each group, and writes it down."""
    return lambda group: groups.append(group) is None


# What is trained


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_every_policy_loss_trains_on_policy_and_off(async_trial, policy_loss, late):
    run = async_trial(policy_loss=policy_loss, max_head_offpolicy_versions=late, max_rows=6)

    records = run.records()
    assert run.summary.steps == len(records) == 3
    assert all(
        math.isfinite(value) for record in records for value in record.values() if value != "train"
    )
    assert all(record["train/grad_norm"] > 0 for record in records)
    has_own_ratio = policy_loss in ("importance_sampling", "reinforce")
    assert ("train/tis/weight_mean" in records[0]) == (late > 0 and not has_own_ratio)
    assert find_changed(run.weights())


def test_kl_minibatches_and_tis_go_together_off_policy(async_trial):
    run = async_trial(
        kl_beta=0.1,
        ppo_n_minibatches=2,
        max_head_offpolicy_versions=2,
        max_rows=9,
        learning_rate=5e-3,
    )

    records = run.records()
    assert run.summary.reference_job_id is not None
    assert [record["step"] for record in records] == [2, 4, 6, 8, 10]
    assert group_counts(run) == [2.0, 2.0, 2.0, 2.0, 1.0]
    assert {record["train/num_minibatches"] for record in records} == {2.0}
    assert records[-1]["train/ref_kl"] > 1e-4
    # The second minibatch is compared with the policy before the first.
    assert all(abs(record["train/ppo_ratio_mean"] - 1) > 1e-6 for record in records)
    assert all("perf/old_policy_forward_time" in record for record in read_metrics(run.folder))
    assert all(0 < record["train/tis/weight_mean"] <= 2.0 for record in records)
    assert max(record["async/version_offset_max"] for record in records) <= 2


def test_tis_weighs_each_token_by_its_own_logprob(async_trial):
    """On-policy all weights are 1, but for tokens whose logprob says that they were less likely."""
    shifted = []

    def shift(sample, completion):
        sample.logprobs[completion.prompt_len] -= math.log(1.5)
        shifted.append(sample)
        return sample

    make = make_rollouts(finish=shift)
    run = async_trial(make=make, tis_enabled=True, tis=TISConfig(cap=5.0), max_rows=2)

    (record,) = run.records()
    expected = 1 + 0.5 * len(shifted) / record["train/active_tokens"]
    assert record["train/tis/weight_mean"] == pytest.approx(expected, rel=1e-4)


def test_a_lora_policy_trains_off_policy_and_exports_a_merged_model(async_trial):
    run = async_trial(
        lora_rank=4,
        kl_beta=0.01,
        max_head_offpolicy_versions=1,
        learning_rate=1e-2,
        merge_adapter=True,
        make=make_rollouts(delays(1, 0.05)),
    )

    changed = find_changed(run.weights())
    assert run.summary.reference_job_id is None
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name for name in changed)
    assert run.records()[0]["train/inference_diff"] < 1e-5


def cut_in_half(whole, completion):
    """A trajectory of two segments: each half of the completion trains its own tokens."""
    if completion.completion_len == 1:
        return RolloutRun([whole])
    cut = completion.prompt_len + completion.completion_len // 2
    first = RolloutSample(
        whole.tokens[:cut], whole.logprobs[:cut], whole.loss_mask[:cut], whole.reward
    )
    logprobs, mask = [0.0] * cut + whole.logprobs[cut:], [0] * cut + whole.loss_mask[cut:]
    return RolloutRun([first, RolloutSample(whole.tokens, logprobs, mask, whole.reward)])


def test_a_run_in_two_segments_has_the_gradient_of_its_tokens_in_one_sample(async_trial):
    in_one = async_trial(**PLAIN_STEP)
    in_two = async_trial(make=make_rollouts(finish=cut_in_half), **PLAIN_STEP)

    (whole,), (halves,) = in_one.records(), in_two.records()
    assert halves["train/num_sequences"] > whole["train/num_sequences"] == 2 * GROUP
    assert halves["train/active_tokens"] == whole["train/active_tokens"]
    assert halves["rollout/reward"] == whole["rollout/reward"]
    assert halves["rollout/response_len/mean"] == whole["rollout/response_len/mean"]
    assert measure_difference(in_one.weights(), in_two.weights()) < 1e-4


def make_seeded(count: int):
    """Rollouts of ``count`` runs; a row's seeds are the same however many that are."""

    def make_rollout_fn(setup):
        sampler = build_deployment_sampler(setup)

        async def sample_run(row, seed):
            (completion,) = await sampler.sample_with_tokens(
                row["messages"], n=1, seed=seed, **setup.sample_kwargs
            )
            sample = completion_sample(completion, spread(completion.text, row))
            return RolloutRun([sample], f"run {seed}")

        async def rollout_fn(row, sample_index):
            seeds = range(sample_index * count, (sample_index + 1) * count)
            return Rollout(
                [await sample_run(row, seed) for seed in seeds], row_meta={"runs": count}
            )

        return rollout_fn

    return make_rollout_fn


def test_runs_of_one_rollout_are_trajectories_of_their_group_like_any_other(async_trial):
    groups = []

    four = async_trial(make=make_seeded(1), completions_per_prompt=4)
    two = async_trial(make=make_seeded(2), completions_per_prompt=2, accepts=keep_all(groups))

    assert four.has_weights_of(two)
    assert [record["rollout/samples_completed"] for record in two.records()] == [8.0] * 4
    assert [len(group.rewards) for group in groups] == [4] * 8
    assert all(group.row_meta == {"runs": 2} for group in groups)


# Which rows are trained


@pytest.mark.parametrize("late", [0, 2])
def test_a_refused_group_is_replaced_by_the_next_rows(async_trial, late):
    run = async_trial(
        accepts=lambda group: group.row.index % 3 != 1,
        max_rows=11,
        max_head_offpolicy_versions=late,
    )

    refused = 4
    assert group_counts(run) == [2.0, 2.0, 2.0, 1.0]
    assert run.summary.rows == 11
    assert total(run, "rollout/valid_prompt_groups") + refused == 11
    if late == 0:  # else some are refused after the last step
        assert total(run, "async/filter_drops") == total(run, "rollout/dropped/filtered") >= 3


def test_when_every_group_is_refused_nothing_is_trained_and_that_is_said(async_trial, capsys):
    run = async_trial(accepts=lambda group: False, max_rows=5)

    assert run.summary.steps == 0
    assert run.summary.rows == 5
    assert (
        "5 rows were dropped and no optimizer step was taken: 5 that dynamic_filter_fn did not "
        "accept" in capsys.readouterr().out
    )


def test_a_group_is_trained_if_enough_of_its_rollouts_succeed(async_trial):
    async def before(row: int, number: int) -> bool:
        if (row, number) == (5, 3):
            raise ConnectionError("the tool's host is down")
        return (row, number) not in ((1, 0), (2, 0), (2, 1))

    groups = []
    make = make_rollouts(before)
    run = async_trial(
        make=make, accepts=keep_all(groups), min_group_size=3, rollout_retries=0, max_rows=8
    )

    sizes = {group.row.index: len(group.rewards) for group in groups}
    assert sizes == {0: 4, 1: 3, 3: 4, 4: 4, 5: 3, 6: 4, 7: 4}
    assert group_counts(run) == [2.0, 2.0, 2.0, 1.0]
    assert total(run, "async/empty_samples") == 3
    assert total(run, "async/sample_fails") == 1
    assert total(run, "rollout/dropped/too_few") == 1
    assert run.summary.rows == 8


@pytest.mark.parametrize("late", [0, 2])
def test_each_epoch_has_every_row_in_an_order_of_its_own(async_trial, rows, late):
    seen = []

    def make_rollout_fn(setup):
        plain = make_rollouts()(setup)

        async def rollout_fn(row, **where):
            seen.append((where, row["messages"][0]["content"]))
            return await plain(
                row, cursor_index=where["cursor_index"], sample_index=where["sample_index"]
            )

        return rollout_fn

    run = async_trial(
        make=make_rollout_fn,
        rows=rows[:5],
        epochs=2,
        shuffle=True,
        seed=1,
        max_head_offpolicy_versions=late,
    )

    assert group_counts(run) == [2.0] * 5
    places = {where["cursor_index"]: where for where, _ in seen}
    assert sorted(places) == list(range(10))
    assert len(seen) == 10 * GROUP
    orders = [[places[index + 5 * epoch]["row_index"] for index in range(5)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(5))
    assert orders[0] != orders[1]
    for where, question in seen:
        assert question == rows[where["row_index"]]["messages"][0]["content"]
        assert where["epoch"] == where["cursor_index"] // 5
        assert where["end_of_epoch"] == (where["cursor_index"] in (4, 9))
        assert where["rollout_idx"] == where["sample_index"]


def test_rows_of_a_file_need_no_messages(async_trial, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps({"terms": [number, 2]}) for number in range(9)))

    def ask(row):
        return [{"role": "user", "content": "What is {} + {}?".format(*row["terms"])}]

    run = async_trial(make=make_rollouts(messages=ask), dataset=str(file), max_rows=4)

    assert (run.summary.steps, run.summary.rows) == (2, 4)


# What is said of it

PROMISED = {
    "async/version_offset_mean",
    "async/version_offset_max",
    "async/version_offset_min",
    "async/in_flight",
    "async/sample_fails",
    "async/filter_drops",
    "async/stale_drops",
    "async/running_samples",
    "async/accepted_samples",
    "async/staleness_capacity_at_step",
    "async/concurrency_capacity_at_step",
    "async/realized_training_chunks",
    "async/trained_against_version",
    "train/step",
    "train/num_minibatches",
    "version/sample_staleness_mean",
    "version/sample_staleness_max",
    "perf/step_time",
    "perf/train_time",
    "perf/train_wait_time",
    "perf/train_chunk_wait_time",
    "perf/wait_time_ratio",
    "perf/weight_update_time",
    "perf/overlap_ratio",
    "perf/trainer_idle_ratio",
    "perf/sampler_idle_ratio",
}


def phases_s(record) -> float:
    """Seconds of a step's phases together; waiting for more groups is part of waiting."""
    names = ("perf/train_time", "perf/train_wait_time", "perf/weight_update_time")
    return sum(record[name] for name in names)


def test_no_sample_is_later_than_allowed_whatever_rollouts_take(async_trial):
    run = async_trial(make=make_rollouts(delays(3)), max_head_offpolicy_versions=2, max_rows=24)

    records = read_metrics(run.folder)
    assert len(records) == 12
    for number, record in enumerate(records):
        assert record.keys() >= PROMISED
        assert record["async/trained_against_version"] == number
        assert record["async/version_offset_max"] <= 2
        # By what the deployment says of each token; it may be younger than its row.
        assert record["version/sample_staleness_max"] <= record["async/version_offset_max"]
        assert phases_s(record) <= record["perf/step_time"]
        assert record["perf/train_chunk_wait_time"] <= record["perf/train_wait_time"]
    assert max(record["version/sample_staleness_max"] for record in records) >= 1
    assert max(record["perf/overlap_ratio"] for record in records) > 0
    assert run.summary.rows == 24


def test_a_late_row_is_given_up_when_its_time_is_over(async_trial):
    ended = []

    async def before(row: int, number: int) -> None:
        if row == 2 and number != 3:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(number)

    run = async_trial(
        make=make_rollouts(before), max_head_offpolicy_versions=1, late_row_wait_s=1.0, max_rows=9
    )

    records = run.records()
    assert sorted(ended) == [0, 1, 2]
    assert group_counts(run) == [2.0] * 4
    assert total(run, "async/stale_drops") == records[-1]["async/total_stale_drops"] == 1
    # Of the rollout that had ended.
    assert 0 < total(run, "async/stale_drop_response_len_mean") <= 16
    assert run.summary.rows == 9


def test_a_resumed_run_goes_on_counting_its_late_rows_and_its_samples(async_trial):
    async def before(row: int, number: int) -> None:
        if row == 2 and number != 3:
            await asyncio.sleep(3600)

    common = {
        "make": make_rollouts(before),
        "max_head_offpolicy_versions": 1,
        "late_row_wait_s": 1.0,
        "dcp_save_interval": 1,
        "folder": "run",
    }
    async_trial(**common, max_rows=7)
    run = async_trial(**common, max_rows=11, resume="force")

    records = run.records()
    assert [record["async/stale_drops"] for record in records].count(1) == 1
    assert records[-1]["async/total_stale_drops"] == 1
    assert records[-1]["async/accepted_samples"] == 10 * GROUP


@pytest.mark.parametrize(("limit", "most"), [(None, 3 * 2 * GROUP), (9, 2 * GROUP)])
def test_rollouts_in_flight_stay_below_their_limit(async_trial, limit, most):
    flying, seen = set(), []

    def make_rollout_fn(setup):
        plain = make_rollouts()(setup)

        async def rollout_fn(row, cursor_index, sample_index):
            place = (cursor_index, sample_index)
            flying.add(place)
            seen.append(len(flying))
            await asyncio.sleep(0.02)
            try:
                return await plain(row, cursor_index=cursor_index, sample_index=sample_index)
            finally:
                flying.remove(place)

        return rollout_fn

    run = async_trial(
        make=make_rollout_fn, max_head_offpolicy_versions=2, max_concurrency_rollout_sample=limit
    )

    assert max(seen) == most
    room = {record["async/concurrency_capacity_at_step"] for record in run.records()}
    assert room == {-1.0} if limit is None else room <= {1.0, 5.0, 9.0}


def test_versions_go_on_where_a_running_deployment_stands(async_trial, named_platform):
    common = {
        "deployment": DeployConfig(deployment_id="serving", tokenizer_model=str(MODEL)),
        "max_head_offpolicy_versions": 1,
        "output_model_id": None,
        "max_rows": 6,
    }
    first = async_trial(**common, cleanup_on_exit=False)
    second = async_trial(**common)

    assert (first.summary.version, second.summary.version) == (3, 3 + 1 + 3)
    records = second.records()
    assert [record["async/trained_against_version"] for record in records] == [4.0, 5.0, 6.0]
    assert [record["version/sample_staleness_max"] for record in records] == [0.0, 1.0, 1.0]
    assert records[0]["train/inference_diff"] < 1e-5 < records[1]["train/inference_diff"]
    # The first step begins with the weight sync that its samples need.
    assert all(
        phases_s(record) <= record["perf/step_time"] for record in read_metrics(second.folder)
    )


def test_a_batch_is_trained_in_pieces_while_its_last_row_is_sampled(async_trial):
    async def before(row: int, _number: int) -> None:
        await asyncio.sleep(1.0 if row == 3 else 0.0)

    run = async_trial(
        make=make_rollouts(before),
        max_head_offpolicy_versions=2,
        fifo_slack=0,
        max_rows=16,
        prompt_groups_per_step=4,
        min_samples_per_fwd_bwd=GROUP,
        max_samples_per_fwd_bwd=2 * GROUP,
    )

    records = read_metrics(run.folder)
    assert group_counts(run) == [4.0] * 4
    assert all(2 <= record["async/realized_training_chunks"] <= 4 for record in records)
    assert all(record["async/version_offset_max"] <= 2 for record in records)
    assert 0.3 < records[0]["perf/train_chunk_wait_time"] <= records[0]["perf/train_wait_time"]


def test_synchronous_training_has_nothing_in_flight_while_it_trains(async_trial):
    run = async_trial(
        make=make_rollouts(delays(4, 0.05)),
        synchronous_training=True,
        max_head_offpolicy_versions=2,
    )

    for record in read_metrics(run.folder):
        assert record["async/version_offset_max"] == record["version/sample_staleness_max"] == 0
        assert record["async/in_flight"] in (0, 2)  # none, or those of the next batch
        assert record["perf/overlap_ratio"] < 0.05


def test_completions_go_on_under_new_weights_and_their_oldest_token_counts(async_trial):
    spans, behavior = [], {}

    def make_rollout_fn(setup):
        sampler = build_deployment_sampler(setup)

        async def rollout_fn(row, cursor_index):
            fields = setup.sample_kwargs | {"max_tokens": 20 if cursor_index % 2 else 200}
            (completion,) = await sampler.sample_with_tokens(
                row["messages"], n=1, ignore_eos=True, **fields
            )
            spans.append(completion.versions)
            behavior[tuple(completion.full_tokens)] = completion.inference_logprobs
            return completion_sample(completion, spread(completion.text, row))

        return rollout_fn

    groups = []
    run = async_trial(
        make=make_rollout_fn,
        accepts=keep_all(groups),
        in_flight_weight_updates=True,
        fifo_slack=2,
        max_head_offpolicy_versions=3,
        max_rows=12,
        max_seq_len=256,
        max_completion_tokens=200,
        learning_rate=3e-4,
    )

    assert any(len(span) > 1 for span in spans), "no completion spans a weight sync"
    records = run.records()
    assert all(math.isfinite(record["train/grad_norm"]) for record in records)
    assert 1 <= max(record["version/sample_staleness_max"] for record in records) <= 3
    assert max(record["train/inference_diff"] for record in records) > 1e-4
    for sample in (sample for group in groups for sample in group.flat()):
        logprobs = [logprob for logprob in sample.behavior_logprobs if logprob != 0.0]
        sampled = behavior[tuple(sample.rollout.tokens)]
        assert logprobs == [logprob for logprob in sampled if logprob != 0.0]


def read_wandb(path):
    """The records of a W&B file, once its writer, a process of its own, has ended it."""
    wait_until(lambda: (found := parse_wandb(path)) and found[-1].HasField("exit"), 60, str(path))
    return parse_wandb(path)


def parse_wandb(path):
    """The whole records of a W&B file: LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2  # slow to import

    content, records, place, parts = path.read_bytes(), [], 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if not kind or place + 7 + length > len(content):
            break
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_wandb_gets_entity_project_names_and_every_record_in_one_run(async_trial, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    options = {"folder": "run", "dcp_save_interval": 1, "prompt_groups_per_step": 1}
    wandb = WandBConfig(entity="team", project="async", run_name="first")
    run = async_trial(**options, max_rows=1, wandb=wandb)
    async_trial(**options, max_rows=2, wandb=wandb, resume="force")

    files = sorted(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    started, resumed = map(read_wandb, files)
    (header,) = [record.run for record in started if record.HasField("run")]
    assert (header.entity, header.project, header.display_name) == ("team", "async", "first")
    assert header.run_id == (run.folder / "wandb_run_id.txt").read_text()
    assert {record.run.run_id for record in resumed if record.HasField("run")} == {header.run_id}
    settings = {item.key: orjson.loads(item.value_json) for item in header.config.update}
    assert settings["learning_rate"] == 1e-3
    logged = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in [*started, *resumed]
        if record.HasField("history")
    ]
    records = list(map(orjson.loads, (run.folder / "metrics.jsonl").read_bytes().splitlines()))
    assert len(logged) == len(records)
    for row, record in zip(logged, records, strict=True):
        assert orjson.loads(row["train/step"]) == record["step"]
        assert orjson.loads(row["rollout/reward"]) == pytest.approx(record["rollout/reward"])


# How rollouts fail


def fail_at(place: tuple[int, int], *errors: BaseException):
    """Before one rollout: its first attempts raise these errors."""
    left = list(errors)
    attempts = []

    async def before(row: int, number: int) -> None:
        if (row, number) == place:
            attempts.append(time.monotonic())
            if left:
                raise left.pop(0)

    return before, attempts


def test_a_rollout_that_times_out_once_is_tried_again(async_trial):
    before, attempts = fail_at((1, 2), TimeoutError("the judge did not answer"))

    run = async_trial(make=make_rollouts(before), max_rows=4)

    assert len(attempts) == 2
    assert total(run, "async/sample_fails") == 0
    assert total(run, "rollout/valid_prompt_groups") == 4
    assert run.has_weights_of(async_trial(max_rows=4))


def test_a_rollout_that_takes_too_long_is_given_up_and_tried_again(async_trial):
    slow = itertools.chain([3600.0], itertools.repeat(0.0))

    async def before(row: int, number: int) -> None:
        if (row, number) == (1, 2):
            await asyncio.sleep(next(slow))

    run = async_trial(make=make_rollouts(before), max_rows=4, rollout_timeout_s=2.0)

    assert total(run, "rollout/valid_prompt_groups") == 4
    assert run.has_weights_of(async_trial(max_rows=4))


def read_states(platform):
    """States of the trainers and replicas of the deployments that a platform has."""
    trainers = TrainerJobManager("x", base_url=platform.base_url)
    deployments = DeploymentManager("x", base_url=platform.base_url)
    with contextlib.closing(trainers), contextlib.closing(deployments):
        jobs = [job.state for job in trainers.list()]
        return jobs, [deployment.max_replica_count for deployment in deployments.list()]


@pytest.mark.parametrize("late", [0, 2])
def test_a_rollouts_own_error_ends_the_run_as_it_is(async_trial, tmp_path, named_platform, late):
    error = ValueError("ground_truth must be a number, got 'x'")
    before, attempts = fail_at((5, 1), error)
    make = make_rollouts(before)

    with pytest.raises(ValueError, match="must be a number") as caught:
        async_trial(make=make, folder="failed", max_head_offpolicy_versions=late, kl_beta=0.1)

    assert caught.value is error
    assert "in the rollout of row 5, sample 1" in error.__notes__
    assert len(attempts) == 1
    assert read_states(named_platform) == (["JOB_STATE_CANCELLED"] * 2, [0])
    steps = [record["step"] for record in read_metrics(tmp_path / "failed")]
    assert steps == [1, 2][: len(steps)]
    assert len(steps) == 2 or late > 0
    assert "hearth-rollouts" not in {thread.name for thread in threading.enumerate()}


def test_rollouts_that_keep_failing_end_the_run(async_trial):
    async def before(row: int, _number: int) -> None:
        if row > 1:
            raise ConnectionError("the tool's host is down")

    with pytest.raises(RolloutsFailingError, match="failures in a row, last with ConnectionError"):
        async_trial(make=make_rollouts(before))


class OddError(BaseException):
    """What is no ``Exception``, as pytest's own outcomes are."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), OddError()], ids=repr)
def test_a_rollout_that_would_end_the_process_ends_the_run_with_its_place(async_trial, error):
    before, _ = fail_at((3, 1), error)

    with pytest.raises(RuntimeError, match="must return or raise an Exception, got") as caught:
        async_trial(make=make_rollouts(before), stall_timeout_s=20.0)

    assert caught.value.__cause__ is error
    assert "in the rollout of row 3, sample 1" in caught.value.__notes__


def test_a_rollout_whose_own_task_ends_the_event_loop_ends_the_run(async_trial):
    async def leave() -> None:
        sys.exit(3)

    async def before(row: int, _number: int) -> None:
        if row == 3:
            await asyncio.create_task(leave())

    with pytest.raises(ClosedError, match=r"nor sys\.exit\(\) in a task that it starts"):
        async_trial(make=make_rollouts(before), stall_timeout_s=20.0)


def test_the_factory_is_called_once_with_what_rollouts_need(async_trial):
    setups = []

    def make_rollout_fn(setup):
        setups.append(setup)
        return make_rollouts()(setup)

    run = async_trial(make=make_rollout_fn, max_rows=4, epochs=2, rollout_extras={"tool": "x"})

    assert run.summary.steps == 4
    (setup,) = setups
    assert (setup.tokenizer_id, setup.completions_per_prompt) == (str(MODEL), GROUP)
    assert setup.sample_kwargs["max_tokens"] == 16
    assert setup.sample_kwargs["max_seq_len"] == 128
    assert setup.sample_kwargs["logprobs"] is True
    assert setup.extras == {"tool": "x"}
    assert setup.tokenizer.decode(setup.tokenizer.encode("20 + 22")) == "20 + 22"
    assert "/deployments/" in setup.model
    assert setup.inference_base_url
    assert setup.api_key


def test_a_factory_that_fails_takes_everything_down(async_trial):
    def make_rollout_fn(setup):
        raise OSError("no judge at all")

    with pytest.raises(OSError, match="no judge at all"):
        async_trial(make=make_rollout_fn, folder="run")

    assert async_trial(folder="run", max_rows=2).summary.steps == 1


def test_a_rollout_that_blocks_its_thread_is_named_with_its_line(async_trial):
    async def before(row: int, _number: int) -> None:
        while row == 3:
            time.sleep(0.1)  # the line that blocks
            if is_over.is_set():
                raise ValueError("the test is over")

    is_over = threading.Event()
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="a rollout function must let others run") as caught:
            async_trial(make=make_rollouts(before), rollout_timeout_s=1.0)
    finally:
        is_over.set()

    assert "# the line that blocks" in str(caught.value)
    assert "asyncio.to_thread" in str(caught.value)
    assert time.monotonic() - started < 20


# How a run ends that no longer gets anywhere


def test_a_run_that_stalls_says_who_waits_for_whom(async_trial, tmp_path):
    async def before(row: int, _number: int) -> None:
        if row == 3:
            await asyncio.Event().wait()

    with pytest.raises(StalledError, match="phase 'waiting for rollouts' of step 2"):
        async_trial(
            make=make_rollouts(before),
            folder="stalled",
            stall_timeout_s=3.0,
            rollout_timeout_s=None,
        )

    report = (tmp_path / "stalled" / "stall.txt").read_text(encoding="utf-8")
    assert "weight version 1" in report
    assert "1 rows are being sampled (4 rollouts), 1 groups wait for their batch" in report
    assert "late rows: [3]" in report
    assert "the oldest rollout is of row 3" in report
    assert "row 3, sample 0: " in report
    assert " in before, " in report.split("row 3, sample 0: ")[1].splitlines()[0]
    assert "Thread MainThread:" in report
    assert "Thread hearth-rollouts:" in report


STALLING = """
import asyncio, sys, time
from pathlib import Path
from tests.integration.conftest import async_config
from tests.integration.rollouts import make_rollouts
from training.recipes import async_rl_loop

async def before(row, number):
    await asyncio.to_thread(time.sleep, 3600)

config = async_config(Path(sys.argv[1]), stall_timeout_s=1.0, rollout_timeout_s=None)
async_rl_loop.main(config, rollout_fn_factory=make_rollouts(before))
"""


def test_a_script_that_stalls_in_a_thread_of_its_rollouts_exits_with_1(tmp_path, request):
    command = [sys.executable, "-c", STALLING, str(tmp_path / "run")]

    done = subprocess.run(
        command,
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "StalledError: " in done.stderr.splitlines()[-1]
    assert (tmp_path / "run" / "stall.txt").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["sigterm", "ctrl-c"]
)
def test_a_signal_during_rollouts_ends_the_run_cleanly(recipes, tmp_path, number, code):
    folder = tmp_path / "run"
    long = ["--max-completion-tokens=400", "--max-seq-len=512", "--temperature=5"]
    off_policy = ["--max-head-offpolicy-versions=2", "--in-flight-weight-updates"]
    recipe = recipes.start_async(None, folder, "--max-rows=512", "--epochs=20", *long, *off_policy)
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "a step")

    recipe.send(number)

    assert recipe.wait(20) == code
    assert "Traceback" not in recipe.output
    assert "never retrieved" not in recipe.output


# How a run goes on


@pytest.mark.parametrize(
    "passes", [{"max_rows": 12}, {"max_rows": 6, "epochs": 2, "shuffle": True}], ids=["one", "two"]
)
def test_a_crashed_run_goes_on_to_the_weights_of_one_that_did_not(async_trial, tmp_path, passes):
    rows = []

    async def drop(row: int, _number: int) -> bool:
        rows.append(row)
        return row not in (2, 7)

    async def crash(row: int, number: int) -> bool:
        if row == 8:
            raise ValueError("a crash")
        return await drop(row, number)

    common = {"dcp_save_interval": 1, "seed": 5, "folder": "run"} | passes
    whole = async_trial(**common | {"folder": "whole", "make": make_rollouts(drop)})
    with pytest.raises(ValueError, match="a crash"):
        async_trial(**common, make=make_rollouts(crash))
    point = read_manifest(tmp_path / "run")[-1]
    rows.clear()
    resumed = async_trial(**common, make=make_rollouts(drop))

    # Rows 0 1 3 4 5 6 were trained, 2 and 7 gave no groups.
    assert (point.step, point.cursor, point.beyond) == (3, 7, [])
    assert sorted(set(rows)) == [7, 8, 9, 10, 11]
    assert but_for_versions(resumed.records()) == but_for_versions(whole.records())
    assert [record["step"] for record in resumed.records()] == [1, 2, 3, 4, 5]
    assert resumed.has_weights_of(whole)
    assert resumed.summary.rows == 12


def but_for_versions(records):
    """A deployment made anew counts from 0."""
    return [
        {name: value for name, value in record.items() if "version" not in name}
        for record in records
    ]


@pytest.mark.parametrize("interval", [1, 2])
def test_off_policy_no_row_is_lost_or_trained_twice_over_a_crash(async_trial, tmp_path, interval):
    async def crash(row: int, number: int) -> None:
        await delays(row)(row, number)
        if row == 13:
            raise ValueError("a crash")

    common = {
        "max_rows": 18,
        "dcp_save_interval": interval,
        "max_head_offpolicy_versions": 2,
        "folder": "run",
        "fifo_slack": 2,
    }
    with pytest.raises(ValueError, match="a crash"):
        async_trial(**common, make=make_rollouts(crash))
    point = read_manifest(tmp_path / "run")[-1]
    unfinished = sorted(set(range(18)) - set(range(point.cursor)) - set(point.beyond))
    recorder = Recorder()
    resumed = async_trial(**common, make=make_rollouts(recorder))

    assert point.cursor + len(point.beyond) == 2 * point.step
    assert Counter(row for row, _ in recorder.rollouts) == Counter(unfinished * GROUP)
    assert [record["step"] for record in resumed.records()] == list(range(1, 10))
    assert total(resumed, "rollout/valid_prompt_groups") == 18
    assert max(record["version/sample_staleness_max"] for record in resumed.records()) <= 2
    accepted = [record["async/accepted_samples"] for record in resumed.records()]
    assert accepted == sorted(accepted)
    assert accepted[-1] == 18 * GROUP
    last = read_manifest(resumed.folder)[-1]
    assert (last.step, last.cursor, last.beyond) == (9, 18, [])


def test_a_finished_run_trains_nothing_more_and_promotes_the_same_model(async_trial):
    common = {"folder": "run", "dcp_save_interval": 3, "max_head_offpolicy_versions": 1}
    first = async_trial(**common)
    weights = first.weights()
    recorder = Recorder()

    second = async_trial(**common, make=make_rollouts(recorder))

    assert [point.step for point in read_manifest(first.folder)] == [3, 4]
    assert recorder.rollouts == []
    assert second.summary.steps == 4
    assert second.summary.model_path == second.folder / "models" / "out"
    assert same_weights(weights, second.weights())


@pytest.mark.parametrize("choice", ["skip", "take"])
def test_a_step_whose_groups_are_all_uniform_changes_nothing_unless_it_is_taken(
    async_trial, choice
):
    run = async_trial(
        make=make_rollouts(reward=lambda text, row: 1.0),
        zero_gradient_steps=choice,
        learning_rate=1e-2,
        weight_decay=0.01,
        max_rows=4,
    )

    assert bool(find_changed(run.weights())) == (choice == "take")
    # Each step has its record, skipped or not.
    assert [record["train/skipped"] for record in run.records()] == [float(choice == "skip")] * 2
    assert run.summary.steps == run.summary.version == 2


def test_a_config_that_cannot_be_is_refused_before_anything_is_started(async_trial, tmp_path):
    with pytest.raises(ConfigError, match="ratio_max must be None with policy_loss='grpo'"):
        async_trial(folder="run", max_head_offpolicy_versions=1, ratio_max=10.0)
    with pytest.raises(ConfigError, match=r"rows must be given where config\.dataset is empty"):
        async_trial(folder="run", dataset="")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("choice", ["drop", "score"])
def test_truncated_completions_are_one_setting_of_both_recipes(trial, async_trial, choice, capsys):
    options = {"truncated_completions": choice, "max_completion_tokens": 6, "max_rows": 6}
    asynchronous = async_trial(**options, accepts=lambda group: len(set(group.rewards)) > 1)
    assert ("were cut at max_completion_tokens" in capsys.readouterr().out) == (choice == "drop")
    synchronous = trial(**options, reward_fn=spread)
    assert ("were cut at max_completion_tokens" in capsys.readouterr().out) == (choice == "drop")

    trained = [
        [record["train/active_tokens"] for record in run.records()]
        for run in (synchronous, asynchronous)
    ]
    assert trained[0] == trained[1] != []
    assert all(record["rollout/truncated_ratio"] > 0 for record in asynchronous.records())
