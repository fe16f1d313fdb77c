"""torch.vmap: every slice gets what a call by itself gives it, whichever tensors have slices, and along which dim."""

import functools
import itertools

import pytest
import torch
from torch._vmap_internals import _vmap as older_vmap

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.derivatives.small_cases import SMALL, function_of
from support.packed import PackedCase, cu_seqlens, make_packed
from support.params import computes_in, over_cases, over_dtypes

SIZE = 3
TENSORS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "intervals")
HIDING = ("mask", "intervals")  # which have no gradients
BATCH = dict(sq=5, sk=7, d=4, batch=2, heads=4, kv_heads=2)
CASES = [
    Case(**BATCH),
    Case(**BATCH, causal="bottom_right", window=(2, 1), softcap=1.0),
    Case(**BATCH, bias="bhqk", mask="b1qk"),
    Case(**BATCH, bias="1hqk", mask="11qk"),  # a bias without a batch goes into the heads
    Case(**BATCH, bias="11q1", alibi="h", sink=True),
    Case(**BATCH, intervals="1h", num_intervals=2, sink=True),
    Case(**BATCH, intervals="b1", bias="11qk"),
    Case(**BATCH, bias="1h1k", alibi="bh", layout="bshd"),
    Case(**(BATCH | dict(batch=1)), bias="11qk", alibi="h", mask="1hqk"),
]
# Which tensors are mapped: alone, and together.
MAPPED = [("q",), ("k", "v"), ("q", "k", "v"), ("bias",), ("mask", "alibi_slopes"), ("sink",), ("intervals",), TENSORS]


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: getattr(inputs, name) for name in TENSORS if getattr(inputs, name) is not None}


def mapped_tensors(draw, names, in_dim: int | None):
    """Tensors, those of `names` with SIZE slices along a dim of their own each, and the dims."""
    draws = [tensors_of(draw(seed)) for seed in range(SIZE)]
    tensors, dims = dict(draws[0]), dict.fromkeys(draws[0])
    for position, name in enumerate(name for name in names if name in tensors):
        dim = position if in_dim is None else in_dim
        dims[name] = dim % (tensors[name].dim() + 1)
        tensors[name] = torch.stack([slice_[name] for slice_ in draws], dims[name])
    return tensors, dims


def slices(tensors, dims):
    for index in range(SIZE):
        yield {n: t if dims[n] is None else t.select(dims[n], index) for n, t in tensors.items()}


def attend(case: Case, backend, **tensors):
    return flash_attn_ext.attention(
        **tensors, **case.options(), layout=case.layout, return_lse=True, backend=backend.name
    )


def laid_out(case: Case, tensors):
    """q, k, v drawn in (B, H, S, D) as the case's layout has them."""
    if case.layout == "bhsd":
        return tensors
    return {n: t.transpose(1, 2) if n in ("q", "k", "v") else t for n, t in tensors.items()}


@over_cases(CASES)
@pytest.mark.parametrize("names", MAPPED, ids="+".join)
@pytest.mark.parametrize("in_dim", [0, -1, None], ids=str)
def test_any_in_dims(case, names, in_dim, backend):
    tensors, dims = mapped_tensors(lambda seed: make_inputs(case, torch.float32, backend.device, seed), names, in_dim)
    if all(dim is None for dim in dims.values()):
        return

    def call(tensors):
        return attend(case, backend, **laid_out(case, tensors))

    found = torch.vmap(call, in_dims=(dims,))(tensors)
    expected = [call(slice_) for slice_ in slices(tensors, dims)]
    for ours, theirs in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


@computes_in(torch.float64)
@over_cases(CASES)
@pytest.mark.parametrize("names", MAPPED, ids="+".join)
def test_per_sample_gradients(case, names, backend):
    """vmap(grad) for every input, mapped or shared."""
    tensors, dims = mapped_tensors(lambda seed: make_inputs(case, torch.float64, backend.device, seed), names, None)
    if all(dim is None for dim in dims.values()):
        return
    hiding = {name: tensors.pop(name) for name in HIDING if name in tensors}
    hiding_dims = {name: dims.pop(name) for name in hiding}

    def loss(tensors, hiding):
        out, lse = attend(case, backend, **laid_out(case, tensors | hiding))
        return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(dims, hiding_dims))(tensors, hiding)
    for index, (slice_, of_slice) in enumerate(zip(slices(tensors, dims), slices(hiding, hiding_dims), strict=True)):
        expected = torch.func.grad(loss)(slice_, of_slice)
        for name in tensors:
            torch.testing.assert_close(found[name][index], expected[name], msg=name)


@computes_in(torch.float64)
@over_cases(CASES[2:5])
def test_second_derivatives_of_slices(case, backend):
    """vmap of jvp of grad, and of grad of jvp, with all tensors mapped."""
    names = tuple(name for name in TENSORS if name != "mask")
    tensors, dims = mapped_tensors(lambda seed: make_inputs(case, torch.float64, backend.device, seed), names, 0)
    mask = tensors.pop("mask", None)
    dims.pop("mask", None)
    along = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}

    def loss(tensors):
        return attend(case, backend, **tensors, mask=mask)[0].square().sum()

    def forward_over_reverse(tensors, along):
        return torch.func.jvp(torch.func.grad(loss), (tensors,), (along,))[1]

    def reverse_over_forward(tensors, along):
        return torch.func.grad(lambda tensors: torch.func.jvp(loss, (tensors,), (along,))[1])(tensors)

    for order in (forward_over_reverse, reverse_over_forward):
        found = torch.vmap(order)(tensors, along)
        for index in range(SIZE):
            expected = order(*({name: t[index] for name, t in of.items()} for of in (tensors, along)))
            for name in tensors:
                torch.testing.assert_close(found[name][index], expected[name], msg=name)


@over_dtypes()
def test_outer_products_of_slices(dtype, backend):
    """Nested: every q with every k and v; and out_dims."""
    q = torch.randn(SIZE, 2, 2, 5, 8, device=backend.device).to(dtype)
    k, v = (torch.randn(2, 4, 2, 7, 8, device=backend.device).to(dtype) for _ in range(2))

    def call(q, k, v):
        return flash_attn_ext.attention(q, k, v, backend=backend.name)

    inner = torch.vmap(call, in_dims=(None, 1, 1), out_dims=-1)
    found = torch.vmap(inner, in_dims=(0, None, None), out_dims=1)(q, k, v)
    assert found.shape == (2, SIZE, 2, 5, 8, 4)
    for i, j in itertools.product(range(SIZE), range(4)):
        assert torch.equal(found[:, i, ..., j], call(q[i], k[:, j], v[:, j]))


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_chunks(chunk_size, backend):
    q, k, v = (torch.randn(5, 2, 2, n, 8, device=backend.device) for n in (5, 7, 7))

    def call(q, k, v):
        return flash_attn_ext.attention(q, k, v, causal="top_left", backend=backend.name)

    assert torch.equal(torch.vmap(call, chunk_size=chunk_size)(q, k, v), torch.vmap(call)(q, k, v))


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_any_rank(rank, backend):
    shape = (2, 3, 2)[5 - rank :]
    q, k, v = (torch.randn(SIZE, *shape, n, 8, device=backend.device) for n in (5, 7, 7))
    found = torch.vmap(lambda q, k, v: flash_attn_ext.attention(q, k, v, backend=backend.name))(q, k, v)
    torch.testing.assert_close(found, torch.stack([flash_attn_ext.attention(*t) for t in zip(q, k, v, strict=True)]))


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_older_vmap(rank, backend):
    """That of torch.autograd.functional and is_grads_batched=True, where a backward pass of the user's calls."""
    shape = (2, 3, 2)[5 - rank :]
    q, k, v = (torch.randn(SIZE, *shape, n, 8, device=backend.device).requires_grad_() for n in (5, 7, 7))

    def call(*tensors):
        return flash_attn_ext.attention(*tensors, causal="bottom_right", backend=backend.name)

    found, expected = older_vmap(call)(q, k, v), torch.stack([call(*t) for t in zip(q, k, v, strict=True)])
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@computes_in(torch.float64)
@pytest.mark.parametrize("names", [("q",), ("q", "k", "v"), ("bias",), ("sink",), TENSORS], ids="+".join)
@pytest.mark.parametrize("maps_lengths", [False, True])
def test_packed(names, maps_lengths, backend):
    """Also lengths of their own, in as many tokens."""
    base = Case(d=4, heads=4, kv_heads=2, bias="1hqk", mask="b11k", alibi="bh", sink=True, causal="bottom_right")
    case = PackedCase((3, 0, 2), (2, 3, 3), base)
    tensors, dims = mapped_tensors(lambda seed: make_packed(case, torch.float64, backend.device, seed), names, 0)
    lengths = [cu_seqlens(n, backend.device) for n in ((3, 0, 2), (2, 3, 3))]
    others = [cu_seqlens(n, backend.device) for n in ((1, 2, 2), (3, 2, 3))]
    if maps_lengths:
        lengths = [torch.stack([a, b, a]) for a, b in zip(lengths, others, strict=True)]
    mask, mask_dim = tensors.pop("mask"), dims.pop("mask")

    def loss(tensors, mask, cu_q, cu_k):
        out, lse = flash_attn_ext.attention_varlen(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            cu_q,
            cu_k,
            max_seqlen_q=3,
            max_seqlen_k=3,
            causal=base.causal,
            mask=mask,
            **{name: tensors[name] for name in ("bias", "alibi_slopes", "sink")},
            return_lse=True,
            backend=backend.name,
        )
        return out.square().sum() + lse.sin().sum()

    with_value = torch.func.grad_and_value(loss)
    length_dim = 0 if maps_lengths else None
    gradients, values = torch.vmap(with_value, in_dims=(dims, mask_dim, length_dim, length_dim))(
        tensors, mask, *lengths
    )
    for index, slice_ in enumerate(slices(tensors, dims)):
        of_slice = [t[index] if dim == 0 else t for t, dim in ((mask, mask_dim), *((c, length_dim) for c in lengths))]
        expected, value = with_value(slice_, *of_slice)
        torch.testing.assert_close(values[index], value)
        for name in tensors:
            torch.testing.assert_close(gradients[name][index], expected[name], msg=name)


@pytest.mark.parametrize("sink", [False, True])
@computes_in(torch.float64)
def test_randomness(sink, backend):
    """ "same": all slices drop the same weights. "different": each drops its own, in its gradient too."""
    q, k, v = (torch.randn(SIZE, 2, 2, 20, 4, dtype=torch.float64, device=backend.device) for _ in range(3))
    options = dict(dropout_p=0.5, backend=backend.name)
    if sink:
        options["sink"] = torch.randn(2, dtype=torch.float64, device=backend.device)

    def call(q, k, v):
        return flash_attn_ext.attention(q, k, v, **options)

    equal = [t[:1].expand_as(t) for t in (q, k, v)]
    out = torch.vmap(call, randomness="same")(*equal)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    out = torch.vmap(call, randomness="different")(*equal)
    assert not torch.equal(out[0], out[1]) and not torch.equal(out[0], out[2])
    for randomness in ("same", "different"):

        def linear_in_v(q, k, v):
            gradient, out = torch.func.vjp(lambda v: call(q, k, v), v)[::-1]
            return (gradient(torch.ones_like(out))[0] * v).sum(), out.sum()

        products, sums = torch.vmap(linear_in_v, randomness=randomness)(q, k, v)
        torch.testing.assert_close(products, sums)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q, k, v)


@computes_in(torch.float64)
def test_jacobians_with_dropout(backend):
    """The backward passes of a jacobian draw the bits of its one forward pass."""
    function, leaves, _ = function_of(Case(**SMALL, dropout_p=0.4, sink=True), backend)
    tensors = tuple(leaf.detach() for leaf in leaves.values())
    wanted = tuple(range(len(tensors)))
    expected = torch.autograd.functional.jacobian(lambda *t: function(*t)[0], tensors)
    by_forward = functools.partial(torch.func.jacfwd, randomness="same")  # where its forward pass is within vmap
    for transform in (torch.func.jacrev, by_forward):
        for found, theirs in zip(transform(lambda *t: function(*t)[0], wanted)(*tensors), expected, strict=True):
            torch.testing.assert_close(found, theirs)


class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.project = attend, torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (2, 12)).transpose(-3, -2).chunk(3, dim=-1)
        return self.attend(q, k, v, is_causal=True).sum()


def test_per_sample_gradients_of_a_model(backend):
    """As differential privacy takes them: one gradient of the parameters for each sample."""
    samples = torch.randn(4, 6, 8, device=backend.device)
    results = []
    for attend in (flash_attn_ext.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        torch.manual_seed(0)
        model = Block(attend).to(backend.device)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, sample, model=model):
            return torch.func.functional_call(model, parameters, (sample,))

        if attend is flash_attn_ext.scaled_dot_product_attention:
            results.append(torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples))
        else:
            singly = [torch.func.grad(loss)(parameters, sample) for sample in samples]
            results.append({name: torch.stack([g[name] for g in singly]) for name in parameters})
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-4, atol=1e-5)


def test_the_mapped_dimension_is_part_of_one_call(monkeypatch, backend):
    """Slices are not looped over."""
    calls = []
    forward = flash_attn_ext.autograd._C.attention_forward
    monkeypatch.setattr(
        flash_attn_ext.autograd._C, "attention_forward", lambda p: (calls.append(p[0].shape), forward(p))[1]
    )
    q, k, v = (torch.randn(SIZE, 2, 4, n, 8, device=backend.device) for n in (5, 7, 7))
    torch.vmap(lambda q, k, v: flash_attn_ext.attention(q, k, v, backend=backend.name))(q, k, v)
    sinks = torch.randn(SIZE, 4, device=backend.device)
    torch.vmap(lambda q, sink: flash_attn_ext.attention(q, k[0], v[0], sink=sink, backend=backend.name))(q, sinks)
    assert calls == [(SIZE * 2, 4, 5, 8), (2, SIZE * 4, 5, 8)]


def test_under_compile(backend):
    q, k, v = (torch.randn(SIZE, 2, 2, n, 8, device=backend.device) for n in (5, 7, 7))
    function = torch.vmap(lambda *tensors: flash_attn_ext.attention(*tensors, causal="top_left", backend=backend.name))
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, function(q, k, v))
