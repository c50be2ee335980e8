"""Offline checks: does each part of a policy do its job on recorded episodes? No simulator is needed.

Shapes: N windows, B of them, K codes, A action.
"""

import numpy as np
import torch
from torch import Tensor

from tap.data.windows import Windows
from tap.model.vqvae import encode_windows
from tap.planning.policy import Policy
from tap.results import OfflineChecks

AT_ONCE = 16  # states: each is decoded with all codes


@torch.no_grad()
def check(policy: Policy, windows: Windows, starts_N: Tensor, *, held_out: bool) -> OfflineChecks:
    """Compare what the policy predicts at the windows that start at rows `starts_N` with what was recorded there.

    `windows` are at least one code long, and the policy's model can decode single codes.
    """
    layout, normalizer = policy.vqvae.layout, policy.normalizer
    recorded_NX = windows.transitions_NX[starts_N]
    states_NO, actions_NA = recorded_NX[:, layout.observation], recorded_NX[:, layout.action]
    codes_N = encode_windows(policy.vqvae, windows, starts_N)[:, 0].long()
    batches = [range(first, min(first + AT_ONCE, len(starts_N))) for first in range(0, len(starts_N), AT_ONCE)]
    parts = [_at_states(policy, states_NO[rows], actions_NA[rows], codes_N[rows]) for rows in map(list, batches)]
    own, mean, drawn, value, advantage, gain = (torch.cat(part).double().cpu().numpy() for part in zip(*parts, strict=True))
    acted = (policy.actor(states_NO) - actions_NA).square().sum(dim=-1).mean() if policy.actor else None

    column = slice(layout.return_to_go, layout.return_to_go + 1)
    return_N = normalizer.denormalize(recorded_NX[:, column], column)[:, 0].double().cpu().numpy()
    variance = float(actions_NA.double().var(dim=0, unbiased=False).sum()) or 1.0  # of constant actions
    worth, error = slope(advantage, return_N - value)
    has_critic = policy.critic is not None
    return OfflineChecks(
        windows=len(starts_N),
        held_out=held_out,
        own_code_error=float(own.mean()) / variance,
        mean_error=float(mean.mean()) / variance,
        actor_error=None if acted is None else float(acted) / variance,
        drawn_code_error=float(drawn.mean()) / variance,
        return_std=None if policy.params.objective == "likelihood" else float(return_N.std()),
        predicted_gain=float(gain.mean()) if has_critic else None,
        advantage_slope=worth if has_critic else None,
        advantage_slope_error=error if has_critic else None,
    )


def _at_states(policy: Policy, state_BO: Tensor, action_BA: Tensor, code_B: Tensor) -> tuple[Tensor, ...]:
    """At each state: squared errors of the own code's action, the mean and a drawn code's; value, advantage and gain."""
    layout, B = policy.vqvae.layout, len(state_BO)
    scored = policy.planner.score_codes(state_BO, policy.vqvae.params.codebook.size)
    own_B1 = (scored.codes_RM.view(B, -1) == code_B[:, None]).long().argmax(dim=1, keepdim=True)
    probability_BK = scored.log_probability_R.view(B, -1).exp()
    decoded_BKA = scored.steps.transitions_BTX[:, 0, layout.action].view(B, -1, layout.action_dim)
    error_BK = (decoded_BKA - action_BA[:, None]).square().sum(dim=-1)
    mean_BA = torch.einsum("bk,bka->ba", probability_BK, decoded_BKA)
    return_BK = scored.predicted_return_R.view(B, -1)
    value_B = (probability_BK * return_BK).sum(dim=1)
    weights_BK = (scored.score_R.view(B, -1) / policy.planner.temperature).softmax(dim=1)
    return (
        error_BK.gather(1, own_B1)[:, 0],
        (mean_BA - action_BA).square().sum(dim=-1),
        (probability_BK * error_BK).sum(dim=1),
        value_B,
        return_BK.gather(1, own_B1)[:, 0] - value_B,
        (weights_BK * return_BK).sum(dim=1) - value_B,
    )


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The slope of the least-squares line of `y` on `x`, each (N,), and its standard error; 0 and 0 if `x` is constant."""
    x, y = x - x.mean(), y - y.mean()
    power = float(x @ x)
    if power == 0:
        return 0.0, 0.0
    fitted = float(x @ y) / power
    return fitted, float(np.sqrt(np.square(y - fitted * x).sum() / max(1, len(x) - 2) / power))
