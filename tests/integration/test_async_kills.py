"""SIGKILL to each part of an asynchronous run: nothing is lost, and on-policy nothing changes."""

import os
import signal

import pytest
from tests.integration.conftest import async_config
from tests.integration.rollouts import make_rollouts
from tests.integration.runs import FinishedRun, count_steps
from tests.integration.served import Victims, kill_in, name_anew, pointed_at
from tests.waiting import wait_until

from training.recipes import async_rl_loop
from training.run.checkpoints import read_manifest

ROWS = 12
STEPS = 6
SMALL = {"max_rows": ROWS, "dcp_save_interval": 1}
# Between the optimizer step and the end of its weight sync.
UNPUBLISHED = {
    "snapshot": ("trainer", "save_weights_for_sampler"),
    "hot-load": ("deployment", "load_snapshot"),
}
PHASES = {
    "sampling": ("deployment", "sampling"),
    "forward-backward": ("trainer", "forward_backward"),
    **UNPUBLISHED,
}


def is_complete(run):
    """Each step once, each row in one of them: the steps hold as many as there are."""
    assert [record["step"] for record in run.records] == list(range(1, STEPS + 1))
    assert [record["rollout/valid_prompt_groups"] for record in run.records] == [2.0] * STEPS
    return (run.last.step, run.last.cursor, run.last.beyond) == (STEPS, ROWS, [])


def run_here(served, folder, **changes):
    fields = async_config(folder, **SMALL | changes, output_model_id=folder.name)
    with pointed_at(served):
        async_rl_loop.main(fields, rollout_fn_factory=make_rollouts())
    return FinishedRun(folder, served.data_dir / "models" / folder.name)


@pytest.fixture(scope="module")
def whole(served, tmp_path_factory):
    """An on-policy run that nobody disturbed, on the served platform."""
    return run_here(served, name_anew(tmp_path_factory.mktemp("runs") / "async-whole"))


def test_a_served_run_has_the_metrics_and_the_weights_of_the_embedded_one(whole, tmp_path):
    folder = tmp_path / "async-embedded"
    fields = async_config(folder, **SMALL)

    async_rl_loop.main(fields, rollout_fn_factory=make_rollouts())

    embedded = FinishedRun(folder, folder / "models" / "out")
    assert embedded.has_weights_of(whole)
    assert embedded.records == whole.records
    assert is_complete(whole)


@pytest.mark.parametrize("phase", UNPUBLISHED)
@pytest.mark.parametrize("late", [0, 1])
def test_a_recipe_that_is_killed_before_it_has_published_a_step_takes_it_again(
    served, whole, recipes, tmp_path, phase, late
):
    folder = tmp_path / f"async-{phase}-{late}"
    # Off-policy a step that saves no checkpoint does not wait for its weight sync.
    flags = [f"--max-rows={ROWS}", f"--dcp-save-interval={1 + late}"]
    flags += [f"--max-head-offpolicy-versions={late}"]
    victims = Victims(served)

    first = recipes.start_async(served.url, folder, *flags)

    # Off-policy the second step may be reported before its checkpoint is written.
    def is_time() -> bool:
        return count_steps(folder) >= 2 and bool(read_manifest(folder))

    with kill_in(victims, UNPUBLISHED[phase], folder, lambda: first.pid, is_time=is_time) as killer:
        assert first.wait() == -signal.SIGKILL
    assert killer.hits == [first.pid]
    point = read_manifest(folder)[-1]
    second = recipes.start_async(served.url, folder, *flags)
    assert second.wait() == 0, second.output

    assert point.cursor + len(point.beyond) == 2 * point.step
    assert (
        f"resuming from {point.name} of trainer job {point.job}: step {point.step}, "
        f"{2 * point.step} of {ROWS} rows done"
    ) in second.output
    done = FinishedRun(folder, served.data_dir / "models" / folder.name)
    assert is_complete(done)
    assert done.has_weights_of(whole) == (late == 0)
    assert served.workers() == []


@pytest.fixture
def kill_both(served):
    """A function that runs in a folder, and kills a trainer and then a deployment in a phase."""

    def run(folder, phase, **changes):
        victims = Victims(served)
        with (
            kill_in(victims, PHASES[phase], folder, lambda: victims.pid("trainer"), 1) as first,
            kill_in(victims, PHASES[phase], folder, lambda: victims.pid("deployment"), 3) as last,
        ):
            done = run_here(served, folder, **changes)
        assert [len(first.hits), len(last.hits)] == [1, 1]
        assert victims.pid("trainer") not in first.hits
        assert victims.pid("deployment") not in last.hits
        return done

    return run


@pytest.mark.parametrize("phase", PHASES)
def test_workers_that_are_killed_amid_rollouts_come_back(kill_both, tmp_path, phase):
    done = kill_both(tmp_path / f"async-killed-{phase}", phase, max_head_offpolicy_versions=1)

    assert is_complete(done)
    assert all(record["version/sample_staleness_max"] <= 1 for record in done.records)
    assert max(record["async/version_offset_max"] for record in done.records) == 1


def test_on_policy_killed_workers_change_nothing(kill_both, whole, tmp_path):
    done = kill_both(tmp_path / "async-on-policy", "sampling")

    assert done.has_weights_of(whole)
    assert done.records == whole.records


def test_a_run_ends_although_its_deployment_hangs_in_a_weight_sync(served, recipes, tmp_path):
    folder = tmp_path / "async-hung"
    victims = Victims(served)
    recipe = recipes.start_async(served.url, folder, "--max-rows=512", "--epochs=20")
    wait_until(lambda: count_steps(folder) >= 1, 60, "a step")
    wait_until(lambda: victims.phase("deployment") == "load_snapshot", 30, "a hot-load", 0.0)
    hung = victims.pid("deployment")
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)

    recipe.send(signal.SIGTERM)

    assert recipe.wait(30) == 143
    assert "Traceback" not in recipe.output
    wait_until(lambda: served.workers() == [], 20, "the workers' end")
