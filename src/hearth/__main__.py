"""``python -m hearth``: the ``hearth`` command."""

import sys

from hearth.cli.main import main

sys.exit(main())
