"""Names of PyTorch that its documentation does not promise, one by one: each does what it is used for here."""

import inspect

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

import flash_attn_ext  # noqa: F401  (registers the operators)
from flash_attn_ext import _torch_private as names

FORWARD = torch.ops.flash_attn_ext.attention_forward.default
TESTED = {}


def of(*tested: str):
    def note(test):
        TESTED.update(dict.fromkeys(tested, test))
        return test

    return note


@pytest.fixture
def library():
    """Of operators that only the test has."""
    library = Library("flash_attn_ext_test", "DEF")
    yield library
    library._destroy()


def test_each_name_has_a_test():
    own = {name for name, value in vars(names).items() if getattr(value, "__module__", None) == names.__name__}
    assigned = set(inspect.getsource(names).split("\n"))
    assigned = {line.split(" = ")[0] for line in assigned if " = torch." in line and not line.startswith(" ")}
    assert own | assigned == set(TESTED)


@of("data_address")
def test_an_address_leaves_a_lazy_clone_as_it_is():
    tensor = torch.randn(4)
    clone = torch._lazy_clone(tensor)
    assert names.data_address(clone[1:]) == names.data_address(tensor) + 4
    assert torch._C._is_cow_tensor(clone)
    view = torch.randn(4)[2:]
    assert names.data_address(view) == view.data_ptr()


@of("sleep_on_gpu")
def test_it_is_there_without_a_gpu_too():
    assert callable(names.sleep_on_gpu)
    if torch.cuda.is_available():
        names.sleep_on_gpu(1000)


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@of("num_function_modes", "function_mode_at")
def test_modes_of_this_thread_from_the_outermost_on():
    before = names.num_function_modes()
    with Counting() as outer, Counting() as inner:
        assert names.num_function_modes() == before + 2
        assert [names.function_mode_at(before + index) for index in range(2)] == [outer, inner]


@of("DisableTorchFunction")
def test_a_context_that_modes_do_not_see():
    with Counting() as mode, names.DisableTorchFunction():
        torch.ones(2).sin()
    assert mode.seen == 0


def shifted(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("TorchScript calls the operator")


@of("register_torchscript_builtin")
def test_torchscript_takes_a_function_for_an_operator():
    names.register_torchscript_builtin(shifted, "aten::sin")

    def function(x):
        return shifted(x)

    scripted = torch.jit.script(function)
    x = torch.randn(3)
    assert torch.equal(scripted(x), x.sin())


@of("replace_engine", "engine")
@pytest.mark.parametrize("start", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_each_backward_pass_starts_by_it(start):
    starts = []

    def run(*args, **kwargs):
        starts.append(start)
        return before(*args, **kwargs)

    x = torch.randn(3, requires_grad=True)
    before = names.replace_engine(run)
    try:
        assert names.engine() is run
        y = x.sin().sum()
        if start == "Tensor.backward":
            y.backward()
        elif start == "autograd.backward":
            torch.autograd.backward(y)
        else:
            torch.autograd.grad(y, x)
    finally:
        assert names.replace_engine(before) is run
    assert starts == [start]


@of("run_by_dynamo")
@pytest.mark.usefixtures("fresh_compiler")
def test_dynamo_runs_a_function():
    """One that it could not trace, once for each compilation."""
    runs = []

    @names.run_by_dynamo
    def run() -> int:
        runs.append(inspect.currentframe().f_code.co_name)
        return 3

    assert torch.compile(lambda x: x + run(), fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [3, 3]
    assert runs == ["run"]


@of("DispatchKeySet", "AFTER_AUTOGRAD", "keys_of")
def test_a_kernel_of_autograd_passes_a_call_on(library):
    library.define("twice(Tensor x) -> Tensor")
    sets = []

    def of_autograd(keys, x):
        sets.append(keys)
        return torch.ops.flash_attn_ext_test.twice.default.redispatch(keys & names.AFTER_AUTOGRAD, x)

    library.impl("twice", of_autograd, "Autograd", with_keyset=True)
    library.impl("twice", lambda x: 2 * x, "CPU")
    x = torch.ones(2, requires_grad=True)
    assert torch.ops.flash_attn_ext_test.twice(x).tolist() == [2, 2]
    (keys,) = sets
    assert isinstance(keys, names.DispatchKeySet)
    kernel = torch.library.get_kernel("flash_attn_ext_test::twice", "CPU")
    assert kernel.call_boxed(names.keys_of("CPU"), x.detach()).tolist() == [2, 2]


@of("AutoDispatchBelowAutograd")
def test_calls_below_autograd_are_not_recorded():
    x = torch.ones(2, requires_grad=True)
    with names.AutoDispatchBelowAutograd():
        assert x.sin().grad_fn is None
    assert x.sin().grad_fn is not None


@of("has_kernel", "destroy")
def test_a_library_takes_its_kernel_away():
    library = Library("flash_attn_ext_test", "DEF")
    library.define("gone(Tensor x) -> Tensor")
    library.impl("gone", lambda x: x, "CPU")
    assert names.has_kernel("flash_attn_ext_test::gone", "CPU")
    assert not names.has_kernel("flash_attn_ext_test::gone", "CUDA")
    names.destroy(library)
    assert not hasattr(torch.ops.flash_attn_ext_test, "gone")


@of("forget_choices_of_kernels")
def test_traces_choose_again(library):
    library.define("chosen(Tensor x) -> Tensor")
    library.impl("chosen", torch.sin, "CompositeImplicitAutograd")
    operator = torch.ops.flash_attn_ext_test.chosen

    def keys_at_which_a_trace_finds_a_kernel() -> list[str]:
        with enable_python_dispatcher():
            operator(torch.ones(2, requires_grad=True))
        return [str(key) for key in operator.default._dispatch_cache]

    replacement = Library("flash_attn_ext_test", "IMPL")
    for key in ("AutogradCPU", "CPU"):
        replacement.impl("chosen", torch.cos, key)
    keys_at_which_a_trace_finds_a_kernel()
    names.destroy(replacement)
    assert keys_at_which_a_trace_finds_a_kernel() == ["DispatchKey.AutogradCPU", "DispatchKey.CPU"]
    names.forget_choices_of_kernels(operator)
    assert keys_at_which_a_trace_finds_a_kernel() == ["DispatchKey.AutogradCPU"]


@of("parameters_of")
def test_parameters_in_order():
    assert names.parameters_of(torch.ops.aten.baddbmm.default) == ["self", "batch1", "batch2", "beta", "alpha"]


@of("schema_infos_of")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_what_dtensor_remembers_a_call_by():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.aten.cosh.default)(lambda x: [])
    assert names.schema_infos_of(DTensor)[torch.ops.aten.cosh.default].static_argnum >= 0


@of("are_functorch_transforms_active")
def test_transforms_are_noticed():
    found = []

    def function(x):
        found.append(names.are_functorch_transforms_active())
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2, 2))
    assert found == [False, True, True]


@of("SingleLevelFunction", "enable_single_level_autograd_function")
def test_a_function_of_one_level_of_torch_func(library):
    """An operator's kernel of autograd is called at each level, and applies the Function only at that level."""

    class Twice(names.SingleLevelFunction):
        @staticmethod
        def forward(keys, x):
            return torch.ops.flash_attn_ext_test.double.default.redispatch(keys & names.AFTER_AUTOGRAD, x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return None, 2 * gradient

    def of_autograd(keys, x):
        with names.enable_single_level_autograd_function():
            return Twice.apply(keys, x)

    library.define("double(Tensor x) -> Tensor")
    library.impl("double", of_autograd, "Autograd", with_keyset=True)
    library.impl("double", lambda x: 2 * x, "CPU")
    x = torch.ones(3, requires_grad=True)
    torch.ops.flash_attn_ext_test.double(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@of("is_fwd_grad_enabled", "set_fwd_grad_enabled")
def test_forward_mode_goes_off_and_on():
    assert names.is_fwd_grad_enabled()
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with names.set_fwd_grad_enabled(False):
            assert not names.is_fwd_grad_enabled()
            assert torch.autograd.forward_ad.unpack_dual(x * 2).tangent is None
        assert torch.autograd.forward_ad.unpack_dual(x * 2).tangent is not None


@of("FunctionalTensorMode", "ProxyTorchDispatchMode")
@pytest.mark.usefixtures("fresh_compiler")
def test_the_modes_of_aot_autograd(library):
    """Operators meet the one, then the other, and symbols of numbers are still symbols there."""
    library.define("scaled(Tensor x, Scalar factor) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    library.impl("scaled", lambda x, factor: x * factor, "CPU")
    library.impl("scaled", lambda x, factor: torch.empty_like(x), "Meta")
    met = []

    def rule(mode, operator, types, arguments, keywords):
        met.append((type(mode), isinstance(arguments[1], torch.SymFloat)))
        return mode.__torch_dispatch__(operator, types, arguments, keywords)

    for mode in (names.FunctionalTensorMode, names.ProxyTorchDispatchMode):
        torch.library.register_torch_dispatch("flash_attn_ext_test::scaled", mode, rule, lib=library)
    compiled = torch.compile(torch.ops.flash_attn_ext_test.scaled, fullgraph=True, backend="aot_eager")
    for factor in (2.0, 3.0):
        assert compiled(torch.ones(2), factor).tolist() == [factor, factor]
    modes = (names.FunctionalTensorMode, names.ProxyTorchDispatchMode)
    assert {(mode, True) for mode in modes} <= set(met)


@of("activation_memory_budget")
def test_the_budget_is_what_users_set():
    with torch._functorch.config.patch(activation_memory_budget=0.25):
        assert names.activation_memory_budget() == 0.25
    assert names.activation_memory_budget() == 1.0


@of("nodes_with_policy")
def test_a_policy_is_noted_at_nodes():
    def function(x):
        x = x.sin()
        with names.nodes_with_policy(CheckpointPolicy.MUST_SAVE):
            x = x.cos()
        return x.exp()

    calls = [node for node in make_fx(function)(torch.ones(2)).graph.nodes if node.op == "call_function"]
    assert [node.meta.get("recompute") for node in calls] == [None, CheckpointPolicy.MUST_SAVE, None]


@of("is_within_a_functorch_level")
def test_a_level_is_entered_where_a_transform_hands_on(library):
    """torch.func calls an operator's kernel of autograd once for each level, within that level."""
    seen = []

    def of_autograd(keys, x):
        seen.append(names.is_within_a_functorch_level())
        with names.AutoDispatchBelowAutograd():
            return torch.ops.flash_attn_ext_test.same.default.redispatch(keys & names.AFTER_AUTOGRAD, x)

    library.define("same(Tensor x) -> Tensor")
    library.impl("same", of_autograd, "Autograd", with_keyset=True)
    library.impl("same", torch.clone, "CPU")
    assert not names.is_within_a_functorch_level()
    torch.func.jvp(torch.ops.flash_attn_ext_test.same, (torch.ones(2),), (torch.ones(2),))
    assert True in seen


@of("assert_later")
def test_an_assertion_about_a_tensor():
    names.assert_later(torch.tensor(True), "is true")
    with pytest.raises(RuntimeError, match="is false"):
        names.assert_later(torch.tensor(False), "is false")


@of("skip_frames_of")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_skipped_function_runs_in_python():
    def skipped(x):
        return x.sin(), torch.compiler.is_compiling()

    def function(x):
        torch._dynamo.graph_break()
        return skipped(x)

    names.skip_frames_of(skipped.__code__)
    skipped(torch.ones(1))
    compiled = torch.compile(skipped, backend="eager")
    assert compiled(torch.ones(1))[1] is False


@of("overloaded_args")
def test_subclasses_are_asked_first():
    class Base(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    class Derived(Base):
        pass

    base, derived = (torch.ones(1).as_subclass(cls) for cls in (Base, Derived))
    assert [type(one) for one in names.overloaded_args([1.0, base, derived])] == [Derived, Base]


@of("jagged_class")
def test_jagged_tensors_are_of_that_class():
    jagged = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    assert type(jagged) is names.jagged_class()
