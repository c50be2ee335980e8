"""Averaged weights: the exponential moving average of a model over its updates.

Single updates scatter the weights around a better point, which their average approaches (Polyak and Juditsky 1992).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights:
    """The moving average of all floating-point state of `model`, beginning with what it holds now.

    That is its weights and its buffers: code vectors follow the encoder, so their average belongs to the averaged encoder.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._current = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
        self.tensors = [tensor.clone() for tensor in self._current]

    def update(self, update: int) -> None:
        """Include the model after its update number `update`, counted from 1; never waits for the GPU."""
        # A smaller decay in the first updates: the state before training must not count for long.
        decay = min(self.decay, (1 + update) / (10 + update))
        get_ema_multi_avg_fn(decay)(self.tensors, self._current, update)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """A context in which the model holds the average; changes made there to the model's state are made to the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: a CUDA graph reads and writes the model's own memory.
        for average, current in zip(self.tensors, self._current, strict=True):
            kept = current.clone()
            current.copy_(average)
            average.copy_(kept)

    def restore(self, tensors: list[Tensor]) -> None:
        """Continue from the `tensors` of an earlier average."""
        for average, stored in zip(self.tensors, tensors, strict=True):
            average.copy_(stored)

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the average for good."""
        for average, current in zip(self.tensors, self._current, strict=True):
            current.copy_(average)
