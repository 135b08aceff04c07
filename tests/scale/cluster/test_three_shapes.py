"""One recipe in three shapes: embedded; two ranks and vLLM on one machine; on two nodes of Ray."""

from __future__ import annotations

import pytest
from tests.scale.cluster.clusters import on_main_thread, places, ranks_apart
from tests.scale.cluster.greedy import (
    LOGPROB_TOLERANCE,
    SAMPLES_OF_STEP,
    STEPS,
    Greedy,
    check_same,
    needs_vllm,
    on_vllm,
    train,
)

from training.utils import TrainerConfig


def test_what_is_compared_shows_the_weights_of_each_step(embedded, tmp_path):
    trial, greedy = embedded
    places_of: dict[str, list[int]] = {}
    for place, number, question in greedy.rollouts:
        if number == 0:
            places_of.setdefault(question, []).append(place)

    assert len({record["train/surrogate_loss_sum"] for record in trial.records()}) == STEPS
    for first, again in places_of.values():
        before, after = (greedy.samples[place, 0].logprobs for place in (first, again))
        assert before != pytest.approx(after, abs=10 * LOGPROB_TOLERANCE)

    other = Greedy()
    faster = train(tmp_path, other, learning_rate=1.05e-3)
    with pytest.raises(AssertionError):
        check_same((faster, other), embedded)


@needs_vllm
def test_two_ranks_and_vllm_have_the_rows_and_losses_of_an_embedded_run(embedded, tmp_path):
    greedy = Greedy()

    trial = train(
        tmp_path, greedy, placement="process", trainer=TrainerConfig(ranks=2), deployment=on_vllm(1)
    )

    check_same((trial, greedy), embedded)


@needs_vllm
def test_two_nodes_of_ray_have_them_too_and_go_on_when_that_of_a_rank_is_lost(
    two_nodes, embedded, tmp_path
):
    before: list[dict[str, list[str]]] = []

    def lose_the_small_node() -> None:
        before.append(places())
        two_nodes.lose(two_nodes.smallest)

    with ranks_apart(two_nodes), on_main_thread(lose_the_small_node) as lose:
        greedy = Greedy(before=lambda count: lose() if count == 2 * SAMPLES_OF_STEP + 3 else None)
        trial = train(
            tmp_path,
            greedy,
            placement="ray",
            dcp_save_interval=1,
            trainer=TrainerConfig(ranks=2),
            deployment=on_vllm(2),
        )

    (used,) = before
    assert {name: len(nodes) for name, nodes in used.items()} == {"trainer": 2, "deployment": 3}
    assert len(set(used["trainer"])) == 2
    check_same((trial, greedy), embedded)
