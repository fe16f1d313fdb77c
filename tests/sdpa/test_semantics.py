"""scaled_dot_product_attention against torch.nn.functional's: same arguments, same results, same gradients."""

import inspect

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_attn_ext
from flash_attn_ext import scaled_dot_product_attention
from flash_attn_ext.reference import attention_reference
from support.backends import generator_state
from support.errors import Comparison, assert_rule, assert_rule_over_draws, compare
from support.params import over_dtypes
from support.yardstick import fused_sdpa, is_an_answer, mask_in, unfused_sdpa


def normal(on, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """On the device of a backend or of a tensor."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(on.device, dtype)


def qkv_of(backend, leading=(2, 3), length=65, keys=97, e=16, ev=16, dtype=torch.float32, kv_leading=None):
    kv = leading if kv_leading is None else kv_leading
    return (
        normal(backend, *leading, length, e, dtype=dtype, seed=1),
        normal(backend, *kv, keys, e, dtype=dtype, seed=2),
        normal(backend, *kv, keys, ev, dtype=dtype, seed=3),
    )


def forward_and_backward(attention, tensors, attn_mask=None, **options):
    """out and the gradients of everything that can have one, the mask included."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.detach().requires_grad_()
        leaves.append(attn_mask)
    out = attention(*leaves[:3], attn_mask=attn_mask, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    return [out, *torch.autograd.grad(out, leaves, weights)]


def check_against_pytorch(tensors, attn_mask=None, **options) -> None:
    """The error rule, with PyTorch in float64 as the exact answer and in the same dtype as the yardstick."""

    def draw(seed: int) -> list[torch.Tensor]:
        if seed == 0:
            return tensors
        return [normal(t, *t.shape, dtype=t.dtype, seed=10 * seed + i) for i, t in enumerate(tensors)]

    assert_rule_over_draws(lambda seed: compare_with_pytorch(draw(seed), attn_mask, **options))


def compare_with_pytorch(tensors, attn_mask, **options) -> dict[str, Comparison]:
    ours = forward_and_backward(scaled_dot_product_attention, tensors, attn_mask, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.reshape((1,) * (2 - attn_mask.dim()) + attn_mask.shape)  # PyTorch needs two dimensions
    exact = exactly(tensors, attn_mask, **options)
    theirs = yardstick(tensors, attn_mask, exact, **options)
    terms = terms_of_mask_gradient(tensors, attn_mask, **options) if len(exact) > 4 else 0.0
    expected = [*tensors[:1], *tensors, attn_mask][: len(ours)]
    assert all(a.dtype == b.dtype for a, b in zip(ours, expected, strict=True))
    assert all(a.shape == b.shape for a, b in zip(ours, exact, strict=True))
    names = ("out", "dq", "dk", "dv", "dmask")[: len(ours)]
    return {
        name: compare(a, b, c, terms if name == "dmask" else 0.0)
        for name, a, b, c in zip(names, ours, theirs, exact, strict=True)
    }


def exactly(tensors, attn_mask, **options) -> list[torch.Tensor]:
    is_float = attn_mask is not None and attn_mask.is_floating_point()
    mask64 = attn_mask.double() if is_float else attn_mask
    return forward_and_backward(unfused_sdpa, [t.double() for t in tensors], mask64, **options)


def yardstick(tensors, attn_mask, exact, **options) -> list[torch.Tensor]:
    """PyTorch in the dtype of the tensors; where it gives no answer, the plain formula. As in support/yardstick.py."""
    dtype = tensors[0].dtype
    theirs = forward_and_backward(fused_sdpa, tensors, attn_mask, **options)
    if tensors[0].is_cuda and attn_mask is not None and attn_mask.is_floating_point():
        rounded = exactly(tensors, mask_in(dtype, attn_mask), **options)
        theirs = [t.double() - (r - e) for t, r, e in zip(theirs, rounded, exact, strict=True)]
    plain = forward_and_backward(plain_sdpa, tensors, attn_mask, **options)
    return [t if is_an_answer(t, p, e) else p for t, p, e in zip(theirs, plain, exact, strict=True)]


def plain_sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    return attention_reference(
        query,
        key,
        value,
        causal="top_left" if is_causal else None,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool or attn_mask is None else attn_mask.to(query.dtype),
        scale=scale,
        return_lse=False,
    )


def terms_of_mask_gradient(tensors, attn_mask, **options) -> float:
    """The largest sum of absolute gradients that broadcasting adds up: those of a row cancel."""
    q, k, _ = tensors
    full = torch.broadcast_to(attn_mask, (*q.shape[:-1], k.shape[-2])).contiguous()
    gradient = exactly(tensors, full, **options)[4]
    return float(gradient.abs().sum_to_size(attn_mask.shape).max())


def test_signature():
    """PyTorch's is built in and has no signature to ask; this is its documented one."""
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    defaults = [parameter.default for parameter in parameters.values()][3:]
    assert defaults == [None, 0.0, False, None, False]


@over_dtypes()
@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 2, 3), (1, 2, 1, 3)], ids=str)
def test_ranks(leading, dtype, backend):
    check_against_pytorch(qkv_of(backend, leading, dtype=dtype))


@over_dtypes()
@pytest.mark.parametrize(("length", "keys"), [(65, 97), (97, 65), (128, 128), (2, 50), (50, 2)])
def test_is_causal_is_top_left(length, keys, dtype, backend):
    check_against_pytorch(qkv_of(backend, length=length, keys=keys, dtype=dtype), is_causal=True)


@over_dtypes()
@pytest.mark.parametrize("scale", [None, 1.0, 0.02, -0.5, 0.0])
def test_scale(scale, dtype, backend):
    check_against_pytorch(qkv_of(backend, e=40, ev=40, dtype=dtype), scale=scale)


@pytest.mark.parametrize(("length", "keys"), [(1, 50), (50, 1)])
def test_is_causal_with_one_visible_key(length, keys, backend):
    """Its weight is 1 whatever the score, so nothing but rounding reaches q and k."""
    tensors = qkv_of(backend, length=length, keys=keys)
    ours = forward_and_backward(scaled_dot_product_attention, tensors, is_causal=True)
    theirs = forward_and_backward(unfused_sdpa, tensors, is_causal=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


MASK_SHAPES = [(97,), (1,), (65, 97), (65, 1), (1, 97), (3, 65, 97), (3, 1, 97), (1, 65, 1)]
MASK_SHAPES += [(2, 3, 65, 97), (2, 1, 1, 97), (1, 3, 65, 97), (2, 1, 65, 97), (2, 3, 1, 1), (1, 1, 1, 1), ()]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_shapes(shape, kind, backend):
    """Anything that broadcasts to (N, ..., L, S); a float mask's gradient is summed over what was broadcast."""
    mask = normal(backend, *shape, seed=5)
    check_against_pytorch(qkv_of(backend), mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize(
    "shape", [(97,), (65, 97), (3, 65, 97), (2, 1, 65, 97), (2, 2, 3, 65, 97), (2, 1, 1, 1, 97)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_shapes_beside_5d_inputs(shape, kind, backend):
    mask = normal(backend, *shape, seed=5)
    check_against_pytorch(qkv_of(backend, (2, 2, 3)), mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize("shape", [(97,), (65, 97), (1, 97)], ids=str)
@pytest.mark.parametrize("leading", [(), (4,)], ids=str)
def test_mask_beside_2d_and_3d_inputs(leading, shape, backend):
    check_against_pytorch(qkv_of(backend, leading), normal(backend, *shape, seed=5))


@over_dtypes((torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("kind", ["bool", "float", "float32"])
def test_mask_dtypes(kind, dtype, backend):
    """Boolean, the dtype of q, or float32."""
    mask = normal(backend, 2, 1, 65, 97, seed=5)
    mask = {"bool": mask > -0.5, "float": mask.to(dtype), "float32": mask}[kind]
    check_against_pytorch(qkv_of(backend, dtype=dtype), mask)


def test_boolean_mask_true_means_attend(backend):
    tensors = qkv_of(backend)
    mask = torch.zeros(65, 97, dtype=torch.bool, device=backend.device)
    mask[:, 42] = True
    out = scaled_dot_product_attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(out, tensors[2][:, :, 42:43].expand_as(out))


def test_mask_strides(backend):
    """Expanded without memory, and transposed."""
    row = normal(backend, 1, 1, 1, 97, seed=5)
    square = normal(backend, 97, 65, seed=6)
    for mask in (row.expand(2, 3, 65, 97), square.T, row.flatten().expand(65, 97), row[..., :1].expand(2, 3, 65, 97)):
        check_against_pytorch(qkv_of(backend), mask.contiguous())
        ours = forward_and_backward(scaled_dot_product_attention, qkv_of(backend), mask)
        contiguous = forward_and_backward(scaled_dot_product_attention, qkv_of(backend), mask.contiguous())
        for a, b in zip(ours, contiguous, strict=True):
            torch.testing.assert_close(a, b)


def test_gradient_of_an_expanded_mask_is_summed(backend):
    """The expansion is the caller's: autograd sums our dense gradient into the one row."""
    row = normal(backend, 97, seed=5)
    gradients = []
    for attention, dtype in (
        (scaled_dot_product_attention, torch.float32),
        (unfused_sdpa, torch.float32),
        (unfused_sdpa, torch.float64),
    ):
        leaf = row.to(dtype).requires_grad_()
        tensors = [tensor.to(dtype) for tensor in qkv_of(backend)]
        out = attention(*tensors, attn_mask=leaf.expand(2, 3, 65, 97))
        gradients.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert_rule({"dmask": compare(*gradients)})


@over_dtypes()
def test_rows_without_keys_are_zero(dtype, backend):
    tensors = qkv_of(backend, dtype=dtype)
    mask = normal(backend, 65, 97, seed=5) > -0.5
    mask[[0, 13, 64]] = False
    check_against_pytorch(tensors, mask)
    out, dq, *_ = forward_and_backward(scaled_dot_product_attention, tensors, mask)
    assert bool((out[:, :, [0, 13, 64]] == 0).all()) and bool((dq[:, :, [0, 13, 64]] == 0).all())


@over_dtypes()
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1), (3, 3), (6, 3)])
def test_enable_gqa(heads, kv_heads, dtype, backend):
    tensors = qkv_of(backend, (2, heads), dtype=dtype, kv_leading=(2, kv_heads))
    check_against_pytorch(tensors, enable_gqa=True)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (4, 2), (1, 2)])
def test_key_and_value_heads_may_differ(key_heads, value_heads, backend):
    """Each number divides that of query heads; PyTorch's math path takes them too."""
    q = normal(backend, 2, 4, 65, 16)
    k, v = normal(backend, 2, key_heads, 97, 16, seed=2), normal(backend, 2, value_heads, 97, 16, seed=3)
    repeated = [t.repeat_interleave(4 // t.shape[1], 1) for t in (k, v)]
    ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(ours, unfused_sdpa(q, *repeated))


def test_gqa_with_mask_gradient(backend):
    tensors = qkv_of(backend, (2, 4), kv_leading=(2, 2))
    check_against_pytorch(tensors, normal(backend, 4, 65, 97, seed=5), enable_gqa=True)


@pytest.mark.parametrize(("leading", "kv_leading"), [((2, 3), (1, 3)), ((2, 3), (3,)), ((2, 3), (1, 1)), ((4,), (1,))])
def test_batch_dimensions_broadcast(leading, kv_leading, backend):
    """PyTorch's math path broadcasts leading dimensions of size 1; gradients are summed back."""
    check_against_pytorch(qkv_of(backend, leading, kv_leading=kv_leading))


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("e", [1, 3, 40, 72, 160, 256, 300])
def test_head_dims(e, dtype, backend):
    if refusal := backend.refusal(dtype, e):
        pytest.skip(refusal)
    check_against_pytorch(qkv_of(backend, e=e, ev=max(1, e // 2), dtype=dtype))


def test_dropout_applies_without_a_training_flag(backend):
    ones = torch.ones(2, 3, 200, 4, device=backend.device)
    torch.manual_seed(0)
    out = scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert abs(float(out.mean()) - 1) < 0.02
    assert float(out.std()) > 0.01
    torch.manual_seed(0)
    assert torch.equal(out, scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_output_stride_order_is_the_querys(order, backend):
    shape = (2, 3, 65, 16)
    storage = normal(backend, *(shape[dim] for dim in order))
    q = storage.permute([order.index(dim) for dim in range(4)])
    out = scaled_dot_product_attention(q, q, q)
    assert out.permute(order).is_contiguous()
    if order == (0, 2, 1, 3):
        assert out.transpose(1, 2).reshape(2, 65, 48).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_mixed_dtypes_raise_and_name_the_tensors(which, backend):
    tensors = list(qkv_of(backend))
    tensors[which] = tensors[which].double()
    got = ", ".join(f"{name} {t.dtype}" for name, t in zip(("query", "key", "value"), tensors, strict=True))
    with pytest.raises(RuntimeError, match=rf"same dtype, got {got}: cast key and value to query.dtype"):
        scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("length", "keys"), [(65, 97), (97, 65), (65, 65)])
def test_causal_bias_objects(variant, length, keys, backend):
    """torch.nn.attention.bias: masks by their type, which say the alignment themselves."""
    tensors = qkv_of(backend, length=length, keys=keys)
    bias = variant(length, keys)
    torch.testing.assert_close(
        scaled_dot_product_attention(*tensors, attn_mask=bias),
        unfused_sdpa(*tensors, attn_mask=bias._materialize(backend.device)),
    )


def test_dropout_of_everything(backend):
    """out and every gradient are 0, those of a float mask included; nothing is drawn."""
    mask = normal(backend, 65, 97, seed=5)
    state = generator_state(backend.device)
    results = forward_and_backward(scaled_dot_product_attention, qkv_of(backend), mask, dropout_p=1.0)
    assert torch.equal(state, generator_state(backend.device))
    theirs = forward_and_backward(unfused_sdpa, qkv_of(backend), mask, dropout_p=1.0)
    for ours, expected in zip(results, theirs, strict=True):
        assert torch.equal(ours, expected) and not bool(ours.any())


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("leading", "ones"), [((), (1,)), ((), (1, 1)), ((4,), (1,)), ((2, 3), (1,)), ((2, 2, 3), (1,))]
)
def test_leading_ones_of_a_mask(leading, ones, kind, backend):
    """More of them than the inputs have dimensions: they broadcast against nothing."""
    mask = normal(backend, *leading, 65, 97, seed=5)
    mask = mask > -0.5 if kind == "bool" else mask
    expected = scaled_dot_product_attention(*qkv_of(backend, leading), attn_mask=mask)
    more = mask.reshape(*ones, *mask.shape)
    assert torch.equal(scaled_dot_product_attention(*qkv_of(backend, leading), attn_mask=more), expected)
    if kind == "float":
        *_, gradient = forward_and_backward(scaled_dot_product_attention, qkv_of(backend, leading), more)
        assert gradient.shape == more.shape


def test_our_own_entry_takes_mask_and_causal(backend):
    q, k, v = qkv_of(backend)
    mask = normal(backend, 65, 97, seed=5) > -0.5
    ours = flash_attn_ext.attention(q, k, v, mask=mask, causal="top_left", backend=backend.name)
    both = mask & torch.ones_like(mask).tril()
    torch.testing.assert_close(ours, unfused_sdpa(q, k, v, attn_mask=both))
