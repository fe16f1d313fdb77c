"""Makes ``import flash_attn`` find this library's functions, by modules of that name in ``sys.modules``."""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flash_attn_ext.integrations.flash_attn import bert_padding, functions, kvcache, packed_tensors

PACKAGE = "flash_attn"
INTERFACE_VERSION = "2.8.3"  # these functions have its arguments and results; code asks flash_attn.__version__
FUNCTIONS = {
    name: value
    for module in (functions, packed_tensors, kvcache)
    for name, value in vars(module).items()
    if name.startswith("flash_attn_")
}
PADDING = {
    name: getattr(bert_padding, name)
    for name in ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")
}


def install(force: bool = False) -> None:
    """Make ``import flash_attn`` find this library's functions, in the whole process, until :func:`uninstall`.

    The package has the functions of flash-attention 2, ``flash_attn.flash_attn_interface`` and
    ``flash_attn.bert_padding``, and no other submodule. Calling it again does nothing.

    Args:
        force: put it in place of a flash_attn that is installed or imported already. All modules of that one are set
            aside until :func:`uninstall`. Code that took a function from it earlier keeps that function.

    Raises RuntimeError when there is another flash_attn and ``force`` is not given.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> flash_attn.install(force=True)
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func is flash_attn.flash_attn_func
        True
        >>> flash_attn.uninstall()
    """
    with _lock:
        if _state.ours is not None:
            return
        others = _modules_now()
        if not force and (others or importlib.util.find_spec(PACKAGE) is not None):
            raise RuntimeError(
                f"another flash_attn is {'imported' if others else 'installed'}, and install() would hide it: call "
                "install(force=True) to set it aside until uninstall(), or import the functions from "
                "flash_attn_ext.integrations.flash_attn"
            )
        _state.ours, _state.others = _stand_ins(), others
        _replace(_state.ours)


def uninstall() -> None:
    """Undo :func:`install`: the modules that it had set aside are back. Does nothing when it is not installed.

    Code that took a function from the stand-in keeps it, and it still works.

    Raises RuntimeError when something else has put modules of that name in place meanwhile.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> flash_attn.install(force=True)
        >>> flash_attn.uninstall()
    """
    with _lock:
        if _state.ours is None:
            return
        foreign = [name for name, module in _modules_now().items() if module is not _state.ours.get(name)]
        if foreign:
            raise RuntimeError(
                f"{', '.join(foreign)} in sys.modules came after install(), and uninstall() would remove it: undo that "
                "first"
            )
        _replace(_state.others)
        _state.ours, _state.others = None, {}


class _State:
    def __init__(self) -> None:
        self.ours: dict[str, ModuleType] | None = None  # None while not installed
        self.others: dict[str, ModuleType] = {}  # the modules that were there before


_state = _State()
_lock = threading.Lock()


def _modules_now() -> dict[str, ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == PACKAGE}


def _replace(modules: dict[str, ModuleType]) -> None:
    for name in _modules_now():
        del sys.modules[name]
    sys.modules.update(modules)


def _stand_ins() -> dict[str, ModuleType]:
    interface = _module(f"{PACKAGE}.flash_attn_interface", FUNCTIONS)
    padding = _module(f"{PACKAGE}.bert_padding", PADDING)
    submodules = dict(flash_attn_interface=interface, bert_padding=padding)
    package = _module(PACKAGE, dict(__version__=INTERFACE_VERSION, __path__=[], **FUNCTIONS, **submodules))
    return {module.__name__: module for module in (package, interface, padding)}


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    """A module with a spec like that of a real one, which importlib.util.find_spec and repr() read."""
    module = ModuleType(name, "Stands in for flash-attention 2: flash_attn_ext.integrations.flash_attn.install().")
    is_package = "__path__" in contents
    module.__spec__ = ModuleSpec(name, None, origin="stand-in by flash_attn_ext", is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    vars(module).update(contents)
    return module
