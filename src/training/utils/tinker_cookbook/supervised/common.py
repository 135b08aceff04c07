"""Tokens to datums."""

from training.samples.datums import datum_from_tokens_weights

__all__ = ["datum_from_tokens_weights"]
