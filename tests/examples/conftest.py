import sys
from pathlib import Path

# The demo's modules import one another by their names, as Python does for a script's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
