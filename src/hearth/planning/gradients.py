"""How ranks add up a gradient over the micro-batches of a request: whole, or in parts.

Whole is faster: each rank adds up all gradients itself, and ranks exchange them once a request. In
parts they exchange them in every micro-batch, and each keeps its own part only.
"""

from __future__ import annotations

WHOLE_GRADIENT_SHARE = 0.5
"""Most of a rank's memory for what it holds between passes and a whole gradient. The other half is
for activations, logits, and the weights of the layers that run."""


def fits_whole_gradient(parameters: int, *, held: int, memory: int) -> bool:
    """Whether a rank has room for a float32 gradient of all ``parameters``.

    ``held`` are the bytes that stay in its memory between passes: its parts of weights, gradients
    and moments, and of frozen models. ``memory`` are all bytes of its GPU, or its share of the
    machine's. Memory that is free at the moment does not count, so that a run that is started again
    makes the same choice, and has the same bits.
    """
    return held + 4 * parameters <= WHOLE_GRADIENT_SHARE * memory
