"""Operands whose class says what a call means (__torch_function__) are asked first, as by PyTorch itself."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import flash_attn_ext
from support.frames import attention_ranges


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return "theirs", types, len(args), sorted(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubling(torch.Tensor):
    """Does what PyTorch does, and something of its own with the result."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is F.scaled_dot_product_attention else out


class Unwrapping(torch.Tensor):
    """Calls PyTorch's name again, with plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return F.scaled_dot_product_attention(*(one.as_subclass(torch.Tensor) for one in args), **kwargs or {}) + 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Inheriting(torch.Tensor):
    """Overrides nothing."""


class Declining(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class Failing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            raise ValueError("their error")
        return super().__torch_function__(func, types, args, kwargs or {})


class NoTensor:
    """Need not be a tensor at all."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "theirs"


def qkv(device) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, 8, device=device) for _ in range(3)]


def assert_ours(function, num_calls: int = 1) -> None:
    assert attention_ranges(function) == (num_calls, 0)


@pytest.mark.parametrize("place", ["query", "key", "value", "attn_mask"])
def test_any_operand_is_asked(place, replaced, device):
    q, k, v = qkv(device)
    operands = dict(query=q, key=k, value=v, attn_mask=torch.zeros(5, 5, device=device))
    operands[place] = operands[place].as_subclass(Overriding)
    expected = F.scaled_dot_product_attention(*operands.values()), F.scaled_dot_product_attention(**operands, scale=0.3)
    assert expected[0][0] == "theirs"
    with replaced():
        by_position = F.scaled_dot_product_attention(*operands.values())
        by_name = F.scaled_dot_product_attention(**operands, scale=0.3)
    assert (by_position, by_name) == expected


@pytest.mark.parametrize("kind", [Doubling, Unwrapping, Inheriting])
def test_what_a_class_leaves_to_pytorch_is_ours(kind, replaced, device):
    q, k, v = (tensor.as_subclass(kind) for tensor in qkv(device))
    expected = F.scaled_dot_product_attention(q, k, v)
    with replaced():
        out = F.scaled_dot_product_attention(q, k, v)
        assert_ours(lambda: F.scaled_dot_product_attention(q, k, v))
    assert type(out) is type(expected)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


def test_where_overrides_are_off(replaced, device):
    q, k, v = (tensor.as_subclass(Overriding) for tensor in qkv(device))
    with replaced(), torch._C.DisableTorchFunctionSubclass():
        out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*(t.as_subclass(torch.Tensor) for t in (q, k, v))))


def test_a_subclass_goes_before_its_class(replaced, device):
    class Derived(Doubling):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "derived", types

    q, k, v = qkv(device)
    operands = q.as_subclass(Doubling), k, v.as_subclass(Derived)
    with replaced():
        assert F.scaled_dot_product_attention(*operands) == ("derived", (Derived, Doubling))


def test_all_may_decline(replaced, device):
    q, k, v = qkv(device)
    with replaced(), pytest.raises(TypeError, match=r"scaled_dot_product_attention.*Declining"):
        F.scaled_dot_product_attention(q, k.as_subclass(Declining), v)
    with replaced():
        out = F.scaled_dot_product_attention(q.as_subclass(Declining), k.as_subclass(Overriding), v)
    assert out[0] == "theirs"


def test_their_errors_are_no_reason_to_fall_back(replaced, device):
    q, k, v = qkv(device)
    with replaced(), pytest.raises(ValueError, match="their error"):
        F.scaled_dot_product_attention(q, k.as_subclass(Failing), v)


def test_what_is_no_tensor(replaced, device):
    q, k, _ = qkv(device)
    with replaced():
        assert F.scaled_dot_product_attention(q, k, NoTensor()) == "theirs"
    with replaced(), pytest.raises(TypeError, match=r"value|argument"):
        F.scaled_dot_product_attention(q, k, object())


def test_a_causal_bias_beside_one(replaced, device):
    """A CausalBias is not asked: it is taken as what it stands for."""
    q, k, v = qkv(device)
    bias = causal_lower_right(5, 5)
    with replaced():
        assert F.scaled_dot_product_attention(q.as_subclass(Overriding), k, v, bias)[:2] == ("theirs", (Overriding,))
        assert_ours(lambda: F.scaled_dot_product_attention(q, k, v, bias))


def test_other_names_of_the_function(fallback, device):
    """Which replace_sdpa reaches: their classes are asked about these."""
    asked = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = (tensor.as_subclass(Noting) for tensor in qkv(device))
    operator = torch.ops.aten.scaled_dot_product_attention
    with flash_attn_ext.replace_sdpa(fallback):
        assert_ours(lambda: operator(q, k, v))
    assert operator in asked


@pytest.mark.parametrize("kind", [Overriding, Doubling])
def test_in_a_module_of_pytorch(kind, replaced, device):
    """nn.MultiheadAttention asks the classes of its input about F.multi_head_attention_forward."""
    asked = []

    class Noting(kind):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.manual_seed(3)
    model = nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    x = torch.randn(2, 9, 32, device=device)
    expected = model(x, x, x, need_weights=False)[0]
    x = x.as_subclass(Noting)
    with replaced():
        out = model(x, x, x, need_weights=False)[0]
        assert_ours(lambda: model(x, x, x, need_weights=False))
    assert F.multi_head_attention_forward in asked
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_symbolic_trace(replaced, device):
    """The graph calls PyTorch's function by its name: ours while calls are replaced, whenever it was traced."""
    model, x = Attention().to(device), torch.randn(2, 3, 9, 32, device=device)
    expected, before = model(x), torch.fx.symbolic_trace(model)
    with replaced():
        traced = torch.fx.symbolic_trace(model)
        assert [(node.op, node.name) for node in traced.graph.nodes] == [
            (node.op, node.name) for node in before.graph.nodes
        ]
        copies = [traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))]
        for graph in copies:
            torch.testing.assert_close(graph(x), expected)
            assert_ours(lambda graph=graph: graph(x))
    for graph in (*copies, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(graph(x), expected)
        assert attention_ranges(lambda graph=graph: graph(x)) == (0, 1)


def test_symbolic_trace_of_a_module_of_pytorch(replaced, device):
    weights = [torch.randn(shape, device=device) for shape in ((96, 32), (32, 32))]

    def function(x):
        options = (32, 4, weights[0], None, None, None, False, 0.0, weights[1], None)
        return F.multi_head_attention_forward(x, x, x, *options, need_weights=False)[0]

    x = torch.randn(9, 2, 32, device=device)
    with replaced():
        traced = torch.fx.symbolic_trace(function)
        assert F.multi_head_attention_forward in [node.target for node in traced.graph.nodes]
        torch.testing.assert_close(traced(x), function(x))
        assert_ours(lambda: traced(x))


def test_symbolic_trace_of_our_own_function(device):
    x = torch.randn(2, 3, 9, 32, device=device)
    traced = torch.fx.symbolic_trace(lambda x: flash_attn_ext.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert flash_attn_ext.scaled_dot_product_attention in [node.target for node in traced.graph.nodes]
    assert_ours(lambda: traced(x))


def test_our_own_function_asks_about_itself(device):
    q, k, v = qkv(device)

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is flash_attn_ext.scaled_dot_product_attention:
                return "theirs"
            return super().__torch_function__(func, types, args, kwargs or {})

    assert flash_attn_ext.scaled_dot_product_attention(q, k.as_subclass(Mine), v) == "theirs"
    out = flash_attn_ext.scaled_dot_product_attention(q.as_subclass(Overriding), k, v)  # of which it knows nothing
    torch.testing.assert_close(out.as_subclass(torch.Tensor), F.scaled_dot_product_attention(q, k, v))


def other_calls(device: str) -> list[tuple]:
    """Each other function of ours, with tensors and options. All tensors are named, and two orders are told apart."""
    q, k, v = qkv(device)
    packed = [tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v)]
    ends = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    scores = dict(bias=torch.randn(5, 5, device=device), sink=torch.randn(3, device=device), return_lse=True)
    cache = dict(
        k_new=k[:, :, :1].clone(),
        v_new=v[:, :, :1].clone(),
        cache_seqlens=torch.tensor([1, 4], dtype=torch.int32, device=device),
    )
    return [
        (flash_attn_ext.attention, dict(q=q, k=k, v=v), scores | dict(causal="top_left")),
        (
            flash_attn_ext.attention_varlen,
            dict(q=packed[0], k=packed[1], v=packed[2], cu_seqlens_q=ends, cu_seqlens_k=ends),
            dict(sink=scores["sink"], window=(1, 0), return_lse=True),
        ),
        (flash_attn_ext.attention_with_kvcache, dict(q=q, k_cache=k, v_cache=v), scores | cache),
    ]


@pytest.mark.parametrize("index", range(3), ids=["attention", "attention_varlen", "attention_with_kvcache"])
def test_our_other_functions_ask_too(index, device):
    """About themselves, with all that they were given."""
    function, tensors, options = other_calls(device)[index]
    asked = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is function:
                given = dict(zip(tensors, args, strict=True)) | kwargs
                asked.append({name: one for name, one in given.items() if name in tensors or name in options})
                return "theirs"
            return super().__torch_function__(func, types, args, kwargs or {})

    for name, tensor in (tensors | options).items():
        if isinstance(tensor, torch.Tensor):
            given = tensors | options | {name: tensor.as_subclass(Noting)}
            assert function(**given) == "theirs", name
            assert all(one is given[name] for name, one in asked.pop().items())
    expected = function(**copy.deepcopy(tensors), **options)
    found = function(**{name: tensor.as_subclass(Doubling) for name, tensor in tensors.items()}, **options)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is Doubling
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("index", range(3), ids=["attention", "attention_varlen", "attention_with_kvcache"])
def test_symbolic_trace_of_our_other_functions(index, device):
    function, tensors, options = other_calls(device)[index]
    traced = torch.fx.symbolic_trace(lambda q: function(q, **{n: t for n, t in tensors.items() if n != "q"}, **options))
    assert function in [node.target for node in traced.graph.nodes]
    for one, other in zip(traced(tensors["q"]), function(**tensors, **options), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("index", range(3), ids=["attention", "attention_varlen", "attention_with_kvcache"])
def test_subclasses_in_our_other_functions_under_compile(index, device):
    function, tensors, options = other_calls(device)[index]

    def call(tensors):
        return function(**tensors, **options)

    given = {name: tensor.clone().as_subclass(Inheriting) for name, tensor in tensors.items()}
    for one, other in zip(torch.compile(call, backend="eager")(given), call(tensors), strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other)


def test_a_pickle_of_the_name_needs_no_package_of_ours(installed):
    pickled = pickle.dumps(F.scaled_dot_product_attention)
    assert b"flash_attn_ext" not in pickled and pickle.loads(pickled) is F.scaled_dot_product_attention


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [Doubling, Inheriting])
def test_under_compile(kind, replaced, device):
    tensors = [tensor.as_subclass(kind) for tensor in qkv(device)]
    expected = F.scaled_dot_product_attention(*tensors)

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors)

    with replaced():
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        out = compiled(*tensors)
        assert_ours(lambda: compiled(*tensors))
    assert type(out) is type(expected)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [Doubling, Inheriting])
def test_under_compile_in_nested_contexts(kind, fallback, device):
    """While a mode is active, Dynamo asks a class about attributes even where its overrides are off."""
    tensors = [tensor.as_subclass(kind) for tensor in qkv(device)]
    expected = F.scaled_dot_product_attention(*tensors)

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors)

    with flash_attn_ext.replace_sdpa(), flash_attn_ext.replace_sdpa(fallback):
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        out = compiled(*tensors)
        assert_ours(lambda: compiled(*tensors))
    assert type(out) is type(expected)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
