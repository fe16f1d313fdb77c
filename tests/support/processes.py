"""Processes that work together through torch.distributed: gloo on the CPU, NCCL with a GPU for each."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing


def run_processes(task, size: int, device: str, *arguments) -> None:
    """task(device, *arguments) in each of `size` processes of one group. A function of a module's top level."""
    multiprocessing.set_forkserver_preload(["torch"])  # which takes longer to import than most tasks run
    with tempfile.TemporaryDirectory() as folder:
        of_all = (task, size, device, Path(folder) / "store", arguments)
        multiprocessing.start_processes(_run, args=of_all, nprocs=size, start_method="forkserver")


def _run(rank: int, task, size: int, device: str, store: Path, arguments: tuple) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    # They find one another by a file of their own: a port that is free now may be another test's a moment later.
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=store.as_uri(), rank=rank, world_size=size)
    try:
        task(device, *arguments)
    finally:
        dist.destroy_process_group()
    # At times a process of a gloo group aborts behind its task ("terminate called without an active exception", as in
    # PyTorch issue 190489), probably when the interpreter ends. The task is done, and said so by not raising; that our
    # library lets an interpreter end is seen by all other processes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
