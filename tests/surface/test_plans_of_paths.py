"""The table of paths has a call for each kernel of the GPU backends, and each call takes its path."""

import re

import pytest

from support.host_programs import CSRC
from support.paths import PATHS
from support.plans import mismatches

# Of biases by table, whose paths are in features/test_bias_table.py.
RELATIVE = {
    "of a relative-position bias, from recomputed dS",
    "of a relative-position bias, from dS recomputed over the batch",
}
ON_THE_CPU = "tiled on the CPU"


def names_in(function: str) -> set[str]:
    """The names that a function of csrc/kernels/plan/report.cpp returns."""
    text = (CSRC / "kernels" / "plan" / "report.cpp").read_text(encoding="utf-8")
    body = text.partition(f"const char* name_of({function}")[2].partition("\n}")[0]
    return set(re.findall(r'return "([^"?]+)";', body))


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_each_call_takes_its_path(path):
    forward, backward = path.call().plans()
    assert mismatches(forward, path.forward) == {} and mismatches(backward, path.backward) == {}


def test_each_kernel_has_a_path():
    plans = [path.call().plans() for path in PATHS]
    forward, backward = zip(*plans, strict=True)
    assert {plan.kernel for plan in forward} == names_in("ForwardKernel") - {ON_THE_CPU}
    assert {plan.kernel for plan in backward} == names_in("BackwardKernels") - {ON_THE_CPU}
    assert any(plan.intervals for plan in forward)  # within another plan, for batch entries with padding alone
    assert {plan.delta.partition(", then")[0] for plan in backward} == names_in("DeltaSource")
    assert {plan.dbias for plan in backward if plan.dbias} == names_in("BiasGradientSource") - RELATIVE
