"""torch.nn.attention's switch: what it replaces and restores, whom it reaches, and what it leaves to PyTorch."""

import contextlib
import inspect
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

import flash_attn_ext
from flash_attn_ext.integrations import torch_backend
from flash_attn_ext.integrations.torch_backend import flash, operands, switch
from support import aten
from support.forks import run_forked

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


pytestmark = pytest.mark.usefixtures("every_reason_is_new")


def qkv(dtype=torch.float32, device="cpu", shape=(2, 3, 37, 16)) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


def dispatch_tables() -> dict[str, str]:
    """What PyTorch's dispatcher says about each operator, its kernels and where they came from."""
    names = {switch.FUNCTION, *(override.operator for override in switch.OVERRIDES)}
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in names}


def test_names():
    torch_backend.register()
    torch_backend.register()
    assert attention.list_flash_attention_impls().count("flash_attn_ext") == 1
    assert attention.current_flash_attention_impl() is None
    with aten.active():
        assert attention.current_flash_attention_impl() == "flash_attn_ext"
    assert attention.current_flash_attention_impl() is None


def test_a_pytorch_without_the_switch(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(ImportError, match=r"came with PyTorch 2\.11.*install_sdpa"):
        torch_backend.register()


def test_imports_activate_nothing():
    program = (
        "import torch, flash_attn_ext; from flash_attn_ext.integrations import torch_backend; torch_backend.register();"
        "from flash_attn_ext.integrations.torch_backend import switch;"
        "assert not switch._libraries and torch.nn.attention.current_flash_attention_impl() is None;"
        "assert 'torch_backend' not in torch._C._dispatch_dump('aten::_scaled_dot_product_flash_attention')"
    )
    process = run_forked(program)
    assert process.returncode == 0, process.stderr


def test_every_operator_is_replaced_and_restored():
    before, arguments = dispatch_tables(), [t.detach() for t in qkv()]
    theirs = F.scaled_dot_product_attention(*arguments, is_causal=True)
    with aten.active():
        during = dispatch_tables()
        ours = F.scaled_dot_product_attention(*arguments, is_causal=True)
        assert torch.equal(ours, flash_attn_ext.scaled_dot_product_attention(*arguments, is_causal=True))
    assert all("torch_backend" in during[name] for name in before)
    assert dispatch_tables() == before
    assert torch.equal(F.scaled_dot_product_attention(*arguments, is_causal=True), theirs)


def test_all_overrides_have_their_operators_parameters():
    """By name, in order, with its defaults. Ours have those of the newest PyTorch that is known."""
    for override in switch.OVERRIDES:
        arguments = getattr(torch.ops.aten, override.operator).default._schema.arguments
        ours = list(inspect.signature(override.kernel).parameters.values())
        if override.kernel is flash.flash_forward_into:
            ours = ours[:1] + list(inspect.signature(flash.flash_forward).parameters.values())
        ours, newer = ours[: len(arguments)], ours[len(arguments) :]
        assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in ours] == [(a.name, a.kwarg_only) for a in arguments], (
            override.operator
        )
        for parameter, argument in zip(ours, arguments, strict=True):
            default = argument.default_value if argument.has_default_value() else parameter.empty
            assert parameter.default == default, (override.operator, parameter.name)
        assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in newer), override.operator


def test_activations_nest():
    before = dispatch_tables()
    outer = switch.activate()
    inner = switch.activate()
    inner.remove()
    inner.remove()
    assert "torch_backend" in dispatch_tables()["_scaled_dot_product_flash_attention_for_cpu"]
    outer.remove()
    assert dispatch_tables() == before


def test_activated_twice_and_restored_once():
    before = dispatch_tables()
    torch_backend.register()
    attention.activate_flash_attention_impl("flash_attn_ext")
    attention.activate_flash_attention_impl("flash_attn_ext")
    with aten.recorded() as passes:
        F.scaled_dot_product_attention(*qkv())
    attention.restore_flash_attention_impl()
    assert passes == ["forward"] and dispatch_tables() == before


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_compiled_before_and_after_the_switch(first_is_ours, fresh_compiler):
    """What one trace has chosen holds for no other."""
    q, k, v = qkv()
    expected = torch.autograd.grad(flash_attn_ext.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    for ours in (first_is_ours, not first_is_ours, first_is_ours):
        torch._dynamo.reset()
        compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        with aten.active() if ours else contextlib.nullcontext():
            out = compiled(q, k, v)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), expected)


def test_what_could_not_be_replaced_is_as_before(monkeypatch):
    monkeypatch.setattr(switch, "OVERRIDES", (*switch.OVERRIDES, switch.Override("neg", "CPU", None)))
    before = dispatch_tables()
    monkeypatch.setattr(switch, "_with_fallback", lambda override: override.kernel)
    with pytest.raises(TypeError, match="callable"):
        switch.activate()
    assert dispatch_tables() == before and torch.backends.mha.get_fastpath_enabled()


def test_threads():
    """Those that run while it is switched on and off, too."""
    arguments = [t.detach() for t in qkv()]
    expected = F.scaled_dot_product_attention(*arguments)
    done, outs = threading.Event(), []

    def call():
        while not done.is_set():
            outs.append(F.scaled_dot_product_attention(*arguments))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with aten.active():
            pass
    done.set()
    for thread in threads:
        thread.join()
    assert outs
    for out in outs:
        torch.testing.assert_close(out, expected)
    with aten.active(), aten.recorded() as passes:
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=arguments)
        thread.start()
        thread.join()
    assert passes == ["forward"]


def test_what_is_not_taken_goes_to_the_kernel_before_with_one_warning(monkeypatch):
    """Whatever the sizes in the reason."""
    tensors = qkv()
    expected = CPU_FLASH(*tensors)

    def refuse(*args, **kwargs):
        raise RuntimeError(f"no such size: {10 ** len(args)}")

    kept = (o._replace(kernel=refuse) if o.operator.endswith("cpu") else o for o in switch.OVERRIDES)
    monkeypatch.setattr(switch, "OVERRIDES", tuple(kept))
    with aten.active():
        with pytest.warns(UserWarning, match=r"_for_cpu, and PyTorch's kernel runs: no such size: 1000"):
            got = CPU_FLASH(*tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CPU_FLASH(*tensors, 0.0)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_refusals_of_both():
    """PyTorch's error, since its kernel has the last word."""
    with (
        aten.active(),
        pytest.warns(UserWarning, match="no place for a seed"),
        pytest.raises(RuntimeError, match="do not support dropout"),
    ):
        CPU_FLASH(*qkv(), 0.5)


def test_out_of_memory_is_not_hidden(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("none left")

    kept = (o._replace(kernel=fail) if o.operator.endswith("cpu") else o for o in switch.OVERRIDES)
    monkeypatch.setattr(switch, "OVERRIDES", tuple(kept))
    with aten.active(), pytest.raises(torch.OutOfMemoryError, match="none left"):
        CPU_FLASH(*qkv())


@pytest.mark.parametrize("first_is_ours", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_switched_between_forward_and_backward(first_is_ours, with_mask):
    """Without dropout a backward pass does not depend on who ran the forward pass, also where rows see no key. Where
    PyTorch had no operator to choose, since ours took the call, it is ours in any case."""
    q, k, v = qkv()
    mask = None
    if with_mask:
        mask = torch.rand(37, 37) < 0.5
        mask[3] = False
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask).sum(), (q, k, v))
    with aten.recorded() as passes:
        if first_is_ours:
            with aten.active():
                out = F.scaled_dot_product_attention(q, k, v, mask)
            gradients = torch.autograd.grad(out.sum(), (q, k, v))
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask)
            with aten.active():
                gradients = torch.autograd.grad(out.sum(), (q, k, v))
    if first_is_ours:
        assert passes == (["forward"] if with_mask else ["forward", "backward"])
    else:
        assert passes == ["backward"]
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want)


def flash_with_dropout(*tensors):
    return torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.3)[0]


def test_restoring_before_a_backward_pass_with_dropout_warns():
    tensors = qkv(shape=(1, 2, 8, 8))
    with warnings.catch_warnings(), aten.on_device("cpu"):
        warnings.simplefilter("error")
        flash_with_dropout(*tensors).sum().backward()
    with pytest.warns(UserWarning, match=r"1 forward pass\(es\) with dropout"), aten.on_device("cpu"):
        out = flash_with_dropout(*tensors)
    del out


def test_a_backward_pass_with_our_dropout_bits_goes_nowhere_else():
    """It has its own error, and not another kernel's gradients."""
    tensors = qkv(shape=(1, 2, 8, 8))
    problem = operands.Problem(*tensors, dropout_p=0.3, rng_seed=torch.zeros(1, dtype=torch.int64))
    wrong = torch.zeros(3)
    with pytest.raises(operands.OursAlone, match="out has shape"):
        operands.backward(problem, wrong, wrong, wrong, wrong)
