"""The planner as plainly as it can be written, to test the fast one against and to measure it by.

It plans for one state after the other, keeps nothing from one depth to the next but the plans' codes, and computes whatever it
needs of a plan from all of its codes: the next code's probabilities, its likelihood, its steps. Given the same noise, it finds
the same plan.

Shapes: C plans, M codes, S samples a plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tap.planning.planner import Plan, Search


@torch.no_grad()
def plan(search: Search, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
    """What `search.plan` finds for raw states (N, O), up to rounding."""
    noise = search.noise(generators).to(observations_NO.device)
    found = [_plan(search, observations_NO[n : n + 1], noise[n : n + 1]) for n in range(len(noise))]
    return Plan(*(torch.cat(field).cpu().numpy() for field in zip(*found, strict=True)))


def _plan(search: Search, observation_1O: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    layout, params = search.vqvae.layout, search.params
    state_1O = search.normalizer.normalize(observation_1O, layout.observation)
    codes_CM = torch.empty(1, 0, dtype=torch.long, device=state_1O.device)
    for depth, noise_of_depth in enumerate(search.noise_of_depths(noise), start=1):
        earlier_CM = functional.pad(codes_CM, (1, 0), value=search.prior.start)
        log_probs_CMK, _ = search.prior(earlier_CM, state_1O.expand(len(codes_CM), -1))
        drawn_CS = search.draw(log_probs_CMK[:, -1], noise_of_depth, search.samples[depth - 1])
        codes_CM = torch.cat([codes_CM.repeat_interleave(drawn_CS.shape[1], dim=0), drawn_CS.reshape(-1, 1)], dim=1)
        if params.search != "beam" and depth < search.num_codes:
            continue
        state_CO = state_1O.expand(len(codes_CM), -1)
        log_probability_C = search.prior.log_probabilities(codes_CM, state_CO).sum(dim=1)
        steps, _ = search.vqvae.decode(codes_CM, state_CO)
        value_C, score_C = search.objective(steps, log_probability_C, depth if params.partial_threshold else search.num_codes)
        best = score_C.topk(search.kept[depth] if depth < search.num_codes else 1).indices
        codes_CM = codes_CM[best]
    raw = search.normalizer.denormalize(steps.transitions_BTX[best])
    columns = [raw[..., column] for column in (layout.observation, layout.action, layout.reward, layout.return_to_go)]
    return *columns, codes_CM, log_probability_C[best], value_C[best], score_C[best]
