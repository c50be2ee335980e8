"""The Trajectory Transformer's beam search for the plan of highest predicted return (Janner et al. 2021, section 3.2).

Tokens of actions are sampled, those of states and rewards are the likeliest, as in the published code's configurations; a
predicted reward or return-to-go is the mean over all bins.

Plans for any number of states at once: each state has its own random generator, so its plan does not depend on the others.

Shapes: N states, P past transitions, W kept plans of a state, S = expansion_factor, R = N * W rows, H steps, O observation,
A action, X dimensions, D = X - 1 tokens of a transition, K bins, E width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_model import Cache, TrajectoryModel
from tap.data.windows import Layout
from tap.settings import TrajectorySearchParams

MAX_ROWS = 512  # kept plans that are extended at once: bounds the memory of their keys and values


@dataclass(frozen=True)
class TrajectoryPlan:
    """A plan for each of N states, in the environment's units."""

    observations: np.ndarray  # (N, H, O), the first is the bins' values of the given state
    actions: np.ndarray  # (N, H, A)
    rewards: np.ndarray  # (N, H)
    returns_to_go: np.ndarray  # (N, H)
    predicted_return: np.ndarray  # (N,), discounted: what the search maximises


def sample_bins(logits: Tensor, noise: Tensor, top_k: int | None, cdf: float) -> Tensor:
    """Sample a bin (...) from each row of `logits` (..., K), by inverting its cumulative sum at `noise`, uniform in [0, 1).

    Only the `top_k` likeliest bins are sampled, and none of the unlikeliest, whose probabilities add up to less than `cdf`.
    """
    ascending, bins = logits.softmax(dim=-1).sort(dim=-1)
    kept = ascending * (ascending.cumsum(dim=-1) >= cdf)
    if top_k is not None:
        kept[..., :-top_k] = 0
    cumulative = kept.cumsum(dim=-1)
    place = torch.searchsorted(cumulative, noise[..., None] * cumulative[..., -1:], right=True)
    return bins.gather(-1, place.clamp(max=logits.shape[-1] - 1))[..., 0]


class TrajectoryPlanner:
    """Plans with one model, which must be in evaluation mode."""

    def __init__(
        self, model: TrajectoryModel, discretizer: Discretizer, layout: Layout, discount: float, params: TrajectorySearchParams
    ) -> None:
        if params.context >= model.length:
            raise ValueError(f"the context of {params.context} transitions leaves no room in windows of {model.length}")
        self.model, self.discretizer, self.layout, self.discount, self.params = model, discretizer, layout, discount, params

    @torch.no_grad()
    def plan(
        self, observations_NO: Tensor, generators: Sequence[torch.Generator], past_NPD: Tensor | None = None
    ) -> TrajectoryPlan:
        """The best plan from each raw state, with one random generator per state (on the CPU).

        `past_NPD` are the raw transitions before the states, without return-to-go; fewer than a window's length.
        """
        N = len(observations_NO)
        past_NPD = observations_NO.new_empty(N, 0, self.layout.transition_dim - 1) if past_NPD is None else past_NPD
        batch = max(1, MAX_ROWS // self.params.beam_width)
        parts = zip(observations_NO.split(batch), self.noise(generators).split(batch), past_NPD.split(batch), strict=True)
        found = [[field.cpu().numpy() for field in self._solve(*part)] for part in parts]
        return TrajectoryPlan(*(np.concatenate(field) for field in zip(*found, strict=True)))

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """All uniform random numbers of a search, one for each action token: (N, H, A, W, S)."""
        params = self.params
        shape = params.horizon, self.layout.action_dim, params.beam_width, params.expansion_factor
        return torch.stack([torch.rand(shape, generator=generator) for generator in generators])

    def begin(self, observations_NO: Tensor, past_NPD: Tensor) -> Tensor:
        """The tokens (N, P * D + O) of the past and the state."""
        assert past_NPD.shape[1] < self.model.length
        past = self.discretizer.tokens(past_NPD, slice(0, self.layout.return_to_go)).flatten(1)
        return torch.cat([past, self.discretizer.tokens(observations_NO, self.layout.observation)], dim=1)

    def mean(self, hidden: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
        """The likeliest bin (...) of a dimension, and the mean over all of its bins (...)."""
        logits = self.model.logits(hidden, dimension)
        return logits.argmax(dim=-1), logits.softmax(dim=-1) @ self.discretizer.values_XK[dimension]

    def _solve(self, observations_NO: Tensor, noise: Tensor, past_NPD: Tensor) -> tuple[Tensor, ...]:
        """The fields of TrajectoryPlan."""
        model, layout, params = self.model, self.layout, self.params
        N, W, S, D = len(noise), params.beam_width, params.expansion_factor, model.token_dim
        noise_HARS = noise.to(observations_NO.device).permute(1, 2, 0, 3, 4).flatten(2, 3)
        room = model.length * D + (S - 1) * (layout.action_dim + 1)

        state_R = torch.arange(N, device=observations_NO.device).repeat_interleave(W)
        tokens_NP = self.begin(observations_NO, past_NPD)
        hidden_NE, keys_values = model.read(tokens_NP)
        cache = Cache.of(keys_values, room).select(state_R)
        hidden_RE, tokens_RP = hidden_NE[state_R], tokens_NP[state_R]
        paid_R = tokens_RP.new_zeros(N * W, dtype=torch.float32)  # discounted rewards of the plan so far
        estimates_RT2 = paid_R.new_empty(N * W, 0, 2)  # rewards and returns-to-go

        for step, noise_ARS in enumerate(noise_HARS):
            # Each plan is continued by S actions, with what they are predicted to earn.
            cache, hidden_RSE, new = cache.branch(S), hidden_RE[:, None].expand(-1, S, -1), []
            for dimension, noise_RS in enumerate(noise_ARS, start=layout.observation_dim):
                logits = model.logits(hidden_RSE, dimension)
                new.append(sample_bins(logits, noise_RS, params.top_k, params.cdf))
                hidden_RSE = model.step(new[-1], cache)
            reward_bin_RS, reward_RS = self.mean(hidden_RSE, layout.reward)
            new.append(reward_bin_RS)
            hidden_RSE = model.step(reward_bin_RS, cache)
            _, return_RS = self.mean(hidden_RSE, layout.return_to_go)

            # The best of each state's W * S are kept.
            score_NC = (paid_R[:, None] + self.discount**step * return_RS).view(N, -1)
            count = W if step + 1 < params.horizon else 1
            best_NW = score_NC.topk(count).indices
            best_R = (best_NW + W * S * torch.arange(N, device=best_NW.device)[:, None]).flatten()
            parent_R = best_R // S
            tokens_RP = torch.cat([tokens_RP[parent_R], torch.stack(new, dim=-1).flatten(0, 1)[best_R]], dim=1)
            estimate_R12 = torch.stack([reward_RS, return_RS], dim=-1).flatten(0, 1)[best_R, None]
            estimates_RT2 = torch.cat([estimates_RT2[parent_R], estimate_R12], dim=1)
            paid_R = paid_R[parent_R] + self.discount**step * estimate_R12[:, 0, 0]
            if step + 1 == params.horizon:
                break

            # Of each kept plan, the next state. Where the window is full, its last transitions begin a new one.
            if cache.steps == model.length * D:
                hidden_RE, keys_values = model.read(tokens_RP[:, -params.context * D :])
                cache = Cache.of(keys_values, room)
            else:
                hidden_RE, cache = hidden_RSE.flatten(0, 1)[best_R], cache.select(best_R)
            for dimension in range(layout.observation_dim):
                bin_R = model.logits(hidden_RE, dimension).argmax(dim=-1)
                tokens_RP = torch.cat([tokens_RP, bin_R[:, None]], dim=1)
                hidden_RE = model.step(bin_R[:, None], cache)[:, 0]

        plan_NHD = tokens_RP[:, past_NPD.shape[1] * D :].unflatten(1, (-1, D))
        raw_NHD = self.discretizer.decode(plan_NHD, slice(0, layout.return_to_go))
        columns = raw_NHD[..., layout.observation], raw_NHD[..., layout.action]
        return *columns, *estimates_RT2.unbind(-1), score_NC.amax(dim=1)
