"""Boolean masks of every broadcast shape: True = attend, and a row without any key is zero, never NaN."""

import pytest
import torch

from support.cases import ALL_PATTERNS, Case, Inputs, make_inputs
from support.checks import check_case, check_drawn, check_inputs
from support.errors import assert_same_answer
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

CASES = [Case(sq=140, sk=270, d=16, batch=3, mask=pattern) for pattern in ALL_PATTERNS]
SPARSE = [Case(sq=140, sk=270, d=16, mask="bhqk", mask_keep=keep) for keep in (0.003, 0.02, 0.999)]
# Where a GPU keeps scores between the kernels of the backward pass.
KEPT = [
    Case(sq=201, sk=sk, d=d, mask=pattern, heads=4, kv_heads=2, causal=causal)
    for d in (64, 96, 128, 256)
    for pattern, sk, causal in (("b11k", 330, None), ("11qk", 336, "top_left"), ("bhqk", 130, "bottom_right"))
]
COMBINED = [Case(sq=140, sk=270, d=16, mask="b1qk", causal=causal, dlse=True) for causal in (None, "top_left")]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
def test_every_broadcast_shape(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float16))
@over_cases(SPARSE + COMBINED)
def test_sparse_masks_and_combinations(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(KEPT)
def test_where_scores_are_kept(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes()
@pytest.mark.parametrize("rows", [[0], [127, 128], list(range(0, 140)), list(range(128, 140))], ids=str)
def test_rows_without_keys(rows, dtype, backend):
    """Output 0, LSE -inf, gradients 0; the other rows as if the empty ones were not there."""
    inputs = make_inputs(Case(sq=140, sk=270, mask="11qk", dlse=True), dtype, backend.device)
    inputs.mask[:, :, rows] = False
    result = check_inputs(inputs, backend)
    assert bool((result["out"][:, :, rows] == 0).all())
    assert bool((result["lse"][:, :, rows] == -float("inf")).all())
    assert bool((result["dq"][:, :, rows] == 0).all())


def test_keys_that_no_query_attends_get_no_gradient(backend):
    inputs = make_inputs(Case(sq=140, sk=270, mask="111k"), torch.float32, backend.device)
    result = run_ours(inputs, backend)
    hidden = ~inputs.mask[0, 0, 0]
    assert bool((result["dk"][:, :, hidden] == 0).all())
    assert bool((result["dv"][:, :, hidden] == 0).all())


def test_mask_of_whole_tiles(backend):
    """Blocks of 128 x 256 that are all False, all True, or mixed, in one mask."""
    inputs = make_inputs(Case(sq=300, sk=600, d=16, mask="11qk"), torch.float32, backend.device)
    inputs.mask[..., :128, 256:512] = False
    inputs.mask[..., 128:256, :512] = True
    inputs.mask[..., 256:, :256] = False
    check_inputs(inputs, backend)


def blocks(rows: int, columns: int, size: int, keep: float) -> torch.Tensor:
    """A block-sparse mask: True in some blocks of size x size, and False in whole tiles of any kernel between them."""
    generator = torch.Generator().manual_seed(rows + columns)
    kept = torch.rand(-(-rows // size), -(-columns // size), generator=generator) < keep
    return kept.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]


BLOCK_SPARSE = [
    Case(sq=512, sk=768, d=64, mask="11qk", batch=1, heads=1),
    Case(sq=400, sk=600, d=64, mask="11qk", batch=1, kv_heads=1, causal="bottom_right"),
    Case(sq=300, sk=700, d=40, mask="11qk", batch=1, bias="1hqk", alibi="h", sink=True, dlse=True),
    Case(sq=300, sk=600, d=128, mask="11qk", batch=1, heads=1, window=(200, 100), softcap=8.0, dropout_p=0.1),
    Case(sq=400, sk=700, d=128, mask="11qk", batch=1, heads=4, kv_heads=2, window=(150, 250)),
    Case(sq=300, sk=640, d=96, mask="11qk", batch=1, bias="1hqk", causal="top_left"),
]


@over_dtypes((torch.float32, torch.bfloat16, *for_gpus([torch.float16, torch.float64])))
@pytest.mark.parametrize("size", [64, 160])
@over_cases(BLOCK_SPARSE)
def test_block_sparse(case, size, dtype, backend):
    """Tiles without a True are skipped; a whole row and a whole column of them leave queries and keys with nothing."""
    mask = blocks(case.sq, case.sk, size, keep=0.3)
    mask[128:256] = False
    mask[:, 256:512] = False

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, backend.device, seed)
        return inputs.replace(mask=mask.expand(1, 1, -1, -1).to(backend.device))

    check_drawn(draw, backend)
    result = run_ours(draw(0), backend)
    assert bool((result["out"][:, :, 128:256] == 0).all()) and bool((result["dq"][:, :, 128:256] == 0).all())
    assert bool((result["dk"][:, :, 256:512] == 0).all()) and bool((result["dv"][:, :, 256:512] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16))
def test_nan_in_skipped_blocks(dtype, backend):
    """Whether a tile is skipped or masked does not show: NaN in keys that the mask hides reaches nothing."""
    inputs = make_inputs(Case(sq=300, sk=700, d=64, mask="11qk"), dtype, backend.device)
    inputs.mask = blocks(300, 700, 64, keep=0.3).expand(1, 1, -1, -1).to(backend.device).clone()
    inputs.mask[..., 256:512] = False
    clean = run_ours(inputs, backend)
    for name in ("k", "v"):
        getattr(inputs, name)[:, :, 256:512] = float("nan")
    for name, tensor in run_ours(inputs, backend).items():
        assert_same_answer(tensor, clean[name], backend, name)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize(("offset", "stride"), [(0, 2), (1, 1), (3, 1), (16, 1)])
@over_cases([Case(sq=70, sk=sk, d=64, mask=pattern) for sk in (77, 128, 200, 333) for pattern in ("b11k", "bhqk")])
def test_wherever_a_mask_lies(case, offset, stride, dtype, backend):
    """Bit for bit the same, at any address and in every second byte."""
    inputs = make_inputs(case, dtype, backend.device)
    memory = torch.zeros(offset + inputs.mask.numel() * stride, dtype=torch.bool, device=backend.device)
    elsewhere = memory[offset::stride].view(inputs.mask.shape).copy_(inputs.mask)
    found, expected = run_ours(inputs.replace(mask=elsewhere), backend), run_ours(inputs, backend)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mask_equals_a_bias_of_minus_infinity(backend):
    case = Case(sq=140, sk=270, mask="bhqk")
    masked = make_inputs(case, torch.float32, backend.device)
    bias = torch.zeros_like(masked.mask, dtype=torch.float32).masked_fill(~masked.mask, -float("inf"))
    biased = masked.replace(case=Case(sq=140, sk=270, bias="bhqk"), mask=None, bias=bias)
    by_mask, by_bias = run_ours(masked, backend), run_ours(biased, backend)
    for name in by_mask:
        torch.testing.assert_close(by_mask[name], by_bias[name])
    assert not bool(by_bias["dbias"].isnan().any())
