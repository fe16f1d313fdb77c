"""`python -m build_support`: bring what is compiled up to date in the source tree, without pip or setuptools."""

from build_support.build import build_into
from build_support.plan import ROOT

build_into(ROOT / "flash_attn_ext")
