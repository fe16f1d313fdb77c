"""The elementwise kernels of forward mode and double backward, each beside PyTorch operations in float64."""

import re

import pytest
import torch

from flash_attn_ext import _C
from support.params import over_dtypes
from support.runners import poisoned_memory

pytestmark = pytest.mark.usefixtures("gpu")

PAIRS, GROUP, SCALE = 3, 2, 0.25  # no rounding of a float64
# Rows that are read 16 bytes at a time and element by element, shorter and longer than what a warp has at a time.
NUM_KEYS = [1, 3, 4, 60, 127, 128, 130, 516]
EVERYTHING = (-1000, 1000)
# Which keys query 0 sees, of 5 queries: all, causality, a window, a window that ends before the last queries' keys.
VISIBLE = [EVERYTHING, (-1000, 1), (-2, 3), (1, 2), (-4, -2)]


class Tile:
    """Numbers of a tile, with NaN where nothing is seen."""

    def __init__(self, num_keys: int, visible=EVERYTHING, num_queries=5):
        generator = torch.Generator("cuda").manual_seed(0)
        rows = GROUP * num_queries

        def numbers(*shape):
            return torch.randn(shape, generator=generator, device="cuda")

        queries = torch.arange(rows, device="cuda")[:, None] % num_queries
        keys = torch.arange(num_keys, device="cuda")
        self.seen = ((keys >= visible[0] + queries) & (keys < visible[1] + queries)).expand(PAIRS, -1, -1)
        names = ("products", "product_tangents", "weight_gradients", "weight_gradient_tangents")
        self.scores = {
            name: numbers(PAIRS, rows, num_keys).masked_fill(~self.seen, torch.nan).contiguous() for name in names
        }
        self.rows = {name: numbers(PAIRS, rows, 1) for name in ("lse", "lse_tangent", "delta", "delta_tangent")}
        self.visible, self.num_queries = visible, num_queries

    def first_arguments(self, dtype=torch.float32, **other) -> list:
        tensors = self.scores | self.rows | other
        names = ("products", "product_tangents", "lse")
        return [*(tensors[name] for name in names), SCALE, self.visible, self.num_queries, dtype]

    def exact(self) -> dict[str, torch.Tensor]:
        """In float64, with 0 for tensors that are absent."""
        scores = {name: tensor.double() for name, tensor in self.scores.items() if tensor is not None}
        lse, lse_tangent, delta, delta_tangent = (tensor.double() for tensor in self.rows.values())
        weights = (SCALE * scores["products"] - lse).exp()
        score_tangents = SCALE * scores.get("product_tangents", 0)
        weight_tangents = weights * (score_tangents - lse_tangent)
        above = scores["weight_gradients"] - delta
        above_tangent = scores.get("weight_gradient_tangents", 0) - delta_tangent
        found = dict(
            weights=weights,
            weighted=weights * score_tangents,
            weight_tangents=weight_tangents,
            score_gradients=weights * above,
            score_gradient_tangents=weight_tangents * above + weights * above_tangent,
        )
        return {name: torch.where(self.seen, tensor, 0) for name, tensor in found.items()}


def close(found: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    tolerance = 2**-8 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-4, msg=lambda m: f"{name}: {m}")


@over_dtypes([torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visible", VISIBLE, ids=str)
@pytest.mark.parametrize("num_keys", NUM_KEYS)
def test_weights(num_keys, visible, dtype):
    tile = Tile(num_keys, visible)
    exact = tile.exact()
    lse_tangent = tile.rows["lse_tangent"].clone()
    with poisoned_memory():
        weights, weighted = _C.plain_weights(*tile.first_arguments(dtype), lse_tangent, True)
    assert weights.dtype == weighted.dtype == dtype
    close(weights, exact["weights"], "P")
    close(weighted, exact["weighted"], "P dS")
    sums = tile.rows["lse_tangent"].double() + exact["weighted"].sum(-1, keepdim=True)
    torch.testing.assert_close(lse_tangent.double(), sums, rtol=1e-5, atol=1e-3)


@over_dtypes([torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visible", VISIBLE, ids=str)
@pytest.mark.parametrize("num_keys", NUM_KEYS)
def test_gradients(num_keys, visible, dtype):
    tile = Tile(num_keys, visible)
    exact = tile.exact()
    with poisoned_memory():
        results = _C.plain_gradients(*tile.first_arguments(dtype), *gradient_arguments(tile), True)
    for name, found in zip(("weight_tangents", "score_gradients", "score_gradient_tangents"), results, strict=True):
        assert found.dtype == dtype
        close(found, exact[name], name)


def gradient_arguments(tile: Tile) -> list:
    names = ("lse_tangent", "weight_gradients", "weight_gradient_tangents", "delta", "delta_tangent")
    return [(tile.scores | tile.rows)[name] for name in names]


@pytest.mark.parametrize("num_keys", [4, 7])
def test_absent_tangents(num_keys):
    """Tangents that are not there count as zeros, and what is not needed is not written."""
    tile = Tile(num_keys)
    tile.scores |= dict(product_tangents=None, weight_gradient_tangents=None)
    exact = tile.exact()
    lse_tangent = tile.rows["lse_tangent"].clone()
    weights, weighted = _C.plain_weights(*tile.first_arguments(), lse_tangent, True)
    close(weights, exact["weights"], "P")
    assert weighted is None
    assert torch.equal(lse_tangent, tile.rows["lse_tangent"])
    assert _C.plain_weights(*tile.first_arguments(), lse_tangent, False) == [None, None]
    results = _C.plain_gradients(*tile.first_arguments(), *gradient_arguments(tile), False)
    assert results[:2] == [None, None]
    close(results[2], exact["score_gradient_tangents"], "score_gradient_tangents")


def test_large_scores():
    """A score and an LSE that are large and nearly equal."""
    tile = Tile(8)
    tile.scores["products"] = tile.scores["products"] + 3e4
    tile.rows["lse"] = tile.rows["lse"] + SCALE * 3e4
    exact = (SCALE * tile.scores["products"].double() - tile.rows["lse"].double()).exp()
    weights, _ = _C.plain_weights(*tile.first_arguments(), tile.rows["lse_tangent"], True)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=0.0)


WRONG_TENSORS = {
    "products is on cpu, expected a GPU": ("products", torch.Tensor.cpu),
    "products has dtype float64, expected float32": ("products", torch.Tensor.double),
    "product_tangents is on cpu, but products is on cuda:0": ("product_tangents", torch.Tensor.cpu),
    "product_tangents has shape [3, 9, 8], expected [3, 10, 8]": ("product_tangents", lambda t: t[:, 1:].contiguous()),
    "product_tangents has strides [80, 1, 10], expected a ": ("product_tangents", lambda t: t.mT.contiguous().mT),
    "lse has strides [20, 2, 1], expected a contiguous": ("lse", lambda t: t.expand(-1, -1, 2).contiguous()[..., :1]),
}


@pytest.mark.parametrize("message", WRONG_TENSORS)
def test_wrong_tensors(message):
    name, spoil = WRONG_TENSORS[message]
    tile = Tile(8)
    spoiled = {name: spoil((tile.scores | tile.rows)[name])}
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        _C.plain_weights(*tile.first_arguments(**spoiled), tile.rows["lse_tangent"], True)


def test_wrong_options():
    tile = Tile(8)
    with pytest.raises(RuntimeError, match="dtype is float16, expected float32 or bfloat16"):
        _C.plain_weights(*tile.first_arguments(torch.float16), tile.rows["lse_tangent"], True)
    tile.num_queries = 4
    with pytest.raises(RuntimeError, match="num_queries is 4, expected a divisor of the number of rows, 10"):
        _C.plain_weights(*tile.first_arguments(), tile.rows["lse_tangent"], True)
