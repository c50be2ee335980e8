"""Sampled plans against a plain loop, for a point on a line and in Hopper."""

from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from conftest import custom_dataset

from pipelines.stages.diagnose import frames
from tap.envs.make import State, make_environment
from tap.evaluation.diagnostics import Distribution, distribution, render, visualise, with_planner
from tap.evaluation.rollout import episode_generator
from tap.planning.plan import Plan
from tap.planning.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")  # of Hopper-v4


class Point(gymnasium.Env[np.ndarray, np.ndarray]):
    """A point starts at its seed and moves by the action; beyond 3 the episode ends. Pictures are as bright as its position."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-5, 5, (1,), np.float32)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.x = np.array([float(seed or 0)])
        return self.x, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.x = self.x + action
        return self.x, 0.0, bool(self.x[0] > 3), False, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((320, 480, 3), 10 * self.x[0], np.uint8)


class Blind(Point):
    """A point that cannot be rendered."""

    def render(self) -> np.ndarray:  # type: ignore[override]
        raise RuntimeError("no display")


gymnasium.register("RenderedPoint-v0", entry_point=Point)
gymnasium.register("BlindPoint-v0", entry_point=Blind)
POINT = custom_dataset("point", "RenderedPoint-v0", max_episode_steps=50)
HOPPER = replace(POINT, environment="Hopper-v4", max_episode_steps=1000)


class Walker:
    """Proposes plans that move by -1, 1 and 2 a step, and predicts each step to go `drift` further."""

    moves = np.array([-1.0, 1.0, 2.0])

    def __init__(self, drift: float) -> None:
        self.drift = drift

    def candidates(self, observations: np.ndarray, generators: list[torch.Generator]) -> Plan:
        (start,), C, H = observations[0], 3, 4
        states = start + (self.moves[:, None] + self.drift) * np.arange(H)
        actions = np.repeat(self.moves, H).reshape(1, C, H, 1)
        zeros, value = np.zeros((1, C, H)), self.moves[None]
        return Plan(states[None, ..., None], actions, zeros, zeros, np.zeros((1, C, 1), int), value, value, value)


def sample(drift: float) -> Distribution:
    walker: Any = Walker(drift)
    return distribution(walker, make_environment(POINT), [State(0), State(1)], 0)


def test_a_perfect_model_has_no_error() -> None:
    assert (sample(0.0).state_prediction_errors == 0).all()


def test_errors_count_the_steps_to_the_episodes_end() -> None:
    sampled = sample(0.5)
    # Step t of a plan is off by t/2: 4 steps give (0 + 1 + 4 + 9) / 4 / 4. From 0, moves of 2 end the episode at the second
    # step; from 1, moves of 1 at the third, of 2 at the second.
    four, three, two = 14 / 16, 5 / 12, 1 / 8
    np.testing.assert_allclose(sampled.state_prediction_errors, [[four, four, two], [four, three, two]])
    np.testing.assert_array_equal(sampled.predicted_returns, [[-1, 1, 2]] * 2)
    summary = sampled.summarize()
    assert summary["state_prediction_error_median"] == pytest.approx((four + three) / 2)
    assert summary["predicted_return_median"] == 1 and summary["distinct_plans"] == pytest.approx(1 / 3)
    # Ranks, ties averaged: returns 1.5 3.5 5.5 twice, errors 5 5 1.5 5 3 1.5; their covariance over their stds
    assert summary["rank_correlation"] == pytest.approx(-14 / np.sqrt(16 * 15))


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_constant_returns_have_no_rank_correlation() -> None:
    alike = Distribution(np.zeros((1, 3, 2), int), np.ones((1, 3)), np.array([[1.0, 2.0, 3.0]]))
    assert alike.summarize()["rank_correlation"] == 0


def test_hoppers_errors_equal_a_loop(tiny_policy: Policy) -> None:
    sampling = with_planner(tiny_policy, search="prior_sampling", samples=3)
    sampled = distribution(sampling, make_environment(HOPPER), [State(7), State(8)], 5)
    for episode, seed in enumerate((7, 8)):
        env = gymnasium.make("Hopper-v4")
        start = env.reset(seed=seed)[0][None].astype(np.float32)
        plan = sampling.candidates(start, [episode_generator(5, episode)])
        for row in range(3):
            observation, errors = env.reset(seed=seed)[0], []
            for planned, action in zip(plan.observations[0, row], plan.actions[0, row], strict=True):
                errors += list((planned - observation) ** 2)
                observation, _, terminated, _, _ = env.step(np.clip(action, -1, 1))
                if terminated:
                    break
            assert sampled.state_prediction_errors[episode, row] == pytest.approx(np.mean(errors), rel=1e-5)


def test_a_prior_concentrated_on_one_code_samples_one_plan_and_uniform_sampling_many(tiny_policy: Policy) -> None:
    with torch.no_grad():
        tiny_policy.prior.to_logits.weight.zero_()
        tiny_policy.prior.to_logits.bias.copy_(torch.eye(8)[3] * 100)
    sampled = {
        search: distribution(with_planner(tiny_policy, search=search, samples=20), make_environment(HOPPER), [State(0)], 0)
        for search in ("prior_sampling", "uniform_sampling")
    }
    assert (sampled["prior_sampling"].codes == 3).all()
    sure, uniform = (sampled[search].summarize() for search in ("prior_sampling", "uniform_sampling"))
    assert sure["distinct_plans"] == 1 / 20 and sure["predicted_return_deviation"] < 1e-3
    assert uniform["distinct_plans"] > 10 / 20 and uniform["predicted_return_deviation"] > 0.1


def test_visualised_plans_include_the_executed_one(tiny_policy: Policy) -> None:
    env, state = make_environment(HOPPER), State(3, (np.full(3, 0.5, np.float32),) * 4)
    shown = visualise(tiny_policy, env, state, None, 5)
    first, second = shown["dimensions"]
    assert 0 <= first < second < 11
    raw = gymnasium.make("Hopper-v4")
    raw.reset(seed=3)
    for action in state.actions:
        observation, *_ = raw.step(action)
    beam = with_planner(tiny_policy, beam_width=64, expansion_factor=4)
    executed = beam.plan(observation[None].astype(np.float32), [episode_generator(5, 0)])
    found = shown["searches"]["beam"]
    assert np.shape(found["observations"]) == (256, 6, 2) and len(found["scores"]) == 256
    np.testing.assert_allclose(found["chosen_actions"], executed.actions[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["observations"][found["chosen"]], executed.observations[0][:, [first, second]], atol=1e-3)
    np.testing.assert_allclose(found["simulated"][0], observation[[first, second]], atol=1e-5)
    assert visualise(tiny_policy, env, state, (0, 1), 5)["dimensions"] == [0, 1]


def test_visualised_plans_vary_most_in_the_dimensions_shown(tiny_policy: Policy) -> None:
    layout = tiny_policy.vqvae.layout
    tiny_policy.normalizer.std[layout.observation] = 1e3
    tiny_policy.normalizer.std[[2, 6]] = 1.0
    with torch.no_grad():
        tiny_policy.vqvae.to_token.weight[[2, 6]] *= 100  # normalised states differ most here
    assert visualise(tiny_policy, make_environment(HOPPER), State(3), None, 5)["dimensions"] == [2, 6]


def test_frames_show_start_middle_and_end_of_the_chosen_plan() -> None:
    strip = render(make_environment(POINT, render_mode="rgb_array"), State(1), np.full((9, 1), 1.0))
    assert strip.shape == (160, 3 * 240, 3)
    # From 1 to 4, where the episode ends, in three steps; halfway is rounded to the second.
    assert [strip[80, 120 + 240 * frame, 0] for frame in range(3)] == [10, 30, 40]


def test_without_a_renderer_there_are_no_frames_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    searches = {"beam": {"chosen_actions": [[1.0], [1.0]]}}
    assert list(frames(POINT, State(0), searches)) == ["beam"]
    assert frames(replace(POINT, environment="BlindPoint-v0"), State(0), searches) == {}
    assert "no pictures of the simulator: RuntimeError: no display" in capsys.readouterr().err
