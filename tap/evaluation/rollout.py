"""Rolling a planner out in simulators, and what is measured on the way.

Shapes: E episodes, N episodes still running, H plan steps, O observation, A action.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import gymnasium
import numpy as np
import torch
from tqdm import tqdm

from tap.data.catalog import DatasetInfo
from tap.data.score import normalized_score
from tap.envs.make import State, get_state, set_state
from tap.estimates import standard_error

if TYPE_CHECKING:
    from tap.planning.policy import Plan

LATENCY_DECISIONS = 20
WARM_UP_DECISIONS = 2


class PlansAhead(Protocol):
    """What a rollout needs of a policy: plans for N states at once, each drawn with its own generator."""

    def plan(self, observations_NO: np.ndarray, generators: Sequence[torch.Generator], /) -> "Plan":
        """Plans from raw observations."""
        ...


@dataclass(frozen=True)
class Comparison:
    """A plan beside what the simulator makes of the plan's actions from the same state.

    The simulated part has n <= H steps: it stops where the episode does.
    """

    title: str
    state: State
    planned_observations: np.ndarray  # (H, O)
    planned_actions: np.ndarray  # (H, A)
    planned_rewards: np.ndarray  # (H,)
    simulated_observations: np.ndarray  # (n, O)
    simulated_rewards: np.ndarray  # (n,)

    @property
    def state_prediction_error(self) -> float:
        """Mean squared error of the planned states, over steps and dimensions."""
        return state_prediction_error(self.planned_observations, self.simulated_observations)

    def as_json(self) -> dict[str, Any]:
        """Nested lists, under the keys "title", "state", "planned" and "simulated"."""
        return {
            "title": self.title,
            "state": {"seed": self.state.seed, "actions": [action.tolist() for action in self.state.actions]},
            "planned": {
                "observations": self.planned_observations.tolist(),
                "actions": self.planned_actions.tolist(),
                "rewards": self.planned_rewards.tolist(),
            },
            "simulated": {"observations": self.simulated_observations.tolist(), "rewards": self.simulated_rewards.tolist()},
        }


@dataclass(frozen=True)
class Rollout:
    """Results of E episodes; episode i was reset with seed `environment_seed` + i. All but the latencies repeat exactly."""

    environment_seed: int
    planner_seed: int
    plan_every: int
    returns: np.ndarray  # (E,) undiscounted
    lengths: np.ndarray  # (E,) steps
    terminated: np.ndarray  # (E,) bool: the environment ended the episode, rather than its time limit
    search_values: np.ndarray  # (E,) predicted return of the plan at the first state
    log_probabilities: np.ndarray  # (E,) of that plan under the prior
    state_prediction_errors: np.ndarray  # (E,) of that plan
    latencies: np.ndarray  # (LATENCY_DECISIONS,) seconds to plan for one state
    batch_latencies: np.ndarray  # (plans,) seconds to plan for all running episodes
    examples: tuple[Comparison, ...]  # at the first and at the middle state of episode 0


def episode_generator(planner_seed: int, episode: int) -> torch.Generator:
    """The planner's source of randomness in one episode, independent of all other episodes."""
    (seed,) = np.random.SeedSequence([planner_seed, episode]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed))


def rollout(
    policy_like: PlansAhead,
    make_env: Callable[[], gymnasium.Env[np.ndarray, np.ndarray]],
    *,
    episodes: int,
    environment_seed: int,
    planner_seed: int,
    plan_every: int = 1,
    progress: bool = True,
) -> Rollout:
    """Run `episodes` episodes in lockstep, planning every `plan_every` steps and executing that many actions of each plan.

    One batched plan serves all running episodes. `make_env` gives environments of `make_environment`.
    """
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(make_env())) for _ in range(episodes)]
        spec = envs[0].spec
        assert spec is not None and spec.max_episode_steps is not None
        limit = spec.max_episode_steps
        observations = [env.reset(seed=environment_seed + episode)[0] for episode, env in enumerate(envs)]
        starts = [get_state(env) for env in envs]
        latencies = _latencies(policy_like, _batch(observations), planner_seed)

        generators = [episode_generator(planner_seed, episode) for episode in range(episodes)]
        returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        terminated, truncated = np.zeros(episodes, bool), np.zeros(episodes, bool)
        first_plan: Plan | None = None
        plans_of_episode_0 = []
        batch_latencies = []
        actions_EHA: list[np.ndarray] = [np.empty(0)] * episodes
        running, step = list(range(episodes)), 0
        with _Progress(episodes, limit, enabled=progress) as report:
            while running:
                if step % plan_every == 0:
                    start = time.perf_counter()
                    plan = policy_like.plan(_batch([observations[i] for i in running]), [generators[i] for i in running])
                    batch_latencies.append(time.perf_counter() - start)
                    first_plan = first_plan or plan
                    if running[0] == 0:
                        plans_of_episode_0.append(_row(plan, 0))
                    for row, i in enumerate(running):
                        actions_EHA[i] = plan.actions[row, :plan_every]
                for i in running:
                    observations[i], reward, terminated[i], truncated[i], _ = envs[i].step(actions_EHA[i][step % plan_every])
                    returns[i] += float(reward)
                    lengths[i] += 1
                step += 1
                running = [i for i in running if not (terminated[i] or truncated[i])]
                report(len(running), returns)

        assert first_plan is not None
        whole_episode, middle = get_state(envs[0]), len(plans_of_episode_0) // 2
        comparisons = [
            _compare(f"first state of episode {i}", envs[i], starts[i], _row(first_plan, i)) for i in range(episodes)
        ]
        halfway = replace(whole_episode, actions=whole_episode.actions[: middle * plan_every])
        example = _compare(f"step {middle * plan_every} of episode 0", envs[0], halfway, plans_of_episode_0[middle])
    return Rollout(
        environment_seed=environment_seed,
        planner_seed=planner_seed,
        plan_every=plan_every,
        returns=returns,
        lengths=lengths,
        terminated=terminated,
        search_values=np.asarray(first_plan.predicted_return, np.float64),
        log_probabilities=np.asarray(first_plan.log_probability, np.float64),
        state_prediction_errors=np.array([comparison.state_prediction_error for comparison in comparisons]),
        latencies=latencies,
        batch_latencies=np.array(batch_latencies),
        examples=(comparisons[0], example),
    )


def _batch(observations: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(observations).astype(np.float32)  # the precision of the training data


def _latencies(policy_like: PlansAhead, observations_EO: np.ndarray, planner_seed: int) -> np.ndarray:
    """Seconds that each of LATENCY_DECISIONS decisions for a single state takes, after a warm-up."""
    seconds = []
    for decision in range(WARM_UP_DECISIONS + LATENCY_DECISIONS):
        episode = decision % len(observations_EO)
        generator = episode_generator(planner_seed, episode)
        start = time.perf_counter()
        policy_like.plan(observations_EO[episode : episode + 1], [generator])
        seconds.append(time.perf_counter() - start)
    return np.array(seconds[WARM_UP_DECISIONS:])


def follow(env: gymnasium.Env[np.ndarray, np.ndarray], state: State, actions_HA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the simulator makes of `actions_HA` from `state`: observations (n, O) before each action and rewards (n,).

    n <= H: it stops where the episode does.
    """
    observation = set_state(env, state)
    observations, rewards = [], []
    for action in actions_HA:
        observations.append(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return np.array(observations), np.array(rewards)


def state_prediction_error(planned_HO: np.ndarray, simulated_nO: np.ndarray) -> float:
    """Mean squared error of planned states over the n steps that were simulated, and over dimensions."""
    return float(np.mean((planned_HO[: len(simulated_nO)] - simulated_nO) ** 2))


PlanRow = tuple[np.ndarray, np.ndarray, np.ndarray]


def _row(plan: "Plan", row: int) -> PlanRow:
    """Observations, actions and rewards of one plan, copied: a view would keep the whole batch in memory."""
    return plan.observations[row].copy(), plan.actions[row].copy(), plan.rewards[row].copy()


def _compare(title: str, env: gymnasium.Env[np.ndarray, np.ndarray], state: State, planned: PlanRow) -> Comparison:
    return Comparison(title, state, *planned, *follow(env, state, planned[1]))


class _Progress:
    """A bar on a terminal; a line every tenth of the time limit in a log."""

    def __init__(self, episodes: int, limit: int, *, enabled: bool) -> None:
        terminal = sys.stderr.isatty()
        self.episodes, self.limit, self.step = episodes, limit, 0
        self.lines = enabled and not terminal
        self.bar = tqdm(total=limit, desc="rollout", unit="step", disable=not (enabled and terminal))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def __call__(self, running: int, returns: np.ndarray) -> None:
        self.step += 1
        status = f"{running} of {self.episodes} episodes running, mean return so far {returns.mean():.1f}"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update()
        if self.lines and (self.step % max(1, self.limit // 10) == 0 or not running):
            print(f"rollout: step {self.step} of at most {self.limit}, {status}", file=sys.stderr, flush=True)


def summarize(result: Rollout, info: DatasetInfo) -> dict[str, Any]:
    """The part of the evaluation metrics that a rollout decides, JSON-able. Standard errors are over episodes.

    Normalised scores are None without reference scores, a standard error is None for a single episode. `scores` are what
    policies are compared by, one an episode: normalised scores, or returns, as `score_metric` says.
    """
    episodes, score, score_error = len(result.returns), None, None
    scores, score_metric = result.returns, "return"
    if info.reference_min_score is not None and info.reference_max_score is not None:
        scores = normalized_score(info, result.returns)
        score, score_metric = float(scores.mean()), "normalized_score"
        score_error = standard_error(scores)
    median, p95 = np.percentile(1000 * result.latencies, [50, 95])
    return {
        "environment_seed": result.environment_seed,
        "episodes": episodes,
        "protocol": f"{episodes} episodes, seeds {result.environment_seed}-{result.environment_seed + episodes - 1}, "
        f"re-planned every {'step' if result.plan_every == 1 else f'{result.plan_every} steps'}, last checkpoint",
        "normalized_score": score,
        "normalized_score_standard_error": score_error,
        "return_mean": float(result.returns.mean()),
        "returns": result.returns.tolist(),
        "score_metric": score_metric,
        "scores": scores.tolist(),
        "lengths": result.lengths.tolist(),
        "terminated": result.terminated.tolist(),
        "search_value_mean": float(result.search_values.mean()),
        "log_probability_mean": float(result.log_probabilities.mean()),
        "state_prediction_error": float(result.state_prediction_errors.mean()),
        "latency_ms": {
            "median": float(median),
            "p95": float(p95),
            "batch_median": float(np.median(1000 * result.batch_latencies)),
        },
    }
