"""Traces: on a CPU, Python takes as long to launch small operations as they take, so a fixed sequence is recorded once.

What `tap/cuda_graph.py` is for a GPU, with TorchScript. A trace computes the same numbers to the bit, and runs without Python's
global lock, so that the other threads of a server proceed. `torch.compile` is TorchScript's successor, but needs a C++ compiler
wherever a policy runs.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning


class _Sequence(nn.Module):
    """A function of tensors, and the models whose weights it reads."""

    def __init__(self, function: Callable[..., Any], models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.function, self.models = function, nn.ModuleList(models)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@torch.no_grad()
def traced(function: Callable[..., Any], models: Sequence[nn.Module], *inputs: Tensor) -> Callable[..., Any]:
    """`function` as a trace for inputs of these shapes, in which the weights of `models` are constants.

    The function runs once, on `inputs`. It must not read their values, nor have an effect. It runs without gradients.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # shapes are constants, which is what is wanted
        warnings.simplefilter("ignore", DeprecationWarning)
        frozen: Callable[..., Any] = torch.jit.freeze(
            torch.jit.trace(_Sequence(function, models).eval(), inputs, check_trace=False)  # type: ignore[no-untyped-call]
        )
    return frozen
