"""transformers is optional: without it everything here is skipped."""

import pytest


@pytest.fixture(autouse=True)
def _registered():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5.15'")
    from flash_attn_ext.integrations import transformers as fused

    fused.register()
    yield
    fused.unregister()


@pytest.fixture
def no_boolean_mask(monkeypatch):
    """Fails where a layer with several queries gets a boolean mask of (queries, keys). Of each call of `attention`,
    whether it gets intervals."""
    from flash_attn_ext.integrations.transformers import attention

    calls, call = [], attention.attention

    def checked(q, *tensors, **options):
        mask = options["mask"]
        assert q.shape[2] == 1 or mask is None or mask.shape[2] == 1
        calls.append(options["intervals"] is not None)
        return call(q, *tensors, **options)

    monkeypatch.setattr(attention, "attention", checked)
    return calls


@pytest.fixture
def intervals_instead(no_boolean_mask):
    """The same, where some layers need more than flags of keys."""
    yield
    assert any(no_boolean_mask)
