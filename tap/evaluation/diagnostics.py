"""What a search chooses from: how drawn plans are spread, how far the simulator agrees, what they look like (paper, appendix).

Shapes: S states, C plans drawn from a state, H plan steps, M codes, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from scipy.stats import spearmanr

from tap.envs.make import State, set_state
from tap.evaluation.rollout import episode_generator, follow, state_prediction_error
from tap.planning.policy import Plan, Policy

Environment = gymnasium.Env[np.ndarray, np.ndarray]

EPISODES = 10  # the paper's, as are the numbers of visualised plans
VISUALISED = {"prior_sampling": {"samples": 256}, "beam": {"beam_width": 64, "expansion_factor": 4}}
FRAMES = 3
FRAME_SIZE = 160  # pixels, about


@dataclass(frozen=True)
class Distribution:
    """Plans drawn from each of S states (paper, "Sampled Distributions")."""

    codes: np.ndarray  # (S, C, M)
    predicted_returns: np.ndarray  # (S, C)
    state_prediction_errors: np.ndarray  # (S, C), the simulator following each plan's actions from the plan's state

    def summarize(self) -> dict[str, float]:
        """Medians over all plans, JSON-able. Diversity: the spread of predicted returns, and the share of different plans."""
        distinct = [len(np.unique(codes_CM, axis=0)) / len(codes_CM) for codes_CM in self.codes]
        returns, errors = self.predicted_returns.ravel(), self.state_prediction_errors.ravel()
        return {
            "predicted_return_median": float(np.median(returns)),
            "predicted_return_deviation": float(returns.std()),
            "state_prediction_error_median": float(np.median(errors)),
            "distinct_plans": float(np.mean(distinct)),
            # Spearman's, undefined where all plans promise or err the same
            "rank_correlation": float(np.nan_to_num(spearmanr(returns, errors).statistic)),
        }

    def as_json(self) -> dict[str, list[float]]:
        """One number a plan, all states' together."""
        return {
            "predicted_returns": self.predicted_returns.ravel().tolist(),
            "state_prediction_errors": self.state_prediction_errors.ravel().tolist(),
        }


def with_planner(policy: Policy, **changes: Any) -> Policy:
    """The same models with other planner params."""
    params = policy.params.model_copy(update=changes)
    return Policy(policy.vqvae, policy.normalizer, policy.prior, params, policy.device)


def candidates(policy: Policy, env: Environment, state: State, planner_seed: int, episode: int) -> Plan:
    """All plans that the policy's search has scored from one state: a Plan whose arrays are (C, ...)."""
    observation_1O = set_state(env, state)[None].astype(np.float32)
    found = policy.candidates(observation_1O, [episode_generator(planner_seed, episode)])
    return Plan(**{name: array[0] for name, array in vars(found).items()})


def distribution(policy: Policy, env: Environment, states: Sequence[State], planner_seed: int) -> Distribution:
    """What the policy's search, a sampling one, draws from each of `states`, the episodes' first or any others."""
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
    """The plans that sampling and beam search choose from at `state`, and the simulator following the chosen ones, JSON-able.

    Shown in two observation `dimensions`; None takes those in which the sampled plans differ most for the data's deviation.
    A beam needs partial plans, which an attention bottleneck does not decode: then there is only sampling.
    """
    searches = VISUALISED if policy.vqvae.params.bottleneck == "pool" else {"prior_sampling": VISUALISED["prior_sampling"]}
    shown: dict[str, Any] = {}
    for search, changes in searches.items():
        plan = candidates(with_planner(policy, search=search, **changes), env, state, planner_seed, 0)
        if dimensions is None:
            deviation_O = policy.normalizer.deviation[policy.vqvae.layout.observation]
            spread_O = (plan.observations.std(axis=0) / deviation_O).mean(axis=0)
            dimensions = sorted(np.resize(np.argsort(-spread_O, kind="stable"), 2).tolist())  # the only one twice
        best = int(plan.score.argmax())
        simulated_nO, _ = follow(env, state, plan.actions[best])
        shown[search] = {
            "observations": _rounded(plan.observations[..., dimensions]),
            "scores": plan.score.tolist(),
            "chosen": best,
            "chosen_actions": plan.actions[best].tolist(),
            "simulated": _rounded(simulated_nO[:, dimensions]),
        }
    assert dimensions is not None
    return {"dimensions": list(dimensions), "searches": shown}


def _rounded(values: np.ndarray) -> Any:
    return values.astype(np.float64).round(5).tolist()  # finer than a drawing, and a third of the file


def render(env: Environment, state: State, actions_HA: np.ndarray) -> np.ndarray:
    """FRAMES pictures side by side of an `env` that renders RGB arrays, as it follows `actions_HA` from `state`.

    The picture is (height, FRAMES * width, 3) uint8. Raises whatever the environment's renderer raises.
    """
    steps = len(follow(env, state, actions_HA)[1])
    pictures = []
    for place in np.linspace(0, steps, FRAMES).round().astype(int):
        set_state(env, replace(state, actions=(*state.actions, *actions_HA[:place])))
        pictures.append(_small(env))
    return np.concatenate(pictures, axis=1)


def _small(env: Environment) -> np.ndarray:
    """One picture, averaged over blocks of pixels."""
    picture = np.asarray(env.render())
    block = max(1, picture.shape[0] // FRAME_SIZE)
    height, width = (size // block for size in picture.shape[:2])
    blocks = picture[: height * block, : width * block].reshape(height, block, width, block, 3)
    small: np.ndarray = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return small
