"""Planning: a search over codes for the plan with the highest predicted return that the data supports (paper, section 3.3).

Knows the models only by `VQVAE.decode` and the prior's log probabilities, steps no environment, reads no file. Plans for any
number of states at once: each state draws from its own generator, so its plan does not depend on the others.

Shapes: N states, W kept plans a state, C candidates a state, R rows (N * W or N * C), M codes, L latent step,
H steps (= M * L), O observation, A action, X transition, K codebook size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tap.cuda_graph import Graphed
from tap.data.windows import Normalizer
from tap.model.prior import Prior
from tap.model.transformer import extend
from tap.model.vqvae import VQVAE, Decoded
from tap.settings import PlannerParams

MOST_STATES = 16  # planned for at once; a power of two. On two CPU cores a state takes longer in larger batches


@dataclass(frozen=True)
class Plan:
    """A plan for each of N states, in the units of the environment."""

    observations: np.ndarray  # (N, H, O), the first is the model's own image of the given state
    actions: np.ndarray  # (N, H, A)
    rewards: np.ndarray  # (N, H)
    returns_to_go: np.ndarray  # (N, H)
    codes: np.ndarray  # (N, M)
    log_probability: np.ndarray  # (N,), ln p(z_1..z_M | s_1)
    value: np.ndarray  # (N,), the predicted return
    score: np.ndarray  # (N,), the objective


def predicted_return(rewards: Tensor, returns_to_go: Tensor, discount: float, end: Tensor | None = None) -> Tensor:
    """sum_{t=1}^{T-1} gamma^(t-1) r_t + gamma^(T-1) R_T over the last dimension: the objective's return part, (...,).

    R_T includes r_T. With `end`, the probability (..., T) that step t lies past the episode's end, each step counts only as far
    as the episode still goes on.
    """
    weights = discount ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    terms = weights * torch.cat([rewards[..., :-1], returns_to_go[..., -1:]], dim=-1)
    if end is not None:
        terms = terms * (1 - end).cumprod(dim=-1)
    return terms.sum(dim=-1)


def likelihood_penalty(log_probability: Tensor, num_codes: int, params: PlannerParams) -> Tensor:
    """alpha * ln(min(p, beta^M)): the objective's second part, constant for plans that are likely enough."""
    return params.likelihood_weight * log_probability.clamp(max=num_codes * math.log(params.likelihood_threshold))


def draw(log_probs_RK: Tensor, noise_RS: Tensor) -> Tensor:
    """Codes (R, S) drawn from the rows of `log_probs_RK` by inverting their cumulative sums at `noise_RS` in [0, 1)."""
    cumulative_RK = log_probs_RK.exp().cumsum(dim=-1)
    target_RS = noise_RS * cumulative_RK[:, -1:]
    return torch.searchsorted(cumulative_RK, target_RS, right=True).clamp(max=log_probs_RK.shape[-1] - 1)


def draw_distinct(log_probs_RK: Tensor, noise_RK: Tensor, count: int) -> Tensor:
    """`count` different codes (R, count) drawn from the rows of `log_probs_RK` one after another, by Gumbel-top-k.

    `noise_RK` is uniform in [0, 1). Kool et al. 2019: the largest of log p + Gumbel noise are a sample without replacement.
    """
    gumbel_RK = -(-noise_RK.clamp(min=torch.finfo(noise_RK.dtype).tiny).log()).log()
    return (log_probs_RK + gumbel_RK).topk(count).indices


def batch_sizes(states: int, recorded: bool) -> list[int]:
    """How many states to plan for at once, one batch after the other, so that the memory of a search stays bounded.

    Where a search is `recorded` as a graph for each size, sizes are powers of two, and there are few graphs.
    """
    sizes = []
    while states:
        sizes.append(min(MOST_STATES, 1 << states.bit_length() - 1 if recorded else states))
        states -= sizes[-1]
    return sizes


@dataclass(frozen=True)
class Candidates:
    """All plans that a search has scored at its last depth, all of a state's side by side: R = N * C rows."""

    codes_RM: Tensor
    steps: Decoded
    log_probability_R: Tensor
    value_R: Tensor
    score_R: Tensor


class Search:
    """The search with one policy's models and params."""

    def __init__(self, vqvae: VQVAE, prior: Prior, normalizer: Normalizer, params: PlannerParams) -> None:
        self.vqvae, self.prior, self.normalizer, self.params = vqvae, prior, normalizer, params
        self.num_codes = params.horizon // vqvae.params.latent_step
        beam = params.search == "beam"
        width, factor = (params.beam_width, params.expansion_factor) if beam else (params.samples, 1)
        self._distinct = beam and not params.replacement
        most = vqvae.params.codebook.size if self._distinct else width * factor  # codes that can be drawn after a plan
        # At each depth: how many plans are kept so far, at first the empty one, and how many codes are drawn after each.
        self.kept, self.samples = [1], [min(width * factor, most)]
        for _ in range(self.num_codes - 1):
            self.kept.append(min(width, self.kept[-1] * self.samples[-1]))
            self.samples.append(min(factor, most))
        self._graphs: dict[tuple[int, bool], Graphed[tuple[Tensor, ...]]] = {}
        self._memory = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None  # shared by all graphs

    def plan(self, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
        """The best plan from each raw state, drawing from its own generator (on the CPU)."""
        return self._run(observations_NO, self.noise(generators), best=True)

    def candidates(self, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
        """All C plans that the search scored at its last depth, from each raw state: a Plan whose arrays are (N, C, ...)."""
        return self._run(observations_NO, self.noise(generators), best=False)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """All uniform numbers that a search uses, those of each of N generators in a row: (N, sum of `_noise_sizes`)."""
        return torch.stack([torch.rand(sum(self._noise_sizes()), generator=generator) for generator in generators])

    def noise_of_depths(self, noise: Tensor) -> list[Tensor]:
        """`noise` by depth, with a row for each kept plan of each state: (N * W, S), without replacement (N * W, K)."""
        parts = noise.split(self._noise_sizes(), dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(len(noise) * kept, -1) for part, kept in zip(parts, self.kept, strict=True)]

    def _noise_sizes(self) -> list[int]:
        size = self.vqvae.params.codebook.size
        return [kept * (size if self._distinct else samples) for kept, samples in zip(self.kept, self.samples, strict=True)]

    def draw(self, log_probs_RK: Tensor, noise: Tensor, samples: int) -> Tensor:
        """The next codes (R, S) of each kept plan."""
        if self.params.search == "uniform_sampling":
            return draw(torch.zeros_like(log_probs_RK), noise)
        if self._distinct:
            return draw_distinct(log_probs_RK, noise, samples)
        return draw(log_probs_RK, noise)

    def objective(self, steps: Decoded, log_probability_R: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
        """Predicted return (R,) of decoded plans, and their score (R,), where plans are held to beta^num_codes."""
        layout = self.vqvae.layout
        raw_RTX = self.normalizer.denormalize(steps.transitions_BTX)
        end_RT = steps.end_logits_BT.sigmoid() if self.params.stop_at_end else None
        discount = self.vqvae.params.windows.discount
        value_R = predicted_return(raw_RTX[..., layout.reward], raw_RTX[..., layout.return_to_go], discount, end_RT)
        return value_R, value_R + likelihood_penalty(log_probability_R, num_codes, self.params)

    def beam_search(self, state_NO: Tensor, noise: Tensor) -> Candidates:
        """The paper's algorithm 1, for all states at once; of the last depth's plans the best is the result.

        1   Z_1: B * E codes drawn from p(z | s)
        2   for t = 2 to T:
        3       C_t: each plan of Z_(t-1), with each of E codes drawn from p(z_t | z_<t, s) after it
        4       decode every plan of C_t
        5       Z_t: the B best of C_t
        6   return the best of the last decoded

        Line 1 is line 3 for a single empty plan with B * E codes drawn after it. Its plans are decoded and cut to B as well.
        Codes drawn without replacement are at most the codebook's K after each plan, and plans kept at most those drawn.
        """
        N = len(state_NO)
        # Tensors of plans have a row for each, all of a state's side by side.
        state_RO, codes_RM = state_NO, torch.empty(N, 0, dtype=torch.long, device=state_NO.device)
        steps = Decoded(state_NO.new_empty(N, 0, self.vqvae.layout.transition_dim), state_NO.new_empty(N, 0))
        log_probability_R = state_NO.new_zeros(N)
        last_R1 = torch.full((N, 1), self.prior.start, device=state_NO.device)
        prior_past: Tensor | None = None
        decoder_past: Tensor | None = None
        for depth, noise_of_depth in enumerate(self.noise_of_depths(noise)):
            # 1, 3: expand. A kept plan is one row for the prior, however many codes are drawn after it.
            samples = self.samples[depth]
            log_probs_R1K, prior_new = self.prior(last_R1, state_RO, prior_past)
            drawn_RS = self.draw(log_probs_R1K[:, 0], noise_of_depth, samples)
            log_probability_R = (log_probability_R[:, None] + log_probs_R1K[:, 0].gather(1, drawn_RS)).flatten()
            parent_R = torch.arange(len(drawn_RS), device=state_NO.device).repeat_interleave(samples)
            codes_RM = torch.cat([codes_RM[parent_R], drawn_RS.reshape(-1, 1)], dim=1)
            state_RO = state_RO[parent_R]

            # 4: decode the new code's steps only, after those of the kept plan.
            new, decoder_new = self.vqvae.decode(codes_RM[:, -1:], state_RO, decoder_past)
            steps = _append(_rows(steps, parent_R), new)
            threshold_codes = depth + 1 if self.params.partial_threshold else self.num_codes
            value_R, score_R = self.objective(steps, log_probability_R, threshold_codes)
            if depth + 1 == self.num_codes:
                return Candidates(codes_RM, steps, log_probability_R, value_R, score_R)  # 6

            # 5: keep the best plans.
            best_NW = score_R.view(N, -1).topk(self.kept[depth + 1]).indices
            row_R = _rows_of(best_NW, len(score_R) // N)
            codes_RM, state_RO, log_probability_R = codes_RM[row_R], state_RO[row_R], log_probability_R[row_R]
            steps, last_R1 = _rows(steps, row_R), codes_RM[:, -1:]
            prior_past = extend(prior_past, prior_new, parent_R[row_R])
            decoder_past = extend(decoder_past, decoder_new, row_R)
        raise AssertionError("a plan has at least one code")

    def sample(self, state_NO: Tensor, noise: Tensor) -> Candidates:
        """Vanilla sampling: whole plans from the prior or uniform over the codebook, none cut."""
        N = len(state_NO)
        state_RO, log_probability_R = state_NO, state_NO.new_zeros(N)
        codes_RM = torch.full((N, 1), self.prior.start, device=state_NO.device)
        past: Tensor | None = None
        for depth, noise_of_depth in enumerate(self.noise_of_depths(noise)):
            log_probs_R1K, new = self.prior(codes_RM[:, -1:], state_RO, past)
            drawn_RS = self.draw(log_probs_R1K[:, 0], noise_of_depth, self.samples[depth])
            log_probability_R = (log_probability_R[:, None] + log_probs_R1K[:, 0].gather(1, drawn_RS)).flatten()
            parent_R = torch.arange(len(drawn_RS), device=state_NO.device).repeat_interleave(self.samples[depth])
            codes_RM = torch.cat([codes_RM[parent_R], drawn_RS.reshape(-1, 1)], dim=1)
            state_RO, past = state_RO[parent_R], extend(past, new, parent_R)
        steps, _ = self.vqvae.decode(codes_RM[:, 1:], state_RO)
        value_R, score_R = self.objective(steps, log_probability_R, self.num_codes)
        return Candidates(codes_RM[:, 1:], steps, log_probability_R, value_R, score_R)

    @torch.no_grad()
    def _run(self, observations_NO: Tensor, noise: Tensor, *, best: bool) -> Plan:
        """Plans for batches of the states, one after the other."""
        assert len(noise) == len(observations_NO) > 0
        sizes = batch_sizes(len(noise), recorded=observations_NO.is_cuda)
        batches = zip(observations_NO.split(sizes), noise.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        parts = [self._run_batch(*batch, best) for batch in batches]
        return Plan(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _run_batch(self, observations_NO: Tensor, noise: Tensor, best: bool) -> list[np.ndarray]:
        """Plan's fields: replays the graph of `_solve` for this many states, on a CPU calls it."""
        if not observations_NO.is_cuda:
            tensors = self._solve(observations_NO, noise, best)
        else:
            key = len(noise), best
            if key not in self._graphs:
                self._graphs[key] = Graphed(partial(self._solve, best=best), warm_up=1, memory=self._memory)
            tensors = self._graphs[key](observations_NO, noise.to(observations_NO.device))
        arrived = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        if observations_NO.is_cuda:
            torch.cuda.current_stream().synchronize()
        return [tensor.numpy() for tensor in arrived]

    def _solve(self, observations_NO: Tensor, noise: Tensor, best: bool) -> tuple[Tensor, ...]:
        """Plan's fields, of the best candidate or of all."""
        N, layout = len(observations_NO), self.vqvae.layout
        search = self.beam_search if self.params.search == "beam" else self.sample
        found = search(self.normalizer.normalize(observations_NO, layout.observation), noise)
        score_NC = found.score_R.view(N, -1)
        C = score_NC.shape[1]
        every = torch.arange(N * C, device=score_NC.device).view(N, C)
        rows = _rows_of(score_NC.argmax(dim=1, keepdim=True), C) if best else every
        raw = self.normalizer.denormalize(found.steps.transitions_BTX[rows])
        columns = [raw[..., column] for column in (layout.observation, layout.action, layout.reward, layout.return_to_go)]
        return *columns, found.codes_RM[rows], found.log_probability_R[rows], found.value_R[rows], found.score_R[rows]


def _rows_of(indices_NW: Tensor, candidates: int) -> Tensor:
    """The rows (N * W,) of candidates that have `indices_NW` among their state's."""
    return (indices_NW + candidates * torch.arange(len(indices_NW), device=indices_NW.device)[:, None]).flatten()


def _rows(steps: Decoded, rows: Tensor) -> Decoded:
    return Decoded(steps.transitions_BTX[rows], steps.end_logits_BT[rows])


def _append(steps: Decoded, new: Decoded) -> Decoded:
    return Decoded(
        torch.cat([steps.transitions_BTX, new.transitions_BTX], dim=1),
        torch.cat([steps.end_logits_BT, new.end_logits_BT], dim=1),
    )
