"""Matrix products of a model in int8, which a CPU computes faster than in float32.

Weights are rounded once, with a scale for each output; inputs at every product, with one scale for all of a batch, so that the
result for a row depends on the batch that it is in.
"""

import warnings
from typing import TypeVar

from torch import nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

Model = TypeVar("Model", bound=nn.Module)


def in_int8(model: Model) -> Model:
    """A copy of a model on the CPU whose linear layers compute in int8. Raises ValueError for one on another device."""
    if (device := next(model.parameters()).device).type != "cpu":
        raise ValueError(f"planner.precision int8 is for a CPU, not for {device}: set TAP_DEVICE=cpu, or leave precision out")
    with warnings.catch_warnings():
        # torch will leave this to torchao, whose products in int8 need a C++ compiler wherever a policy runs.
        warnings.simplefilter("ignore")
        copied: Model = quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig})  # type: ignore[no-untyped-call]
    return copied
