"""Processes that work together through torch.distributed: gloo on the CPU, NCCL with a GPU for each."""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing


def run_processes(task, size: int, device: str, *arguments) -> None:
    """task(device, *arguments) in each of `size` processes of one group. A function of a module's top level."""
    multiprocessing.spawn(_run, args=(task, size, device, free_port(), arguments), nprocs=size)


def _run(rank: int, task, size: int, device: str, port: int, arguments: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", rank=rank, world_size=size)
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
