"""The bytes that each token of a tokenizer stands for, which may be less than a character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space."""


@dataclass(frozen=True)
class TokenBytes:
    """What each token id stands for."""

    tokens: list[bytes | None]
    """By id; None where there is no such token."""
    special: frozenset[int]
    """Ids of marks, which are no text."""

    def decode(self, ids: Iterable[int], *, with_special: bool = True) -> str:
        """The text of tokens; bytes that are no text become U+FFFD, unknown ids nothing.

        A tokenizer does the same, but must not be asked while another thread tokenizes with it.
        """
        known, special = self.tokens, frozenset[int]() if with_special else self.special
        parts = (
            known[number] for number in ids if 0 <= number < len(known) and number not in special
        )
        return b"".join(part for part in parts if part is not None).decode(errors="replace")


def read_tokens(tokenizer: Any) -> TokenBytes:
    """The tokens of a Hugging Face tokenizer; none of what has no vocabulary."""
    if not hasattr(tokenizer, "get_vocab"):
        return TokenBytes([], frozenset())
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens: list[bytes | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    to_bytes = _choose_reader(_decoder_types(tokenizer))
    for token, number in vocabulary.items():
        tokens[number] = to_bytes(token)
    special = set[int](getattr(tokenizer, "all_special_ids", ()))
    for number, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if number < len(tokens):
            tokens[number] = added.content.encode()
        if added.special:
            special.add(number)
    return TokenBytes(tokens, frozenset(special))


def _decoder_types(tokenizer: Any) -> set[str]:
    """The kinds of steps in which a tokenizer turns tokens into text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return set() if decoder is None else set(_find_types(json.loads(decoder.__getstate__())))


def _find_types(part: Any) -> Iterable[str]:
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _find_types(inner)


def _choose_reader(types: set[str]) -> Callable[[str], bytes]:
    if "ByteLevel" in types:
        table = {character: byte for byte, character in enumerate(_byte_characters())}
        return lambda token: _read_byte_level(token, table)
    if "WordPiece" in types:
        return lambda token: (token[2:] if token.startswith("##") else f" {token}").encode()
    return _read_sentence_piece


def _read_byte_level(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


def _read_sentence_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_characters() -> Sequence[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table).

    Printable ones stand for themselves, all others for those from U+0100 on, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
