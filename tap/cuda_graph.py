"""CUDA graphs: small kernels take longer to launch than to run, so a fixed sequence is recorded once and then replayed."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs")  # a tensor, or tuples and dictionaries of them


class Graphed(Generic[Outputs]):
    """A function of GPU tensors of fixed shapes, recorded as a CUDA graph.

    The first `warm_up` calls run the function itself, so that libraries, compilers and optimisers initialise before recording.
    Every call, recorded or not, has the effects of calling the function. Outputs are valid until the next call overwrites them.
    Graphs may share a `memory` pool if the outputs of one are read before another is called.
    """

    def __init__(self, function: Callable[..., Outputs], warm_up: int, memory: Any = None) -> None:
        self.function, self.warm_up, self.memory = function, warm_up, memory
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Outputs:
        """The function's outputs."""
        self.calls += 1
        if self.calls <= self.warm_up:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        if self.graph is None:
            self.inputs = [tensor.clone() for tensor in inputs]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.memory):
                self.outputs = self.function(*self.inputs)
        for recorded, given in zip(self.inputs, inputs, strict=True):
            recorded.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.outputs
