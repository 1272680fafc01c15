"""Lets the tests of this folder build models and meter tensors as the tests of the rooms do."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / room) for room in ("model", "ops")]
