"""A plain version of the Trajectory Transformer's search, to test and benchmark the fast one against.

It plans for one state at a time, keeps only tokens, and recomputes everything else from all tokens of a window. From the same
noise it finds the same plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tap.methods.trajectory_planner import TrajectoryPlan, TrajectoryPlanner, sample_bins


@torch.no_grad()
def plan(
    planner: TrajectoryPlanner,
    observations_NO: Tensor,
    generators: Sequence[torch.Generator],
    past_NPD: Tensor | None = None,
) -> TrajectoryPlan:
    """What `planner.plan` finds from raw states (N, O), up to rounding."""
    noise = planner.noise(generators).to(observations_NO.device)
    begin_NP = planner.begin(observations_NO, past_NPD)
    found = [planner.decode(*_plan(planner, begin_NP[n : n + 1], noise[n])) for n in range(len(noise))]
    return TrajectoryPlan(*(torch.cat(field).cpu().numpy() for field in zip(*found, strict=True)))


def _plan(planner: TrajectoryPlanner, begin_1P: Tensor, noise_HAWS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    model, layout, params = planner.model, planner.layout, planner.params
    first = 0  # token of the window
    tokens_CP, estimates_CT2 = begin_1P.expand(params.beam_width, -1), noise_HAWS.new_empty(params.beam_width, 0, 2)
    for step, noise_AWS in enumerate(noise_HAWS):
        tokens_CP = tokens_CP.repeat_interleave(params.expansion_factor, dim=0)
        estimates_CT2 = estimates_CT2.repeat_interleave(params.expansion_factor, dim=0)
        for dimension, noise_WS in enumerate(noise_AWS, start=layout.observation_dim):
            logits = model.logits(model.read(tokens_CP[:, first:])[0], dimension)
            bins = sample_bins(logits, noise_WS.flatten(), params.top_k, params.cdf)
            tokens_CP = torch.cat([tokens_CP, bins[:, None]], dim=1)
        reward_bin, reward = planner.estimate(model.read(tokens_CP[:, first:])[0], layout.reward)
        tokens_CP = torch.cat([tokens_CP, reward_bin[:, None]], dim=1)
        last_CD = tokens_CP[:, -model.token_dim :]
        return_to_go = planner.return_to_go(
            model.read(tokens_CP[:, first:])[0], last_CD[:, layout.observation], last_CD[:, layout.action]
        )
        estimates_CT2 = torch.cat([estimates_CT2, torch.stack([reward, return_to_go], dim=-1)[:, None]], dim=1)

        score_C = planner.discount**step * return_to_go
        for earlier in range(step):
            score_C = score_C + planner.discount**earlier * estimates_CT2[:, earlier, 0]
        best = score_C.topk(params.beam_width if step + 1 < params.horizon else 1).indices
        tokens_CP, estimates_CT2, score_C = tokens_CP[best], estimates_CT2[best], score_C[best]
        if step + 1 < params.horizon:
            if tokens_CP.shape[1] - first == model.length * model.token_dim:
                first = tokens_CP.shape[1] - params.context * model.token_dim
            for dimension in range(layout.observation_dim):
                bins = model.logits(model.read(tokens_CP[:, first:])[0], dimension).argmax(dim=-1)
                tokens_CP = torch.cat([tokens_CP, bins[:, None]], dim=1)
    return tokens_CP, estimates_CT2, score_C
