from __future__ import annotations

from hearth.inference.vllm.balancing import BLOCK, SLACK, Lane, choose, hash_blocks


def lanes(*running: int, room: int = 64) -> list[Lane]:
    return [Lane(number, room, running=task, is_open=True) for number, task in enumerate(running)]


def test_the_least_loaded_replica_takes_a_new_prompt() -> None:
    assert choose(lanes(3, 1, 2), []).number == 1


def test_a_replica_that_knows_the_beginning_takes_it_although_it_has_more_to_do() -> None:
    known, other = lanes(SLACK, 0)
    first = list(range(3 * BLOCK))
    known.remember(hash_blocks(first))

    second_turn = [*first, *range(500, 500 + BLOCK)]
    assert choose([known, other], hash_blocks(second_turn)) is known
    assert choose([known, other], hash_blocks(list(range(9, 300)))) is other


def test_affinity_ends_where_the_load_is_too_uneven() -> None:
    known, other = lanes(SLACK + 1, 0)
    prompt = list(range(BLOCK))
    known.remember(hash_blocks(prompt))

    assert choose([known, other], hash_blocks(prompt)) is other


def test_the_longest_shared_beginning_wins() -> None:
    short, long = lanes(0, 0)
    prompt = list(range(4 * BLOCK))
    short.remember(hash_blocks(prompt)[:1])
    long.remember(hash_blocks(prompt)[:3])

    assert choose([short, long], hash_blocks(prompt)) is long


def test_full_and_closed_replicas_are_given_nothing() -> None:
    full, closed = lanes(2, 0, room=2)
    closed.is_open = False

    assert choose([full, closed], []) is None


def test_a_restarted_replica_knows_nothing() -> None:
    fresh, other = lanes(1, 0)
    prompt = list(range(BLOCK))
    fresh.remember(hash_blocks(prompt))
    fresh.forget()

    assert choose([fresh, other], hash_blocks(prompt)) is other


def test_blocks_are_of_whole_beginnings() -> None:
    first, other = list(range(2 * BLOCK)), [7, *range(1, 2 * BLOCK)]

    assert hash_blocks(first)[:1] == hash_blocks([*first[:BLOCK], 1, 2])
    assert not set(hash_blocks(first)) & set(hash_blocks(other))
    assert hash_blocks(first[: BLOCK - 1]) == []
