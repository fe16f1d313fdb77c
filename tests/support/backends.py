"""The backend axis: the CPU always, a CUDA backend where it was built and a GPU can run it."""

import functools
import math
from dataclasses import dataclass

import torch

WIDEST_EVERYWHERE = 256  # the head dim that every backend takes in every dtype that it takes


@dataclass(frozen=True)
class HeadDims:
    """The widest ones, of q and k and of v."""

    qk: float = math.inf
    v: float = math.inf


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    capability: tuple[int, int] | None = None  # the least compute capability
    ends_before: tuple[int, int] | None = None  # the first later one that it does not run on
    widest_16_bit: HeadDims | None = HeadDims()  # None: such dtypes are refused
    widest_others: HeadDims | None = HeadDims()
    takes_repeated_rows: bool = True  # q, k or v whose rows are one row with stride 0

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def widest(self, dtype: torch.dtype) -> HeadDims | None:
        return self.widest_16_bit if dtype.itemsize == 2 else self.widest_others

    def refusal(self, dtype: torch.dtype, head_dim: int = 1, head_dim_v: int | None = None) -> str | None:
        """Why it does not take such q, k and v; None when it does."""
        widest = self.widest(dtype)
        if widest is None:
            return f"backend {self.name} does not take {dtype}"
        if head_dim > widest.qk or (head_dim if head_dim_v is None else head_dim_v) > widest.v:
            return f"backend {self.name} takes head dims up to {widest.qk} of q and k and {widest.v} of v in {dtype}"
        return None


# Listed here and not read from the build, so that a backend that went missing shows as skips with a reason. What they
# take is stated here as well: a backend that refuses more than that fails (features/test_gpu_support.py).
BACKENDS = (
    Backend("cpu", "cpu"),
    Backend(
        "sm80",
        "cuda",
        (8, 0),
        widest_16_bit=HeadDims(576, 576),
        widest_others=HeadDims(WIDEST_EVERYWHERE, WIDEST_EVERYWHERE),
    ),
    Backend(
        "sm90",
        "cuda",
        (9, 0),
        ends_before=(10, 0),
        widest_16_bit=HeadDims(576, 512),
        widest_others=None,
        takes_repeated_rows=False,
    ),
)
CPU, SM80, SM90 = BACKENDS


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
    if backend.ends_before is not None and capability >= backend.ends_before:
        return f"backend {backend.name} runs below compute capability {backend.ends_before}, this GPU has {capability}"
    return None


def device_not_runnable_because(device: str) -> str | None:
    """The same for a device that no backend is named for: any backend that runs on it will do."""
    reasons = [not_runnable_because(backend) for backend in BACKENDS if backend.device == device]
    return None if None in reasons else "; ".join(reasons)


def generator_state(device: str) -> torch.Tensor:
    """Of the generator that calls on tensors of this device draw from."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
