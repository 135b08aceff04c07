"""Texts of growing completions, piece by piece."""

import random

import pytest

from hearth.inference.streaming import TextPieces


@pytest.fixture
def pieces_of(tokenizer):
    """The pieces of a completion and whether text was held after each token."""

    def run(tokens, stops=(), text=None):
        def decode(ids):
            return tokenizer.decode(ids, skip_special_tokens=True)

        growing = TextPieces(decode, stops)
        pieces = [growing.push(token) for token in tokens]
        return [*pieces, growing.finish(decode(tokens) if text is None else text)]

    return run


def test_a_character_of_several_tokens_comes_whole(pieces_of, tokenizer):
    text = "größer 🦉 naïve 漢"

    pieces = pieces_of(tokenizer.encode(text))

    assert "".join(pieces) == text
    assert pieces.count("🦉") == pieces.count("漢") == pieces.count("ß") == 1
    assert all("\ufffd" not in piece for piece in pieces)


def test_what_may_begin_a_stop_string_waits_until_it_does_not(pieces_of, tokenizer):
    text = "a STOPP b STO"

    pieces = pieces_of(tokenizer.encode(text), ["STOP b", "TOPS"])

    assert "".join(pieces) == text
    assert pieces[:7] == ["a", " ", "", "", "", "", "STOPP"]
    assert pieces[-4:] == ["", "", "", "STO"]


def test_a_stop_string_is_never_told(pieces_of, tokenizer):
    pieces = pieces_of(tokenizer.encode("yes. END"), ["\n", " END"], text="yes.")

    assert "".join(pieces) == "yes."


def test_special_tokens_have_no_text_and_hold_nothing_back(pieces_of, tokenizer):
    tokens = [*tokenizer.encode("ab"), 257, *tokenizer.encode("c<tag>")]

    assert pieces_of(tokens) == ["a", "b", "", "c", "<tag>", ""]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_bytes_are_the_whole_text(pieces_of, tokenizer, seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(259) for _ in range(rng.randint(1, 120))]
    if seed % 2:
        tokens = tokenizer.encode("".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(60)))
    text = tokenizer.decode(tokens, skip_special_tokens=True)

    stops = [stop for stop in (text[9:12] + "?", "\ufffd!", "a\ufffd") if stop not in text]

    pieces = pieces_of(tokens, stops)

    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > len(text) // 4
