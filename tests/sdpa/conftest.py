"""What tests of replacements share."""

import contextlib
from collections.abc import Callable

import pytest

import flash_attn_ext


@pytest.fixture
def installed():
    flash_attn_ext.install_sdpa()
    yield
    flash_attn_ext.uninstall_sdpa()


@contextlib.contextmanager
def _installed(fallback: str):
    flash_attn_ext.install_sdpa(fallback)
    try:
        yield
    finally:
        flash_attn_ext.uninstall_sdpa()


@pytest.fixture(params=["raise", "torch"])
def fallback(request) -> str:
    return request.param


@pytest.fixture(params=[flash_attn_ext.replace_sdpa, _installed], ids=["replaced", "installed"])
def replaced(request, fallback) -> Callable[[], contextlib.AbstractContextManager]:
    """A context in which calls are replaced, each way of it."""
    return lambda: request.param(fallback)
