"""flash_attn_ext._C called by keyword, for tests of what the public surface does not show."""

import torch

from flash_attn_ext import _C

PROBLEM = {
    "bias": None,
    "mask": None,
    "alibi_slopes": None,
    "sink": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "rng_seed": None,
    "scale": 1.0,
    "softcap": None,
    "causal": None,
    "window_left": None,
    "window_right": None,
    "dropout_p": 0.0,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "backend": None,
    "allow_tf32": False,
    "sequence_first": False,
}


def problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> tuple:
    """The positional arguments that forward, backward and explain share."""
    unknown = options.keys() - PROBLEM.keys()
    assert not unknown, f"not an option of the binding: {unknown}"
    return (q, k, v, *(PROBLEM | options).values())


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options):
    return _C.attention_forward(*problem(q, k, v, **options))
