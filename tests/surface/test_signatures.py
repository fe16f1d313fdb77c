"""The public signatures, and that no argument is ignored: each one changes the result."""

import inspect

import pytest
import torch

import flash_attn_ext

KEYWORDS = dict(
    causal=None,
    window=None,
    bias=None,
    mask=None,
    intervals=None,
    block_lists=None,
    alibi_slopes=None,
    softcap=None,
    sink=None,
    dropout_p=0.0,
    scale=None,
    layout="bhsd",
    return_lse=False,
    return_max_logit=False,
    backend=None,
    allow_tf32=False,
)
OF_TABLES = dict(bias_table=None, bias_index=None)  # of dense calls alone
DENSE_ONLY = ("block_lists",)


def keyword_only(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_attention():
    assert keyword_only(flash_attn_ext.attention) == KEYWORDS | OF_TABLES


def test_attention_varlen():
    expected = dict(max_seqlen_q=None, max_seqlen_k=None) | {
        n: v for n, v in KEYWORDS.items() if n not in ("layout", *DENSE_ONLY)
    }
    assert keyword_only(flash_attn_ext.attention_varlen) == expected


def test_attention_with_kvcache():
    shared = {
        name: default for name, default in KEYWORDS.items() if name not in ("dropout_p", "allow_tf32", *DENSE_ONLY)
    }
    tensors = ("k_new", "v_new", "block_table", "cache_batch_idx", "rotary_cos", "rotary_sin")
    expected = shared | dict.fromkeys(tensors) | dict(causal="bottom_right", rotary_interleaved=False)
    expected["cache_seqlens"] = inspect.Parameter.empty
    assert keyword_only(flash_attn_ext.attention_with_kvcache) == expected


def test_explain_takes_what_both_take():
    taken = keyword_only(flash_attn_ext.explain)
    assert taken.items() >= (keyword_only(flash_attn_ext.attention_varlen) | KEYWORDS | OF_TABLES).items()


def test_everything_public_is_documented():
    for name in flash_attn_ext.__all__:
        assert inspect.getdoc(getattr(flash_attn_ext, name)), name


def options_of(device: str) -> dict[str, dict]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return {
        "top_left": dict(causal="top_left"),
        "bottom_right": dict(causal="bottom_right"),
        "window": dict(window=(2, 1)),
        "bias": dict(bias=normal(5, 9)),
        "mask": dict(mask=normal(5, 9) > -0.5),
        "intervals": dict(intervals=torch.tensor([[1, 4, 6, 8]] * 5, dtype=torch.int32, device=device)),
        "block_lists": dict(
            block_lists=(
                torch.zeros(1, dtype=torch.int32, device=device),
                torch.zeros(1, 1, dtype=torch.int32, device=device),
            )
        ),
        "alibi_slopes": dict(alibi_slopes=normal(2).abs()),
        "softcap": dict(softcap=0.5),
        "sink": dict(sink=normal(2)),
        "dropout_p": dict(dropout_p=0.5),
        "scale": dict(scale=2.0),
    }


@pytest.mark.parametrize(
    ("packed", "name"),
    [(packed, name) for packed in (False, True) for name in options_of("cpu") if not (packed and name in DENSE_ONLY)],
)
def test_every_option_has_an_effect(packed, name, backend):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, n, 8, generator=generator).to(backend.device) for n in (5, 9))
    options = options_of(backend.device)[name]
    if packed:
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=backend.device) for n in (5, 9))
        tensors = (q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), cu_q, cu_k)
        function = flash_attn_ext.attention_varlen
    else:
        tensors, function = (q, k, k), flash_attn_ext.attention
    plain = function(*tensors, backend=backend.name)
    assert not torch.allclose(function(*tensors, **options, backend=backend.name), plain)
