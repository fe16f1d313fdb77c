"""Lets these tests import build_support. At the end of the path, so that the tested package stays the installed one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
