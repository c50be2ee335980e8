"""Diagnostics of a search: the plans it chooses from, and their error against the simulator.

The paper's appendices "Sampled Distributions" and "Visualize Plans".

Shapes: S states, C plans sampled from a state, H plan steps, n <= H simulated steps, M codes, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from tap.envs.make import Environment, State, set_state
from tap.evaluation.comparison import follow, state_prediction_error
from tap.evaluation.rollout import episode_generator
from tap.planning.plan import Plan
from tap.planning.policy import Policy

EPISODES = 10  # as in the paper, like the numbers of visualised plans
VISUALISED = {"prior_sampling": {"samples": 256}, "beam": {"beam_width": 64, "expansion_factor": 4}}
FRAMES = 3
FRAME_SIZE = 160  # pixels, approximately


@dataclass(frozen=True)
class Distribution:
    """Plans sampled from each of S states (paper, appendix "Sampled Distributions")."""

    codes: np.ndarray  # (S, C, M)
    predicted_returns: np.ndarray  # (S, C)
    state_prediction_errors: np.ndarray  # (S, C), against the simulator executing the plan's actions from the same state

    def summarize(self) -> dict[str, float]:
        """Medians, diversity and rank correlation over all plans, ready for JSON.

        Diversity is the std of predicted returns and the share of distinct plans. The rank correlation is Spearman's, between
        predicted returns and state prediction errors; it is 0 if one of them is constant.
        """
        distinct = [len(np.unique(codes_CM, axis=0)) / len(codes_CM) for codes_CM in self.codes]
        returns, errors = self.predicted_returns.ravel(), self.state_prediction_errors.ravel()
        return {
            "predicted_return_median": float(np.median(returns)),
            "predicted_return_deviation": float(returns.std()),
            "state_prediction_error_median": float(np.median(errors)),
            "distinct_plans": float(np.mean(distinct)),
            # undefined if predicted returns or errors are constant
            "rank_correlation": float(np.nan_to_num(spearmanr(returns, errors).statistic)),
        }

    def as_json(self) -> dict[str, list[float]]:
        """One number per plan, for all states together."""
        return {
            "predicted_returns": self.predicted_returns.ravel().tolist(),
            "state_prediction_errors": self.state_prediction_errors.ravel().tolist(),
        }


def with_planner(policy: Policy, **changes: Any) -> Policy:
    """The same models with changed planner params."""
    params = policy.params.model_copy(update=changes)
    return Policy(policy.vqvae, policy.normalizer, policy.prior, params, policy.device, policy.critic, policy.actor)


def candidates(policy: Policy, env: Environment, state: State, planner_seed: int, episode: int) -> Plan:
    """All plans that the policy's search scores from one state: a Plan whose arrays are (C, ...)."""
    observation_1O = set_state(env, state)[None].astype(np.float32)
    found = policy.candidates(observation_1O, [episode_generator(planner_seed, episode)])
    return Plan(**{name: array[0] for name, array in vars(found).items()})


def distribution(policy: Policy, env: Environment, states: Sequence[State], planner_seed: int) -> Distribution:
    """The plans that the policy's search, prior or uniform sampling, samples from each of `states`."""
    plans = [candidates(policy, env, state, planner_seed, episode) for episode, state in enumerate(states)]
    errors = [
        [
            state_prediction_error(observations_HO, follow(env, state, actions_HA)[0])
            for observations_HO, actions_HA in zip(plan.observations, plan.actions, strict=True)
        ]
        for state, plan in zip(states, plans, strict=True)
    ]
    return Distribution(
        np.stack([plan.codes for plan in plans]), np.stack([plan.predicted_return for plan in plans]), np.array(errors)
    )


def visualise(
    policy: Policy, env: Environment, state: State, dimensions: Sequence[int] | None, planner_seed: int
) -> dict[str, Any]:
    """The candidate plans of sampling and beam search at `state`, and the simulation of the chosen ones, ready for JSON.

    They are shown in two observation `dimensions`; None selects the two in which the sampled plans vary most, relative to the
    std of the data. A model with the attention bottleneck cannot decode the partial plans of a beam, so it is only sampled.
    """
    searches = VISUALISED if policy.vqvae.params.bottleneck == "pool" else {"prior_sampling": VISUALISED["prior_sampling"]}
    plans = {
        search: candidates(with_planner(policy, search=search, **changes), env, state, planner_seed, 0)
        for search, changes in searches.items()
    }
    shown_dimensions = _most_varied(policy, plans["prior_sampling"]) if dimensions is None else list(dimensions)
    shown = {search: _shown_plans(plan, env, state, shown_dimensions) for search, plan in plans.items()}
    return {"dimensions": shown_dimensions, "searches": shown}


def _most_varied(policy: Policy, plan: Plan) -> list[int]:
    """The two observation dimensions in which the C plans vary most; the same one twice if there is only one."""
    std_O = policy.normalizer.std[policy.vqvae.layout.observation]
    relative_O = (plan.observations.std(axis=0) / std_O).mean(axis=0)
    return sorted(np.resize(np.argsort(-relative_O, kind="stable"), 2).tolist())


def _shown_plans(plan: Plan, env: Environment, state: State, dimensions: list[int]) -> dict[str, Any]:
    best = int(plan.score.argmax())
    simulated_nO, _ = follow(env, state, plan.actions[best])
    return {
        "observations": _rounded(plan.observations[..., dimensions]),
        "scores": plan.score.tolist(),
        "chosen": best,
        "chosen_actions": plan.actions[best].tolist(),
        "simulated": _rounded(simulated_nO[:, dimensions]),
    }


def _rounded(values: np.ndarray) -> Any:
    return values.astype(np.float64).round(5).tolist()  # precise enough for a plot, at a third of the file size


def render(env: Environment, state: State, actions_HA: np.ndarray) -> np.ndarray:
    """FRAMES pictures side by side of `env`, which renders RGB arrays, as it executes `actions_HA` from `state`.

    The picture is (height, FRAMES * width, 3) uint8. Raises whatever the environment's renderer raises.
    """
    steps = len(follow(env, state, actions_HA)[1])
    pictures = []
    for step in np.linspace(0, steps, FRAMES).round().astype(int):
        set_state(env, replace(state, actions=(*state.actions, *actions_HA[:step])))
        pictures.append(_small(env))
    return np.concatenate(pictures, axis=1)


def _small(env: Environment) -> np.ndarray:
    """The current picture, averaged over blocks of pixels."""
    picture = np.asarray(env.render())
    block = max(1, picture.shape[0] // FRAME_SIZE)
    height, width = (size // block for size in picture.shape[:2])
    blocks = picture[: height * block, : width * block].reshape(height, block, width, block, 3)
    small: np.ndarray = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return small
