"""Packed rows, and each of their sequences alone by transformers' "eager"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from support.models.tiny import VOCAB, TinyModel

PADDING = None  # in a row's list of sequences: (PADDING, number of tokens)


@dataclass(frozen=True)
class PackedRows:
    """Rows of the same length. Each part of a row is the positions of a sequence, or (PADDING, count)."""

    rows: tuple[tuple, ...]
    mask: torch.dtype | None = torch.int64  # of the 2-D attention_mask; None: there is none
    padding_position: int = 1  # what padding has in position_ids

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        positions, keep = [], []
        for row in self.rows:
            positions.append([at for part in row for at in self._positions(part)])
            keep.append([not is_padding(part) for part in row for _ in self._positions(part)])
        position_ids, keep = torch.tensor(positions), torch.tensor(keep)
        ids = torch.randint(3, VOCAB, keep.shape, generator=torch.Generator().manual_seed(seed)) * keep
        given = {"input_ids": ids, "position_ids": position_ids}
        if self.mask is not None:
            given["attention_mask"] = keep.to(self.mask)
        return {name: tensor.to(device) for name, tensor in given.items()}

    def _positions(self, part) -> list[int]:
        return [self.padding_position] * part[1] if is_padding(part) else list(part)

    def sequences(self) -> list[tuple[int, slice]]:
        """The row and the tokens of each sequence."""
        found = []
        for index, row in enumerate(self.rows):
            start = 0
            for part in row:
                end = start + len(self._positions(part))
                if not is_padding(part):
                    found.append((index, slice(start, end)))
                start = end
        return found


def is_padding(part) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and part[0] is PADDING


def logits_and_gradients(model: nn.Module, packed: PackedRows, inputs: dict) -> dict[str, Tensor]:
    """Of the tokens of all sequences, and what a loss over these gives the weights."""
    logits = model(**inputs).logits
    return _with_gradients(model, [logits[row, tokens] for row, tokens in packed.sequences()])


def each_alone(
    model: TinyModel, packed: PackedRows, device: str = "cpu", is_training: bool = True
) -> dict[str, Tensor]:
    """The same by "eager", from a call for each sequence."""
    built = model.build("eager", device=device).train(is_training)
    inputs = packed.inputs(device)
    logits = []
    for row, tokens in packed.sequences():
        given = {name: inputs[name][row : row + 1, tokens] for name in ("input_ids", "position_ids")}
        logits.append(built(**given, use_cache=False).logits[0])
    return _with_gradients(built, logits)


def _with_gradients(model: nn.Module, logits: list[Tensor]) -> dict[str, Tensor]:
    outputs = torch.cat(logits)
    weights = torch.linspace(-9, 9, outputs.numel(), device=outputs.device).sin().view_as(outputs)
    leaves = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    gradients = torch.autograd.grad((outputs * weights).sum(), list(leaves.values()), allow_unused=True)
    found = {f"d {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    return {"logits": outputs.detach()} | found


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in given.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            tensor, expected[name], atol=5e-5 * scale, rtol=5e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
