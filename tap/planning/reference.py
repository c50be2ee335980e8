"""A plain version of the planner, to test and benchmark the fast one against.

It plans for one state at a time, keeps only the plans' codes between depths, and recomputes everything else from all of
a plan's codes: the next code's probabilities, the plan's likelihood, its steps. From the same noise it finds the same plan.

Shapes: C plans, M codes, S codes sampled after each plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tap.planning.plan import Plan
from tap.planning.planner import Planner


@torch.no_grad()
def plan(planner: Planner, observations_NO: Tensor, generators: Sequence[torch.Generator]) -> Plan:
    """What `planner.plan` finds from raw states (N, O), up to rounding."""
    noise = planner.noise(generators).to(observations_NO.device)
    found = [_plan(planner, observations_NO[n : n + 1], noise[n : n + 1]) for n in range(len(noise))]
    return Plan(*(torch.cat(field).cpu().numpy() for field in zip(*found, strict=True)))


def _plan(planner: Planner, observation_1O: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    layout, params = planner.vqvae.layout, planner.params
    state_1O = planner.normalizer.normalize(observation_1O, layout.observation)
    codes_CM = torch.empty(1, 0, dtype=torch.long, device=state_1O.device)
    for depth, depth_noise in enumerate(planner.noise_by_depth(noise), start=1):
        earlier_CM = functional.pad(codes_CM, (1, 0), value=planner.prior.start)
        log_probs_CMK, _ = planner.prior(earlier_CM, state_1O.expand(len(codes_CM), -1))
        sampled_CS = planner.next_codes(log_probs_CMK[:, -1], depth_noise, planner.branching[depth - 1])
        codes_CM = torch.cat([codes_CM.repeat_interleave(sampled_CS.shape[1], dim=0), sampled_CS.reshape(-1, 1)], dim=1)
        if params.search != "beam" and depth < planner.num_codes:
            continue
        state_CO = state_1O.expand(len(codes_CM), -1)
        log_probability_C = planner.prior.log_probabilities(codes_CM, state_CO).sum(dim=1)
        steps, _ = planner.vqvae.decode(codes_CM, state_CO)
        return_C, score_C = planner.objective(steps, log_probability_C, depth)
        best = score_C.topk(planner.beam_sizes[depth] if depth < planner.num_codes else 1).indices
        codes_CM = codes_CM[best]
    raw = planner.normalizer.denormalize(steps.transitions_BTX[best])
    columns = [raw[..., column] for column in (layout.observation, layout.action, layout.reward, layout.return_to_go)]
    return *columns, codes_CM, log_probability_C[best], return_C[best], score_C[best]
