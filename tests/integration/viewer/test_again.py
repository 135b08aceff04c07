import json

import pytest

from hearth.errors import NotFoundError
from hearth.records.layout import SampleId
from hearth.records.reading import iterate_tables
from hearth.viewer.again import ask_again, main
from training.quickstart import MODEL
from training.recipes import rl_loop
from training.utils import DeployConfig

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {a}?"}], "ground_truth": str(2 * a)}
    for a in range(2, 8)
]


def spread(text, row):
    """A reward that nearly always differs within a group."""
    return float(len(text) % 5)


def train(folder, **options):
    config = rl_loop.Config(
        log_path=str(folder),
        base_model=str(MODEL),
        deployment=DeployConfig(tokenizer_model=str(MODEL)),
        max_completion_tokens=8,
        max_seq_len=64,
        kl_beta=0.0,
        **({"learning_rate": 1e-3} | options),
    )
    rl_loop.main(config, ROWS, reward_fn=spread)
    return [record for table in iterate_tables(folder, "train") for record in table.to_pylist()]


def identify(record):
    return SampleId(*(record[name] for name in ("kind", "step", "index", "completion", "segment")))


def newest_version(record):
    return max(record["versions"])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dcp_save_interval": 1}, "checkpoint step-"),
        ({"dcp_save_interval": 1, "lora_rank": 4, "learning_rate": 1e-2}, "checkpoint step-"),
        ({"placement": "process"}, "snapshot step-"),
    ],
    ids=["checkpoints", "adapters", "snapshots"],
)
def test_a_sample_of_any_version_that_is_kept_is_sampled_again_bit_for_bit(options, kind, tmp_path):
    records = train(tmp_path, **options)
    by_version = {newest_version(record): record for record in records}
    assert len(by_version) >= 3

    answers = {
        version: ask_again(tmp_path, identify(record)) for version, record in by_version.items()
    }

    for version, record in by_version.items():
        (answer,) = answers[version].answers
        assert answer.equal is True
        assert answer.tokens == record["tokens"][record["prompt_len"] :]
        assert answer.seed == record["seeds"][0]
    assert "the base model" in answers[0].text
    assert kind in answers[2].text


def test_other_seeds_give_other_answers_and_versions_that_are_gone_are_refused(tmp_path, capsys):
    records = train(tmp_path, dcp_save_interval=1, keep_checkpoints=2)
    by_version = {newest_version(record): record for record in records}
    kept = identify(by_version[max(by_version)])

    asked = ask_again(tmp_path, kept, count=8, seed=5)
    again = ask_again(tmp_path, kept, count=8, seed=5)
    with_exact = ask_again(tmp_path, kept, count=3)

    assert len({answer.seed for answer in asked.answers}) == 8
    assert len({tuple(answer.tokens) for answer in asked.answers}) > 1
    assert {answer.equal for answer in asked.answers} == {None}
    assert asked == again
    assert [answer.equal for answer in with_exact.answers] == [True, None, None]

    gone = identify(by_version[1])
    with pytest.raises(NotFoundError, match=r"version 1 \(step 1\) are not kept any more: dcp_"):
        ask_again(tmp_path, gone)
    assert main([str(tmp_path), str(gone)]) == 1
    assert "are not kept any more" in capsys.readouterr().err
    assert main([str(tmp_path), str(kept), "--count", "2", "--others"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [answer["equal"] for answer in printed["answers"]] == [None, None]
