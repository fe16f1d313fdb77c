"""The backend axis: the CPU always, a CUDA backend where it was built and a GPU can run it."""

import functools
import math
from dataclasses import dataclass

import torch

WIDEST_EVERYWHERE = 256  # the head dim that every backend takes in every dtype


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    capability: tuple[int, int] | None = None  # the least compute capability
    widest_16_bit: float = math.inf  # head dims
    widest: float = math.inf

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def widest_head_dim(self, dtype: torch.dtype) -> float:
        return self.widest_16_bit if dtype.itemsize == 2 else self.widest


# Listed here and not read from the build, so that a backend that went missing shows as skips with a reason. What they
# take is stated here as well: a backend that refuses more than that fails (features/test_gpu_support.py).
BACKENDS = (
    Backend("cpu", "cpu"),
    Backend("sm80", "cuda", (8, 0), widest_16_bit=512, widest=WIDEST_EVERYWHERE),
    Backend("sm90", "cuda", (9, 0), widest_16_bit=512, widest=WIDEST_EVERYWHERE),
)
CPU, SM80 = BACKENDS[:2]


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


def device_not_runnable_because(device: str) -> str | None:
    """The same for a device that no backend is named for: any backend that runs on it will do."""
    reasons = [not_runnable_because(backend) for backend in BACKENDS if backend.device == device]
    return None if None in reasons else "; ".join(reasons)


def generator_state(device: str) -> torch.Tensor:
    """Of the generator that calls on tensors of this device draw from."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
