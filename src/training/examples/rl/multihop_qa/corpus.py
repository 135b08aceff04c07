"""A made-up world, the text collection that describes it, and questions of two or three hops.

Everything follows from a seed. A question names a person; the answer stands in the document of
something that only other documents connect with that person, so nobody finds it in one search.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "r", "s", "t", "v")
_STEMS = [one + vowel for one, vowel in itertools.product(_ONSETS, "aeiou")]


def _names(suffix: str, count: int) -> tuple[str, ...]:
    """``count`` capitalized names that end alike, so that one can tell what they name."""
    # Strides apart, or neighbors would differ in their vowel alone.
    stems = [_STEMS[place * 7 % len(_STEMS)] for place in range(count)]
    return tuple((stem + suffix).capitalize() for stem in stems)


PEOPLE = _names("ra", 60)
COMPANIES = _names("corp", 20)
CITIES = _names("ton", 20)
COUNTRIES = _names("land", 20)
LANGUAGES = _names("ish", 20)

HELD_OUT_PEOPLE = 12
"""People, the last ones, whose questions are not trained on."""


@dataclass(frozen=True)
class Question:
    """A question with the names that lead to its answer: what to search for, in order."""

    text: str
    path: tuple[str, ...]
    answer: str

    @property
    def row(self) -> dict[str, Any]:
        """The question as a row to train on."""
        return {
            "messages": [{"role": "user", "content": self.text}],
            "ground_truth": self.answer,
            "hops": len(self.path),
        }


@dataclass(frozen=True)
class World:
    """Who was born where and works for whom, and so on. Every fact is one entry of a mapping."""

    born_in: Mapping[str, str]
    works_at: Mapping[str, str]
    seat: Mapping[str, str]
    country: Mapping[str, str]
    language: Mapping[str, str]

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        """A world in which each fact is drawn by itself."""

        def drawn(subjects: Sequence[str], values: Sequence[str]) -> dict[str, str]:
            return {one: rng.choice(values) for one in subjects}

        return cls(
            born_in=drawn(PEOPLE, CITIES), works_at=drawn(PEOPLE, COMPANIES),
            seat=drawn(COMPANIES, CITIES), country=drawn(CITIES, COUNTRIES),
            language=drawn(COUNTRIES, LANGUAGES),
        )  # fmt: skip

    def documents(self) -> dict[str, str]:
        """The text collection: title to text."""
        people = {
            one: f"{one} was born in {self.born_in[one]} and works at {self.works_at[one]} ."
            for one in PEOPLE
        }
        companies = {one: f"{one} has its seat in {self.seat[one]} ." for one in COMPANIES}
        cities = {one: f"{one} lies in {self.country[one]} ." for one in CITIES}
        countries = {one: f"people in {one} speak {self.language[one]} ." for one in COUNTRIES}
        return people | companies | cities | countries

    def questions(self, person: str) -> list[Question]:
        """All questions about a person, the shorter ways first."""
        born, firm = self.born_in[person], self.works_at[person]
        seat = self.seat[firm]
        home = self.country[born]
        by_birth, by_work = (person, born), (person, firm, seat)
        return [
            Question(f"in which country was {person} born ?", by_birth, home),
            Question(f"in which city does {person} work ?", by_work[:2], seat),
            Question(
                f"which language is spoken where {person} was born ?", (*by_birth, home),
                self.language[home],
            ),
            Question(f"in which country does {person} work ?", by_work, self.country[seat]),
        ]  # fmt: skip


def the_world() -> World:
    """The world that the example's questions are about."""
    return World.drawn(random.Random("multihop_qa"))


def question_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows to train on, held-out rows), both shuffled; they share no person."""
    world = the_world()
    people = (PEOPLE[:-HELD_OUT_PEOPLE], PEOPLE[-HELD_OUT_PEOPLE:])
    train, held_out = (
        [one.row for person in some for one in world.questions(person)] for some in people
    )
    for rows in (train, held_out):
        random.Random(0).shuffle(rows)
    return train, held_out


def vocabulary() -> list[str]:
    """Every word of any world's documents and questions, sorted."""
    world = the_world()
    texts = [*world.documents().values()]
    texts += [one.text for person in PEOPLE for one in world.questions(person)]
    names = {*PEOPLE, *COMPANIES, *CITIES, *COUNTRIES, *LANGUAGES}
    return sorted(names.union(*(text.split() for text in texts)))
