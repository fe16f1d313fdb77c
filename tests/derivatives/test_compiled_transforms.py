"""Transforms of torch.func within compiled functions and under dispatch modes, where calls go through the operators."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn_ext
from support.params import computes_in

pytestmark = computes_in(torch.float64)

OPTIONS = dict(causal="bottom_right", softcap=2.0)


def loss(q, k, v):
    return flash_attn_ext.attention(q, k, v, **OPTIONS).square().sum()


def out_of_q(k, v):
    return lambda q: flash_attn_ext.attention(q, k, v, **OPTIONS)


def dual_level(q, k, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, q.sin()), k, v)).tangent


TRANSFORMS = {
    "grad": lambda q, k, v: func.grad(loss, (0, 1, 2))(q, k, v),
    "jvp": lambda q, k, v: func.jvp(loss, (q, k, v), (q, k, v)),
    "dual level": dual_level,
    "vmap of grad": lambda q, k, v: func.vmap(func.grad(loss))(q, k, v),
    "vmap of jvp": lambda q, k, v: func.vmap(lambda *t: func.jvp(loss, t, t))(q, k, v),
    "jacrev": lambda q, k, v: func.jacrev(out_of_q(k, v))(q),
    "jacfwd": lambda q, k, v: func.jacfwd(out_of_q(k, v))(q),
    "jvp of grad": lambda q, k, v: func.jvp(func.grad(loss), (q, k, v), (q, k, v)),
    "grad of jvp": lambda q, k, v: func.grad(lambda q: func.jvp(loss, (q, k, v), (q, k, v))[1])(q),
    "hessian": lambda q, k, v: func.hessian(loss)(q, k, v),
    "grad of grad": lambda q, k, v: func.grad(lambda q: func.grad(loss)(q, k, v).square().sum())(q),
}


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def tensors(backend):
    return tuple(torch.randn(2, 2, n, 4, dtype=torch.float64, device=backend.device) for n in (3, 5, 5))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled(name, compiler, tensors):
    transform = TRANSFORMS[name]
    torch.testing.assert_close(torch.compile(transform, backend=compiler)(*tensors), transform(*tensors))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_transform_that_is_compiled_itself(compiler, tensors):
    """Not by a name within a function of the user's."""
    for transform in (func.hessian, func.grad, lambda f: func.jacfwd(func.grad(f))):
        transformed = transform(loss)
        torch.testing.assert_close(torch.compile(transformed, backend=compiler)(*tensors), transformed(*tensors))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_watched(name, tensors):
    expected = TRANSFORMS[name](*tensors)
    with Watcher():
        found = TRANSFORMS[name](*tensors)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["jvp", "grad", "hessian", "vmap of jvp"])
def test_transforms_of_a_traced_function(name, packed, tensors):
    """A graph calls the operators, at each level of a transform."""
    q, k, v = tensors
    if packed:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)
        lengths = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=q.device) for n in (3, 5)]

    def attend(q):
        if packed:
            return flash_attn_ext.attention_varlen(q, k, v, *lengths, max_seqlen_q=3, max_seqlen_k=5, **OPTIONS)
        return flash_attn_ext.attention(q, k, v, **OPTIONS)

    transform = dict(
        jvp=lambda f: func.jvp(f, (q,), (q.sin(),)),
        grad=lambda f: func.grad(lambda q: f(q).square().sum())(q),
        hessian=lambda f: func.hessian(lambda q: f(q).square().sum())(q),
    ).get(name, lambda f: func.vmap(lambda along: func.jvp(f, (q,), (along,)))(torch.stack([q, q.sin()])))
    torch.testing.assert_close(transform(make_fx(attend)(q)), transform(attend))


@computes_in(torch.float32)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_watched_plain_scores(name, backend, monkeypatch):
    """Which a GPU's own kernels take where nothing watches."""
    monkeypatch.delitem(OPTIONS, "softcap")
    tensors = tuple(torch.randn(2, 2, n, 4, device=backend.device) for n in (3, 5, 5))
    expected = TRANSFORMS[name](*tensors)
    with Watcher():
        found = TRANSFORMS[name](*tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
