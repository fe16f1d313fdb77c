"""What tests of replacements share."""

import pytest

import flash_attn_ext


@pytest.fixture
def installed():
    flash_attn_ext.install_sdpa()
    yield
    flash_attn_ext.uninstall_sdpa()
