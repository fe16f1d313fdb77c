"""The fields of a call are the same ones, in one order, in Python, in the operators' schema and in C++."""

import pytest
import torch
from torch._vmap_internals import _vmap as older_vmap

from flash_attn_ext import _C
from flash_attn_ext._call.problem import DIFFERENTIABLE, NUM_TENSORS, KvCache, Problem
from support.binding import problem


def test_one_order_everywhere():
    assert Problem._fields == _C.PROBLEM_FIELDS
    operators = (
        ("attention_forward", 0),
        ("attention_backward", 6),
        ("attention_tangents", 9),
        ("attention_backward_tangents", 14),
    )
    for name, leading in operators:
        schema = getattr(torch.ops.flash_attn_ext, name).default._schema
        assert tuple(argument.name for argument in schema.arguments[leading:]) == Problem._fields


def test_those_of_a_cache_follow():
    assert KvCache._fields == _C.CACHE_FIELDS
    schema = torch.ops.flash_attn_ext.attention_with_kvcache.default._schema
    assert tuple(argument.name for argument in schema.arguments) == Problem._fields + KvCache._fields


def test_tensors_come_first():
    schema = torch.ops.flash_attn_ext.attention_forward.default._schema
    assert ["Tensor" in str(argument.type) for argument in schema.arguments] == [
        index < NUM_TENSORS for index in range(len(Problem._fields))
    ]
    gradients = torch.ops.flash_attn_ext.attention_backward.default._schema.returns
    assert tuple(gradient.name for gradient in gradients) == tuple(f"d{name}" for name in DIFFERENTIABLE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(bias=0.5), "bias cannot be float"),
        (dict(scale="1"), "scale cannot be str"),
        (dict(window_left=1.5), "window_left cannot be float"),
        (dict(q=None), "q cannot be NoneType"),
        (dict(backend=3), "backend cannot be int"),
    ],
)
def test_a_field_of_another_type_is_named(change, says):
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=says):
        _C.attention(problem(q, q, q)._replace(**change))


def test_what_is_no_problem_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    for wrong in ((q, q, q), [q, q, q], None):
        with pytest.raises(TypeError, match=r"a tuple with the \d+ fields of"):
            _C.attention(wrong)


def test_what_operands_are():
    q = torch.zeros(2, 4, 5, 8)
    shared = torch.zeros(2, 2, 5, 8)
    assert _C.operands_of(q, q, q) == _C.EQUAL_HEADS
    assert _C.operands_of(q, shared, shared) == _C.CANONICAL
    for plain in ((q[0], q[0], q[0]), (q, q.double(), q), (q, shared, q), (q, q[:1], q[:1])):
        assert _C.operands_of(*plain) == _C.PLAIN
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _C.operands_of(q, q, q) == _C.PLAIN
    with torch.autograd.forward_ad.dual_level():
        assert _C.operands_of(q, q, q) == _C.TRANSFORMED
    seen = []
    torch.func.grad(lambda x: (seen.append(_C.operands_of(x, q, q)), x.sum())[1])(q)
    assert seen == [_C.TRANSFORMED]
    older_vmap(lambda x: (seen.append(_C.operands_of(q, x, q)), x)[1])(torch.stack([q, q]))
    assert seen[1:] == [_C.SYMBOLIC]
    for symbolic in ((q.to("meta"),) * 3, (None, q, q), ([1.0], q, q), (q.as_subclass(torch.Tensor), q, "v")):
        assert _C.operands_of(*symbolic) == _C.SYMBOLIC
