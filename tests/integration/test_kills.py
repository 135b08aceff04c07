"""SIGKILL to each part of a run, in each phase: the weights come out the same to the bit."""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from tests.chaos.proxy import KINDS, FlakyProxy
from tests.integration.conftest import config
from tests.integration.runs import FinishedRun, count_steps
from tests.integration.served import HEARTH, Killer, Served, Victims, kill_in, name_anew, pointed_at
from tests.waiting import wait_until

from training.recipes.rl_loop import main
from training.run.checkpoints import read_manifest

PHASES = {
    "sampling": ("deployment", "sampling"),
    "forward-backward": ("trainer", "forward_backward"),
    "optimizer-step": ("trainer", "optim_step"),
    "save": ("trainer", "save_weights"),
    "snapshot": ("trainer", "save_weights_for_sampler"),
    "hot-load": ("deployment", "load_snapshot"),
}
SMALL = {"max_rows": 16, "dcp_save_interval": 1}
SAVING = "--dcp-save-interval=1"


def find_run(served, folder):
    """A finished run that a platform has made a model of."""
    return FinishedRun(folder, served.data_dir / "models" / folder.name)


def run_here(served, folder, **changes):
    with pointed_at(served):
        main(config(folder, **SMALL | changes, output_model_id=folder.name))
    return find_run(served, folder)


def check_unchanged(killers, done, whole):
    """Somebody was killed by each, and the run is the one that nobody disturbed."""
    assert [len(killer.hits) for killer in killers] == [1] * len(killers)
    assert done.has_weights_of(whole)
    assert done.records == whole.records
    assert done.samples == whole.samples


def take_up(recipes, served, folder):
    """Give the command of a run again that was killed; what it says."""
    recipe = recipes.start(served.url, folder, SAVING)
    assert recipe.wait() == 0, recipe.output
    return recipe.output


@pytest.fixture(scope="module")
def whole(served, tmp_path_factory):
    """A run that nobody disturbed, on the served platform, in this process."""
    return run_here(served, name_anew(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.mark.parametrize("phase", PHASES)
def test_workers_that_are_killed_come_back_and_the_run_ends_as_if_nothing_was(
    served, whole, tmp_path, phase
):
    folder, victims = name_anew(tmp_path / phase), Victims(served)

    with (
        kill_in(victims, PHASES[phase], folder, lambda: victims.pid("trainer")) as first,
        kill_in(victims, PHASES[phase], folder, lambda: victims.pid("deployment"), steps=3) as last,
    ):
        done = run_here(served, folder)

    check_unchanged([first, last], done, whole)
    assert victims.pid("trainer") not in first.hits
    assert victims.pid("deployment") not in last.hits
    assert done.last.cursor == whole.last.cursor == 16


def test_workers_that_hang_are_treated_as_ones_that_died(served, whole, tmp_path):
    folder, victims = name_anew(tmp_path / "hung"), Victims(served)

    with (
        kill_in(victims, PHASES["forward-backward"], folder, hangs=True) as first,
        kill_in(victims, PHASES["sampling"], folder, steps=5, hangs=True) as last,
    ):
        done = run_here(served, folder)

    check_unchanged([first, last], done, whole)


def test_a_recipe_goes_on_although_its_trainer_hangs_or_dies_when_it_comes_back(
    served, whole, recipes, tmp_path
):
    folder, victims = tmp_path / "hanging", Victims(served)
    recipe = recipes.start(served.url, folder, SAVING)
    wait_until(lambda: count_steps(folder) >= 2, 120, "two steps")
    hung = victims.pid("trainer")
    os.kill(hung, signal.SIGSTOP)
    recipe.send(signal.SIGKILL)
    recipe.wait()

    def is_back():
        return victims.pid("trainer") != hung

    # Those that come back are killed as soon as they answer.
    with Killer(victims, "trainer", "idle", is_time=is_back, times=2) as killer:
        assert "is resumed: " in take_up(recipes, served, folder)

    assert len(killer.hits) == 2
    done = find_run(served, folder)
    assert done.has_weights_of(whole)
    assert done.records == whole.records


def test_a_network_that_loses_cuts_and_doubles_changes_nothing(served, whole, recipes, tmp_path):
    folder = tmp_path / "network"
    with FlakyProxy(served.port, seed=0, share=0.15) as proxy:
        recipe = recipes.start(proxy.url, folder, SAVING)
        assert recipe.wait(240) == 0, recipe.output
    done = find_run(served, folder)

    assert done.has_weights_of(whole)
    assert done.records == whole.records
    assert set(proxy.counts) == set(KINDS), proxy.counts


def test_a_recipe_that_is_killed_in_each_phase_goes_on_when_the_same_command_is_given_again(
    served, whole, recipes, tmp_path
):
    folder, victims = name_anew(tmp_path / "recipe"), Victims(served)
    points = []

    # To go on loads weights, too: that phase comes first.
    for number, phase in enumerate(reversed(PHASES)):
        recipe = recipes.start(served.url, folder, SAVING)
        steps = 2 + (number + 1) // 2
        killer = kill_in(victims, PHASES[phase], folder, lambda pid=recipe.pid: pid, steps)
        with killer:
            assert recipe.wait() == -signal.SIGKILL, recipe.output
        assert killer.hits == [recipe.pid]
        points.append(read_manifest(folder)[-1])
    output = take_up(recipes, served, folder)

    done = find_run(served, folder)
    for point in points:
        assert (
            f"resuming from {point.name} of trainer job {point.job}: step {point.step}, "
            f"{point.cursor} of 16 rows done"
        ) in output
    assert len({point.name for point in points}) > 1
    assert done.has_weights_of(whole)
    assert _but_for_versions(done.records) == _but_for_versions(whole.records)
    assert done.samples == whole.samples
    assert done.last.cursor == 16
    (job,) = served.resources("rlorTrainerJobs", done.last.job)
    assert job["state"] == "JOB_STATE_CANCELLED"
    assert served.workers() == []


def test_a_platform_that_is_killed_and_started_again_is_bridged(served, whole, tmp_path):
    folder, victims = name_anew(tmp_path / "platform"), Victims(served)
    workers = []

    def come_back():
        workers.append((victims.pid("trainer"), victims.pid("deployment")))
        served.come_back()

    with contextlib.ExitStack() as stack:
        killers = [
            stack.enter_context(
                kill_in(victims, PHASES[phase], folder, lambda: served.pid, steps, then=come_back)
            )
            for steps, phase in ((2, "sampling"), (4, "forward-backward"), (6, "hot-load"))
        ]
        done = run_here(served, folder)

    check_unchanged(killers, done, whole)
    # They ran on meanwhile, and were found again.
    assert set(workers) == {(victims.pid("trainer"), victims.pid("deployment"))}


def test_a_platform_that_is_killed_while_it_makes_the_model_makes_it_when_it_is_back(
    served, whole, tmp_path
):
    folder = tmp_path / "promoted"
    victims, making = Victims(served), ("export", "writing model")

    with Killer(victims, *making, lambda: served.pid, then=served.come_back) as killer:
        done = run_here(served, folder)

    assert len(killer.hits) == 1
    assert done.has_weights_of(whole)


def test_a_recipe_that_is_killed_while_its_model_is_made_has_it_made_again(
    served, whole, recipes, tmp_path
):
    folder = tmp_path / "promoted-again"
    first = recipes.start(served.url, folder, SAVING)
    with Killer(Victims(served), "export", "writing model", lambda: first.pid):
        assert first.wait() == -signal.SIGKILL
    output = take_up(recipes, served, folder)

    done = find_run(served, folder)
    assert "16 of 16 rows done" in output
    assert done.has_weights_of(whole)
    assert done.records == whole.records


@pytest.mark.parametrize(
    ("victim", "settings"),
    [("reference", {}), ("trainer", {"lora_rank": 4, "merge_adapter": True})],
    ids=["its own trainer", "the policy's trainer"],
)
def test_a_frozen_reference_that_is_killed_while_it_scores_comes_back(
    served, tmp_path, victim, settings
):
    settings = {"kl_beta": 0.1, "max_rows": 8} | settings
    undisturbed = run_here(served, tmp_path / f"kl-{victim}", **settings)

    folder = tmp_path / f"kl-{victim}-killed"
    killer = Killer(Victims(served), victim, "forward", is_time=lambda: count_steps(folder) >= 1)
    with killer:
        done = run_here(served, folder, **settings)

    check_unchanged([killer], done, undisturbed)


def test_a_trainer_that_died_together_with_its_platform_is_reported_and_comes_back(
    served, whole, tmp_path
):
    folder = tmp_path / "both"
    victims = Victims(served)
    jobs = []

    def end_trainer_too():
        os.kill(victims.pid("trainer"), signal.SIGKILL)
        served.come_back()
        job_id = victims.folder("trainer").name.removeprefix("trainer-")
        jobs.extend(served.resources("rlorTrainerJobs", job_id))

    killer = kill_in(victims, PHASES["sampling"], folder, lambda: served.pid, then=end_trainer_too)
    with killer:
        done = run_here(served, folder)

    check_unchanged([killer], done, whole)
    assert jobs[0]["state"] == "JOB_STATE_FAILED"
    assert jobs[0]["statusMessage"][:16] == "ended by SIGKILL"


def test_a_trainer_that_dies_each_time_in_one_phase_ends_the_run_with_what_is_known(
    served, recipes, tmp_path
):
    folder = tmp_path / "again-and-again"
    victims = Victims(served)

    started = time.monotonic()
    recipe = recipes.start(served.url, folder)
    with Killer(victims, "trainer", "forward_backward", times=100):
        code = recipe.wait(60)

    error = " ".join(recipe.output.split())
    assert code == 1
    assert "forward_backward must end, got a trainer that was lost 4 times meanwhile" in error
    assert "ended by SIGKILL, last phase forward_backward" in error
    assert "start the same command again" in error
    assert "Traceback" not in error
    assert time.monotonic() - started < 60
    assert served.workers() == []


def test_hearth_stop_ends_a_run_and_its_job_stays_stopped(served, recipes, tmp_path):
    folder = tmp_path / "stopped"
    victims = Victims(served)
    recipe = recipes.start(served.url, folder, "--max-rows=512", "--epochs=20")
    wait_until(lambda: count_steps(folder) >= 2, 60, "two steps")
    job_id = victims.folder("trainer").name.removeprefix("trainer-")

    stop = [str(HEARTH), "stop", job_id, "--base-url", served.url, "--api-key", "x"]
    subprocess.run(stop, check=True, capture_output=True, timeout=60)
    code = recipe.wait(30)

    assert code == 2
    assert "JOB_STATE_CANCELLED" in recipe.output
    assert "Traceback" not in recipe.output
    (job,) = served.resources("rlorTrainerJobs", job_id)
    assert job["state"] == "JOB_STATE_CANCELLED"
    assert served.workers() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["sigterm", "ctrl-c"]
)
@pytest.mark.parametrize("moment", ["asked", "starting", "sampling", "forward-backward"])
def test_a_signal_takes_down_what_the_run_had_started(
    served, recipes, tmp_path, number, code, moment
):
    folder = tmp_path / "ended"
    victims = Victims(served)
    recipe = recipes.start(served.url, folder, "--max-rows=512", "--epochs=20")
    if moment == "asked":
        wait_until(lambda: victims.folder("trainer") is not None, 30, "a trainer's folder", 0.0)
    elif moment == "starting":
        wait_until(lambda: victims.phase("trainer") == "loading model", 30, "a start", 0.0)
    else:
        watched, marker = PHASES[moment]
        wait_until(lambda: victims.phase(watched) == marker, 30, moment, 0.0)

    recipe.send(number)

    assert recipe.wait(20) == code
    assert "Traceback" not in recipe.output
    wait_until(lambda: served.workers() == [], 10, "the workers' end")
    suffix = victims.folder("trainer").name.rsplit("-", 1)[-1]
    jobs = served.resources("rlorTrainerJobs", suffix)
    assert [job["state"] for job in jobs] == ["JOB_STATE_CANCELLED"]
    for resource in served.resources("deployments", suffix):
        assert (resource["state"], resource["maxReplicaCount"]) == ("READY", 0)


def test_a_run_that_was_ended_by_a_signal_goes_on_with_the_same_command(
    served, whole, recipes, tmp_path
):
    folder = tmp_path / "signalled"
    first = recipes.start(served.url, folder, SAVING)
    wait_until(lambda: count_steps(folder) >= 3, 60, "three steps")
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    take_up(recipes, served, folder)

    done = find_run(served, folder)
    assert done.has_weights_of(whole)
    assert len(served.resources("rlorTrainerJobs", done.last.job)) == 1


@pytest.mark.parametrize("flags", [[], [SAVING]], ids=["automatic checkpoints", "every step"])
def test_an_embedded_run_killed_at_random_moments_goes_on_exactly(whole, recipes, tmp_path, flags):
    folder = tmp_path / "embedded"
    chance = random.Random(len(flags))
    starts, code = 0, None
    while code != 0:
        recipe = recipes.start(None, folder, *flags)
        starts += 1
        # The last ones are left alone.
        end_s = time.monotonic() + (chance.uniform(0.2, 0.9) if starts <= 6 else 60)
        while (code := recipe.code()) is None and time.monotonic() < end_s:
            time.sleep(0.002)
        if code is None:
            recipe.send(signal.SIGKILL)
            assert recipe.wait() == -signal.SIGKILL
        assert code in (None, 0), recipe.output

    done = FinishedRun(folder, folder / "models" / folder.name)
    assert starts > 1
    assert done.has_weights_of(whole)
    assert done.last.cursor == 16
    assert _but_for_versions(done.records) == _but_for_versions(whole.records)


def test_workers_whose_platform_never_comes_back_end_themselves(recipes, tmp_path):
    platform = Served(tmp_path / "p", trainer_threads=1, deployment_threads=1, orphan_timeout_s=2)
    try:
        recipe = recipes.start(platform.url, tmp_path / "run", "--max-rows=512", "--epochs=20")
        wait_until(lambda: count_steps(tmp_path / "run") >= 1, 60, "a step")
        time.sleep(2.5)
        assert recipe.code() is None, recipe.output
        recipe.send(signal.SIGKILL)
        recipe.wait()
        platform.kill()
        assert len(platform.workers()) == 2

        wait_until(lambda: platform.processes() == [], 20, "the orphans' end")
    finally:
        platform.stop()
        for pid in platform.processes():
            os.kill(pid, signal.SIGKILL)


def _but_for_versions(records):
    return [
        {name: value for name, value in record.items() if "version" not in name}
        for record in records
    ]
