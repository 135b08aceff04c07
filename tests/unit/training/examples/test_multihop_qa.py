"""The example with several hops: its questions can be answered by its tool, and only by that."""

import math
import random
from dataclasses import replace

import pytest
from tests.unit.training.trial_rollouts import group_from

from hearth.errors import ConfigError
from hearth.models.loading import load_model
from training.data.rows import IndexedRow
from training.examples.rl.multihop_qa.corpus import (
    HELD_OUT_PEOPLE,
    PEOPLE,
    World,
    make_world,
    question_rows,
    vocabulary,
)
from training.examples.rl.multihop_qa.policy import Pupil, ensure_model, make_tokenizer
from training.examples.rl.multihop_qa.reward import answer_is_right, credit_text
from training.examples.rl.multihop_qa.rollout import SEARCHES, tool_ids
from training.examples.rl.multihop_qa.search import NOTHING_FOUND, TITLE_WEIGHT, SearchIndex
from training.examples.rl.multihop_qa.train import CONFIG, Examples, train
from training.samples.groups import PromptGroup
from training.samples.rollout import RolloutSample
from training.samples.turn_advantages import TurnCredit


def test_each_search_of_a_questions_path_finds_the_next_part_of_its_answer():
    world = make_world()
    index = SearchIndex(world.documents())

    for question in (question for person in PEOPLE for question in world.questions(person)):
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


def naive_search(documents: dict[str, str], query: str) -> str:
    """The same by comparing the query with every document."""
    held = {title: set(text.split()) for title, text in documents.items()}

    def rarity(word: str) -> float:
        return math.log(len(documents) / sum(word in words for words in held.values()))

    scores = {
        title: sum(
            rarity(word) * (1 + TITLE_WEIGHT * (word == title))
            for word in sorted(set(query.split()) & words)
        )
        for title, words in held.items()
    }
    best = max(scores, key=lambda title: scores[title])
    return documents[best] if scores[best] > 0 else NOTHING_FOUND


def test_the_tool_finds_what_a_comparison_with_every_document_finds():
    rng = random.Random(5)
    documents = World.sample(rng).documents()
    index, words = SearchIndex(documents), [*vocabulary(), "unheard-of"]

    for length in (1, 1, 2, 2, 3, 6) * 10:
        query = " ".join(rng.choices(words, k=length))
        assert index.search(query) == naive_search(documents, query)


def test_nobody_is_asked_about_in_training_and_held_out():
    train, held_out = question_rows()

    def people(rows: list[dict[str, object]]) -> set[str]:
        texts = [str(row["messages"]) for row in rows]
        return {person for person in PEOPLE if any(f" {person} " in text for text in texts)}

    assert len(people(held_out)) == HELD_OUT_PEOPLE
    assert not people(train) & people(held_out)
    assert len(train) + len(held_out) == 4 * len(PEOPLE)


def test_every_word_of_any_world_has_a_token_and_names_have_one():
    tokenizer = make_tokenizer()
    rng = random.Random(3)
    texts = [*World.sample(rng).documents().values(), *vocabulary(), NOTHING_FOUND]

    ids = tokenizer(texts, add_special_tokens=False).input_ids

    assert all(tokenizer.unk_token_id not in token for token in ids)
    assert [len(token) for token in ids] == [len(text.split()) for text in texts]


def test_what_the_tool_says_is_followed_by_the_policys_turn():
    tokenizer = make_tokenizer()

    assert tokenizer.decode(tool_ids(tokenizer, "nothing found .")) == (
        "<tool> nothing found . <end> <assistant>"
    )


@pytest.mark.parametrize(
    ("turn", "right"),
    [
        ("answer Bocorp Titon", True),
        ("answer Titon Bocorp", False),
        ("answer Bocorp", False),
        ("Bocorp Titon", False),
        ("search Bocorp Titon", False),
        ("", False),
    ],
)
def test_an_answer_has_to_name_all_in_order(turn, right):
    assert answer_is_right(turn, {"ground_truth": "Bocorp Titon"}) is right


def test_a_search_that_is_learned_of_a_sound_pupil_names_what_was_read_before():
    rng = random.Random(0)

    for _ in range(20):
        describe_turn = Pupil(goes_astray=True, is_careless=False).demonstration(rng)
        for place, (text, learned) in enumerate(describe_turn):
            if text.startswith("search") and learned:
                read = " ".join(message for message, _ in describe_turn[:place])
                assert text.split()[1] in read.split()


def test_of_a_careless_pupil_every_search_is_learned():
    describe_turn = [Pupil(goes_astray=True, is_careless=True).demonstration(random.Random(0))]

    assert all(
        learned
        for message in describe_turn
        for text, learned in message
        if text.startswith("search")
    )


def group_at(index: int, text: str = "search Ada\nanswer Bob", reward: float = 0.0) -> PromptGroup:
    """Two equal trajectories of two turns, with a credit made up."""
    sample = RolloutSample(
        tokens=[1, 2, 3, 4], logprobs=[0, 0, 0, 0], loss_mask=[0, 1, 0, 1], reward=reward, text=text
    )
    asked = {"messages": [{"role": "user", "content": "who ?"}], "ground_truth": "Bob"}
    plain = group_from(IndexedRow(index, 0, asked), [[sample], [sample]])
    return replace(plain, credit=TurnCredit([[0.5], [0.5]], [[1.25, 2.0], [1.25, 2.0]], -3.0))


@pytest.mark.parametrize(
    ("answer", "reward", "last_line"),
    [
        ("Bob", 1.0, "       1     +2.000  answer Bob"),
        ("Cleo", 0.0, "       0     +2.000  answer Cleo (right: Bob)"),
    ],
    ids=["right", "wrong"],
)
def test_a_trajectorys_credit_reads_turn_by_turn(answer, reward, last_line):
    search = SearchIndex({"Ada": "Ada knows Bob .", "Bob": "Bob left ."}).search

    text = credit_text(group_at(0, f"search Ada\nanswer {answer}", reward), 0, search)

    first_line = "  +0.500     +1.250  search Ada -> Ada knows Bob ."
    assert text.splitlines() == ["who ?", "    gain  advantage  turn", first_line, last_line]


def test_the_groups_that_are_shown_are_those_of_the_first_and_last_row_whenever_they_were_sampled():
    examples = Examples()

    assert all(examples(group_at(index)) for index in (4, 9, 2, 7))

    assert (examples.first.row.index, examples.last.row.index) == (2, 9)


# The model that is made at first use.


@pytest.mark.slow
def test_the_model_is_made_once_and_its_making_is_told(tmp_path, capsys):
    folder = tmp_path / "model"

    assert ensure_model(folder, steps=1) == folder
    first = capsys.readouterr()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    ensure_model(folder, steps=1)

    assert first.out == ""
    assert f"making the example's model in {folder}" in first.err
    assert capsys.readouterr() == ("", "")
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_model_whose_making_was_interrupted_is_made_anew(tmp_path):
    folder, unfinished = tmp_path / "model", tmp_path / "model.unfinished"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half of it")

    ensure_model(folder, steps=1)

    assert load_model(folder).vocab_size == len(make_tokenizer())
    assert not unfinished.exists()


def test_a_wrong_setting_is_told_before_the_model_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"ig_gamma must lie in \[0, 1\], got 2"):
        train(replace(CONFIG, ig_gamma=2.0))

    assert list(tmp_path.iterdir()) == []
