"""DTensor and context parallelism on our operators: two processes, or on a GPU as many as there are GPUs, up to two.

Without a GPU the processes call the operator of flash attention themselves (support/aten.py), since PyTorch has rules
for those of CUDA only.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support import aten
from support.processes import run_processes

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SHAPE = (2, 4, 128, 16)  # half a process's share is a multiple of 32, as PyTorch needs for efficient attention


def operator_of(kernel: str, q, k, v, is_causal=False, **_):
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    name = f"_scaled_dot_product_{kernel}_attention"
    return getattr(torch.ops.aten, name)(q, k, v, None, True, 0.0, is_causal)[0]


def attention_of(device: str, kernel: str):
    """PyTorch's function with that kernel, and what stands for it on the CPU."""
    if device == "cpu":
        return functools.wraps(F.scaled_dot_product_attention)(functools.partial(operator_of, kernel))

    def attend(*args, **kwargs):
        with sdpa_kernel(KERNELS[kernel]):
            return PYTORCHS(*args, **kwargs)

    return functools.wraps(F.scaled_dot_product_attention)(attend)


PYTORCHS = F.scaled_dot_product_attention


def global_problem(device: str):
    """The same in all processes: q, k, v, dout, and what they give without a mesh."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = flash_attn_ext.scaled_dot_product_attention(*leaves, is_causal=True)
    return (q, k, v, dout), (out.detach(), *torch.autograd.grad(out, leaves, dout))


def share_heads(mesh, attend, device: str, size: int) -> None:
    """Each process has some of the heads, whose results are the bits of the whole."""
    tensors, expected = global_problem(device)
    q, k, v, dout = (DTensor.from_local(t.chunk(size, 1)[dist.get_rank()].clone(), mesh, [Shard(1)]) for t in tensors)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with aten.on_device(device), aten.recorded() as passes:
        out = attend(*leaves, is_causal=True)
        assert list(out.placements) == [Shard(1)]
        results = (out, *torch.autograd.grad(out, leaves, dout))
    assert passes == ["forward", "backward"]
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got.to_local(), want.chunk(size, 1)[dist.get_rank()])


def share_sequences(mesh, attend, device: str, size: int) -> None:
    """Context parallelism: keys rotate among the processes, and PyTorch merges results by their LSE."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    tensors, expected = global_problem(device)
    buffers = [tensor.clone() for tensor in tensors]
    F.scaled_dot_product_attention = attend
    with aten.on_device(device), aten.recorded() as passes:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            *leaves, dout = (buffer.detach().clone() for buffer in buffers)
            leaves = [tensor.requires_grad_() for tensor in leaves]
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            gradients = torch.autograd.grad(out, leaves, dout)
        results = context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4)
    assert passes.count("forward") == passes.count("backward") == size
    tolerance = dict(rtol=2e-2, atol=2e-2) if device == "cuda" else dict(rtol=1e-4, atol=1e-5)
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


TASKS = {"heads": share_heads, "sequences": share_sequences}


def run_task(device: str, task: str) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size,))
    for kernel in KERNELS:
        TASKS[task](mesh, attention_of(device, kernel), device, size)


@pytest.mark.parametrize("task", TASKS)
def test_distributed(task, device):
    if not dist.is_available():
        pytest.skip("this PyTorch was built without torch.distributed")
    size = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    run_processes(run_task, size, device, task)
