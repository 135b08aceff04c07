"""A folder's run goes on only as the same run: same rows, same settings, nothing overwritten."""

import orjson
import pytest
from tests.integration.rollouts import spread
from tests.integration.test_resume import crash, failing_after

from hearth.errors import ConfigError, EngineError
from training.utils import ResumeConfig, TrainerConfig

FOUR_STEPS = {"folder": "run", "reward_fn": spread, "dcp_save_interval": 1, "max_rows": 8}


def contents(folder) -> dict[str, bytes]:
    """What every file of a folder holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def finished(trial):
    return trial(**FOUR_STEPS)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"policy_loss": "dapo"}, ["policy_loss: 'grpo' then, 'dapo' now"]),
        (
            {"learning_rate": 1e-5, "weight_sync_interval": 2},
            ["learning_rate: 0.001 then, 1e-05 now", "weight_sync_interval: 1 then, 2 now"],
        ),
        ({"seed": 7}, ["seed: 0 then, 7 now"]),
        ({"max_rows": 3}, ["rows: 8 then, 3 now (with other content or order)"]),
        ({"max_rows": 10}, ["rows: 8 then, 10 now (the first 8 are the same)"]),
        ({"epochs": 2}, ["epochs: 1 then, 2 now"]),
    ],
)
def test_another_run_in_the_folder_is_refused_and_nothing_is_touched(
    trial, finished, changes, lines
):
    before = contents(finished.folder)

    with pytest.raises(ConfigError) as refused:
        trial(**(FOUR_STEPS | changes))

    for line in lines:
        assert f"\n  - {line}" in str(refused.value)
    assert str(refused.value).count("\n  - ") == len(lines)
    assert f"aside to {finished.folder}.1" in str(refused.value)
    assert contents(finished.folder) == before


def test_rows_with_other_content_are_refused(trial, finished, rows):
    with pytest.raises(ConfigError, match=r"rows: 8 then, 8 now \(with other content or order\)"):
        trial(**FOUR_STEPS, rows=[*rows[:6], rows[7], rows[6]])


def test_a_finished_run_says_so_and_how_to_train_more(trial, finished, capsys):
    capsys.readouterr()

    again = trial(**FOUR_STEPS)

    assert again.rewarded == []
    assert again.has_weights_of(finished)
    said = capsys.readouterr().out
    assert "8 of 8 rows done" in said
    assert 'this run is finished; to train more, give more epochs with resume="force"' in said


def test_a_finished_run_goes_on_for_more_epochs_when_forced(trial, finished):
    more = trial(**FOUR_STEPS, epochs=2, resume="force")

    whole = trial(**(FOUR_STEPS | {"folder": "whole"}), epochs=2)
    assert len(more.rewarded) == 8 * 4
    assert more.has_weights_of(whole)
    # What it was first started with is kept beside.
    kept = orjson.loads((finished.folder / "config.1.json").read_bytes())
    assert kept["epochs"] == 1


def test_more_rows_behind_the_old_ones_may_be_forced(trial, finished):
    more = trial(**(FOUR_STEPS | {"max_rows": 10}), resume="force")

    assert len(more.rewarded) == 2 * 4


def test_what_the_rows_order_follows_from_cannot_be_forced(trial, finished):
    with pytest.raises(ConfigError, match=r"(?s)seed: 0 then, 7 now.*cannot change within a run"):
        trial(**FOUR_STEPS, seed=7, resume="force")
    with pytest.raises(ConfigError, match="rows: 8 then, 4 now"):
        trial(**(FOUR_STEPS | {"max_rows": 4}), resume="force")


def test_never_moves_the_older_run_aside_whole(trial, finished, capsys):
    before = contents(finished.folder)

    new = trial(**FOUR_STEPS, policy_loss="dapo", resume=ResumeConfig(mode="never"))

    aside = finished.folder.with_name("run.1")
    assert contents(aside) == before
    assert f"the older run of this folder is in {aside} now" in capsys.readouterr().out
    assert len(new.rewarded) == 8 * 4


def test_a_run_that_died_before_its_first_checkpoint_is_kept_when_another_starts(trial):
    common = FOUR_STEPS | {"dcp_save_interval": 0, "prompt_groups_per_step": 1}
    with pytest.raises(OSError, match="disk is full"):
        trial(**common | {"reward_fn": failing_after(9, crash)})

    run = trial(**common, learning_rate=1e-5)

    kept = (run.folder.with_name("run.1") / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in kept if b'"train"' in line] == [1, 2]
    assert len(run.rewarded) == 8 * 4


def test_where_an_older_run_went_is_said_even_if_the_new_one_cannot_start(trial, finished, capsys):
    with pytest.raises(EngineError, match="Unrecognized model"):
        trial(**FOUR_STEPS, resume="never", base_model=str(finished.folder))

    assert f"is in {finished.folder}.1 now" in capsys.readouterr().out


def test_settings_that_train_nothing_else_may_differ(trial):
    whole = trial(**(FOUR_STEPS | {"folder": "whole"}))
    with pytest.raises(OSError, match="disk is full"):
        trial(**FOUR_STEPS | {"reward_fn": failing_after(20, crash)})

    resumed = trial(
        **FOUR_STEPS | {"dcp_save_interval": 3},
        placement="process",
        max_concurrent=2,
        keep_checkpoints=3,
        trainer=TrainerConfig(timeout_s=60.0),
    )

    assert resumed.has_weights_of(whole)


def test_an_async_run_does_not_go_on_as_another_either(async_trial):
    async_trial(folder="run", dcp_save_interval=1, max_rows=4)

    with pytest.raises(ConfigError, match="max_head_offpolicy_versions: 0 then, 1 now"):
        async_trial(folder="run", dcp_save_interval=1, max_rows=4, max_head_offpolicy_versions=1)


def test_two_recipes_do_not_share_a_folder(trial, async_trial):
    trial(**FOUR_STEPS | {"max_rows": 4})

    with pytest.raises(ConfigError, match="max_head_offpolicy_versions"):
        async_trial(folder="run", max_rows=4, max_head_offpolicy_versions=2)


def test_people_who_start_anew_in_their_own_folder_are_refused(trial, tmp_path, monkeypatch):
    run = trial(**FOUR_STEPS | {"max_rows": 4})
    monkeypatch.chdir(run.folder)
    (run.folder / "train.py").write_text("work")

    with pytest.raises(ConfigError, match="must be a folder of its own to start anew in"):
        trial(**FOUR_STEPS | {"max_rows": 4}, resume="never")

    assert (run.folder / "train.py").read_text() == "work"


def test_a_damaged_record_of_the_start_is_an_error(trial, finished):
    (finished.folder / "trained_on.json").write_text("{")

    with pytest.raises(ConfigError, match=r"trained_on.json must be what a run was started with"):
        trial(**FOUR_STEPS)
