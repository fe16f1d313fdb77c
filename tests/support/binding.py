"""flash_attn_ext._C called by keyword, for tests of what the public surface does not show."""

import torch

from flash_attn_ext import _C
from flash_attn_ext._call.problem import Problem


def problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Problem:
    """What forward, backward and explain take, and the operators one by one; scores are not scaled unless asked for."""
    return Problem(q=q, k=k, v=v, **(dict(scale=1.0) | options))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options):
    return _C.attention_forward(problem(q, k, v, **options))
