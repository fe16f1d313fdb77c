"""Visibility and ALiBi by brute force: an (Sq, Sk) table from the definitions, independent of the library. Masks that
hide whole tiles."""

import torch

from support.cases import Case, Inputs


def diagonal(case: Case) -> int:
    """Key index minus query index on the diagonal: aligned at the top left only where the case says so."""
    return 0 if case.causal == "top_left" else case.sk - case.sq


def offsets(case: Case, device: str = "cpu") -> torch.Tensor:
    """key - (query + diagonal), (Sq, Sk)."""
    queries = torch.arange(case.sq, device=device).unsqueeze(1) + diagonal(case)
    return torch.arange(case.sk, device=device).unsqueeze(0) - queries


def visible(case: Case, device: str = "cpu") -> torch.Tensor:
    """Causal and window, (Sq, Sk), True = seen."""
    distance = offsets(case, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if case.causal is not None:
        seen &= distance <= 0
    left, right = case.window or (None, None)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def attended(case: Case, mask: torch.Tensor | None, device: str = "cpu") -> torch.Tensor:
    """Visibility and the boolean mask, (B, H, Sq, Sk)."""
    seen = visible(case, device).expand(case.batch, case.heads, case.sq, case.sk)
    return seen if mask is None else seen & mask.to(device)


def with_empty_tiles(inputs: Inputs) -> Inputs:
    """Whole tiles hidden: some of each row of tiles, all of one, all of a tile of keys, and a single query's."""
    generator = torch.Generator().manual_seed(1)
    *shape, sq, sk = inputs.mask.shape
    blocks = torch.rand(*shape, -(-sq // 64), -(-sk // 64), generator=generator) < 0.4
    blocks[..., 2, :] = False
    blocks[..., :, 1] = False
    blocks = blocks.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :sq, :sk].to(inputs.mask.device)
    blocks[..., 70, :] = False
    return inputs.replace(mask=inputs.mask & blocks)
