"""One run of ``rl_loop`` in a process of its own: FOLDER RANKS."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.conftest import config
from tests.integration.rollouts import spread

from training.recipes.rl_loop import main
from training.utils import TrainerConfig

TWO_STEPS = {"max_rows": 4, "learning_rate": 1e-4, "kl_beta": 0.01, "output_model_id": None}
"""With a reference."""

if __name__ == "__main__":
    trainer = TrainerConfig(ranks=int(sys.argv[2]))
    changes = TWO_STEPS | {"placement": "process", "trainer": trainer}
    main(config(Path(sys.argv[1]), **changes), reward_fn=spread)
