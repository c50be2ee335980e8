"""Rollouts of planners with known plans, in an environment with hand-computed returns and in Hopper."""

import json
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import custom_dataset, random_episodes

from tap.data.history import History
from tap.data.windows import Layout, fit_normalizer
from tap.envs.make import make_environment
from tap.evaluation.rollout import LATENCY_DECISIONS, WARM_UP_DECISIONS, episode_generator, rollout, summarize
from tap.methods.decision_transformer import DecisionTransformer, window_params
from tap.planning.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")  # of Hopper-v4
HORIZON = 4


class Line(gymnasium.Env):
    """A point on a line: starts at half its seed, moves by the action, is rewarded by its new position, and ends at 3."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.array([seed / 2])
        return self.x, {}

    def step(self, action):
        self.x = self.x + action
        return self.x, self.x.item(), bool(self.x[0] >= 3), False, {}


gymnasium.register("Line-v0", entry_point=Line)

LINE = custom_dataset("line", "Line-v0", max_episode_steps=5)
HOPPER = replace(
    LINE,
    id="hopper-medium-replay",
    suite="locomotion",
    environment="Hopper-v4",
    max_episode_steps=1000,
    reference_min_score=-20.272305,
    reference_max_score=3234.3,
)


def plan_of(observations, actions, rewards):
    """A Plan around known observations (N, H, O), actions (N, H, A) and rewards (N, H)."""
    value = rewards.sum(axis=1)
    codes = np.zeros((len(value), 1), int)
    return Plan(
        observations=observations,
        actions=actions,
        rewards=rewards,
        returns_to_go=np.flip(np.flip(rewards, 1).cumsum(1), 1),
        codes=codes,
        log_probability=-value,
        predicted_return=value,
        score=value,
    )


class Mover:
    """On the line: plans to move by `move` each step, and predicts `drift` more."""

    def __init__(self, move, drift=0.0):
        self.move, self.drift, self.batch_sizes = move, drift, []

    def plan(self, observations, generators):
        assert observations.shape == (len(generators), 1)
        self.batch_sizes.append(len(generators))
        states = observations[:, None] + (self.move + self.drift) * np.arange(HORIZON)[:, None]
        return plan_of(states, np.full((len(generators), HORIZON, 1), self.move), states[..., 0] + self.move + self.drift)


class Dice:
    """Linear feedback plus noise from the generators, in any environment."""

    def __init__(self, gains, noise=0.3):
        self.gains, self.noise = gains, noise

    def plan(self, observations, generators):
        noise = np.stack([torch.rand(len(self.gains), generator=generator).numpy() for generator in generators])
        action = observations @ self.gains.T + self.noise * (2 * noise - 1)
        states = np.repeat(observations[:, None], HORIZON, axis=1)
        return plan_of(states, np.repeat(action[:, None], HORIZON, axis=1), np.repeat(noise[:, :1], HORIZON, axis=1))


class Reflex:
    """On the line: moves by `move`; its plans are actions alone."""

    def __init__(self, move):
        self.move = move

    def plan(self, observations, generators):
        return SimpleNamespace(actions=np.full((len(generators), 1, 1), self.move))


class Diary:
    """On the line: tries to move by 2 at each step, of which the environment executes 1, and records the histories it gets."""

    def __init__(self, remembered_steps):
        self.remembered_steps, self.given = remembered_steps, []

    def check(self, observations, histories=None):
        pass

    def plan(self, observations, generators, histories=None):
        self.given.append(histories)
        return SimpleNamespace(actions=np.full((len(generators), HORIZON, 1), 2.0))


class SimulatorHopper:
    """A planner with a perfect model: it steps its own Hopper, at any height, from the observed state."""

    def __init__(self, gains):
        self.env, self.gains = gymnasium.make("Hopper-v4").unwrapped, gains
        self.env.reset(seed=0)

    def plan(self, observations, generators):
        states, actions, rewards = (np.zeros((len(generators), HORIZON, *shape)) for shape in ((11,), (3,), ()))
        for n, observation in enumerate(observations.astype(float)):
            self.env.set_state(np.concatenate([[0.0], observation[:5]]), observation[5:])
            for h in range(HORIZON):
                states[n, h], actions[n, h] = observation, np.clip(self.gains @ observation, -1, 1)
                observation, rewards[n, h], *_ = self.env.step(actions[n, h])
        return plan_of(states, actions, rewards)


def roll(planner, info=LINE, episodes=3, environment_seed=0, planner_seed=0):
    make_env = partial(make_environment, info)
    seeds = {"environment_seed": environment_seed, "planner_seed": planner_seed}
    return rollout(planner, make_env, episodes=episodes, progress=False, **seeds)


GAINS = np.random.default_rng(0).normal(0, 0.5, (3, 11))


def repeatable(result):
    values = {field.name: getattr(part, field.name) for part in (result, result.predictions) for field in fields(part)}
    for name in ("latencies", "batch_latencies", "predictions"):
        del values[name]
    return values | {"examples": [example.as_json() for example in values["examples"]]}


def same(one, other):
    one, other = repeatable(one), repeatable(other)
    return all(np.array_equal(one[key], other[key]) for key in one)


def test_returns_lengths_and_ends_by_hand():
    """Seeds 0 to 4 start at 0 to 2 and move by 0.75 a step until they reach 3."""
    planner = Mover(0.75)
    result = roll(planner, episodes=5)
    np.testing.assert_array_equal(result.lengths, [4, 4, 3, 2, 2])
    np.testing.assert_array_equal(result.returns, [7.5, 9.5, 7.5, 2.25 + 3, 2.75 + 3.5])
    assert result.terminated.all()
    assert planner.batch_sizes[-4:] == [5, 5, 3, 2]  # only episodes that still run are planned for
    assert len(result.batch_latencies) == 4
    np.testing.assert_array_equal(result.predictions.search_values, [4 * start + 7.5 for start in (0, 0.5, 1, 1.5, 2)])
    np.testing.assert_array_equal(result.predictions.log_probabilities, -result.predictions.search_values)


def test_time_limit_is_not_a_termination():
    result = roll(Mover(0.5), episodes=5)
    np.testing.assert_array_equal(result.lengths, [5, 5, 4, 3, 2])
    np.testing.assert_array_equal(result.terminated, [False, True, True, True, True])  # the second ends at the limit itself
    assert result.returns[0] == 0.5 + 1 + 1.5 + 2 + 2.5


def test_environment_seed_counts_up_from_its_start():
    np.testing.assert_array_equal(roll(Mover(0.75), episodes=2, environment_seed=3).returns, [2.25 + 3, 2.75 + 3.5])


def test_state_prediction_error_by_hand():
    assert (roll(Mover(0.5)).predictions.state_prediction_errors == 0).all()
    # Off by 0, 0.25, 0.5, 0.75 at the four states; the last episode, from 2.5, ends after one step: one state to compare.
    result = roll(Mover(0.5, drift=0.25), episodes=6)
    whole = (0.25**2 + 0.5**2 + 0.75**2) / 4
    errors = [whole, whole, whole, (0.25**2 + 0.5**2) / 3, 0.25**2 / 2, 0]
    np.testing.assert_allclose(result.predictions.state_prediction_errors, errors)


def test_a_perfect_model_has_no_state_prediction_error():
    result = roll(SimulatorHopper(GAINS), HOPPER, episodes=2)
    assert (result.predictions.state_prediction_errors < 1e-9).all()
    wrong = roll(Dice(GAINS), HOPPER, episodes=2)
    assert (wrong.predictions.state_prediction_errors > 1e-3).all()


def test_examples_compare_a_plan_with_the_simulation():
    first, middle = roll(Mover(0.5, drift=0.25)).predictions.examples
    assert first.title == "first state of episode 0" and middle.title == "step 2 of episode 0"
    np.testing.assert_array_equal(first.planned_observations[:, 0], [0, 0.75, 1.5, 2.25])
    np.testing.assert_array_equal(first.simulated_observations[:, 0], [0, 0.5, 1, 1.5])
    np.testing.assert_array_equal(first.planned_actions[:, 0], [0.5] * 4)
    np.testing.assert_array_equal(first.planned_rewards, [0.75, 1.5, 2.25, 3])
    np.testing.assert_array_equal(first.simulated_rewards, [0.5, 1, 1.5, 2])
    # Steps 2, 3 and 4 are the last before the time limit.
    assert json.loads(json.dumps(middle.as_json())) == {
        "title": "step 2 of episode 0",
        "state": {"seed": 0, "actions": [[0.5], [0.5]]},
        "planned": {"observations": [[1], [1.75], [2.5], [3.25]], "actions": [[0.5]] * 4, "rewards": [1.75, 2.5, 3.25, 4]},
        "simulated": {"observations": [[1], [1.5], [2]], "rewards": [1.5, 2, 2.5]},
    }


def test_lockstep_equals_each_episode_alone():
    planner, together = Dice(GAINS), roll(Dice(GAINS), HOPPER, episodes=4, environment_seed=20, planner_seed=5)
    assert len(set(together.lengths)) > 1
    for episode in range(4):
        env, generator = gymnasium.make("Hopper-v4"), episode_generator(5, episode)
        observation, _ = env.reset(seed=20 + episode)
        rewards, over, predicted_return = [], False, None
        while not over:
            plan = planner.plan(observation[None].astype(np.float32), [generator])
            predicted_return = plan.predicted_return[0] if predicted_return is None else predicted_return
            observation, reward, terminated, truncated, _ = env.step(np.clip(plan.actions[0, 0], -1, 1).astype(np.float32))
            rewards.append(reward)
            over = terminated or truncated
        assert together.lengths[episode] == len(rewards) and together.terminated[episode] == terminated
        assert together.returns[episode] == pytest.approx(sum(rewards), rel=1e-6)  # float32 matmul rounds by batch size
        assert together.predictions.search_values[episode] == pytest.approx(predicted_return)


def test_equal_seeds_give_equal_rollouts():
    base = roll(Dice(GAINS), HOPPER)
    assert same(base, roll(Dice(GAINS), HOPPER))
    assert not same(base, roll(Dice(GAINS), HOPPER, planner_seed=1))
    assert not same(base, roll(Dice(GAINS), HOPPER, environment_seed=1))
    still, reseeded = roll(Dice(GAINS, noise=0.0), HOPPER), roll(Dice(GAINS, noise=0.0), HOPPER, planner_seed=1)
    np.testing.assert_array_equal(still.returns, reseeded.returns)  # the environment does not depend on the planner's seed
    more = roll(Dice(GAINS), HOPPER, episodes=4)
    np.testing.assert_allclose(more.returns[:3], base.returns, rtol=1e-6)  # more episodes do not change the earlier ones


def test_a_policy_rolls_out(tiny_policy):
    result = roll(tiny_policy, HOPPER)
    assert (result.lengths > 1).all() and np.isfinite(result.predictions.state_prediction_errors).all()
    assert same(result, roll(tiny_policy, HOPPER)) and not same(result, roll(tiny_policy, HOPPER, planner_seed=1))
    assert result.predictions.examples[0].planned_observations.shape == (6, 11)
    assert result.predictions.examples[0].simulated_observations.shape[1:] == (11,)


def test_plan_every_executes_so_many_actions_of_each_plan():
    """Plans number their steps, so the executed actions identify plan and step."""

    class Counter:
        def __init__(self):
            self.plans = 0

        def plan(self, observations_NO, generators):
            self.plans += 1
            steps = np.arange(HORIZON) / 10 + self.plans / 100
            shape = (len(observations_NO), HORIZON, 1)
            return plan_of(np.zeros(shape), np.broadcast_to(steps[:, None], shape), np.zeros(shape[:2]))

    result = rollout(
        Counter(), partial(make_environment, LINE), episodes=2, environment_seed=0, planner_seed=0, plan_every=3, progress=False
    )
    plans = WARM_UP_DECISIONS + LATENCY_DECISIONS  # before the episodes begin
    first, second = (plans + 1) / 100, (plans + 2) / 100
    actions = np.array([first, 0.1 + first, 0.2 + first, second, 0.1 + second])
    np.testing.assert_allclose(result.returns, [actions.cumsum().sum(), (0.5 + actions.cumsum()).sum()])
    assert len(result.batch_latencies) == 2
    assert result.predictions.examples[1].title == "step 3 of episode 0"
    assert "re-planned every 3 steps" in summarize(result, LINE)["protocol"]


def test_episode_generators_are_independent():
    samples = {(s, e): torch.rand(8, generator=episode_generator(s, e)) for s in range(3) for e in range(3)}
    assert len({tuple(sample.tolist()) for sample in samples.values()}) == 9
    assert torch.equal(samples[1, 2], torch.rand(8, generator=episode_generator(1, 2)))


def test_latency_is_of_one_state_at_a_time():
    planner = Mover(0.75)
    result = roll(planner, episodes=5)
    assert len(result.latencies) == LATENCY_DECISIONS and (result.latencies > 0).all()
    before = WARM_UP_DECISIONS + LATENCY_DECISIONS
    assert planner.batch_sizes[:before] == [1] * before and planner.batch_sizes[before] == 5


def test_a_log_shows_progress(capfd):
    rollout(Mover(0.5), partial(make_environment, LINE), episodes=2, environment_seed=0, planner_seed=0)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 5 and lines[0] == "rollout: step 1 of at most 5, 2 of 2 episodes running, mean return so far 0.8"
    assert "step 5 of at most 5, 0 of 2 episodes running, mean return so far 8.8" in lines[-1]
    roll(Mover(0.5))
    assert capfd.readouterr().err == ""


def test_summary():
    result = replace(
        roll(Mover(0.75), episodes=2, environment_seed=1000),
        returns=np.array([1607.01, 3234.3]),
        terminated=np.array([True, False]),
        latencies=np.arange(1, 21) / 1000,
        batch_latencies=np.array([0.1, 0.3, 0.2]),
    )
    summary = summarize(result, HOPPER)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["normalized_score"] == pytest.approx(75, abs=0.01)  # 50 and 100
    assert summary["normalized_score_standard_error"] == pytest.approx(25, abs=0.01)
    assert summary["score_metric"] == "normalized_score" and summary["scores"] == pytest.approx([50, 100], abs=0.01)
    assert summary["return_mean"] == pytest.approx((1607.01 + 3234.3) / 2) and summary["terminated"] == [True, False]
    assert summary["latency_ms"] == pytest.approx({"median": 10.5, "p95": 19.05, "batch_median": 200.0})
    assert summary["protocol"] == "2 episodes, seeds 1000-1001, re-planned every step, last checkpoint"
    assert summary["state_prediction_error"] == 0 and summary["search_value_mean"] == result.predictions.search_values.mean()


def test_summary_without_reference_scores_or_spread():
    summary = summarize(roll(Mover(0.75)), LINE)
    assert summary["normalized_score"] is None and summary["normalized_score_standard_error"] is None
    assert summary["score_metric"] == "return" and summary["scores"] == summary["returns"]
    assert summarize(roll(Mover(0.75), episodes=1), replace(HOPPER, id="x"))["normalized_score_standard_error"] is None


def test_a_policy_whose_plans_are_actions_alone_has_scores_and_no_predictions():
    """As long as a plan's actions are the same, so are the returns."""
    result, planned = roll(Reflex(0.75), episodes=5), roll(Mover(0.75), episodes=5)
    np.testing.assert_array_equal(result.returns, planned.returns)
    np.testing.assert_array_equal(result.lengths, planned.lengths)
    assert result.predictions is None and len(result.latencies) == LATENCY_DECISIONS
    summary = summarize(result, LINE)
    assert summary["protocol"] == "5 episodes, seeds 0-4, last checkpoint"
    assert summary["return_mean"] == planned.returns.mean()
    assert [key for key, value in summary.items() if value is None] == [
        *("normalized_score", "normalized_score_standard_error"),
        *("search_value_mean", "log_probability_mean", "state_prediction_error"),
    ]


@pytest.mark.parametrize("plan_every", [1, 2])
def test_a_policy_that_remembers_gets_each_episodes_history(plan_every):
    """Seeds 0 to 3 start at 0, 0.5, 1 and 1.5, and end after 3, 3, 2 and 2 steps."""
    diary = Diary(remembered_steps=2)
    rollout(
        diary, partial(make_environment, LINE), episodes=4, environment_seed=0, planner_seed=0, plan_every=plan_every,
        progress=False,
    )  # fmt: skip
    given = diary.given[WARM_UP_DECISIONS + LATENCY_DECISIONS :]
    running = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]  # at each step
    assert [len(histories) for histories in given] == [len(each) for each in running[::plan_every]]
    for step, histories in zip(range(0, 3, plan_every), given, strict=True):
        for episode, history in zip(running[step], histories, strict=True):
            places = episode / 2 + np.arange(step)
            np.testing.assert_array_equal(history.observations, places[-2:, None])
            np.testing.assert_array_equal(history.actions, np.ones((step, 1))[-2:])  # as executed, within the bounds
            np.testing.assert_array_equal(history.rewards, places + 1)


def test_it_remembers_no_more_than_it_asks_for():
    diary = Diary(remembered_steps=1)
    roll(diary, episodes=1)
    last = diary.given[-1][0]
    assert (last.observations.tolist(), last.actions.tolist(), last.rewards.tolist()) == ([[1]], [[1]], [1, 2])


def test_a_replayed_history_gives_the_rollouts_actions(tiny_params):
    """The Decision Transformer in Hopper: each action again, by the whole episode up to it, which the simulator recorded."""
    episodes, params = random_episodes([30, 5, 40], observation_dim=11, action_dim=3), tiny_params.train_dt
    torch.manual_seed(0)
    policy = DecisionTransformer(params, Layout(11, 3), fit_normalizer(episodes, window_params(params))).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    envs = []

    def make_env():
        envs.append(make_environment(HOPPER))
        return envs[-1]

    result = rollout(policy, make_env, episodes=2, environment_seed=0, planner_seed=0, progress=False)
    for env, length, total in zip(envs, result.lengths, result.returns, strict=True):
        executed, replay = np.array(env.actions), make_environment(HOPPER)
        assert len(executed) == length > policy.params.context
        observation, _ = replay.reset(seed=env.seed)
        observations, rewards = [observation], []
        for action in executed:
            observation, reward, *_ = replay.step(action)
            observations.append(observation)
            rewards.append(reward)
        assert sum(rewards) == pytest.approx(total)
        seen = np.array(observations[:-1])
        pasts = [History(seen[:t], executed[:t], np.array(rewards[:t])) for t in range(length)]
        np.testing.assert_allclose(np.clip(policy.act(seen, [], pasts), -1, 1), executed, rtol=1e-3, atol=1e-4)
        assert not np.allclose(np.clip(policy.act(seen, []), -1, 1), executed, atol=1e-2)  # the history matters
