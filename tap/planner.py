"""Planning: a search over codes for the plan with the highest predicted return that the data supports (paper, section 3.3).

Knows the models only by `VQVAE.decode` and the prior's log probabilities, steps no environment, reads no file. Plans for any
number of states at once: each state draws from its own generator, so its plan does not depend on the others.

Shapes: N states, W kept plans a state, C candidates a state, R rows (N * W or N * C), M codes, L latent step,
H steps (= M * L), O observation, A action, X transition, K codebook size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tap.prior import Prior
from tap.settings import Planner
from tap.transformer import Cache, select
from tap.vqvae import VQVAE, Decoded
from tap.windows import Normalizer


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


def likelihood_penalty(log_probability: Tensor, num_codes: int, params: Planner) -> Tensor:
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


@dataclass(frozen=True)
class _Candidates:
    """All plans that a search has scored at its last depth, all of a state's side by side: R = N * C rows."""

    codes_RM: Tensor
    steps: Decoded
    log_probability_R: Tensor
    value_R: Tensor
    score_R: Tensor


def plan(
    vqvae: VQVAE,
    prior: Prior,
    normalizer: Normalizer,
    params: Planner,
    observations_NO: Tensor,
    generators: Sequence[torch.Generator],
) -> Plan:
    """The best plan from each raw state in `observations_NO`, drawing from its own generator (on the CPU)."""
    found = _search(vqvae, prior, normalizer, params, observations_NO, generators)
    N = len(observations_NO)
    best_NC = found.score_R.view(N, -1)
    row_N = best_NC.argmax(dim=1) + best_NC.shape[1] * torch.arange(N, device=best_NC.device)
    return _finish(vqvae, normalizer, found, row_N)


def candidates(
    vqvae: VQVAE,
    prior: Prior,
    normalizer: Normalizer,
    params: Planner,
    observations_NO: Tensor,
    generators: Sequence[torch.Generator],
) -> Plan:
    """All C plans that the search scored at its last depth, from each state: a Plan whose arrays are (N, C, ...)."""
    found = _search(vqvae, prior, normalizer, params, observations_NO, generators)
    N, C = len(observations_NO), len(found.score_R) // len(observations_NO)
    return _finish(vqvae, normalizer, found, torch.arange(N * C, device=found.score_R.device).view(N, C))


@torch.no_grad()
def _search(
    vqvae: VQVAE,
    prior: Prior,
    normalizer: Normalizer,
    params: Planner,
    observations_NO: Tensor,
    generators: Sequence[torch.Generator],
) -> _Candidates:
    assert len(generators) == len(observations_NO)
    state_NO = normalizer.normalize(observations_NO, vqvae.layout.observation)
    search = beam_search if params.search == "beam" else sample
    return search(vqvae, prior, normalizer, params, state_NO, generators)


def beam_search(
    vqvae: VQVAE,
    prior: Prior,
    normalizer: Normalizer,
    params: Planner,
    state_NO: Tensor,
    generators: Sequence[torch.Generator],
) -> _Candidates:
    """Algorithm 1 of the paper: expand every kept plan by sampled codes, decode, keep the best by the objective."""
    N, C = len(state_NO), params.beam_width * params.expansion_factor
    num_codes = params.horizon // vqvae.params.latent_step

    # One empty plan for each state. Tensors of plans have a row for each, all of a state's side by side.
    kept = 1
    state_RO, codes_RM = state_NO, torch.empty(N, 0, dtype=torch.long, device=state_NO.device)
    steps = Decoded(state_NO.new_empty(N, 0, vqvae.layout.transition_dim), state_NO.new_empty(N, 0))
    log_probability_R = state_NO.new_zeros(N)
    last_R1 = torch.full((N, 1), prior.start, device=state_NO.device)
    prior_cache: Cache | None = None
    decoder_cache: Cache | None = None
    for depth in range(num_codes):
        log_probs_R1K, prior_cache = prior(last_R1, state_RO, prior_cache)
        log_probs_RK = log_probs_R1K[:, 0]

        # Expand: the same number of samples from every kept plan.
        samples = C // kept
        if params.replacement:
            drawn_RS = draw(log_probs_RK, _noise(generators, (kept, samples), state_NO.device).flatten(0, 1))
        else:
            noise_RK = _noise(generators, (kept, log_probs_RK.shape[-1]), state_NO.device).flatten(0, 1)
            drawn_RS = draw_distinct(log_probs_RK, noise_RK, samples)
        log_probability_R = (log_probability_R[:, None] + log_probs_RK.gather(1, drawn_RS)).flatten()
        parent_R = torch.arange(N * kept, device=state_NO.device).repeat_interleave(samples)
        codes_RM = torch.cat([codes_RM[parent_R], drawn_RS.reshape(-1, 1)], dim=1)
        state_RO = state_RO[parent_R]

        # Decode the new code's steps only; those before it are cached.
        decoder_cache = select(decoder_cache, parent_R) if decoder_cache else None
        new, decoder_cache = vqvae.decode(codes_RM[:, -1:], state_RO, decoder_cache)
        steps = _append(_rows(steps, parent_R), new)
        value_R = _value(vqvae, normalizer, params, steps)
        threshold_codes = depth + 1 if params.partial_threshold else num_codes
        score_R = value_R + likelihood_penalty(log_probability_R, threshold_codes, params)
        if depth + 1 == num_codes:
            return _Candidates(codes_RM, steps, log_probability_R, value_R, score_R)

        # Keep the best plans.
        kept = params.beam_width
        best_NW = score_R.view(N, C).topk(kept).indices
        row_R = (best_NW + C * torch.arange(N, device=best_NW.device)[:, None]).flatten()
        codes_RM, state_RO, log_probability_R = codes_RM[row_R], state_RO[row_R], log_probability_R[row_R]
        steps = _rows(steps, row_R)
        prior_cache, decoder_cache = select(prior_cache, parent_R[row_R]), select(decoder_cache, row_R)
        last_R1 = codes_RM[:, -1:]
    raise AssertionError("a plan has at least one code")


def sample(
    vqvae: VQVAE,
    prior: Prior,
    normalizer: Normalizer,
    params: Planner,
    state_NO: Tensor,
    generators: Sequence[torch.Generator],
) -> _Candidates:
    """Vanilla sampling: `params.samples` whole plans from the prior or uniform over the codebook."""
    num_codes = params.horizon // vqvae.params.latent_step
    noise_NMC = _noise(generators, (num_codes, params.samples), state_NO.device)
    state_RO = state_NO.repeat_interleave(params.samples, dim=0)
    last_R1 = torch.full((len(state_RO), 1), prior.start, device=state_NO.device)
    codes_RM = last_R1[:, :0]
    log_probability_R = state_RO.new_zeros(len(state_RO))
    cache: Cache | None = None
    for depth in range(num_codes):
        log_probs_R1K, cache = prior(last_R1, state_RO, cache)
        noise_R1 = noise_NMC[:, depth].reshape(-1, 1)
        uniform = params.search == "uniform_sampling"
        last_R1 = draw(torch.zeros_like(log_probs_R1K[:, 0]) if uniform else log_probs_R1K[:, 0], noise_R1)
        log_probability_R = log_probability_R + log_probs_R1K[:, 0].gather(1, last_R1)[:, 0]
        codes_RM = torch.cat([codes_RM, last_R1], dim=1)
    steps, _ = vqvae.decode(codes_RM, state_RO)
    value_R = _value(vqvae, normalizer, params, steps)
    return _Candidates(
        codes_RM, steps, log_probability_R, value_R, value_R + likelihood_penalty(log_probability_R, num_codes, params)
    )


def _noise(generators: Sequence[torch.Generator], shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([torch.rand(shape, generator=generator) for generator in generators]).to(device)


def _rows(steps: Decoded, rows: Tensor) -> Decoded:
    return Decoded(steps.transitions_BTX[rows], steps.end_logits_BT[rows])


def _append(steps: Decoded, new: Decoded) -> Decoded:
    return Decoded(
        torch.cat([steps.transitions_BTX, new.transitions_BTX], dim=1),
        torch.cat([steps.end_logits_BT, new.end_logits_BT], dim=1),
    )


def _value(vqvae: VQVAE, normalizer: Normalizer, params: Planner, steps: Decoded) -> Tensor:
    layout = vqvae.layout
    raw_RTX = normalizer.denormalize(steps.transitions_BTX)
    end_RT = steps.end_logits_BT.sigmoid() if params.stop_at_end else None
    discount = vqvae.params.windows.discount
    return predicted_return(raw_RTX[..., layout.reward], raw_RTX[..., layout.return_to_go], discount, end_RT)


def _finish(vqvae: VQVAE, normalizer: Normalizer, found: _Candidates, rows: Tensor) -> Plan:
    """The candidates in `rows` (...) as a Plan."""
    layout, raw = vqvae.layout, normalizer.denormalize(found.steps.transitions_BTX[rows])
    columns = (raw[..., layout.observation], raw[..., layout.action], raw[..., layout.reward], raw[..., layout.return_to_go])
    numbers = (found.codes_RM[rows], found.log_probability_R[rows], found.value_R[rows], found.score_R[rows])
    return Plan(*(tensor.cpu().numpy() for tensor in (*columns, *numbers)))
