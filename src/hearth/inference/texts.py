"""Token ids as the text of an answer, and how long a text of a prompt may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hearth.errors import RequestError
from hearth.inference.backend import Tokenizer

TextOf = Callable[[Sequence[int]], str]


def text_decoder(tokenizer: Tokenizer | None, visible_tokens: Collection[str] = ()) -> TextOf:
    """A function from token ids to text, without special tokens except ``visible_tokens``.

    Without a tokenizer every text is empty.
    """
    if tokenizer is None:
        return lambda _: ""
    decode = tokenizer.decode
    added = tokenizer.added_tokens_decoder.items() if visible_tokens else ()
    special = {token_id: str(token) for token_id, token in added if token.special}
    hidden = {token_id for token_id, text in special.items() if text not in visible_tokens}
    if len(hidden) == len(special):
        return lambda tokens: decode(list(tokens), skip_special_tokens=True)
    return lambda tokens: decode([token for token in tokens if token not in hidden])


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Ids of a tokenizer's special tokens by their texts."""
    if tokenizer is None:
        return {}
    added = tokenizer.added_tokens_decoder.items()
    return {str(token): token_id for token_id, token in added if token.special}


def longest_text(tokenizer: Tokenizer | None, max_seq_len: int) -> int:
    """Bytes of UTF-8 that a text of ``max_seq_len`` tokens has at most; 0 without a tokenizer.

    That is as many of the longest token. A byte-level vocabulary writes some bytes as two, so its
    longest token may be shorter than it is taken here.
    """
    if tokenizer is None:
        return 0
    return max_seq_len * max(len(token.encode()) for token in tokenizer.get_vocab())


def check_length(field: str, text: str, most_bytes: int) -> None:
    """Refuse a text that cannot fit the context, before time is spent on tokenizing it.

    Raises:
        RequestError: it has more than ``most_bytes`` bytes.
    """
    size = len(text.encode())
    if size > most_bytes:
        raise RequestError(
            f"{field} must be at most {most_bytes} bytes of text, got {size}: this model's maximum "
            "context length is less, even with the longest tokens"
        )
