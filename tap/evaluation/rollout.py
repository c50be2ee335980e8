"""Rollouts of a policy in simulators, and what is measured in them (paper, section 4).

Shapes: E episodes, N episodes still running, H plan steps, O observation, A action.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from tqdm import tqdm

from tap.data.catalog import DatasetInfo
from tap.data.history import History
from tap.data.score import normalized_score
from tap.envs.make import Environment, State, get_state
from tap.estimates import standard_error
from tap.evaluation.comparison import Comparison, follow
from tap.planning.plan import Plan, Planned, Remembering

LATENCY_DECISIONS = 20
WARM_UP_DECISIONS = 2


class BatchPlanner(Protocol):
    """The part of a policy that a rollout needs: plans for N states at once, each sampled with its own generator.

    A `Plan` is also compared with the simulator. A `Remembering` policy gets the history of each episode, too.
    """

    def plan(self, observations_NO: np.ndarray, generators: Sequence[torch.Generator], /) -> Planned:
        """Plans from raw observations."""
        ...


@dataclass(frozen=True)
class Predictions:
    """What the plans at the first state of each of E episodes predict, and how it compares with the simulator."""

    search_values: np.ndarray  # (E,) predicted return
    log_probabilities: np.ndarray  # (E,) under the prior
    state_prediction_errors: np.ndarray  # (E,)
    examples: tuple[Comparison, ...]  # at the first and at the middle state of episode 0


@dataclass(frozen=True)
class Rollout:
    """Results of E episodes; episode i is reset with seed `environment_seed` + i. All but the latencies are reproducible."""

    environment_seed: int
    planner_seed: int
    plan_every: int
    returns: np.ndarray  # (E,) undiscounted
    lengths: np.ndarray  # (E,) steps
    terminated: np.ndarray  # (E,) bool: ended by the environment, not by its time limit
    latencies: np.ndarray  # (LATENCY_DECISIONS,) seconds to plan for one state
    batch_latencies: np.ndarray  # (plans,) seconds to plan for all running episodes
    predictions: Predictions | None  # None for a policy whose plans are actions alone


def episode_generator(planner_seed: int, episode: int) -> torch.Generator:
    """The planner's random generator for one episode, independent of all other episodes."""
    (seed,) = np.random.SeedSequence([planner_seed, episode]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed))


def rollout(
    policy: BatchPlanner,
    make_env: Callable[[], Environment],
    *,
    episodes: int,
    environment_seed: int,
    planner_seed: int,
    plan_every: int = 1,
    progress: bool = True,
) -> Rollout:
    """Run `episodes` episodes in lockstep: plan every `plan_every` steps and execute that many actions of each plan.

    All running episodes share one batched plan. `make_env` returns environments of `make_environment`.
    """
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(make_env())) for _ in range(episodes)]
        observations = [env.reset(seed=environment_seed + episode)[0] for episode, env in enumerate(envs)]
        starts = [get_state(env) for env in envs]
        latencies = measure_latencies(policy, _batch(observations), planner_seed)
        generators = [episode_generator(planner_seed, episode) for episode in range(episodes)]
        run = _run_in_lockstep(policy, envs, observations, generators, plan_every, progress)
        predictions = _predictions(run, run.first_plan, envs, starts, plan_every) if isinstance(run.first_plan, Plan) else None
    return Rollout(
        environment_seed=environment_seed,
        planner_seed=planner_seed,
        plan_every=plan_every,
        returns=run.returns,
        lengths=run.lengths,
        terminated=run.terminated,
        latencies=latencies,
        batch_latencies=np.array(run.batch_latencies),
        predictions=predictions,
    )


def _batch(observations: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(observations).astype(np.float32)  # the precision of the training data


def measure_latencies(policy: BatchPlanner, observations_EO: np.ndarray, planner_seed: int) -> np.ndarray:
    """Seconds of each of LATENCY_DECISIONS decisions for a single state, after a warm-up."""
    seconds = []
    for decision in range(WARM_UP_DECISIONS + LATENCY_DECISIONS):
        episode = decision % len(observations_EO)
        generator = episode_generator(planner_seed, episode)
        start = time.perf_counter()
        policy.plan(observations_EO[episode : episode + 1], [generator])
        seconds.append(time.perf_counter() - start)
    return np.array(seconds[WARM_UP_DECISIONS:])


PlanArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _plan_arrays(plan: Plan, row: int) -> PlanArrays:
    """Observations, actions and rewards of one plan, copied: a view would keep the whole batch in memory."""
    return plan.observations[row].copy(), plan.actions[row].copy(), plan.rewards[row].copy()


def _compare(title: str, env: Environment, state: State, planned: PlanArrays) -> Comparison:
    return Comparison(title, state, *planned, *follow(env, state, planned[1]))


def _predictions(
    run: "_Run", first_plan: Plan, envs: Sequence[Environment], starts: Sequence[State], plan_every: int
) -> Predictions:
    """What the plans of a finished run predict, compared with the simulator from the states `starts` of its `envs`."""
    episode_0 = get_state(envs[0])  # before the comparisons reset it
    at_start = [
        _compare(f"first state of episode {i}", env, start, _plan_arrays(first_plan, i))
        for i, (env, start) in enumerate(zip(envs, starts, strict=True))
    ]
    plan_index = len(run.plans_of_episode_0) // 2
    step = plan_index * plan_every
    middle_state = replace(episode_0, actions=episode_0.actions[:step])
    middle = _compare(f"step {step} of episode 0", envs[0], middle_state, run.plans_of_episode_0[plan_index])
    return Predictions(
        search_values=np.asarray(first_plan.predicted_return, np.float64),
        log_probabilities=np.asarray(first_plan.log_probability, np.float64),
        state_prediction_errors=np.array([comparison.state_prediction_error for comparison in at_start]),
        examples=(at_start[0], middle),
    )


@dataclass(frozen=True)
class _Run:
    """E finished episodes, and the plans that are compared with the simulator afterwards."""

    returns: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    first_plan: Planned  # of all E episodes
    plans_of_episode_0: list[PlanArrays]  # empty where plans are actions alone
    batch_latencies: list[float]


def _run_in_lockstep(
    policy: BatchPlanner,
    envs: Sequence[Environment],
    observations: list[np.ndarray],
    generators: Sequence[torch.Generator],
    plan_every: int,
    progress: bool,
) -> _Run:
    """Step all environments from their first `observations` until every episode has ended."""
    episodes, spec, action_shape = len(envs), envs[0].spec, envs[0].action_space.shape
    assert spec is not None and spec.max_episode_steps is not None and action_shape is not None
    returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
    terminated, truncated = np.zeros(episodes, bool), np.zeros(episodes, bool)
    first_plan: Planned | None = None
    plans_of_episode_0: list[PlanArrays] = []
    batch_latencies: list[float] = []
    actions_EHA: list[np.ndarray] = [np.empty(0)] * episodes
    histories = [History.empty(len(observations[0]), *action_shape)] * episodes
    running, step = list(range(episodes)), 0
    with _Progress(episodes, spec.max_episode_steps, enabled=progress) as report:
        while running:
            if step % plan_every == 0:
                inputs = _batch([observations[i] for i in running]), [generators[i] for i in running]
                start = time.perf_counter()
                if isinstance(policy, Remembering):
                    plan = policy.plan(*inputs, [histories[i] for i in running])
                else:
                    plan = policy.plan(*inputs)
                batch_latencies.append(time.perf_counter() - start)
                first_plan = first_plan or plan
                if isinstance(plan, Plan) and running[0] == 0:
                    plans_of_episode_0.append(_plan_arrays(plan, 0))
                for row, i in enumerate(running):
                    actions_EHA[i] = plan.actions[row, :plan_every]
            for i in running:
                before = observations[i]
                observations[i], reward, terminated[i], truncated[i], _ = envs[i].step(actions_EHA[i][step % plan_every])
                if isinstance(policy, Remembering):
                    executed = get_state(envs[i]).actions[-1]  # clipped to the action space
                    histories[i] = histories[i].after(before, executed, float(reward), policy.remembered_steps)
                returns[i] += float(reward)
                lengths[i] += 1
            step += 1
            running = [i for i in running if not (terminated[i] or truncated[i])]
            report(len(running), returns)
    assert first_plan is not None
    return _Run(returns, lengths, terminated, first_plan, plans_of_episode_0, batch_latencies)


class _Progress:
    """A progress bar on a terminal; in a log, a line every tenth of the time limit."""

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
    """The metrics of an evaluation that come from its rollout, ready for JSON. Standard errors are over episodes.

    Normalised scores are None without reference scores, and a standard error is None for a single episode. `scores`, one per
    episode, are what policies are compared by: normalised scores or returns, as named by `score_metric`. Metrics of predictions
    are None for a policy whose plans are actions alone.
    """
    episodes, score, score_error, predictions = len(result.returns), None, None, result.predictions
    scores, score_metric = result.returns, "return"
    if info.reference_min_score is not None and info.reference_max_score is not None:
        scores = normalized_score(info, result.returns)
        score, score_metric = float(scores.mean()), "normalized_score"
        score_error = standard_error(scores)
    interval = "step" if result.plan_every == 1 else f"{result.plan_every} steps"
    replanned = f"re-planned every {interval}, " if predictions else ""
    median, p95 = np.percentile(1000 * result.latencies, [50, 95])
    return {
        "environment_seed": result.environment_seed,
        "episodes": episodes,
        "protocol": f"{episodes} episodes, seeds {result.environment_seed}-{result.environment_seed + episodes - 1}, "
        f"{replanned}last checkpoint",
        "normalized_score": score,
        "normalized_score_standard_error": score_error,
        "return_mean": float(result.returns.mean()),
        "returns": result.returns.tolist(),
        "score_metric": score_metric,
        "scores": scores.tolist(),
        "lengths": result.lengths.tolist(),
        "terminated": result.terminated.tolist(),
        "search_value_mean": float(predictions.search_values.mean()) if predictions else None,
        "log_probability_mean": float(predictions.log_probabilities.mean()) if predictions else None,
        "state_prediction_error": float(predictions.state_prediction_errors.mean()) if predictions else None,
        "latency_ms": {
            "median": float(median),
            "p95": float(p95),
            "batch_median": float(np.median(1000 * result.batch_latencies)),
        },
    }
