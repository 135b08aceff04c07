"""A made-up world, the text collection that describes it, and questions of two to four hops.

Everything follows from a seed. A question names a person; each part of the answer stands in the
document of what the part before names, so nobody finds all of it in one search.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "r", "s", "t", "v")
_STEMS = [onset + vowel for onset, vowel in itertools.product(_ONSETS, "aeiou")]


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
    """A question, what to search for in order, and the names that the searches find in order."""

    text: str
    path: tuple[str, ...]
    answer: tuple[str, ...]

    @property
    def row(self) -> dict[str, Any]:
        """The question as a row to train on."""
        return {
            "messages": [{"role": "user", "content": self.text}],
            "ground_truth": " ".join(self.answer),
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
    def sample(cls, rng: random.Random) -> World:
        """A world in which each fact is sampled by itself."""

        def sample(subjects: Sequence[str], values: Sequence[str]) -> dict[str, str]:
            return {subject: rng.choice(values) for subject in subjects}

        return cls(
            born_in=sample(PEOPLE, CITIES),
            works_at=sample(PEOPLE, COMPANIES),
            seat=sample(COMPANIES, CITIES),
            country=sample(CITIES, COUNTRIES),
            language=sample(COUNTRIES, LANGUAGES),
        )

    def documents(self) -> dict[str, str]:
        """The text collection: title to text."""
        people = {
            person: f"{person} was born in {self.born_in[person]} "
            f"and works at {self.works_at[person]} ."
            for person in PEOPLE
        }
        companies = {
            company: f"{company} has its seat in {self.seat[company]} ." for company in COMPANIES
        }
        cities = {city: f"{city} lies in {self.country[city]} ." for city in CITIES}
        countries = {
            country: f"people in {country} speak {self.language[country]} ."
            for country in COUNTRIES
        }
        return people | companies | cities | countries

    def questions(self, person: str) -> list[Question]:
        """All questions about a person."""
        born, firm = self.born_in[person], self.works_at[person]
        seat = self.seat[firm]
        home, place = self.country[born], self.country[seat]
        asked = {
            f"where was {person} born ?": (born, home),
            f"where was {person} born and what is spoken there ?": (
                born,
                home,
                self.language[home],
            ),
            f"where does {person} work ?": (firm, seat, place),
            f"where does {person} work and what is spoken there ?": (
                firm,
                seat,
                place,
                self.language[place],
            ),
        }
        return [Question(text, (person, *found[:-1]), found) for text, found in asked.items()]


def make_world() -> World:
    """The world that the example's questions are about."""
    return World.sample(random.Random("multihop_qa"))


def question_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows to train on, held-out rows), both shuffled; they share no person."""
    world = make_world()
    people = (PEOPLE[:-HELD_OUT_PEOPLE], PEOPLE[-HELD_OUT_PEOPLE:])
    train, held_out = (
        [question.row for person in some for question in world.questions(person)] for some in people
    )
    for rows in (train, held_out):
        random.Random(0).shuffle(rows)
    return train, held_out


def vocabulary() -> list[str]:
    """Every word of any world's documents and questions, sorted."""
    world = make_world()
    texts = [*world.documents().values()]
    texts += [question.text for person in PEOPLE for question in world.questions(person)]
    names = {*PEOPLE, *COMPANIES, *CITIES, *COUNTRIES, *LANGUAGES}
    return sorted(names.union(*(text.split() for text in texts)))
