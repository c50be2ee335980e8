"""The Trajectory Transformer's search against a plain one, an exhaustive one, and data whose best actions are known."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tap.data.windows import Layout
from tap.methods import trajectory_planner, trajectory_reference
from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_model import TrajectoryModel
from tap.methods.trajectory_planner import TrajectoryPlan, TrajectoryPlanner, sample_bins
from tap.settings import TrajectorySearchParams, TransformerParams

FIELDS = ("observations", "actions", "rewards", "returns_to_go", "predicted_return")
DISCOUNT = 0.9


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def search_params(**changes: Any) -> TrajectorySearchParams:
    defaults = {"horizon": 5, "beam_width": 4, "expansion_factor": 3, "context": 2, "top_k": None, "cdf": 0.6}
    return TrajectorySearchParams(**defaults | changes)


def a_critic(observation: Any, action: Any) -> Any:
    """Of numpy's arrays as of tensors; it ranks plans otherwise than the return-to-go does."""
    return 3 * observation[..., 0] * action[..., 1] - observation[..., 2] + action[..., 0]


def random_planner(bins: int = 7, layout: Layout = Layout(3, 2), q: Any = None, **changes: Any) -> TrajectoryPlanner:  # noqa: B008
    """Of random weights, large enough that plans differ; windows of 4 transitions. With `q`, plans are valued by `a_critic`."""
    torch.manual_seed(0)
    discretizer = Discretizer.fit(torch.randn(1000, layout.transition_dim), bins, "quantile")
    transformer = TransformerParams(layers=2, width=16, heads=2, dropout=0.1)
    model = TrajectoryModel(transformer, layout.transition_dim, bins, length=4).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return TrajectoryPlanner(model, discretizer, layout, DISCOUNT, search_params(**changes), q)


def random_states(count: int, past: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, generator=generator), torch.randn(count, past, 6, generator=generator)


def assert_equal(one: TrajectoryPlan, other: TrajectoryPlan, tolerance: float = 1e-5) -> None:
    for field in FIELDS:
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), rtol=0, atol=tolerance, err_msg=field)


@pytest.mark.parametrize(
    ("past", "changes"),
    [
        (0, {}),
        (3, {}),
        (1, {"horizon": 9}),  # the window is full twice
        (2, {"context": 3, "horizon": 4}),
        (0, {"expansion_factor": 1}),
        (1, {"beam_width": 1}),
        (0, {"beam_width": 1, "expansion_factor": 1}),
        (0, {"cdf": 0.0}),
        (1, {"top_k": 2}),
        (0, {"horizon": 1}),
        (0, {"q": a_critic}),
        (1, {"q": a_critic, "horizon": 9}),
    ],
)
def test_it_finds_the_plain_searchs_plan(past: int, changes: dict[str, Any]) -> None:
    planner = random_planner(**changes)
    states, earlier = random_states(3, past)
    plan = planner.plan(states, generators(3), earlier)
    assert_equal(plan, trajectory_reference.plan(planner, states, generators(3), earlier))
    assert plan.actions.shape == (3, planner.params.horizon, 2)
    assert len(np.unique(plan.predicted_return)) == 3


def test_it_finds_the_plain_searchs_plan_at_the_papers_search_size() -> None:
    planner = random_planner(bins=100, beam_width=128, expansion_factor=2, horizon=3)
    states, earlier = random_states(1, 1)
    assert_equal(
        planner.plan(states, generators(1), earlier), trajectory_reference.plan(planner, states, generators(1), earlier)
    )


def test_with_a_critic_the_return_to_go_is_its_value_of_each_planned_step() -> None:
    states, earlier = random_states(3, 1)
    plan = random_planner(q=a_critic).plan(states, generators(3), earlier)
    np.testing.assert_allclose(plan.returns_to_go, a_critic(plan.observations, plan.actions), rtol=1e-5, atol=1e-5)
    discounts = DISCOUNT ** np.arange(5)
    total = (discounts[:4] * plan.rewards[:, :4]).sum(axis=1) + discounts[4] * plan.returns_to_go[:, 4]
    np.testing.assert_allclose(plan.predicted_return, total, rtol=1e-4)
    without = random_planner().plan(states, generators(3), earlier)
    assert (plan.actions != without.actions).any(axis=(1, 2)).all()


def exhaustive(planner: TrajectoryPlanner, begin: list[int]) -> tuple[float, tuple[int, ...]]:
    """The greatest predicted return of all action sequences of two steps, and its actions' bins."""
    model, layout = planner.model, planner.layout

    def probabilities(tokens: list[int], dimension: int) -> Tensor:
        hidden, _ = model.read(torch.tensor([tokens]))
        return torch.softmax(model.heads_XKE[dimension] @ hidden[0], dim=0)

    found = []
    for bins in itertools.product(range(model.bins), repeat=2 * layout.action_dim):
        tokens = begin + list(bins[: layout.action_dim])
        reward = probabilities(tokens, layout.reward)
        tokens.append(int(reward.argmax()))
        for dimension in range(layout.observation_dim):
            tokens.append(int(probabilities(tokens, dimension).argmax()))
        tokens += bins[layout.action_dim :]
        tokens.append(int(probabilities(tokens, layout.reward).argmax()))
        first = float(reward @ planner.discretizer.values_XK[layout.reward])
        rest = float(probabilities(tokens, layout.return_to_go) @ planner.discretizer.values_XK[layout.return_to_go])
        if planner.q:
            last = tokens[-layout.observation_dim - layout.action_dim - 1 : -1]
            raw = planner.discretizer.values_XK[torch.arange(len(last)), last].numpy()
            rest = a_critic(raw[: layout.observation_dim], raw[layout.observation_dim :])
        found.append((first + DISCOUNT * rest, bins))
    return max(found)


@pytest.mark.parametrize("q", [None, a_critic])
@torch.no_grad()
def test_a_wide_beam_finds_the_exhaustive_optimum(q: Any) -> None:
    planner = random_planner(bins=3, q=q, beam_width=3000, expansion_factor=1, horizon=2, cdf=0.0)
    states, earlier = random_states(1, 1)
    value, bins = exhaustive(planner, planner.begin(states, earlier)[0].tolist())
    plan = planner.plan(states, generators(1), earlier)
    assert plan.predicted_return[0] == pytest.approx(value, rel=1e-4)
    expected = planner.discretizer.decode(torch.tensor(bins).view(2, 2), planner.layout.action)
    np.testing.assert_array_equal(plan.actions[0], expected)


def test_a_plan_depends_on_its_own_state_past_and_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = random_planner()
    states, earlier = random_states(3, 2)
    together = planner.plan(states, generators(3), earlier)
    for n in range(3):
        alone = planner.plan(states[n : n + 1], generators(3)[n : n + 1], earlier[n : n + 1])
        np.testing.assert_allclose(alone.actions[0], together.actions[n], atol=1e-6)
    monkeypatch.setattr(trajectory_planner, "MAX_CACHE_BYTES", 1)  # one state at a time
    assert_equal(planner.plan(states, generators(3), earlier), together)
    assert not np.allclose(planner.plan(states, generators(3), earlier + 1).actions, together.actions)
    assert not np.allclose(planner.plan(states, generators(6)[3:], earlier).actions, together.actions)


def test_bins_are_sampled_with_their_probabilities() -> None:
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.0, 0.0, 0.0, 1.0]])
    noise = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(0))
    bins = sample_bins(probabilities.log()[:, None].expand(-1, 20_000, -1), noise, None, 0.0)
    frequencies = torch.stack([torch.bincount(row, minlength=4) / 20_000 for row in bins])
    torch.testing.assert_close(frequencies, probabilities, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "cdf", "kept"),
    [
        (2, 0.0, [2, 3]),
        (9, 0.0, [0, 1, 2, 3]),
        (None, 0.04, [0, 1, 2, 3]),
        (None, 0.2, [1, 2, 3]),  # without 0.05
        (None, 0.3, [2, 3]),  # and without 0.2: 0.25 in all
        (None, 0.99, [2]),
        (3, 0.3, [2, 3]),
    ],
)
def test_unlikely_bins_are_left_out(top_k: int | None, cdf: float, kept: list[int]) -> None:
    probabilities = torch.tensor([0.05, 0.2, 0.45, 0.3])
    noise = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    bins = sample_bins(probabilities.log().expand(20_000, -1), noise, top_k, cdf)
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    torch.testing.assert_close(torch.bincount(bins, minlength=4) / 20_000, expected, atol=0.01, rtol=0)
    assert set(bins.tolist()) == set(kept)


@pytest.fixture(scope="module")
def delayed_reward() -> TrajectoryPlanner:
    """Trained on random actions in episodes of two steps, of which action 1, then 1, is the best, and earns 1.

    Action -1 pays 0.6 at once and nothing later. Action 1 pays nothing; after it another 1 pays 1 and a -1 nothing, so that
    what usually follows it, 0.5, is less.
    """
    rng = np.random.default_rng(0)
    first, second = rng.choice([-1.0, 1.0], (2, 512))
    reward, later = np.where(first < 0, 0.6, 0.0), np.where((first > 0) & (second > 0), 1.0, 0.0)
    steps = np.stack([np.zeros(512), first, reward, reward + later, first, second, later, later], axis=1)
    rows = torch.from_numpy(steps.reshape(512, 2, 4).astype(np.float32))
    torch.manual_seed(0)
    discretizer = Discretizer.fit(rows.flatten(0, 1), 10, "quantile")
    model = TrajectoryModel(TransformerParams(layers=1, width=32, heads=2, dropout=0.0), 4, 10, length=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens, valid = discretizer.tokens(rows), torch.ones(512, 2, dtype=torch.bool)
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(tokens, valid, torch.ones(4))["loss"].backward()
        optimizer.step()
    # One action after each plan, so none is pruned: of more, copies of the best first action would displace the other.
    params = search_params(horizon=2, context=1, beam_width=32, expansion_factor=1, cdf=0.0)
    return TrajectoryPlanner(model.eval(), discretizer, Layout(1, 1), 1.0, params)


def test_it_learns_and_finds_the_best_actions(delayed_reward: TrajectoryPlanner) -> None:
    plan = delayed_reward.plan(torch.zeros(1, 1), generators(1))
    np.testing.assert_array_equal(plan.actions, [[[1], [1]]])
    np.testing.assert_array_equal(plan.observations, [[[0], [1]]])
    np.testing.assert_allclose(plan.rewards, [[0, 1]], atol=0.05)
    np.testing.assert_allclose(plan.returns_to_go, [[0.5, 1]], atol=0.1)
    np.testing.assert_allclose(plan.predicted_return, 1, atol=0.05)


def test_without_a_second_step_it_takes_what_usually_pays_more(delayed_reward: TrajectoryPlanner) -> None:
    planner = delayed_reward
    params = planner.params.model_copy(update={"horizon": 1})
    greedy = TrajectoryPlanner(planner.model, planner.discretizer, planner.layout, 1.0, params)
    plan = greedy.plan(torch.zeros(1, 1), generators(1))
    np.testing.assert_array_equal(plan.actions, [[[-1]]])
    np.testing.assert_allclose(plan.predicted_return, 0.6, atol=0.05)
