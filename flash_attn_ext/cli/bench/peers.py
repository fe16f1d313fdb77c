"""Peers that are no part of PyTorch: they take part where they can be imported, in the forward pass."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from flash_attn_ext.cli.bench.workload import Inputs, Workload


@dataclass(frozen=True)
class Package:
    title: str
    module: str  # which has flash_attn_func(q, k, v, causal=) for (B, S, H, D)


PACKAGES = {
    "fa3": Package("FlashAttention-3", "flash_attn_interface"),
    "fa4": Package("FlashAttention-4", "flash_attn.cute"),
}


def missing_packages(workloads: Iterable[Workload]) -> dict[str, str]:
    """Why, for each package that a workload wants and that cannot be imported."""
    wanted = dict.fromkeys(name for workload in workloads for name in workload.peers if name in PACKAGES)
    reasons = {}
    for name in wanted:
        try:
            importlib.import_module(PACKAGES[name].module)
        except Exception as error:  # one that was built for another torch raises more than ImportError
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return reasons


def without(workload: Workload, missing: Iterable[str]) -> Workload:
    return dataclasses.replace(workload, peers=tuple(name for name in workload.peers if name not in missing))


def of_pass(workload: Workload, pass_: str) -> Workload:
    return workload if pass_ == "forward" else without(workload, PACKAGES)


def package_versions(workloads: Iterable[Workload]) -> dict[str, str]:
    """Of the distributions that the peers' modules come from; a module in a plain folder has none."""
    modules = {PACKAGES[name].module for workload in workloads for name in workload.peers if name in PACKAGES}
    if not modules:
        return {}
    distributions = importlib.metadata.packages_distributions()
    names = {name for module in modules for name in distributions.get(module.partition(".")[0], ())}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def package_forward(name: str, workload: Workload, inputs: Inputs) -> Callable[[], Tensor]:
    """The layout that these packages are made for is prepared here, outside of what is timed."""
    flash_attn_func = importlib.import_module(PACKAGES[name].module).flash_attn_func
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v))

    def forward() -> Tensor:
        result = flash_attn_func(q, k, v, causal=workload.causal)
        out = result[0] if isinstance(result, tuple) else result  # with the log-sum-exp, by version
        return out.transpose(1, 2)

    return forward


def package_decode(
    name: str, causal: bool, cache_seqlens: Tensor | None, block_table: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A call with q, k and v in the package's layout. flash_attn_func of FlashAttention-3 never divides the keys; its
    flash_attn_with_kvcache does, with and without a cache that grows."""
    module = importlib.import_module(PACKAGES[name].module)
    options = dict(causal=causal, cache_seqlens=cache_seqlens, page_table=block_table)
    # Looked up in the call, where a release without this function loses its own figure alone.
    return lambda q, k, v: module.flash_attn_with_kvcache(q, k, v, **options).transpose(1, 2)
