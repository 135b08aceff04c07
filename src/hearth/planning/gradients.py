"""How ranks divide weights and add up gradients, by the memory that each of them has.

Gradients over the micro-batches of a request are added up whole or in parts. Whole is faster: each
rank adds up all gradients itself, and ranks exchange them once a request. In parts they exchange
them in every micro-batch, and each keeps its own part only.

Weights are divided over all ranks, or over those of each machine, and machines hold equal copies.
Copies are faster: only sums of gradients cross the network between machines, and no weights.
"""

from __future__ import annotations

HELD_SHARE = 0.5
"""Most of a rank's memory for what it holds between the passes of a request. The other half is for
activations, logits, and the weights of the layers that run."""
TRAINED_BYTES = 16
"""Of a trained parameter between passes: the weight, its gradient and its moments, in float32."""


def fits_whole_gradient(parameters: int, *, held: int, memory: int) -> bool:
    """Whether a rank has room for a float32 gradient of all ``parameters``.

    ``held`` are the bytes that stay in its memory between passes: its parts of weights, gradients
    and moments, and of frozen models. ``memory`` are all bytes of its GPU, or its share of the
    machine's. Memory that is free at the moment does not count, so that a run that is started again
    makes the same choice, and has the same bits.
    """
    return held + 4 * parameters <= HELD_SHARE * memory


def fits_one_machine(parameters: int, *, ranks: int, bytes_each: int, memory: int) -> bool:
    """Whether the ranks of one machine have room for a whole model between passes.

    ``bytes_each`` are bytes of a parameter: ``TRAINED_BYTES``, or of a frozen one those of its
    dtype. ``memory`` is each rank's.
    """
    return bytes_each * -(-parameters // ranks) <= HELD_SHARE * memory
