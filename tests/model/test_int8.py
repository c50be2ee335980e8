import pytest
import torch
from torch import nn

from tap.model.int8 import in_int8


def test_products_err_by_no_more_than_the_rounding_of_weights_and_inputs() -> None:
    """Weights by 127 steps to each side of 0, of each output its own; inputs by 127 steps in all, which never overflow."""
    torch.manual_seed(0)
    layer, x_BI = nn.Linear(40, 7), 3 * torch.randn(16, 40) + 1
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 3, 7)[:, None]
        w_OI, bias_O = layer.weight.double(), layer.bias.double()
        error_BO = (in_int8(nn.Sequential(layer))(x_BI).double() - (x_BI.double() @ w_OI.T + bias_O)).abs()
    step_O = w_OI.abs().amax(dim=1) / 127
    step = float(x_BI.max() - x_BI.min()) / 127
    most_BO = x_BI.double().abs().sum(dim=1)[:, None] * step_O / 2 + w_OI.abs().sum(dim=1) * step / 2 + 40 * step_O * step / 4
    assert (error_BO <= 1.01 * most_BO).all()
    assert (error_BO > 1e-4 * most_BO).any()  # it is not float32


def test_the_model_itself_stays_in_float32() -> None:
    layer = nn.Linear(3, 2)
    copied = in_int8(nn.Sequential(layer))
    assert layer.weight.dtype == torch.float32 and not isinstance(copied[0], nn.Linear)


def test_other_devices_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"planner\.precision int8 is for a CPU, not for meta: set TAP_DEVICE=cpu"):
        in_int8(nn.Linear(3, 2, device="meta"))
