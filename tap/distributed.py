"""Rank, world size and sums over processes. In a single process, sums and broadcasts return their input."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all processes, as a new tensor; no gradient flows through it."""
    tensor = tensor.detach()
    if distributed.is_initialized():
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def broadcast(tensor: Tensor) -> Tensor:
    """Rank 0's `tensor` on every process, in place."""
    if distributed.is_initialized():
        distributed.broadcast(tensor, src=0)
    return tensor


@contextmanager
def process_group() -> Iterator[None]:
    """A context in which the processes that torchrun started (environment variable WORLD_SIZE) communicate."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()
