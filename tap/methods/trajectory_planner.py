"""The Trajectory Transformer's beam search for the plan of highest predicted return (Janner et al. 2021, section 3.2).

Tokens of actions are sampled, those of states and rewards are the likeliest, as in the published code's configurations; a
predicted reward or return-to-go is the mean over all bins. With a critic, the return-to-go is Q of the bins of a plan's last
state and action instead (section 4.3).

Plans for any number of states at once: each state has its own random generator, so its plan does not depend on the others.

Shapes: N states, P past transitions, W kept plans of a state, S = expansion_factor, R = N * W rows, H steps, O observation,
A action, X dimensions, D = X - 1 tokens of a transition, K bins, E width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tap.data.windows import Layout
from tap.methods.discretizer import Discretizer
from tap.methods.policy import Action
from tap.methods.trajectory_model import Cache, TrajectoryModel
from tap.settings import TrajectorySearchParams

MAX_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class TrajectoryPlan(Action):
    """A plan for each of N states, in the environment's units."""

    observations: np.ndarray  # (N, H, O), the first is the bins' values of the given state
    rewards: np.ndarray  # (N, H)
    returns_to_go: np.ndarray  # (N, H), or Q of each step
    predicted_return: np.ndarray  # (N,), discounted: what the search maximises
    codes: np.ndarray  # (N, H * D), the plan's bins


def sample_bins(logits: Tensor, noise: Tensor, top_k: int | None, cdf: float) -> Tensor:
    """Sample a bin (...) from each row of `logits` (..., K), by inverting its cumulative sum at `noise`, uniform in [0, 1).

    Only the `top_k` likeliest bins are sampled, and none of the unlikeliest, whose probabilities add up to less than `cdf`.
    """
    ascending, bins = logits.softmax(dim=-1).sort(dim=-1)
    kept = ascending * (ascending.cumsum(dim=-1) >= cdf)
    if top_k is not None:
        kept = functional.pad(kept[..., -top_k:], (max(0, kept.shape[-1] - top_k), 0))
    cumulative = kept.cumsum(dim=-1)
    place = torch.searchsorted(cumulative, noise[..., None] * cumulative[..., -1:], right=True)
    return bins.gather(-1, place.clamp(max=logits.shape[-1] - 1))[..., 0]


class TrajectoryPlanner:
    """Plans with one model, which must be in evaluation mode.

    `q` maps raw states (..., O) and actions (..., A) to the discounted return (...) from there on.
    """

    def __init__(
        self,
        model: TrajectoryModel,
        discretizer: Discretizer,
        layout: Layout,
        discount: float,
        params: TrajectorySearchParams,
        q: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        assert params.context < model.length
        self.q = q
        self.model, self.discretizer, self.layout, self.discount, self.params = model, discretizer, layout, discount, params

    def plan(
        self, observations_NO: Tensor, generators: Sequence[torch.Generator], past_NPD: Tensor | None = None
    ) -> TrajectoryPlan:
        """The best plan from each raw state, with one random generator per state (on the CPU).

        `past_NPD` are the raw transitions before the states, without return-to-go; fewer than a window's length.
        """
        return self.solve(observations_NO, self.noise(generators).to(observations_NO.device), past_NPD)

    @torch.no_grad()
    def solve(self, observations_NO: Tensor, noise_NHAWS: Tensor, past_NPD: Tensor | None = None) -> TrajectoryPlan:
        """As `plan`, with the random numbers that `noise` draws."""
        inputs = self.begin(observations_NO, past_NPD), noise_NHAWS
        batches = zip(*(each.split(self._batch_size()) for each in inputs), strict=True)  # type: ignore[no-untyped-call]
        found = [[field.cpu().numpy() for field in self.decode(*self._search(*batch))] for batch in batches]
        return TrajectoryPlan(*(np.concatenate(field) for field in zip(*found, strict=True)))

    def begin(self, observations_NO: Tensor, past_NPD: Tensor | None) -> Tensor:
        """The tokens (N, P * D + O) of the past and the state."""
        state = self.discretizer.tokens(observations_NO, self.layout.observation)
        if past_NPD is None:
            return state
        assert past_NPD.shape[1] < self.model.length
        past = self.discretizer.tokens(past_NPD, slice(0, self.layout.return_to_go))
        return torch.cat([past.flatten(1), state], dim=1)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """All uniform random numbers of a search, one for each action token: (N, H, A, W, S)."""
        params = self.params
        shape = params.horizon, self.layout.action_dim, params.beam_width, params.expansion_factor
        return torch.stack([torch.rand(shape, generator=generator) for generator in generators])

    def logits(self, hidden: Tensor, dimension: int) -> Tensor:
        """As the model's."""
        return self.model.logits(hidden, dimension)

    def estimate(self, hidden: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
        """The likeliest bin (...) of a dimension, and the mean over all of its bins (...)."""
        logits = self.logits(hidden, dimension)
        return logits.argmax(dim=-1), logits.softmax(dim=-1) @ self.discretizer.values_XK[dimension]

    def return_to_go(self, hidden: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """That of a step (...), of the hidden state (..., E) after its reward, and the bins (..., O) and (..., A)."""
        if self.q is None:
            return self.estimate(hidden, self.layout.return_to_go)[1]
        decode, layout = self.discretizer.decode, self.layout
        return self.q(decode(state, layout.observation), decode(action, layout.action))

    def decode(self, tokens_NP: Tensor, estimates_NH2: Tensor, score_N: Tensor) -> tuple[Tensor, ...]:
        """The fields of TrajectoryPlan, of tokens that end with a plan."""
        horizon, D = self.params.horizon, self.model.token_dim
        steps_NHD = tokens_NP[:, -horizon * D :].view(-1, horizon, D)
        raw_NHD = self.discretizer.decode(steps_NHD, slice(0, self.layout.return_to_go))
        actions_NHA, states_NHO = raw_NHD[..., self.layout.action], raw_NHD[..., self.layout.observation]
        return actions_NHA, states_NHO, *estimates_NH2.unbind(-1), score_N, steps_NHD.flatten(1)

    def _search(self, tokens_NP: Tensor, noise_NHAWS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (N, P), estimates (N, H, 2) and score (N,) of each state's best plan."""
        N, W, S = len(tokens_NP), self.params.beam_width, self.params.expansion_factor
        state_R = torch.arange(N, device=tokens_NP.device).repeat_interleave(W)
        hidden_NE, keys_values = self.model.read(tokens_NP)
        cache = Cache(self.model.params, N * W, self._room(), tokens_NP.device)
        cache.begin(keys_values, state_R)
        tokens_RP, hidden_RE, estimates_RH2 = tokens_NP[state_R], hidden_NE[state_R], hidden_NE.new_empty(N * W, 0, 2)
        paid_R = hidden_NE.new_zeros(N * W)  # the discounted rewards of each plan

        for step in range(self.params.horizon):
            noise_RAS = noise_NHAWS[:, step].transpose(1, 2).flatten(0, 1)
            bins_CA, hidden_CE, estimate_C2 = self._continuations(tokens_RP, hidden_RE, noise_RAS, cache)
            candidates_NC = torch.arange(N * W * S, device=state_R.device).view(N, W * S)
            score_NC = paid_R.repeat_interleave(S).view(N, -1) + self.discount**step * estimate_C2[:, 1].view(N, -1)

            kept_NW = score_NC.topk(W if step + 1 < self.params.horizon else 1).indices
            kept_R = candidates_NC.gather(1, kept_NW).flatten()
            tokens_RP = torch.cat([tokens_RP[kept_R // S], bins_CA[kept_R]], dim=1)
            estimates_RH2 = torch.cat([estimates_RH2[kept_R // S], estimate_C2[kept_R, None]], dim=1)
            paid_R = paid_R[kept_R // S] + self.discount**step * estimate_C2[kept_R, 0]
            if step + 1 < self.params.horizon:
                cache.select(kept_R)
                tokens_RP, hidden_RE = self._next_states(tokens_RP, hidden_CE[kept_R], cache)
        return tokens_RP, estimates_RH2, score_NC.amax(dim=1)

    def _continuations(
        self, tokens_RP: Tensor, hidden_RE: Tensor, noise_RAS: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each plan continued by each of S sampled actions: C = R * S candidates, in this order.

        Bins (C, A + 1) of action and reward, the hidden state (C, E) after them, reward and return-to-go (C, 2).
        """
        layout, bins = self.layout, []
        cache.branch(self.params.expansion_factor)
        hidden_RSE = hidden_RE[:, None].expand(-1, self.params.expansion_factor, -1)
        for dimension, noise_RS in enumerate(noise_RAS.unbind(1), start=layout.observation_dim):
            logits_RSK = self.logits(hidden_RSE, dimension)
            bins.append(sample_bins(logits_RSK, noise_RS, self.params.top_k, self.params.cdf))
            hidden_RSE = self.model.step(bins[-1], cache)
        reward_bin_RS, reward_RS = self.estimate(hidden_RSE, layout.reward)
        hidden_RSE = self.model.step(reward_bin_RS, cache)
        state_RSO = tokens_RP[:, None, -layout.observation_dim :].expand(-1, self.params.expansion_factor, -1)
        return_RS = self.return_to_go(hidden_RSE, state_RSO, torch.stack(bins, dim=-1))
        parts = torch.stack([*bins, reward_bin_RS], dim=-1), hidden_RSE, torch.stack([reward_RS, return_RS], dim=-1)
        bins_CA, hidden_CE, estimate_C2 = (part.flatten(0, 1) for part in parts)
        return bins_CA, hidden_CE, estimate_C2

    def _next_states(self, tokens_RP: Tensor, hidden_RE: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """The tokens (R, P + O) of plans with their next states, and the hidden state (R, E) after them.

        Where the window is full, its last transitions begin a new one.
        """
        if cache.steps == self.model.length * self.model.token_dim:
            hidden_RE, keys_values = self.model.read(tokens_RP[:, -self.params.context * self.model.token_dim :])
            cache.begin(keys_values, torch.arange(len(tokens_RP), device=tokens_RP.device))
        for dimension in range(self.layout.observation_dim):
            bin_R1 = self.logits(hidden_RE, dimension).argmax(dim=-1, keepdim=True)
            tokens_RP = torch.cat([tokens_RP, bin_R1], dim=1)
            hidden_RE = self.model.step(bin_R1, cache)[:, 0]
        return tokens_RP, hidden_RE

    def _room(self) -> int:
        """Tokens of a row of the cache: a window, and actions and rewards of the siblings."""
        return self.model.length * self.model.token_dim + (self.params.expansion_factor - 1) * (self.layout.action_dim + 1)

    def _batch_size(self) -> int:
        """States that are planned for at once: bounds the memory of their caches."""
        transformer = self.model.params
        numbers = 4 * transformer.layers * transformer.width * self._room() * self.params.beam_width
        return max(1, MAX_CACHE_BYTES // (4 * numbers))
