"""Lets the tests of this folder build models as the model's own tests do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
