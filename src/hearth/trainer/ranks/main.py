"""The process of a trainer's rank other than 0: runs the operations that rank 0 sends.

python -m hearth.trainer.ranks.main RANK RANKS HOST PORT DEVICE TIMEOUT_S
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys

import orjson
import torch

from hearth.telemetry import setup_logging
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous
from hearth.trainer.ranks.start import EXIT_GAVE_UP, choose_device

# The module's own name is __main__ here, for which nothing is logged.
logger = logging.getLogger("hearth.trainer.ranks.main")

# Parts of torch's messages when another rank has left a collective or hangs.
_LOST_PEER = ("timed out", "closed by peer", "reset by peer")


def main() -> None:
    """Run the rank of ``sys.argv`` until rank 0 closes or an operation breaks the ranks."""
    rank, ranks, host, port, device, timeout_s = sys.argv[1:]
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    setup_logging()
    faulthandler.enable()
    code = 1
    try:
        pid, threads = os.getpid(), torch.get_num_threads()
        logger.info("rank %s of %s: process %d, %d threads", rank, ranks, pid, threads)
        rendezvous = Rendezvous(host, int(port), int(ranks), float(timeout_s))
        group = rendezvous.join(int(rank), choose_device(device, int(rank)))
        options = TrainerWorkerOptions(**orjson.loads(group.receive()))
        RankEngine(options, group, logger.error).follow()
        code = 0
    except Exception as error:  # the boundary: it is logged, and rank 0 reads the log
        logger.exception("rank %s ends", rank)
        if any(message in str(error).lower() for message in _LOST_PEER):
            code = EXIT_GAVE_UP
    finally:
        logging.shutdown()
        # Not sys.exit: threads of the process group may wait for lost ranks.
        os._exit(code)


if __name__ == "__main__":
    main()
