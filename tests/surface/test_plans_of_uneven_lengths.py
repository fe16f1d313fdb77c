"""Whether the work tiles of a packed batch that exist are listed, on Hopper. Plans need no GPU, and are of an H200."""

import pytest
import torch

from flash_attn_ext._call.options import problem_of
from flash_attn_ext._explanation import plans_of
from support.plans import BF16, DEFAULTS, KEY_STATIONARY, WARP_SPECIALISED, mismatches

LISTED = "work tiles that exist"
SHORT = (80,) * 64
# The list has a count, those of 1024 work tiles each, and an entry for each work tile that may exist. In the backward
# pass a work tile has one query head, too.
ENTRIES = 32 * (13312 // 128 + 65)
BYTES = 4 * (1 + 32 * 65 * 64 // 1024 + ENTRIES)


def plans(lengths: tuple[int, ...], **options):
    heads = dict(q=32, k=8, v=8)
    tensors = {name: torch.empty(sum(lengths), n, 128, dtype=BF16, requires_grad=True) for name, n in heads.items()}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sequences = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    return plans_of(problem_of(**DEFAULTS | tensors | sequences | dict(backend="sm90") | options))


def test_one_long_sequence():
    forward, backward = plans((8192, *SHORT), causal="bottom_right")
    assert mismatches(forward, dict(kernel=WARP_SPECIALISED, workspace={LISTED: BYTES})) == {}
    of_backward = {LISTED: BYTES, "key tiles": 112 * ENTRIES}
    assert mismatches(backward, dict(kernel=KEY_STATIONARY, workspace=of_backward)) == {}


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((2048,) * 8, {}),
        ((4096, 3000, 2000), {}),
        ((2048, 80), {}),
        ((8192, *SHORT), {"backend": "sm80"}),
    ],
    ids=str,
)
def test_there_is_no_list(lengths, options):
    for plan in plans(lengths, **options):
        assert plan.workspace.get(LISTED, 0) == 0
