"""Other work for a GPU."""

import torch


class Disturbance:
    """Work on another stream that comes and goes, so that no two runs meet the same free multiprocessors."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(1024, 1024, device="cuda")

    def start(self, amount: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(amount):
                self.matrix @ self.matrix
