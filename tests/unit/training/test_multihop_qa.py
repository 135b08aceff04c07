"""The example with several hops: its questions can be answered by its tool, and only by that."""

from __future__ import annotations

import random

import pytest

from training.examples.rl.multihop_qa.corpus import (
    HELD_OUT_PEOPLE,
    PEOPLE,
    World,
    question_rows,
    the_world,
    vocabulary,
)
from training.examples.rl.multihop_qa.policy import Pupil, make_tokenizer
from training.examples.rl.multihop_qa.reward import answer_is_right, credit_text
from training.examples.rl.multihop_qa.rollout import SEARCHES, tool_ids
from training.examples.rl.multihop_qa.search import NOTHING_FOUND, SearchIndex
from training.utils.rl.groups import PromptGroup
from training.utils.rl.igpo import TurnCredit
from training.utils.rl.rollout import RolloutSample
from training.utils.rows import IndexedRow


def test_each_search_of_a_questions_path_finds_the_next_part_of_its_answer():
    world = the_world()
    index = SearchIndex(world.documents())

    for question in (one for person in PEOPLE for one in world.questions(person)):
        found = [index.search(name) for name in question.path]
        assert len(question.path) == len(question.answer) <= SEARCHES
        for text, part in zip(found, question.answer, strict=True):
            assert part in text.split()


def test_the_tool_prefers_a_title_and_says_when_it_finds_nothing():
    index = SearchIndex(
        {"Ada": "Ada knows Bob .", "Bob": "Bob knows Cleo .", "Cleo": "Cleo left ."}
    )

    assert index.search("Bob") == "Bob knows Cleo ."
    assert index.search("who knows Cleo") == "Cleo left ."
    assert index.search("Dora") == NOTHING_FOUND
    assert index.search("") == NOTHING_FOUND


def test_nobody_is_asked_about_in_training_and_held_out():
    train, held_out = question_rows()

    def people(rows: list[dict[str, object]]) -> set[str]:
        texts = [str(row["messages"]) for row in rows]
        return {one for one in PEOPLE if any(f" {one} " in text for text in texts)}

    assert len(people(held_out)) == HELD_OUT_PEOPLE
    assert not people(train) & people(held_out)
    assert len(train) + len(held_out) == 4 * len(PEOPLE)


def test_every_word_of_any_world_has_a_token_and_names_have_one():
    tokenizer = make_tokenizer()
    rng = random.Random(3)
    texts = [*World.drawn(rng).documents().values(), *vocabulary(), NOTHING_FOUND]

    ids = tokenizer(texts, add_special_tokens=False).input_ids

    assert all(tokenizer.unk_token_id not in one for one in ids)
    assert [len(one) for one in ids] == [len(text.split()) for text in texts]


def test_what_the_tool_says_is_followed_by_the_policys_turn():
    tokenizer = make_tokenizer()

    assert tokenizer.decode(tool_ids(tokenizer, "nothing found .")) == (
        "<tool> nothing found . <end> <assistant>"
    )


@pytest.mark.parametrize(("turn", "right"), [
    ("answer Bocorp Titon", True), ("answer Titon Bocorp", False), ("answer Bocorp", False),
    ("Bocorp Titon", False), ("search Bocorp Titon", False), ("", False),
])  # fmt: skip
def test_an_answer_has_to_name_all_in_order(turn, right):
    assert answer_is_right(turn, {"ground_truth": "Bocorp Titon"}) is right


def test_a_search_that_is_learned_of_a_sound_pupil_names_what_was_read_before():
    rng = random.Random(0)

    for _ in range(20):
        told = Pupil(goes_astray=True, is_careless=False).demonstration(rng)
        for place, (text, learned) in enumerate(told):
            if text.startswith("search") and learned:
                read = " ".join(one for one, _ in told[:place])
                assert text.split()[1] in read.split()


def test_of_a_careless_pupil_every_search_is_learned():
    told = [Pupil(goes_astray=True, is_careless=True).demonstration(random.Random(0))]

    assert all(learned for one in told for text, learned in one if text.startswith("search"))


def test_a_trajectorys_credit_reads_turn_by_turn():
    sample = RolloutSample(
        tokens=[1, 2, 3, 4], logprobs=[0, 0, 0, 0], loss_mask=[0, 1, 0, 1], reward=1.0,
        text="search Ada\nanswer Bob",
    )  # fmt: skip
    row = IndexedRow(0, 0, {"messages": [{"role": "user", "content": "who ?"}]})
    plain = PromptGroup.of(row, [[sample], [sample]])
    credit = TurnCredit([[0.5], [0.5]], [[1.25, 2.0], [1.25, 2.0]], -3.0)

    text = credit_text(
        PromptGroup(row, plain.rewards, plain.advantages, plain.samples, credit=credit), 0
    )

    assert text.splitlines()[2:] == [
        "  +0.500     +1.250  search Ada",
        "       1     +2.000  answer Bob",
    ]
