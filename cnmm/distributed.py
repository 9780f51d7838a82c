"""Several processes as one: each takes its part of every batch; statistics and gradients are summed over all of them.

`torchrun --nproc-per-node N -m cnmm train ...` starts them. In a single process every function here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cnmm._errors import UserError
from cnmm.config import Device

_paused = False


def start(asked: Device = "auto") -> torch.device:
    """Joins the other processes, if torchrun has started any, and returns the device of this one."""
    device = pick_device(asked)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        store, rank, size = next(iter(rendezvous("env://")))
        # torchrun's store may outlive a restart, and with it the addresses of processes that are gone
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return device


def pick_device(asked: str = "auto") -> torch.device:
    """The CPU, or the GPU that belongs to this process: the one of its number on this machine."""
    if asked not in get_args(Device):
        raise UserError(f"device={asked!r}: must be one of {', '.join(get_args(Device))}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise UserError(f"device='cuda': torch {torch.__version__} finds no GPU here; use auto or cpu")
    if asked == "cpu" or not gpus:
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= gpus:
        raise UserError(
            f"there are {gpus} GPUs for {local_size()} processes; use --nproc-per-node {gpus}, or --device cpu"
        )
    return torch.device("cuda", number)


def end() -> None:
    """Leaves the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def restarted() -> bool:
    """Has torchrun restarted the processes after one of them died?"""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() and not _paused else 1


def local_size() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number; process 0 writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def total(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor over all processes, in one exchange."""
    if world_size() == 1:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def wait() -> None:
    """Until all processes are here."""
    if world_size() > 1:
        dist.barrier()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, this process works alone: its statistics are its own."""
    global _paused
    _paused = True
    try:
        yield
    finally:
        _paused = False
