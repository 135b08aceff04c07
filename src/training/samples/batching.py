"""How a step's groups are cut into pieces, one per forward and backward pass."""

from __future__ import annotations

import math

from training.config.rl import RLConfig


def count_due_groups(config: RLConfig, *, ready: int, places: int, is_last: bool) -> int:
    """How many of the ``ready`` groups go through forward and backward now; 0 waits for more.

    ``places`` are the groups that the step lacks, the ready ones included. With ``is_last`` no
    further group comes. Minibatches are cut from the whole step, which is then one piece.
    A group counts as ``completions_per_prompt`` samples.
    """
    if not ready:
        return 0
    most = max(1, config.max_samples_per_fwd_bwd // config.completions_per_prompt)
    least = most if config.trains_early else places
    if config.ppo_n_minibatches > 1:
        most = least = places
    elif config.min_samples_per_fwd_bwd is not None:
        least = math.ceil(config.min_samples_per_fwd_bwd / config.completions_per_prompt)
        least = min(least, most)  # groups stay whole, so fewer samples than that may be the most
    return min(ready, most) if is_last or ready >= min(least, places) else 0
