"""Lets the tests of the engine import the doubles beside them, and draw models as the tests of the model do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
sys.path.insert(0, str(Path(__file__).parent))
