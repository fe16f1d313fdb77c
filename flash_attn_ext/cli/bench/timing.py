"""Times contestants in rounds, in an order that is drawn again for each round, so that all see the same machine."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_attn_ext._torch_private import sleep_on_gpu
from flash_attn_ext.cli.bench.contestant import OURS, Contestant

Call = Callable[[], object]
Stopwatch = Callable[[Call], float]  # milliseconds of one call

# The GPU is kept busy before the first event. The whole call is then in its queue when it gets there, so that the time
# between the events is the GPU's and not that of the host that launches (docs/kernels/log/sm90.md, "The lead-in of
# timings").
LEAD_IN_CYCLES = 2_000_000
# How many times L2's size is read before each call. Otherwise a contestant that runs after one whose tensors fill L2
# would find its own in memory, and later ones would find theirs in L2.
L2_SIZES_READ = 4
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
HOST_CALLS = 50  # so few that their launches fit the queue, which would make the host wait


class DeviceLost(RuntimeError):
    """Raised after an illegal access, when nothing runs on the GPU any more. Only earlier measurements are left."""


@dataclass(frozen=True)
class Effort:
    warm_ups: int
    min_rounds: int
    max_rounds: int
    seconds: float  # for the rounds of one row, all contestants together

    def rounds(self, seconds_of_a_round: float) -> int:
        affordable = int(self.seconds / max(seconds_of_a_round, 1e-9))
        return max(self.min_rounds, min(self.max_rounds, affordable))


EFFORTS = {
    ("cuda", False): Effort(warm_ups=3, min_rounds=9, max_rounds=41, seconds=1.5),
    ("cuda", True): Effort(warm_ups=1, min_rounds=3, max_rounds=5, seconds=0.3),
    ("cpu", False): Effort(warm_ups=1, min_rounds=5, max_rounds=1000, seconds=2.8),
    ("cpu", True): Effort(warm_ups=1, min_rounds=1, max_rounds=1000, seconds=0.7),
}


@dataclass
class Measurement:
    """The times of each contestant in ms, and the errors of contestants without times."""

    times: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    difference: float | None = None  # of our result from the first peer's, relative, root mean square

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median of each contestant."""
        return {name: statistics.median(times) for name, times in self.times.items()}


def measure(
    entrants: dict[str, Contestant], pass_: str, dout: Tensor, effort: Effort, stopwatch: Stopwatch
) -> Measurement:
    """Times all contestants. One that raises has no time, but does not affect the others."""
    measured = Measurement()
    calls: dict[str, Call] = {}
    results: dict[str, object] = {}
    seconds_of_a_round = 0.0
    for name, contestant in entrants.items():
        with _failure_noted(measured, name), contestant.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns at length about each kernel that it cannot run
            call = contestant.make_call(pass_, dout)
            for _ in range(effort.warm_ups + contestant.compiles):
                start = time.perf_counter()
                result = call()
                _wait(dout)
                seconds = time.perf_counter() - start
            calls[name] = call
            if contestant.comparable and len(results) < 2:
                results[name] = result
            seconds_of_a_round += seconds
        result = None
    if OURS in results and len(results) > 1:
        with _failure_noted(measured, "difference"):
            measured.difference = _difference(*results.values())
    results.clear()
    times: dict[str, list[float]] = {name: [] for name in calls}
    measured.rounds = effort.rounds(seconds_of_a_round)
    with _no_garbage_collection():
        draw = random.Random(0)
        for _ in range(measured.rounds):
            for name in draw.sample(list(calls), len(calls)):  # a call's time depends on the call before it
                if name not in measured.errors:
                    with _failure_noted(measured, name), entrants[name].context():
                        times[name].append(stopwatch(calls[name]))
    measured.times = {name: taken for name, taken in times.items() if name not in measured.errors}
    return measured


def stopwatch_for(device: str, is_host_time: bool, num_calls: int = 1) -> Stopwatch:
    """`num_calls`: how many calls are timed together, for calls that alternate between copies of their tensors, or that
    run behind other work. On a GPU."""
    if is_host_time:
        return functools.partial(_host_clock, device=device)
    if device == "cpu":
        return _wall_clock
    return functools.partial(_device_clock, num_calls=num_calls)


def copy_bandwidth(device: str) -> float:
    """TB/s of PyTorch's own copy, in bytes read and written: the attainable memory bandwidth of this machine."""
    source = torch.zeros(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stopwatch = stopwatch_for(device, is_host_time=False)
    times = [stopwatch(lambda: target.copy_(source)) for _ in range(7)]
    return 2 * source.numel() / statistics.median(times[2:]) * 1e-9


def _wall_clock(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _device_clock(call: Call, num_calls: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _other_data(torch.cuda.current_device()).sum()
    sleep_on_gpu(LEAD_IN_CYCLES * (1 + num_calls // 4))
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_calls


@functools.cache
def _other_data(device_index: int) -> Tensor:
    num_bytes = L2_SIZES_READ * torch.cuda.get_device_properties(device_index).L2_cache_size
    return torch.zeros(num_bytes // 4, device=torch.device("cuda", device_index))


def _host_clock(call: Call, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - start) * 1e3 / HOST_CALLS


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@contextlib.contextmanager
def _failure_noted(measured: Measurement, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        measured.errors[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as lost:
                raise DeviceLost(f"{name}: {measured.errors[name]}") from lost


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _difference(ours: object, peers: object) -> float:
    """The largest difference over the tensors of both results. Equal tensors differ by 0, zeros included."""
    pairs = zip(*(result if isinstance(result, tuple) else (result,) for result in (ours, peers)), strict=True)
    with torch.no_grad():
        return max(_relative(a.float(), b.float()) for a, b in pairs)


def _relative(ours: Tensor, peers: Tensor) -> float:
    return 0.0 if torch.equal(ours, peers) else float((ours - peers).norm() / peers.norm())
