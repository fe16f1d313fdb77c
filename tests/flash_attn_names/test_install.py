"""install() and uninstall(), each case in a Python of its own, where nothing of ours is imported yet."""

import importlib.util
import textwrap

import pytest

from support.forks import run_forked

REAL = {
    "flash_attn/__init__.py": "__version__ = '1.2.3'\nfrom flash_attn.layers import name\n",
    "flash_attn/layers.py": "name = 'a real one'\n",
}
PROLOGUE = """
import importlib.util, sys
from flash_attn_ext.integrations import flash_attn as ours

def modules():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "flash_attn"}

def refusal(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")

"""


def run(code: str, folder=None) -> None:
    """`folder`: a flash_attn is installed there."""
    if folder is None and importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("a flash_attn is installed here")
    path = ""
    if folder is not None:
        (folder / "flash_attn").mkdir()
        for name, text in REAL.items():
            (folder / name).write_text(text, encoding="utf-8")
        path = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    program = path + PROLOGUE + textwrap.dedent(code)
    result = run_forked(program)
    assert result.returncode == 0, result.stderr


def test_importing_ours_installs_nothing():
    run("""
        assert modules() == {}
        assert importlib.util.find_spec("flash_attn") is None
    """)


def test_our_package_does_not_import_it():
    program = "import flash_attn_ext, sys; assert 'flash_attn_ext.integrations.flash_attn' not in sys.modules"
    result = run_forked(program)
    assert result.returncode == 0, result.stderr


def test_every_way_to_import():
    run("""
        ours.install()
        import flash_attn
        import flash_attn.bert_padding
        from flash_attn import bert_padding, flash_attn_func, flash_attn_interface
        from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        from flash_attn_ext.integrations.flash_attn.bert_padding import pad_input as our_pad_input

        assert flash_attn_func is ours.flash_attn_func is flash_attn.flash_attn_func
        assert flash_attn_varlen_func is ours.flash_attn_varlen_func is flash_attn_interface.flash_attn_varlen_func
        assert pad_input is our_pad_input is flash_attn.bert_padding.pad_input is bert_padding.pad_input
        for name in ours.__all__:
            if name.startswith("flash_attn"):
                assert getattr(flash_attn, name) is getattr(flash_attn_interface, name) is getattr(ours, name)
    """)


def test_it_looks_like_a_package():
    run("""
        ours.install()
        import flash_attn
        assert flash_attn.__version__ == "2.8.3"
        assert "flash_attn_ext" in repr(flash_attn)
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
            spec = importlib.util.find_spec(name)
            assert spec.name == name and spec is sys.modules[name].__spec__
            assert spec.parent == sys.modules[name].__package__ == "flash_attn"
        assert importlib.util.find_spec("flash_attn.layers") is None
        try:
            import flash_attn.layers.rotary
        except ModuleNotFoundError as error:
            assert error.name == "flash_attn.layers"
        else:
            raise AssertionError
    """)


def test_uninstall_leaves_no_trace():
    run("""
        before = set(sys.modules)
        ours.install()
        ours.install()
        from flash_attn import flash_attn_func
        import flash_attn.bert_padding
        ours.uninstall()
        ours.uninstall()
        assert set(sys.modules) == before
        assert importlib.util.find_spec("flash_attn") is None
        import torch
        q = torch.randn(1, 3, 2, 8)
        assert flash_attn_func(q, q, q).shape == q.shape  # what code took stays usable
        ours.install()
        import flash_attn
        assert flash_attn.flash_attn_func is ours.flash_attn_func
    """)


def test_an_installed_one_is_not_hidden(tmp_path):
    run(
        """
        assert "another flash_attn is installed" in refusal(ours.install)
        assert modules() == {}
        ours.install(force=True)
        import flash_attn
        assert flash_attn.__version__ == "2.8.3"
        ours.uninstall()
        assert modules() == {}
        import flash_attn
        assert flash_attn.__version__ == "1.2.3"
        """,
        tmp_path,
    )


def test_an_imported_one_is_not_hidden(tmp_path):
    run(
        """
        import flash_attn as real
        before = modules()
        assert set(before) == {"flash_attn", "flash_attn.layers"}
        message = refusal(ours.install)
        assert "another flash_attn is imported" in message and "install(force=True)" in message
        assert modules() == before
        """,
        tmp_path,
    )


def test_force_sets_an_imported_one_aside(tmp_path):
    run(
        """
        import flash_attn as real
        before, contents = modules(), dict(vars(real))
        ours.install(force=True)
        import flash_attn
        assert flash_attn is not real and flash_attn.flash_attn_func is ours.flash_attn_func
        assert set(modules()) == {"flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"}
        ours.install()
        ours.uninstall()
        after = modules()
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        assert vars(real) == contents
        import flash_attn
        assert flash_attn is real
        """,
        tmp_path,
    )


def test_a_blocked_import_stays_blocked():
    run("""
        sys.modules["flash_attn"] = None
        assert "another flash_attn is imported" in refusal(ours.install)
        ours.install(force=True)
        import flash_attn
        ours.uninstall()
        assert modules() == {"flash_attn": None}
    """)


def test_uninstall_removes_nothing_of_others():
    run("""
        import types
        ours.install()
        other = sys.modules["flash_attn.layers"] = types.ModuleType("flash_attn.layers")
        assert "flash_attn.layers in sys.modules came after install()" in refusal(ours.uninstall)
        assert modules()["flash_attn.layers"] is other and len(modules()) == 4
        del sys.modules["flash_attn.layers"]
        ours.uninstall()
        assert modules() == {}
    """)


def test_threads():
    run("""
        import threading
        start = threading.Barrier(8)

        def work():
            start.wait()
            for _ in range(50):
                ours.install()

        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(modules()) == 3
        ours.uninstall()
        assert modules() == {}
    """)
