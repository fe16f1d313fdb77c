"""The backend axis: the CPU always, a CUDA backend where it was built and a GPU can run it."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    capability: tuple[int, int] | None = None  # the least compute capability

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


# Listed here and not read from the build, so that a backend that went missing shows as skips with a reason.
BACKENDS = (Backend("cpu", "cpu"), Backend("sm80", "cuda", (8, 0)), Backend("sm90", "cuda", (9, 0)))
CPU = BACKENDS[0]


@functools.cache
def not_runnable_because(backend: Backend) -> str | None:
    """Why this machine or this build cannot run the backend; None when it can."""
    from flash_attn_ext import _C  # here, so that collecting tests of the source tree needs no built extension

    info = _C.build_info()
    if backend.name not in info["backends"]:
        return f"backend {backend.name} is not in this build, which has {', '.join(info['backends'])}"
    if backend.is_cpu:
        return None
    if not torch.cuda.is_available():
        return f"backend {backend.name} needs a GPU, and torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    if capability < backend.capability:
        return f"backend {backend.name} needs compute capability {backend.capability}, this GPU has {capability}"
    if backend.name == "sm90" and capability[0] != 9:
        return f"backend sm90 runs on compute capability 9.x only, this GPU has {capability}"
    return None
