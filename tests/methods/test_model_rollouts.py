"""Rollouts in a model against a plain loop, in a system that is known."""

import pytest
import torch
from torch import Tensor

from tap.data.windows import Layout
from tap.methods.dynamics import Step
from tap.methods.model_rollouts import ModelRollouts

CPU = torch.device("cpu")
PENALTY = 0.5


def act(state_BO: Tensor) -> Tensor:
    return state_BO * 0.25 + 1


def step(state_BO: Tensor, action_BA: Tensor) -> Step:
    """The state doubles and moves by the action. Beyond 40 the episode ends; the farther, the less sure."""
    following = 2 * state_BO + action_BA
    return Step(following, 100 - state_BO[:, 0], following[:, 0] > 40, state_BO[:, 0].abs())


def plain(starts: list[list[float]], horizon: int) -> list[list[tuple[float, ...]]]:
    """The transitions of each rollout, one after another, where `starts` has B states an update."""
    rows: list[list[tuple[float, ...]]] = []
    for place in range(len(starts[0])):
        row, steps, state = [], 0, starts[0][place]
        for update in range(len(starts)):
            if steps == horizon or (row and row[-1][4]):
                state, steps = starts[update][place], 0
            action = state * 0.25 + 1
            following = 2 * state + action
            row.append((state, action, 100 - state - PENALTY * abs(state), following, float(following > 40)))
            state, steps = following, steps + 1
        rows.append(row)
    return rows


def advance(rollouts: ModelRollouts, starts: list[list[float]]) -> list[Tensor]:
    return [rollouts.advance(torch.tensor(each)[:, None], act, step, PENALTY) for each in starts]


def kept(rollouts: ModelRollouts, update: int) -> list[tuple[float, ...]]:
    return [tuple(row) for row in rollouts.kept_UBC[update].tolist()]


@pytest.mark.parametrize("horizon", [1, 3, 50])
def test_rollouts_are_those_of_a_plain_loop(horizon: int) -> None:
    starts = (torch.randn(12, 5, generator=torch.Generator().manual_seed(0)) * 16).tolist()
    rollouts = ModelRollouts(Layout(1, 1), horizon, 5, 12, CPU)
    penalties = advance(rollouts, starts)
    expected = plain(starts, horizon)
    assert any(row[4] for place in expected for row in place)
    for update in range(12):
        for place, found in enumerate(kept(rollouts, update)):
            assert found == pytest.approx(expected[place][update], rel=1e-5)
            assert penalties[update][place] == pytest.approx(PENALTY * abs(expected[place][update][0]), rel=1e-5)


def test_a_rollout_that_ends_starts_anew_at_once() -> None:
    rollouts = ModelRollouts(Layout(1, 1), 10, 1, 3, CPU)
    advance(rollouts, [[18.0], [3.0], [7.0]])
    assert [row[0] for update in range(3) for row in kept(rollouts, update)] == [18.0, 3.0, 7.75]
    assert [bool(row[4]) for update in range(3) for row in kept(rollouts, update)] == [True, False, False]


def test_transitions_of_the_last_updates_are_drawn_alike_and_no_others() -> None:
    rollouts = ModelRollouts(Layout(1, 1), 1, 2, 4, CPU)
    torch.manual_seed(0)
    advance(rollouts, [[1.0, 2.0]])
    assert set(rollouts.sample(100).observation_BO[:, 0].tolist()) == {1, 2}
    advance(rollouts, [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    batch = rollouts.sample(80_000)
    counts = torch.bincount(batch.observation_BO[:, 0].long(), minlength=11)
    assert counts[:3].sum() == 0 and (counts[3:] / 10_000 - 1).abs().max() < 0.04
    assert torch.equal(batch.action_BA, act(batch.observation_BO))
    following = step(batch.observation_BO, batch.action_BA)
    torch.testing.assert_close(batch.next_observation_BO, following.next_observation_BO)
    torch.testing.assert_close(batch.reward_B, following.reward_B - PENALTY * following.uncertainty_B)
    assert batch.terminated_B.dtype == torch.bool
