"""Which backward kernels run where a boolean mask's visits are listed (csrc/kernels/plan/mask_visits.h): on Hopper, and
what the lists may take.

Lists grow with queries times keys. Where the mask does not, they have a bound, beyond which other kernels run.
"""

import pytest
import torch

from flash_attn_ext._keywords import problem_of
from flash_attn_ext.functional import plans_of
from support.plans import BF16, DEFAULTS, Call

LONG = 2048
LISTED = "warp-specialised (mask)"

# The mask, and the number of packed sequences or None; whether its lists have a bound.
MASKS = [
    ((1, 1, LONG, LONG), None, False),
    ((8, 16, LONG, LONG), None, False),
    ((1, 1, 1, LONG), None, True),
    ((8, 1, 1, LONG), None, True),
    ((2, 1, LONG, LONG), 2, False),
    ((1, 1, LONG, LONG), 2, True),  # each sequence has lists of its own
    ((2, 1, 1, LONG), 2, True),
]


def packed_plan(mask: tuple[int, ...], sequences: int) -> str:
    tensors = {name: torch.empty(sequences * LONG, 16, 64, dtype=BF16, requires_grad=True) for name in ("q", "k", "v")}
    ends = torch.arange(0, (sequences + 1) * LONG, LONG, dtype=torch.int32)
    lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=LONG, max_seqlen_k=LONG)
    options = dict(backend="sm90", mask=torch.ones(mask, dtype=torch.bool))
    return plans_of(problem_of(**DEFAULTS | tensors | lengths | options))[1]


def backward_plan(mask: tuple[int, ...], sequences: int | None) -> str:
    if sequences is not None:
        return packed_plan(mask, sequences)
    return Call(LONG, mask=mask, options={"backend": "sm90"}).plans()[1]


@pytest.mark.parametrize("mebibytes", ["0", "64"])
@pytest.mark.parametrize(("mask", "sequences", "is_bounded"), MASKS, ids=str)
def test_lists_that_outgrow_the_mask_have_a_bound(mask, sequences, is_bounded, mebibytes, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    assert (LISTED in backward_plan(mask, sequences)) == (mebibytes != "0" or not is_bounded)
