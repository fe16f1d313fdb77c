"""How attention behaves inside PyTorch's autograd."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flash_attn_ext
from support.cases import Case, make_inputs
from support.runners import call_ours

CASE = Case(sq=65, sk=97, d=16)


def leaves_of(backend, dtype=torch.float32, case=CASE):
    inputs = make_inputs(case, dtype, backend.device)
    return [tensor.detach().clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]


def attend(backend, *tensors, **options):
    return flash_attn_ext.attention(*tensors, backend=backend.name, **options)


def test_is_behind_every_entry(backend):
    q, k, v = leaves_of(backend)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=backend.device) for n in (65, 97))
    packed = (t[0].transpose(0, 1) for t in (q, k, v))
    outs = [
        attend(backend, q, k, v),
        flash_attn_ext.scaled_dot_product_attention(q, k, v),
        flash_attn_ext.attention_varlen(*packed, cu_q, cu_k, backend=backend.name),
    ]
    for out in outs:
        names, node = [], out.grad_fn
        while node is not None and "FlashAttentionFunction" not in node.name():
            names.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        assert node is not None, names


def test_nothing_is_recorded_without_grad(backend):
    q, k, v = leaves_of(backend)
    with torch.no_grad():
        assert not attend(backend, q, k, v).requires_grad
    with torch.inference_mode():
        assert attend(backend, q, k, v).is_inference()
    assert not attend(backend, q.detach(), k.detach(), v.detach()).requires_grad


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_what_requires_grad_gets_it(wanted, backend):
    full = leaves_of(backend)
    attend(backend, *full).square().sum().backward()
    partial = [leaf.requires_grad_(i in wanted) for i, leaf in enumerate(t.detach().clone() for t in full)]
    attend(backend, *partial).square().sum().backward()
    for index, (leaf, expected) in enumerate(zip(partial, full, strict=True)):
        if index in wanted:
            torch.testing.assert_close(leaf.grad, expected.grad)
        else:
            assert leaf.grad is None


def test_second_backward_over_a_retained_graph(backend):
    leaves = leaves_of(backend)
    loss = attend(backend, *leaves).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_accumulate_over_two_calls(backend):
    once, twice = leaves_of(backend), leaves_of(backend)
    attend(backend, *once).sum().backward()
    for _ in range(2):
        attend(backend, *twice).sum().backward()
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * a.grad, b.grad)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_modifying_a_saved_input_in_place_is_an_error(index, backend):
    leaves = leaves_of(backend)
    tensors = [leaf * 1 for leaf in leaves]
    out = attend(backend, *tensors)
    tensors[index].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modifying_the_saved_output_in_place_is_an_error(backend):
    out = attend(backend, *leaves_of(backend))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_backward_over_a_released_graph_is_an_error(backend):
    out = attend(backend, *leaves_of(backend))
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_backward_releases_what_was_saved(backend):
    tensors = [leaf * 1 for leaf in leaves_of(backend)]
    out = attend(backend, *tensors)
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    assert all(reference() is not None for reference in references)
    out.sum().backward()
    assert all(reference() is None for reference in references)


def test_threads_may_differentiate_one_graph(backend):
    leaves = leaves_of(backend)
    loss = attend(backend, *leaves).square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(torch.autograd.grad, loss, leaves, retain_graph=True) for _ in range(16)]
    for run in runs:
        assert all(torch.equal(a, b) for a, b in zip(run.result(), expected, strict=True))


def test_anomaly_mode_finds_nothing(backend):
    """No NaN in any step of a backward pass with rows that see no key."""
    leaves = leaves_of(backend)
    mask = torch.rand(65, 97, device=backend.device) < 0.5
    mask[[0, 13]] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        out, lse = attend(backend, *leaves, mask=mask, return_lse=True)
        (out.sum() + lse[:, :, 1:13].sum()).backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpoint(dropout_p, use_reentrant, backend):
    """Recomputation draws the same dropout bits, because the seed comes from torch's generator."""
    results = []
    for wrap in (False, True):
        leaves = leaves_of(backend)

        def function(*tensors):
            return attend(backend, *tensors, dropout_p=dropout_p)

        torch.manual_seed(7)
        out = checkpoint(function, *leaves, use_reentrant=use_reentrant) if wrap else function(*leaves)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_func_grad_and_vjp(backend):
    """torch.func transforms use the Function through its setup_context."""
    leaves = leaves_of(backend)
    out = attend(backend, *leaves, causal="top_left")
    cotangent = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, cotangent)
    plain = [leaf.detach() for leaf in leaves]

    def loss(*tensors):
        return (attend(backend, *tensors, causal="top_left") * cotangent).sum()

    for ours, reference in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), expected, strict=True):
        torch.testing.assert_close(ours, reference)
    _, vjp = torch.func.vjp(lambda *tensors: attend(backend, *tensors, causal="top_left"), *plain)
    for ours, reference in zip(vjp(cotangent), expected, strict=True):
        torch.testing.assert_close(ours, reference)


def test_saved_tensors_may_be_packed_elsewhere(backend):
    leaves, kept = leaves_of(backend), leaves_of(backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = attend(backend, *leaves)
    out.square().sum().backward()
    attend(backend, *kept).square().sum().backward()
    for a, b in zip(leaves, kept, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_error_of_a_packing_hook_arrives_as_it_is(backend):
    def refuse(tensor):
        raise KeyError("no room")

    with pytest.raises(KeyError, match="no room"), torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
        attend(backend, *leaves_of(backend))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_batched_gradients(dropout_p, backend):
    """The backward pass under torch.vmap, as torch.autograd.functional.jacobian(vectorize=True) runs it."""
    leaves = leaves_of(backend)
    out = attend(backend, *leaves, dropout_p=dropout_p)
    douts = torch.randn(3, *out.shape, device=out.device)
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for index, dout in enumerate(douts):
        for ours, expected in zip(batched, torch.autograd.grad(out, leaves, dout, retain_graph=True), strict=True):
            torch.testing.assert_close(ours[index], expected)


def test_a_dispatch_mode_sees_the_backward_operator(backend):
    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.operators.append(function)
            return function(*arguments, **(keywords or {}))

    leaves, unwatched = leaves_of(backend), leaves_of(backend)
    options = dict(causal="bottom_right", window=(30, 3), softcap=5.0)
    out = attend(backend, *leaves, **options)
    with Recorder() as recorder:
        out.sum().backward()
    assert torch.ops.flash_attn_ext.attention_backward.default in recorder.operators
    attend(backend, *unwatched, **options).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, unwatched, strict=True))


def test_only_the_lse_is_used(backend):
    """No gradient arrives for out at all, not even zeros."""
    leaves = leaves_of(backend, torch.float64)
    _, lse = attend(backend, *leaves, return_lse=True)
    lse.sum().backward()
    scores = (leaves[0].detach() @ leaves[1].detach().mT) * 16**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(leaves[0].grad, scores.softmax(-1) @ leaves[1].detach() * 16**-0.5)


def test_dropout_is_linear_in_v(backend):
    """out = W v with fixed W, so <dv, v> = <dout, out> whatever was dropped: forward and backward drop the same."""
    inputs = make_inputs(Case(sq=140, sk=270, dropout_p=0.5), torch.float64, backend.device)
    leaves = inputs.leaves()
    out, _ = call_ours(inputs, leaves, backend)
    (dv,) = torch.autograd.grad(out, [leaves["v"]], inputs.dout)
    torch.testing.assert_close((dv * inputs.v).sum(), (out.detach() * inputs.dout).sum())
