"""Other work for a GPU."""

import torch

from support.backends import Backend
from support.cases import Inputs
from support.runners import run_ours


class Disturbance:
    """Work on another stream that comes and goes, so that no two runs find the same SMs idle."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(1024, 1024, device="cuda")

    def start(self, amount: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(amount):
                self.matrix @ self.matrix


def assert_repeats(inputs: Inputs, backend: Backend, runs: int) -> None:
    """Forward and backward pass give the same bits `runs` times more, beside other work."""
    disturbance = Disturbance()
    torch.cuda.synchronize()
    first = run_ours(inputs, backend)
    for run in range(runs):
        disturbance.start(3 * run % 7)
        again = run_ours(inputs, backend)
        for name in first:
            assert torch.equal(first[name], again[name]), f"{name}, run {run}"
    torch.cuda.synchronize()
