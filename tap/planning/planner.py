"""Planning: search over codes for the plan of highest predicted return that is likely under the prior (paper, section 3.3).

Without rewards, for the likeliest plan. Or a mean instead of a search: of the plans of the likeliest single codes, weighted by
prior and critic.

Uses the models only through `VQVAE.decode`, the prior's log probabilities and the critic's values. Plans for any number of
states at once: each state has its own random generator, so its plan does not depend on the others.

Shapes: N states, W kept plans per state, C candidates per state, R rows (N * W or N * C, all plans of a state in sequence),
S codes sampled after each plan, M codes, L latent step, H steps (= M * L), O observation, A action, X transition,
K codebook size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tap.cuda_graph import Graphed
from tap.data.windows import Normalizer
from tap.model.actor import Actor
from tap.model.critic import Critic
from tap.model.int8 import in_int8
from tap.model.prior import Prior
from tap.model.transformer import extend
from tap.model.vqvae import VQVAE, Decoded
from tap.planning.plan import Plan
from tap.settings import PlannerParams
from tap.traced import traced

MAX_BATCH_STATES = 16  # a power of two; on two CPU cores, planning takes longer per state in larger batches


def predicted_return(rewards: Tensor, returns_to_go: Tensor, discount: float, end: Tensor | None = None) -> Tensor:
    """sum_{t=1}^{T-1} gamma^(t-1) r_t + gamma^(T-1) R_T over the last dimension (...,): the first part of the objective.

    R_T includes r_T. The paper (section 3.3, equation 3) writes gamma^t: a constant factor, which rescales alpha. With `end`,
    the probabilities (..., T) that step t is past the episode's end, each step is weighted by the probability of reaching it.
    """
    weights = discount ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    terms = weights * torch.cat([rewards[..., :-1], returns_to_go[..., -1:]], dim=-1)
    if end is not None:
        terms = terms * (1 - end).cumprod(dim=-1)
    return terms.sum(dim=-1)


def likelihood_penalty(log_probability: Tensor, num_codes: int, params: PlannerParams) -> Tensor:
    """alpha * ln(min(p, beta^M)): the second part of the objective, constant for plans above the threshold."""
    return params.likelihood_weight * log_probability.clamp(max=num_codes * math.log(params.likelihood_threshold))


def sample_codes(log_probs_RK: Tensor, noise_RS: Tensor) -> Tensor:
    """Sample codes (R, S) from each row of `log_probs_RK` by inverting its cumulative sum at `noise_RS`, uniform in [0, 1)."""
    cumulative_RK = log_probs_RK.exp().cumsum(dim=-1)
    target_RS = noise_RS * cumulative_RK[:, -1:]
    return torch.searchsorted(cumulative_RK, target_RS, right=True).clamp(max=log_probs_RK.shape[-1] - 1)


def sample_distinct_codes(log_probs_RK: Tensor, noise_RK: Tensor, count: int) -> Tensor:
    """Sample `count` codes (R, count) from each row of `log_probs_RK` without replacement, by the Gumbel-top-k trick.

    `noise_RK` is uniform in [0, 1). Kool et al. 2019: the largest of log p + Gumbel noise are a sample without replacement.
    """
    gumbel_RK = -(-noise_RK.clamp(min=torch.finfo(noise_RK.dtype).tiny).log()).log()
    return (log_probs_RK + gumbel_RK).topk(count).indices


def batch_sizes(states: int, recorded: bool) -> list[int]:
    """Split a number of states into batches of at most MAX_BATCH_STATES, which bounds the planner's memory.

    If each size is `recorded` as a CUDA graph, all sizes are powers of two, so that there are few graphs.
    """
    sizes = []
    while states:
        sizes.append(min(MAX_BATCH_STATES, 1 << states.bit_length() - 1 if recorded else states))
        states -= sizes[-1]
    return sizes


@dataclass(frozen=True)
class PartialPlans:
    """Plans of m codes, one per row."""

    state_RO: Tensor  # normalised
    tokens_RM: Tensor  # the prior's start token, then the codes: (R, 1 + m)
    log_probability_R: Tensor  # ln p(z_1..z_m | s_1)
    prior_past: Tensor | None  # the prior's keys and values of all tokens but the last


@dataclass(frozen=True)
class Expansion:
    """Some partial plans, the parents, each continued by S sampled codes: one row per continuation."""

    state_RO: Tensor
    tokens_RM: Tensor
    log_probability_R: Tensor
    parent_R: Tensor  # row of the parent
    prior_past: Tensor | None  # of the parents
    prior_new: list[Tensor]  # keys and values of the parents' last tokens

    def keep(self, row_R: Tensor) -> PartialPlans:
        """The continuations at rows `row_R`, with the prior's cache extended to all but their last codes."""
        past = extend(self.prior_past, self.prior_new, self.parent_R[row_R])
        return PartialPlans(self.state_RO[row_R], self.tokens_RM[row_R], self.log_probability_R[row_R], past)


@dataclass(frozen=True)
class Candidates:
    """All complete plans that a search has scored: R = N * C rows."""

    codes_RM: Tensor
    steps: Decoded
    log_probability_R: Tensor
    predicted_return_R: Tensor
    score_R: Tensor


class Planner:
    """Plans with the models of one policy: by beam search, by sampling, or as the mean over single codes.

    Raises ValueError if the search needs a critic or an actor and there is none, and for int8 on another device than the CPU.
    """

    def __init__(
        self,
        vqvae: VQVAE,
        prior: Prior,
        normalizer: Normalizer,
        params: PlannerParams,
        critic: Critic | None = None,
        actor: Actor | None = None,
    ) -> None:
        if params.search == "critic_weighted" and critic is None:
            raise ValueError("search critic_weighted needs a critic: run the stage train_critic, or choose another search")
        if params.averages and params.actor and actor is None:
            raise ValueError("planner.actor needs an actor: run the stage train_actor, or set it to false")
        if params.precision == "int8":
            vqvae, prior = in_int8(vqvae), in_int8(prior)
        self.vqvae, self.prior, self.normalizer, self.params = vqvae, prior, normalizer, params
        self.critic, self.actor = critic, actor if params.averages and params.actor else None
        # Of a mean over codes: tau, in units of return.
        self.temperature = params.temperature * critic.held_out_error if params.search == "critic_weighted" and critic else 1.0
        self.num_codes = 1 if params.averages else params.horizon // vqvae.params.latent_step
        beam = params.search == "beam"
        width, factor = (params.beam_width, params.expansion_factor) if beam else (params.samples, 1)
        self._distinct = beam and not params.replacement
        # Without replacement, at most all K codes can be sampled after a plan.
        max_branching = vqvae.params.codebook.size if self._distinct else width * factor
        # Of m codes there are beam_sizes[m] plans per state, and each is continued by branching[m] codes. A mean samples none.
        self.beam_sizes, self.branching = ([], []) if params.averages else ([1], [min(width * factor, max_branching)])
        for _ in range(self.num_codes - 1):
            self.beam_sizes.append(min(width, self.beam_sizes[-1] * self.branching[-1]))
            self.branching.append(min(factor, max_branching))
        self._graphs: dict[tuple[int, bool], Graphed[tuple[Tensor, ...]]] = {}
        self._traces: dict[bool, Callable[..., tuple[Tensor, ...]]] = {}
        self._memory = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None  # shared by all graphs

    def plan(self, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
        """The best plan from each raw state, with one random generator per state (on the CPU)."""
        return self._run(observations_NO, self.noise(generators), best=True)

    def candidates(self, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
        """All C complete plans that the search scored, from each raw state: a Plan whose arrays are (N, C, ...)."""
        return self._run(observations_NO, self.noise(generators), best=False)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """All uniform random numbers of a search, one row per generator: (N, sum of `_noise_sizes`)."""
        return torch.stack([torch.rand(sum(self._noise_sizes()), generator=generator) for generator in generators])

    def noise_by_depth(self, noise: Tensor) -> list[Tensor]:
        """Split `noise` by depth, with one row per kept plan: each (N * W, S), or (N * W, K) without replacement."""
        parts = noise.split(self._noise_sizes(), dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(len(noise) * plans, -1) for part, plans in zip(parts, self.beam_sizes, strict=True)]

    def _noise_sizes(self) -> list[int]:
        size = self.vqvae.params.codebook.size
        sizes = zip(self.beam_sizes, self.branching, strict=True)
        return [plans * (size if self._distinct else branching) for plans, branching in sizes]

    def next_codes(self, log_probs_RK: Tensor, noise: Tensor, branching: int) -> Tensor:
        """Sample the next codes (R, S = branching) of each plan, as `params.search` and `params.replacement` require."""
        if self.params.search == "uniform_sampling":
            return sample_codes(torch.zeros_like(log_probs_RK), noise)
        if self._distinct:
            return sample_distinct_codes(log_probs_RK, noise, branching)
        return sample_codes(log_probs_RK, noise)

    def objective(self, steps: Decoded, log_probability_R: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
        """Predicted returns (R,) and scores (R,) of decoded plans of `num_codes` codes (paper, section 3.3).

        As in the published code, the threshold of a partial plan is the beta^M of a complete one, unless `partial_threshold`
        is set. If `objective` is likelihood, the score is ln p alone, and returns, of which the models know nothing, are 0.
        """
        if self.params.objective == "likelihood":
            return torch.zeros_like(log_probability_R), log_probability_R
        layout = self.vqvae.layout
        raw_RTX = self.normalizer.denormalize(steps.transitions_BTX)
        end_RT = steps.end_logits_BT.sigmoid() if self.params.stop_at_end else None
        discount = self.vqvae.params.windows.discount
        return_R = predicted_return(raw_RTX[..., layout.reward], raw_RTX[..., layout.return_to_go], discount, end_RT)
        threshold_codes = num_codes if self.params.partial_threshold else self.num_codes
        return return_R, return_R + likelihood_penalty(log_probability_R, threshold_codes, self.params)

    def beam_search(self, state_NO: Tensor, noise: Tensor) -> Candidates:
        """Algorithm 1 of the paper (appendix), for all states at once.

        1   Z_1: B * E codes sampled from p(z | s)
        2   for t = 2 to T:
        3       C_t: each plan of Z_(t-1), continued by each of E codes sampled from p(z_t | z_<t, s)
        4       decode every plan of C_t
        5       Z_t: the B best of C_t
        6   return the best of the last decoded

        Line 1 is line 3 for a single empty plan with B * E codes sampled after it; its plans are decoded and pruned to B as
        well. The caller does line 6.
        """
        plans, steps = self._empty_plans(state_NO), Decoded.empty(len(state_NO), self.vqvae.layout, state_NO.device)
        decoder_past: Tensor | None = None
        by_depth = zip(self.noise_by_depth(noise), self.branching, strict=True)
        for depth, (depth_noise, branching) in enumerate(by_depth, start=1):
            expanded = self._expand(plans, depth_noise, branching)  # 1, 3

            # 4: only the new code's steps are decoded, from the cache of the parent's.
            new_steps, decoder_new = self.vqvae.decode(expanded.tokens_RM[:, -1:], expanded.state_RO, decoder_past)
            steps = steps.rows(expanded.parent_R).append(new_steps)

            return_R, score_R = self.objective(steps, expanded.log_probability_R, depth)
            if depth < self.num_codes:  # 5
                best_R = _best_rows(score_R.view(len(state_NO), -1), self.beam_sizes[depth])
                plans, steps = expanded.keep(best_R), steps.rows(best_R)
                decoder_past = extend(decoder_past, decoder_new, best_R)
        return Candidates(expanded.tokens_RM[:, 1:], steps, expanded.log_probability_R, return_R, score_R)

    def sample_plans(self, state_NO: Tensor, noise: Tensor) -> Candidates:
        """Vanilla sampling (paper, section 3.3): complete plans from the prior, or uniform over the codebook."""
        plans = self._empty_plans(state_NO)
        for depth_noise, branching in zip(self.noise_by_depth(noise), self.branching, strict=True):
            expanded = self._expand(plans, depth_noise, branching)
            plans = expanded.keep(torch.arange(len(expanded.parent_R), device=state_NO.device))
        codes_RM = plans.tokens_RM[:, 1:]
        steps, _ = self.vqvae.decode(codes_RM, plans.state_RO)
        return_R, score_R = self.objective(steps, plans.log_probability_R, self.num_codes)
        return Candidates(codes_RM, steps, plans.log_probability_R, return_R, score_R)

    def score_codes(self, state_NO: Tensor, count: int) -> Candidates:
        """All plans of a single code, of the C = `count` codes that are likeliest at each state, for `average`.

        critic_weighted: plan k has the critic's value Q_k of its code as predicted return, and the score Q_k + tau ln p_k, p
        being the prior and tau the params' temperature times the critic's held-out error: values that differ by much less than
        the critic errs hardly change the prior. prior_mean, its limit for large tau, needs no critic: plan k has the decoder's
        predicted return, and the score ln p_k.
        """
        layout = self.vqvae.layout
        log_probs_N1K, _ = self.prior(self._empty_plans(state_NO).tokens_RM, state_NO)
        log_probability_NC, codes_NC = log_probs_N1K[:, 0].topk(count)
        log_probability_R, codes_R1 = log_probability_NC.flatten(), codes_NC.reshape(-1, 1)
        steps, _ = self.vqvae.decode(codes_R1, state_NO.repeat_interleave(count, dim=0))
        if self.critic is None or self.params.search == "prior_mean":
            return_R, _ = self.objective(steps, log_probability_R, num_codes=1)
            return Candidates(codes_R1, steps, log_probability_R, return_R, log_probability_R)
        column = slice(layout.return_to_go, layout.return_to_go + 1)
        return_R = self.normalizer.denormalize(self.critic.values(state_NO, codes_NC)[..., None], column).flatten()
        return Candidates(codes_R1, steps, log_probability_R, return_R, return_R + self.temperature * log_probability_R)

    def average(self, scored: Candidates, state_NO: Tensor) -> Candidates:
        """Of each state's plans from `score_codes`, the mean with weights w_k proportional to exp(score_k / tau): R = N rows.

        Of critic_weighted, w_k is proportional to p_k exp(Q_k / tau), which maximises the objective
        sum_k w_k Q_k - tau KL(w || p), the score of the mean. That is one step of policy improvement, regularised towards the
        policy in the data, with codes as actions (Peters et al. 2010, REPS; Peng et al. 2019, AWR). As in MPPI (Williams et al.
        2017), not one of the actions is executed but their weighted mean. Of prior_mean, w = p, and the first action is an
        estimate of the data's mean action.

        An actor estimates that better. With it, the first actions of all codes are moved by what makes their mean under the
        prior that of the actor: so prior_mean executes the actor's action, and critic_weighted changes it by as much as its
        weights change the mean.
        """
        N, layout = len(state_NO), self.vqvae.layout
        log_weights_NK = (scored.score_R / self.temperature).view(N, -1).log_softmax(dim=1)
        weights_NK = log_weights_NK.exp()
        best_N = scored.score_R.view(N, -1).argmax(dim=1)
        rows_N = _rows_of(best_N[:, None], weights_NK.shape[1])

        def mean(values_R: Tensor, shares_NK: Tensor = weights_NK) -> Tensor:
            values_NK = values_R.view(*shares_NK.shape, *values_R.shape[1:])
            return torch.einsum("nk,nk...->n...", shares_NK, values_NK)

        return_N = mean(scored.predicted_return_R)
        divergence_N = mean(log_weights_NK.flatten() - scored.log_probability_R)
        steps = Decoded(mean(scored.steps.transitions_BTX), mean(scored.steps.end_logits_BT))
        if self.actor:
            prior_NK = scored.log_probability_R.view(N, -1).softmax(dim=1)
            action_RA = scored.steps.transitions_BTX[:, 0, layout.action]
            steps.transitions_BTX[:, 0, layout.action] += self.actor(state_NO) - mean(action_RA, prior_NK)
        score_N = return_N - self.temperature * divergence_N
        return Candidates(scored.codes_RM[rows_N], steps, scored.log_probability_R[rows_N], return_N, score_N)

    def _empty_plans(self, state_NO: Tensor) -> PartialPlans:
        """One plan without codes per state."""
        start_N1 = torch.full((len(state_NO), 1), self.prior.start, device=state_NO.device)
        return PartialPlans(state_NO, start_N1, state_NO.new_zeros(len(state_NO)), None)

    def _expand(self, plans: PartialPlans, noise: Tensor, branching: int) -> Expansion:
        """Each plan, continued by each of `branching` codes sampled after it. The prior runs once per plan."""
        log_probs_R1K, prior_new = self.prior(plans.tokens_RM[:, -1:], plans.state_RO, plans.prior_past)
        codes_RS = self.next_codes(log_probs_R1K[:, 0], noise, branching)
        log_probability_R = (plans.log_probability_R[:, None] + log_probs_R1K[:, 0].gather(1, codes_RS)).flatten()
        parent_R = torch.arange(len(codes_RS), device=codes_RS.device).repeat_interleave(branching)
        tokens_RM = torch.cat([plans.tokens_RM[parent_R], codes_RS.reshape(-1, 1)], dim=1)
        return Expansion(plans.state_RO[parent_R], tokens_RM, log_probability_R, parent_R, plans.prior_past, prior_new)

    @torch.no_grad()
    def _run(self, observations_NO: Tensor, noise: Tensor, *, best: bool) -> Plan:
        """Plan for the states batch by batch."""
        assert len(noise) == len(observations_NO) > 0
        # In int8, a plan depends on the others of its batch.
        sizes = [1] * len(noise) if self.params.precision else batch_sizes(len(noise), recorded=observations_NO.is_cuda)
        batches = zip(observations_NO.split(sizes), noise.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        parts = [self._run_batch(*batch, best) for batch in batches]
        return Plan(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _run_batch(self, observations_NO: Tensor, noise: Tensor, best: bool) -> list[np.ndarray]:
        """The fields of Plan. On a GPU, replays the CUDA graph of `solve` for this number of states; on a CPU, for one state,
        its trace: with more, the operations themselves take most of the time."""
        if not observations_NO.is_cuda:
            if len(noise) > 1:
                return [tensor.numpy() for tensor in self.solve(observations_NO, noise, best)]
            if best not in self._traces:
                models = [model for model in (self.vqvae, self.prior, self.critic, self.actor) if model is not None]
                self._traces[best] = traced(partial(self.solve, best=best), models, observations_NO, noise)
            return [tensor.numpy() for tensor in self._traces[best](observations_NO, noise)]
        key = len(noise), best
        if key not in self._graphs:
            self._graphs[key] = Graphed(partial(self.solve, best=best), warm_up=1, memory=self._memory)
        tensors = self._graphs[key](observations_NO, noise.to(observations_NO.device))
        on_cpu = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        torch.cuda.current_stream().synchronize()
        return [tensor.numpy() for tensor in on_cpu]

    def solve(self, observations_NO: Tensor, noise: Tensor, best: bool) -> tuple[Tensor, ...]:
        """The fields of Plan for raw states and their `noise`, operation by operation; of the best candidate or of all."""
        N, layout = len(observations_NO), self.vqvae.layout
        state_NO = self.normalizer.normalize(observations_NO, layout.observation)
        if self.params.averages:
            scored = self.score_codes(state_NO, min(self.params.likeliest_codes, self.vqvae.params.codebook.size))
            found = self.average(scored, state_NO) if best else scored
        else:
            search = self.beam_search if self.params.search == "beam" else self.sample_plans
            found = search(state_NO, noise)
        score_NC = found.score_R.view(N, -1)
        all_NC = torch.arange(score_NC.numel(), device=score_NC.device).view_as(score_NC)
        rows = _rows_of(score_NC.argmax(dim=1, keepdim=True), score_NC.shape[1]) if best else all_NC
        raw = self.normalizer.denormalize(found.steps.transitions_BTX[rows])
        columns = [raw[..., column] for column in (layout.observation, layout.action, layout.reward, layout.return_to_go)]
        per_plan = found.codes_RM, found.log_probability_R, found.predicted_return_R, found.score_R
        return *columns, *(field[rows] for field in per_plan)


def _best_rows(score_NC: Tensor, count: int) -> Tensor:
    """The rows (N * count,) of the candidates with each state's `count` highest scores."""
    return _rows_of(score_NC.topk(count).indices, score_NC.shape[1])


def _rows_of(indices_NW: Tensor, candidates: int) -> Tensor:
    """The rows (N * W,) of the candidates at `indices_NW` among their state's."""
    return (indices_NW + candidates * torch.arange(len(indices_NW), device=indices_NW.device)[:, None]).flatten()
