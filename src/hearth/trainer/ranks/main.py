"""The process of a trainer's rank other than 0: does what rank 0 tells.

python -m hearth.trainer.ranks.main RANK RANKS HOST PORT DEVICE TIMEOUT_S
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys

import torch

from hearth.telemetry import setup_logging
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous
from hearth.trainer.ranks.start import WAITED_IN_VAIN, rank_device

# Not its own name, which is __main__ here and outside of what is logged.
logger = logging.getLogger("hearth.trainer.ranks.main")

# What torch says of a conversation that another rank has left or does not go on with.
_ANOTHERS = ("timed out", "closed by peer", "reset by peer")


def main() -> None:
    """Be the rank of ``sys.argv``, until rank 0 closes or something is beyond repair."""
    rank, ranks, host, port, device, timeout_s = sys.argv[1:]
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    setup_logging()
    faulthandler.enable()
    code = 1
    try:
        logger.info(
            "rank %s of %s: process %d, %d threads",
            rank,
            ranks,
            os.getpid(),
            torch.get_num_threads(),
        )
        meeting = Rendezvous(host, int(port), int(ranks), float(timeout_s))
        group = meeting.join(int(rank), rank_device(device, int(rank)))
        options = TrainerWorkerOptions.parse(group.listen())
        RankEngine(options, group, logger.error).follow()
        code = 0
    except Exception as error:  # the boundary: the log has it, and rank 0 reads the log
        logger.exception("rank %s ends", rank)
        if any(sign in str(error).lower() for sign in _ANOTHERS):
            code = WAITED_IN_VAIN
    finally:
        logging.shutdown()
        # Not sys.exit: threads of the process group may wait for ranks that are gone.
        os._exit(code)


if __name__ == "__main__":
    main()
