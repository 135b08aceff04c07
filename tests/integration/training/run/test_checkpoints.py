"""When a run saves, what its manifest names, and what a checkpoint says of itself."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from hearth.errors import ConfigError
from training.config.parts import plain_config
from training.data.rows import load_rows
from training.platform.run_infra import RunInfra, load_tokenizer, provision
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config
from training.run.checkpoints import (
    check_adapter,
    check_reference,
    checkpoint_reference,
    choose_checkpoint,
    read_manifest,
)
from training.run.log_path import hold_log_path
from training.run.loop import Loop
from training.run.metrics import Display, MetricsLog
from training.run.state import Run
from training.utils import DeployConfig, ResumeConfig, WeightSyncConfig

BASE = str(MODEL)


class Clock:
    """Seconds that pass when they are told to, and ``tick_s`` with each look."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@dataclasses.dataclass
class Stepped:
    """A run on the embedded platform whose steps are only counted."""

    config: Config
    infra: RunInfra
    run: Run

    def step(self, *, rows: int = 2, is_last: bool = False) -> None:
        self.run.step += 1
        self.drop(rows)
        self.save(is_last=is_last)

    def drop(self, rows: int) -> None:
        start = self.run.cursor.count
        self.run.cursor.finish(range(start, start + rows))

    def save(self, *, is_last: bool = False) -> None:
        asyncio.run(Loop(self.config, self.infra, self.run).save_if_due(is_last=is_last))

    @property
    def named(self) -> list[str]:
        return [checkpoint.name for checkpoint in read_manifest(self.run.log_path)]

    def rows(self):
        """The trainer's resumable checkpoints, as the control plane lists them."""
        found = self.infra.trainers.list_checkpoints(self.infra.policy_job_id)
        return {
            checkpoint.name.rsplit("/", 1)[-1]: checkpoint
            for checkpoint in found
            if checkpoint.checkpoint_type == "CHECKPOINT_TYPE_TRAINING"
        }


def config_of(folder: Path, **changes) -> Config:
    usual = {
        "log_path": str(folder),
        "base_model": BASE,
        "max_seq_len": 128,
        "kl_beta": 0.0,
        "deployment": DeployConfig(tokenizer_model=BASE),
    }
    return Config(**(usual | changes))


@pytest.fixture
def stepped(tmp_path, monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    with contextlib.ExitStack() as stack:

        def make(folder="run", clock=None, served=None, **changes) -> Stepped:
            if served is not None:
                monkeypatch.setenv("FIREWORKS_BASE_URL", served.url)
                monkeypatch.setenv("FIREWORKS_API_KEY", "x")
            path = tmp_path / folder
            path.mkdir(exist_ok=True)
            config = config_of(path, **changes)
            checkpoints = read_manifest(path)
            infra = stack.enter_context(provision(config, load_tokenizer(config.deployment)))
            log = stack.enter_context(MetricsLog.open(path))
            run = Run(
                path,
                log,
                Display(8, Console(quiet=True)),
                load_rows(str(TRAIN_ROWS), 8),
                [],
                0.0,
                checkpoints=checkpoints,
                now=clock or Clock(),
            )
            resumed = choose_checkpoint(checkpoints, config.resume.resume_from)
            run.begin(config, infra, resumed)
            return Stepped(config, infra, run)

        yield make


def test_a_checkpoint_is_written_every_interval_and_at_the_end(stepped):
    run = stepped(dcp_save_interval=2)

    for number in range(1, 6):
        run.step(is_last=number == 5)

    assert run.named == ["step-00002", "step-00004", "step-00005"]
    assert list(run.rows()) == run.named


def test_without_a_final_checkpoint_only_the_interval_saves(stepped):
    run = stepped(dcp_save_interval=2, save_final_checkpoint=False)

    for number in range(1, 4):
        run.step(is_last=number == 3)

    assert run.named == ["step-00002"]


@pytest.mark.parametrize(
    "changes",
    [{"dcp_save_interval": 0}, {"weight_sync": WeightSyncConfig(dcp_save_interval=0)}],
    ids=["interval", "older spelling"],
)
def test_an_interval_of_0_writes_no_checkpoint(stepped, changes):
    run = stepped(**changes)

    for number in range(1, 4):
        run.step(is_last=number == 3)

    assert run.rows() == {}
    assert not (run.run.log_path / "run.json").exists()


def test_checkpoints_that_nobody_asked_for_take_a_fiftieth_of_the_time_at_most(stepped):
    clock = Clock(tick_s=1.0)  # so a save lasts one second
    run = stepped(clock=clock)
    saves = []
    for number in range(1, 41):
        clock.now_s += 9.0
        before = run.run.saved
        run.step()
        if run.run.saved != before:
            saves.append((number, clock.now_s))

    times = [time_s for _, time_s in saves]
    assert saves[0][0] == 1, "the first costs what it costs"
    assert len(saves) >= 6
    assert all(later - earlier >= 50 for earlier, later in itertools.pairwise(times))
    assert len(saves[1:]) * 1.0 <= (clock.now_s - times[0]) / 50
    assert len(run.rows()) == 2, "of those the newest two stay"
    assert run.named == list(run.rows())


def test_a_served_platform_gets_no_checkpoint_that_nobody_asked_for(stage, stepped):
    run = stepped(served=stage)

    run.step(is_last=True)

    assert run.rows() == {}


@pytest.mark.parametrize(("asked", "kept"), [(1, 2), (3, 3), (None, 6)])
def test_the_manifest_names_what_the_trainer_still_has(stepped, asked, kept):
    run = stepped(dcp_save_interval=1, keep_checkpoints=asked)

    for _ in range(6):
        run.step()
        assert run.named == list(run.rows())

    assert run.named == [f"step-{number:05d}" for number in range(7 - kept, 7)]


def test_a_listing_that_fails_costs_no_checkpoint(stage, stepped):
    run = stepped(served=stage, dcp_save_interval=1)
    stage.wire.rule("GET .*list_checkpoints", status=400)

    run.step()
    run.step()

    assert run.named == ["step-00001", "step-00002"]


def test_a_checkpoint_says_where_the_run_stood(stepped):
    run = stepped(dcp_save_interval=1, learning_rate=3e-4)
    run.step()
    run.run.cursor.finish([5, 3])
    run.run.version = 7
    run.step(rows=0)

    metadata = run.rows()["step-00002"].metadata

    assert metadata is not None
    assert metadata["config"] == orjson.loads(orjson.dumps(plain_config(run.config)))
    assert metadata["config"]["learning_rate"] == 3e-4
    del metadata["config"]
    (_, point) = read_manifest(run.run.log_path)
    assert metadata == dataclasses.asdict(point)
    assert (point.step, point.cursor, point.beyond, point.version) == (2, 2, [3, 5], 7)
    assert point.job == run.infra.policy_job_id
    loaded = run.infra.policy.load_state_with_optimizer("step-00002")
    assert loaded.metadata == run.rows()["step-00002"].metadata


def test_rows_that_were_dropped_after_the_last_step_count_as_done(stepped):
    run = stepped(dcp_save_interval=1)
    run.step()
    run.drop(3)

    run.save()
    assert read_manifest(run.run.log_path)[-1].cursor == 2
    run.save(is_last=True)

    (point,) = read_manifest(run.run.log_path)
    assert (point.step, point.cursor) == (1, 5)
    assert list(run.rows()) == ["step-00001"]


def test_a_run_that_took_no_step_writes_no_checkpoint(stepped):
    run = stepped(dcp_save_interval=1)
    run.drop(8)

    run.save(is_last=True)

    assert run.rows() == {}


def test_going_on_from_an_older_checkpoint_forgets_the_newer_ones(stepped):
    first = stepped(dcp_save_interval=2)
    for _ in range(6):
        first.step()
    assert first.named == ["step-00002", "step-00004", "step-00006"]

    run = stepped(dcp_save_interval=2, resume=ResumeConfig(resume_from="step-00002"))
    run.step()
    assert run.named == ["step-00002", "step-00004", "step-00006"], "nothing was written yet"
    run.step()

    assert run.named == ["step-00002", "step-00004"]
    assert (run.run.step, run.run.cursor.count) == (4, 8)


def test_a_step_offset_numbers_the_steps_from_there(stepped):
    stepped(dcp_save_interval=1).step()

    run = stepped(dcp_save_interval=2, resume=ResumeConfig(step_offset=100))
    run.step()
    run.step()

    assert run.named == ["step-00001", "step-00102"]


def test_a_checkpoint_of_another_job_is_found_and_stays_named(stepped):
    first = stepped(dcp_save_interval=1)
    first.step()

    run = stepped(dcp_save_interval=1, learning_rate=1e-3, keep_checkpoints=2)
    run.step()

    assert run.infra.policy_job_id != first.infra.policy_job_id
    points = read_manifest(run.run.log_path)
    assert [(point.step, point.job) for point in points] == [
        (1, first.infra.policy_job_id),
        (2, run.infra.policy_job_id),
    ]


class Place:
    """What a reference depends on."""

    def __init__(self, work_dir: Path, *, is_embedded: bool = True) -> None:
        self.work_dir = work_dir
        self.is_embedded = is_embedded


def checkpoint_in(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(text)
    return folder


def test_another_runs_checkpoint_is_linked_into_the_runs_folder(tmp_path):
    first = checkpoint_in(tmp_path / "a" / "step-00001", "first")
    second = checkpoint_in(tmp_path / "b" / "step-00001", "second")
    place = Place(tmp_path / "run")
    copied = place.work_dir / "checkpoints" / "imported" / "step-00001"

    for source, text in ((first, "first"), (second, "second"), (copied, "second")):
        assert checkpoint_reference(str(source), place) == "cross_job://imported/step-00001"
        assert (copied / "manifest.json").read_text() == text
    shutil.rmtree(second)
    assert (copied / "manifest.json").read_text() == "second"


def test_another_jobs_checkpoint_is_named_by_job_and_name(tmp_path):
    for is_embedded in (True, False):
        place = Place(tmp_path, is_embedded=is_embedded)
        assert checkpoint_reference("policy:step-00002", place) == "cross_job://policy/step-00002"


@pytest.mark.parametrize("wanted", ["nowhere", "job:", ":name", ""])
def test_a_reference_is_a_folder_or_job_and_name(tmp_path, wanted, monkeypatch):
    monkeypatch.chdir(tmp_path / "..")

    with pytest.raises(ConfigError, match="init_from_checkpoint must be a checkpoint's folder"):
        check_reference(wanted or str(tmp_path), is_embedded=True)


def test_a_served_platform_reads_no_folder_of_the_clients(tmp_path):
    folder = checkpoint_in(tmp_path / "step-00001")

    with pytest.raises(ConfigError, match="must be JOB:NAME on a served platform, got the folder"):
        check_reference(str(folder), is_embedded=False)


def test_an_adapters_folder_is_looked_at_where_it_can_be(tmp_path):
    with pytest.raises(ConfigError, match=r"which has no adapter_config\.json"):
        check_adapter(str(tmp_path), is_embedded=True)
    check_adapter(str(tmp_path), is_embedded=False)
    (tmp_path / "adapter_config.json").write_text("{}")
    check_adapter(str(tmp_path), is_embedded=True)


def test_a_folder_that_another_process_holds_names_its_pid(tmp_path):
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with hold_log_path(tmp_path):
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with (
            pytest.raises(ConfigError, match=f"which process {pid} uses: wait for it"),
            hold_log_path(tmp_path),
        ):
            raise AssertionError("held by another")
    finally:
        os.write(done[1], b"x")
        os.waitpid(pid, 0)
        for end in (*ready, *done):
            os.close(end)

    with hold_log_path(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
