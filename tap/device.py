"""The device that a process computes on."""

import os

import torch


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is this process's GPU, or the CPU without one. Raises ValueError for an unknown name
    or a missing GPU.

    If it is a GPU, float32 matrix products use TF32 from then on.
    """
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"TAP_DEVICE={name} is not a device: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"TAP_DEVICE={name} is not on this machine, where torch finds {count} GPUs: use auto or cpu")
        torch.set_float32_matmul_precision("high")
        torch.cuda.set_device(device.index or 0)
    return device
