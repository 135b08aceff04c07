"""Token ids as the text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

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
