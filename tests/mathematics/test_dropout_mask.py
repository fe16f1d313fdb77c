"""The dropout bits of the binding against a second implementation of Philox-4x32-7 in NumPy."""

import numpy as np
import pytest
import torch

from flash_attn_ext import _C
from flash_attn_ext._call.seeds import draw_seed

WORD = np.uint64(0xFFFFFFFF)


def philox_4x32_7(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Salmon et al., SC 2011, section 3.3, on arrays of 32-bit words held in uint64."""
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(7):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ key[0],
            second & WORD,
            (first >> np.uint64(32)) ^ counter[3] ^ key[1],
            first & WORD,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & WORD, (key[1] + np.uint64(0xBB67AE85)) & WORD]
    return counter


def expected_bits(seed: int, p: float, batch: int, heads: int, sq: int, sk: int) -> np.ndarray:
    """In blocks of 16 x 32, one call draws 16 bits for queries {q, q + 8} x keys {k, k + 8, k + 16, k + 24}."""
    b, h, q, k = np.meshgrid(*map(np.arange, (batch, heads, sq, sk)), indexing="ij")
    counter = [(k // 32) * 8 + k % 8, (q // 16) * 8 + q % 8, h, b]
    words = philox_4x32_7([part.astype(np.uint64) for part in counter], seed % 2**64)
    word = np.choose((k // 8) % 4, words)
    draw = np.where((q // 8) % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return draw >= max(1, round(p * 65536))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
def test_bits(seed, p):
    shape = (2, 3, 40, 70)
    bits = _C.dropout_mask(torch.tensor([seed]), p, *shape)
    assert torch.equal(bits, torch.from_numpy(expected_bits(seed, p, *shape)))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything(p):
    bits = _C.dropout_mask(torch.tensor([1]), p, 2, 3, 4, 5)
    assert bits.shape == (2, 3, 4, 5) and bool((bits == (p == 0.0)).all())


def test_calls_draw_seeds_of_63_bits():
    torch.manual_seed(0)
    seeds = torch.cat([draw_seed(torch.device("cpu")) for _ in range(500)])
    assert int(seeds.min()) >= 0 and int(seeds.max()) > 2**62


def test_empty():
    assert _C.dropout_mask(torch.tensor([1]), 0.5, 0, 2, 3, 4).shape == (0, 2, 3, 4)
