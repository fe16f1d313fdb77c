"""transformers is optional: without it everything here is skipped."""

import pytest


@pytest.fixture(autouse=True)
def _registered():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5.15'")
    from flash_attn_ext.integrations import transformers as fused

    fused.register()
    yield
    fused.unregister()
