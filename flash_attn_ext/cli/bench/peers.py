"""Peers that need a package beside PyTorch, and which of them take part."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flash_attn_ext.cli.bench.contestant import Contestant, sequence_first
from flash_attn_ext.cli.bench.cudnn_flex import CUDNN_FLEX
from flash_attn_ext.cli.bench.cudnn_flex import MODULE as CUDNN_FLEX_MODULE
from flash_attn_ext.cli.bench.flex import FLEX, is_compiled_on_cpu
from flash_attn_ext.cli.bench.workload import Inputs, Workload


@dataclass(frozen=True)
class Package:
    title: str
    module: str  # which has flash_attn_func(q, k, v, causal=) for (B, S, H, D)
    deterministic: bool = False  # asks for a backward pass that is bitwise reproducible; the forward pass is the same


PACKAGES = {
    "fa3": Package("FlashAttention-3", "flash_attn_interface"),
    "fa4": Package("FlashAttention-4", "flash_attn.cute"),
    "fa4 deterministic": Package("FlashAttention-4", "flash_attn.cute", deterministic=True),
}
MODULES = {FLEX: "triton", CUDNN_FLEX: CUDNN_FLEX_MODULE}  # triton is for GPUs alone
MODULES |= {name: package.module for name, package in PACKAGES.items()}
TITLES = {FLEX: "FlexAttention", CUDNN_FLEX: "cuDNN's FlexAttention"}
TITLES |= {name: package.title for name, package in PACKAGES.items()}


def missing_packages(workloads: Iterable[Workload], device: str) -> dict[str, str]:
    """The reason for each peer that a workload wants and whose module cannot be imported."""
    modules = {name: module for name, module in MODULES.items() if (name, device) != (FLEX, "cpu")}
    wanted = dict.fromkeys(name for workload in workloads for name in workload.peers if name in modules)
    reasons = {}
    for name in wanted:
        try:
            importlib.import_module(modules[name])
        except Exception as error:  # one that was built for another torch raises more than ImportError
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return reasons


def absences(missing: dict[str, str]) -> list[str]:
    """A line for each missing package, whichever rows it would have had."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, reason in missing.items():
        names.setdefault((TITLES[name], reason), []).append(name)
    return [f"{title} ({', '.join(of_title)}) takes no part: {reason}" for (title, reason), of_title in names.items()]


def without(workload: Workload, missing: Iterable[str]) -> Workload:
    return dataclasses.replace(workload, peers=tuple(name for name in workload.peers if name not in missing))


def of_pass(workload: Workload, pass_: str, device: str) -> Workload:
    """The workload of a pass, without FlexAttention where PyTorch cannot compile it. In a forward pass, deterministic
    variants of packages do not differ and are left out."""
    if device == "cpu" and not is_compiled_on_cpu(workload, pass_):
        workload = without(workload, [FLEX])
    if pass_ != "forward":
        return workload
    return without(workload, [name for name, package in PACKAGES.items() if package.deterministic])


def package_versions(workloads: Iterable[Workload]) -> dict[str, str]:
    """The versions of the distributions that contain the peers' modules; a module in a plain folder has none."""
    modules = {MODULES[name] for workload in workloads for name in workload.peers if name in MODULES}
    if not modules:
        return {}
    distributions = importlib.metadata.packages_distributions()
    names = {name for module in modules for name in distributions.get(module.partition(".")[0], ())}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def package_contestant(name: str, workload: Workload, inputs: Inputs) -> Contestant:
    """A contestant whose tensors have the memory layout that these packages are made for. They are converted here,
    outside of the timed call. A package without a backward pass lacks only the figures of that pass."""
    package = PACKAGES[name]
    flash_attn_func = importlib.import_module(package.module).flash_attn_func
    options: dict[str, Any] = dict(causal=workload.causal)
    if workload.window is not None:
        options["window_size"] = (workload.window[0], 0 if workload.causal else workload.window[1])
    if workload.softcap is not None:
        options["softcap"] = workload.softcap
    if package.deterministic:
        options["deterministic"] = True
    leaves = tuple(
        sequence_first(tensor.detach()).requires_grad_(tensor.requires_grad)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )

    def forward() -> Tensor:
        result = flash_attn_func(*(leaf.transpose(1, 2) for leaf in leaves), **options)
        out = result[0] if isinstance(result, tuple) else result  # with the log-sum-exp, by version
        return out.transpose(1, 2)

    return Contestant(forward, leaves, comparable=workload.dropout_p == 0, sequence_first=True)


def package_decode(
    name: str, causal: bool, cache_seqlens: Tensor | None, block_table: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A call with q, k and v in the package's layout. flash_attn_func of FlashAttention-3 has no split-KV; its
    flash_attn_with_kvcache does, with and without a cache that grows."""
    module = importlib.import_module(PACKAGES[name].module)
    options = dict(causal=causal, cache_seqlens=cache_seqlens, page_table=block_table)
    # The function is looked up in the call, so that a release without it lacks only this figure.
    return lambda q, k, v: module.flash_attn_with_kvcache(q, k, v, **options).transpose(1, 2)
