"""`python -m build_support`: bring flash_attn_ext/_C up to date in the source tree, without pip or setuptools."""

import sysconfig

from build_support.plan import ROOT, build_into

build_into(ROOT / "flash_attn_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
