"""flash_attn_ext, from the folder beside this file. Whoever loads this file may give it another name."""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "flash_attn_ext"


def _load():
    """Under its own name, which its modules and operators have. A process has one copy."""
    if loaded := sys.modules.get("flash_attn_ext"):
        if Path(loaded.__file__).resolve().parent != _FOLDER:
            raise ImportError(f"flash_attn_ext {loaded.__version__} is imported already, from {loaded.__file__}")
        return loaded
    folders = [str(_FOLDER)]
    spec = importlib.util.spec_from_file_location(
        "flash_attn_ext", _FOLDER / "__init__.py", submodule_search_locations=folders
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["flash_attn_ext"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["flash_attn_ext"]
        raise
    return package


_package = _load()
__all__ = [*_package.__all__]
__version__ = _package.__version__
globals().update({name: getattr(_package, name) for name in __all__})
