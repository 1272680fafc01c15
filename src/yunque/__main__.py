"""``python -m yunque``: the command line."""

import sys

from yunque.cli.main import main

sys.exit(main())
