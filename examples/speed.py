"""How fast attention alone is, with ours and with PyTorch's: what a model with a long context would see."""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_ext import scaled_dot_product_attention

ATTENTIONS = {"flash_attn_ext": scaled_dot_product_attention, "torch": F.scaled_dot_product_attention}
SECONDS = 5.0
TOKENS = 2048
LEAST_ROUNDS = 3


def speed_line(device: torch.device, tokens: int = TOKENS, seconds: float = SECONDS) -> str:
    """Times forward and backward passes of both in turn for so many seconds. Returns a sentence with the medians."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 8, tokens, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    for name in ATTENTIONS:
        _time_of(name, q, k, v)  # the first call of each sets up its threads or loads its kernels
    times: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    start = time.perf_counter()
    while len(times["torch"]) < LEAST_ROUNDS or time.perf_counter() - start < seconds:
        for name in ATTENTIONS if len(times["torch"]) % 2 else reversed(ATTENTIONS):
            times[name].append(_time_of(name, q, k, v))
    ours, theirs = (statistics.median(times[name]) for name in ATTENTIONS)
    return (
        f"Attention alone, forward and backward, {tokens} causal tokens: flash_attn_ext {1e3 * ours:.2f} ms, torch "
        f"{1e3 * theirs:.2f} ms. That is {theirs / ours:.2f} times as fast (medians of {len(times['torch'])})."
    )


def _time_of(name: str, q: Tensor, k: Tensor, v: Tensor) -> float:
    if q.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    torch.autograd.grad(ATTENTIONS[name](q, k, v, is_causal=True).sum(), (q, k, v))
    if q.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
