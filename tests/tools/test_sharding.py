"""DTensors and FSDP in two processes: what they compute together is what one computes alone.

On the CPU they talk by gloo, on GPUs, of which there must be two, by NCCL.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flash_attn_ext
from flash_attn_ext.integrations import dtensor
from support.cases import Case, Inputs, make_inputs
from support.packed import cu_seqlens
from support.processes import run_processes
from support.runners import call_ours, gradients

PROCESSES = 2
# Sums of another order, by another plan on a GPU.
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
CASES = {
    "grouped heads": Case(sq=33, sk=49, d=16, heads=4, kv_heads=2, causal="bottom_right", window=(20, 3), dlse=True),
    "bshd": Case(sq=33, sk=49, d=16, layout="bshd", causal="top_left"),
    "one key head": Case(sq=33, sk=49, d=16, heads=4, kv_heads=1),
    "groups that do not divide": Case(sq=33, sk=49, d=16, heads=6, kv_heads=3),
    "heads that do not divide": Case(sq=33, sk=49, d=16, heads=3),
    "a batch that does not divide": Case(batch=3, sq=33, sk=49, d=16),
    "tables": Case(sq=33, sk=49, d=16, bias="bhqk", mask="bhqk", alibi="bh", dlse=True, softcap=9.0),
    "intervals": Case(sq=33, sk=49, d=16, intervals="bh", num_intervals=2),
    "intervals that broadcast": Case(sq=33, sk=49, d=16, intervals="11", causal="top_left"),
    "tables that broadcast": Case(sq=33, sk=49, d=16, bias="11qk", mask="b11k", alibi="h", sink=True),
}
LAYOUTS = {"batch": Shard(0), "heads": Shard(1), "replicated": Replicate()}


def shardings(inputs: Inputs, dim: int) -> dict:
    """Of each tensor, for a batch (0) or heads (1) that are sharded."""
    placements = {}
    for name in Inputs.TENSORS:
        tensor = getattr(inputs, name)
        if name in ("alibi_slopes", "sink") and tensor is not None and tensor.dim() == 1:
            placements[name] = Replicate() if dim == 0 else Shard(0)
        elif tensor is not None:
            placements[name] = Replicate() if tensor.size(dim) == 1 else Shard(dim)
    return placements


def without_rules(device: str) -> None:
    mesh = init_device_mesh(device, (PROCESSES,))
    q = distribute_tensor(torch.randn(2, 2, 5, 8, device=device), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
        flash_attn_ext.attention(q, q, q)


def results_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves)
    return {"out": out, "lse": lse} | gradients({"out": out, "lse": lse}, inputs, leaves)


def sharded_as_alone(device: str, case_name: str, layout: str) -> None:
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    case, dim = CASES[case_name], {"batch": 0, "heads": 1}.get(layout)
    inputs = make_inputs(case, torch.float32, device)
    placements = dict.fromkeys(Inputs.TENSORS, Replicate()) if dim is None else shardings(inputs, dim)
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS if getattr(inputs, name) is not None}
    spread = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in tensors.items()}
    with CommDebugMode() as communication:
        results = results_of(inputs.replace(**spread))
    in_groups = dim != 1 or case.num_kv_heads in (1, case.heads) or case.num_kv_heads % PROCESSES == 0
    assert (communication.get_total_counts() == 0) == in_groups, communication.get_comm_counts()
    if in_groups:
        assert results["out"].placements == (placements["q"],)
    for name, expected in results_of(inputs).items():
        where = f"{case_name}, {layout}, {name}"
        assert_close(results[name].full_tensor(), expected, msg=lambda text, where=where: f"{where}: {text}")


def all_sharded_as_alone(device: str) -> None:
    for case_name in CASES:
        for layout in LAYOUTS:
            sharded_as_alone(device, case_name, layout)


def largest_scores_as_alone(device: str) -> None:
    """Of rows without communication; those of heads may be the largest of several processes' shares."""
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    inputs = make_inputs(CASES["grouped heads"], torch.float32, device)
    for placement in LAYOUTS.values():
        spread = [distribute_tensor(tensor, mesh, [placement]) for tensor in (inputs.q, inputs.k, inputs.v)]
        with CommDebugMode() as communication:
            rows = flash_attn_ext.attention(*spread, causal="bottom_right", return_max_logit="row")[1]
        assert communication.get_total_counts() == 0 and rows.placements == (placement,)
        heads = flash_attn_ext.attention(*spread, causal="bottom_right", return_max_logit="head")[1]
        expected = flash_attn_ext.attention(
            inputs.q, inputs.k, inputs.v, causal="bottom_right", return_max_logit="row"
        )[1]
        assert_close(rows.full_tensor(), expected)
        assert_close(heads.full_tensor(), expected.amax((0, 2)))


def second_derivatives_as_alone(device: str) -> None:
    """Of the inputs and of dout, without communication where the call has none."""
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    for case_name in ("grouped heads", "tables", "tables that broadcast"):
        for dim in (0, 1):
            inputs = make_inputs(CASES[case_name], torch.float32, device)
            placements = shardings(inputs, dim)
            tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS if getattr(inputs, name) is not None}
            spread = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in tensors.items()}
            expected = second_derivatives_of(inputs)
            for name, found in second_derivatives_of(inputs.replace(**spread)).items():
                where = f"{case_name}, {dim}, {name}"
                assert_close(found.full_tensor(), expected[name], msg=lambda text, where=where: f"{where}: {text}")


def second_derivatives_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    leaves = inputs.leaves()
    out, _ = call_ours(inputs, leaves)
    dout = inputs.dout.detach().requires_grad_()
    found = torch.autograd.grad(out, list(leaves.values()), dout, create_graph=True, allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
    asked = leaves | dict(dout=dout)
    loss = sum(gradient.square().sum() for gradient in gradients.values())
    second = torch.autograd.grad(loss, list(asked.values()), allow_unused=True)
    return {name: tensor for name, tensor in zip(asked, second, strict=True) if tensor is not None}


def packed_as_alone(device: str) -> None:
    """Heads only; the lengths are what all processes have."""
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    tensors = [torch.randn(30, heads, 16, device=device) for heads in (4, 2, 2)]
    cu = cu_seqlens((10, 0, 20), device)
    options = dict(max_seqlen_q=20, max_seqlen_k=20, causal="bottom_right", return_lse=True)

    def train(leaves, cu):
        out, lse = flash_attn_ext.attention_varlen(*leaves, cu, cu, **options)
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]

    alone = train([tensor.clone().requires_grad_() for tensor in tensors], cu)
    spread = [distribute_tensor(tensor, mesh, [Shard(1)]).requires_grad_() for tensor in tensors]
    together = train(spread, distribute_tensor(cu, mesh, [Replicate()]))
    assert together[0].placements == (Shard(1),) and together[1].placements == (Shard(0),)
    for ours, expected in zip(together, alone, strict=True):
        assert_close(ours.full_tensor(), expected)


def two_dimensions_of_a_mesh(device: str) -> None:
    """Batch and heads at once."""
    dtensor.register()
    inputs = make_inputs(CASES["grouped heads"], torch.float32, device)
    expected = results_of(inputs)
    for shape in ((1, PROCESSES), (PROCESSES, 1)):
        mesh = init_device_mesh(device, shape)
        names = ("q", "k", "v", "dout", "dlse")
        spread = {name: distribute_tensor(getattr(inputs, name), mesh, [Shard(0), Shard(1)]) for name in names}
        with CommDebugMode() as communication:
            results = results_of(inputs.replace(**spread))
        assert communication.get_total_counts() == 0
        for name, result in results.items():
            assert_close(result.full_tensor(), expected[name])


def which_gradients_are_asked_for(device: str) -> None:
    """One set after the other: DTensor remembers calls."""
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    inputs = make_inputs(Case(sq=17, sk=19, d=16), torch.float32, device)
    spread = inputs.replace(**{n: distribute_tensor(getattr(inputs, n), mesh, [Shard(1)]) for n in ("q", "k", "v")})
    spread = spread.replace(dout=distribute_tensor(inputs.dout, mesh, [Shard(1)]))
    for wanted in ("q", "v", "qk", "qkv"):
        together = gradients_for(spread, wanted)
        for ours, expected in zip(together, gradients_for(inputs, wanted), strict=True):
            assert_close(ours.full_tensor(), expected)


def gradients_for(inputs: Inputs, wanted: str) -> tuple[torch.Tensor, ...]:
    leaves = inputs.replace(differentiable=tuple(wanted)).leaves()
    out = flash_attn_ext.attention(**({name: getattr(inputs, name) for name in "qkv"} | leaves))
    return torch.autograd.grad(out, list(leaves.values()), inputs.dout)


def entry_of_pytorchs_signature(device: str) -> None:
    """By name and by replace_sdpa, also with dimensions that have to be folded."""
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    for shape, dim in (((2, 4, 17, 16), 0), ((2, 4, 17, 16), 1), ((4, 17, 16), 0), ((2, 2, 4, 17, 16), 2)):
        tensors = [torch.randn(shape, device=device) for _ in range(3)]
        expected = flash_attn_ext.scaled_dot_product_attention(*tensors, is_causal=True)
        spread = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors]
        with flash_attn_ext.replace_sdpa(), CommDebugMode() as communication:
            outs = [
                flash_attn_ext.scaled_dot_product_attention(*spread, is_causal=True),
                F.scaled_dot_product_attention(*spread, is_causal=True),
            ]
        assert communication.get_total_counts() == 0
        for out in outs:
            assert out.placements == (Shard(dim),)
            assert_close(out.full_tensor(), expected)


def dropout_is_refused(device: str) -> None:
    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    q = distribute_tensor(torch.randn(2, 2, 5, 8, device=device), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"dropout_p is 0\.5, but q is a DTensor"):
        flash_attn_ext.attention(q, q, q, dropout_p=0.5)


class Attention(nn.Module):
    """Self-attention of 4 query heads and 2 key heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, 16)) for linear in (self.q, self.k, self.v))
        attended = flash_attn_ext.attention(q, k, v, causal="top_left", layout="bshd")
        return x + self.out(attended.flatten(-2))


def tensor_parallel_module(device: str) -> None:
    """Projections whose heads are sharded: one reduction forward, one backward."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dtensor.register()
    mesh = init_device_mesh(device, (PROCESSES,))
    alone = Attention().to(device)
    together = copy.deepcopy(alone)
    plan = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    parallelize_module(together, mesh, plan | {"out": RowwiseParallel()})
    x = torch.randn(2, 20, 32, device=device)
    outs = [module(x) for module in (alone, together)]
    assert_close(outs[1], outs[0])
    for out in outs:
        out.square().sum().backward()
    for expected, parameter in zip(alone.parameters(), together.parameters(), strict=True):
        ours = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_close(ours, expected.grad)


def fully_sharded_training(device: str) -> None:
    """FSDP2 hands plain tensors to attention, so it needs no rules. Each process has its part of the batch."""
    mesh = init_device_mesh(device, (PROCESSES,))
    alone = nn.Sequential(Attention(), Attention()).to(device)
    together = copy.deepcopy(alone)
    for block in together:
        fully_shard(block, mesh=mesh)
    fully_shard(together, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
    for _ in range(3):
        x, target = torch.randn(2, 4, 20, 32, device=device)
        own = (x.chunk(PROCESSES)[dist.get_rank()], target.chunk(PROCESSES)[dist.get_rank()])
        for model, (batch, wanted), optimizer in zip((alone, together), ((x, target), own), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(batch), wanted).backward()
            optimizer.step()
    for expected, parameter in zip(alone.parameters(), together.parameters(), strict=True):
        assert_close(parameter.full_tensor(), expected)


TASKS = (
    without_rules,  # before another task registers them
    all_sharded_as_alone,
    largest_scores_as_alone,
    second_derivatives_as_alone,
    packed_as_alone,
    two_dimensions_of_a_mesh,
    which_gradients_are_asked_for,
    entry_of_pytorchs_signature,
    dropout_is_refused,
    tensor_parallel_module,
    fully_sharded_training,
)


def run_all(device: str) -> None:
    for task in TASKS:
        torch.manual_seed(0)
        task(device)


def test_two_processes(device):
    """One test, since processes have to import PyTorch first; the traceback of a failure names the task."""
    if device == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip(f"needs {PROCESSES} GPUs")
    run_processes(run_all, PROCESSES, device)
