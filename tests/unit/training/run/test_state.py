import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import ConfigError
from training.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    Cursor,
    choose_checkpoint,
    read_manifest,
    write_manifest,
)
from training.run.metrics import MetricsLog
from training.run.step_metrics import merge_metrics


@pytest.mark.slow
@given(st.permutations(range(12)))
def test_a_cursor_knows_exactly_what_is_finished_in_any_order(order):
    cursor = Cursor()

    for done, index in enumerate(order, start=1):
        cursor.finish([index])
        assert cursor.list_finished() == frozenset(order[:done])
        assert cursor.count == done

    assert cursor == Cursor(start=12, beyond=set())


def test_the_manifest_keeps_what_was_written(tmp_path):
    points = [Checkpoint("step-00001", 1, 2, [], 0), Checkpoint("step-00002", 2, 4, [6], 0)]

    write_manifest(tmp_path, points)

    assert read_manifest(tmp_path) == points
    assert choose_checkpoint(points, None) == points[1]
    assert choose_checkpoint(points, "latest") == points[1]
    assert choose_checkpoint(points, "step-00001") == points[0]


def test_a_run_without_a_manifest_starts_fresh(tmp_path):
    assert read_manifest(tmp_path) == []
    assert choose_checkpoint([], None) is None


@pytest.mark.parametrize("content", ["{", "{}", '{"checkpoints": [{"name": "x"}]}'])
def test_a_damaged_manifest_never_starts_fresh_by_itself(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)

    with pytest.raises(ConfigError, match=MANIFEST):
        read_manifest(tmp_path)


def test_a_checkpoint_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="resume_from must be one of"):
        choose_checkpoint([Checkpoint("step-00001", 1, 2, [], 0)], "step-00009")
    with pytest.raises(ConfigError, match="latest"):
        choose_checkpoint([], "latest")


def test_metrics_of_several_calls_are_weighed_by_their_samples():
    merged = merge_metrics(
        [
            (3, {"mean_kl": 1.0, "loss:sum": 2.0}),
            (1, {"mean_kl": 5.0, "loss:sum": 3.0}),
            (0, {"lr": 2}),
        ]
    )

    assert merged == {"mean_kl": 2.0, "loss_sum": 5.0, "lr": 2.0}


def test_an_older_metrics_file_is_kept(tmp_path):
    for step in (1, 2, 3):
        with MetricsLog.open(tmp_path) as log:
            log.write("train", step, {})

    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert [(tmp_path / name).read_bytes() for name in names] == [
        b'{"type":"train","step":%d}\n' % step for step in (1, 2, 3)
    ]


def test_a_resumed_log_takes_up_at_its_checkpoint(tmp_path):
    lines = [b'{"type":"train","step":%d}\n' % step for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"type":"tra')

    with MetricsLog.open(tmp_path, resumed_step=2) as log:
        log.write("train", 3, {"train/step": 3.0})

    records = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert records == [*lines[:2], b'{"type":"train","step":3,"train/step":3.0}\n']
    assert (tmp_path / "metrics.1.jsonl").read_bytes().startswith(b"".join(lines))
