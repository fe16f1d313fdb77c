"""`python -m build_support`: bring flash_attn_ext/_C up to date in the source tree, without pip or setuptools."""

import sys
import sysconfig

from build_support.plan import ROOT, build_library, replace_if_different
from build_support.toolchain import BuildError

try:
    library = build_library()
except BuildError as error:
    sys.exit(f"\nflash_attn_ext cannot be built: {error}\n")
replace_if_different(library, ROOT / "flash_attn_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
