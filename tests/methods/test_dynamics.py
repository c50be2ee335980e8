"""The dynamics ensemble against numpy, member by member, and on a system whose dynamics and noise are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tap.data.episodes import Episodes, Selection
from tap.data.windows import fit_normalizer
from tap.methods.dynamics import DynamicsEnsemble
from tap.methods.transitions import WINDOWS, Batch, Transitions
from tap.settings import DynamicsParams, NetworkParams, RewardParams

CPU = torch.device("cpu")
NETWORK = NetworkParams(layers=2, width=32)
PARAMS = DynamicsParams(network=NETWORK, members=4, elites=2, beta=0, updates=1, learning_rate=1, weight_decay=0)

# A damped oscillator with noise: s' = TURN s + PUSH a + NOISE e. It ends where the position has passed WALL.
TURN, PUSH = np.array([[1.0, 0.3], [-0.3, 0.8]]), np.array([0.0, 0.4])
NOISE, REWARD_NOISE, WALL, STEPS = np.array([0.02, 0.1]), 0.05, 1.0, 20


def move(states: np.ndarray, actions: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The next states (N, 2) and the rewards (N,): less the distance from the middle."""
    following = states @ TURN.T + actions[:, None] * PUSH + NOISE * rng.normal(size=states.shape)
    return following, 10 - 5 * states[:, 0] ** 2 + REWARD_NOISE * rng.normal(size=len(states))


def oscillations(episodes: int, seed: int) -> Episodes:
    rng = np.random.default_rng(seed)
    rows: list[tuple[np.ndarray, float, float, bool]] = []
    ends = [0]
    for _ in range(episodes):
        state = rng.uniform(-1, 1, 2)
        for _ in range(STEPS):
            action = rng.uniform(-1, 1)
            (following,), (reward,) = move(state[None], np.array([action]), rng)
            over = bool(state[0] > WALL)
            rows.append((state, action, reward, over))
            state = following
            if over:
                break
        ends.append(len(rows))
    states, actions, rewards, terminals = (np.array(column) for column in zip(*rows, strict=True))
    columns = (states.astype(np.float32), actions.astype(np.float32)[:, None], rewards.astype(np.float32))
    return Episodes(*columns, terminals, np.array(ends))


def transitions(episodes: Episodes, scale: float = 1.0, like: Transitions | None = None) -> Transitions:
    everything = Selection(episodes, np.arange(len(episodes.lengths)))
    normalizer = like.normalizer if like else fit_normalizer(everything, WINDOWS)
    return Transitions(everything, normalizer, RewardParams(shift=0, return_range=None), scale, CPU)


@pytest.fixture(scope="module")
def recorded() -> Transitions:
    return transitions(oscillations(300, seed=0))


@pytest.fixture(scope="module")
def held_out(recorded: Transitions) -> Transitions:
    return transitions(oscillations(100, seed=1), like=recorded)


@pytest.fixture(scope="module")
def fitted(recorded: Transitions, held_out: Transitions) -> DynamicsEnsemble:
    torch.manual_seed(0)
    dynamics, generator = DynamicsEnsemble(PARAMS, recorded, CPU), torch.Generator().manual_seed(0)
    sample = recorded.sampler(1)
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        optimizer.zero_grad()
        dynamics.loss(recorded.batch(sample(256, generator)))["loss"].backward()
        optimizer.step()
        schedule.step()
    dynamics.choose_elites(held_out)
    return dynamics


def random_ensemble(recorded: Transitions) -> DynamicsEnsemble:
    torch.manual_seed(0)
    dynamics = DynamicsEnsemble(PARAMS, recorded, CPU)
    with torch.no_grad():
        for bias in dynamics.biases:
            bias.normal_()
    return dynamics


def constant_ensemble(recorded: Transitions, *, reward: list[float], end: list[float]) -> DynamicsEnsemble:
    """Whose members predict a mean of the normalised reward, the logit of an end, and else 0, whatever the input."""
    dynamics = DynamicsEnsemble(PARAMS, recorded, CPU)
    with torch.no_grad():
        for parameter in (*dynamics.weights, *dynamics.biases):
            parameter.zero_()
        outputs = dynamics.biases[-1].view(PARAMS.members, -1)
        outputs[:, 2], outputs[:, 6] = torch.tensor(reward), torch.tensor(end)
    return dynamics


def test_the_likelihood_is_that_of_a_plain_loop_over_members(recorded: Transitions) -> None:
    dynamics, some = random_ensemble(recorded), recorded.batch(torch.arange(0, len(recorded), len(recorded) // 40))
    batch = replace(some, terminated_B=torch.arange(len(some.reward_B)) % 3 == 0)
    found = dynamics.log_likelihood(batch).detach().numpy()

    before, after = batch.observation_BO.double().numpy(), batch.next_observation_BO.double().numpy()
    targets = np.column_stack([after - before, batch.reward_B.double().numpy()])
    every = recorded.batch(torch.arange(len(recorded)))
    columns = np.column_stack([(every.next_observation_BO - every.observation_BO).numpy(), every.reward_B.numpy()])
    targets = (targets - columns.mean(0)) / columns.std(0)
    expected = np.zeros_like(found)
    for member in range(PARAMS.members):
        x = np.column_stack([before, batch.action_BA.double().numpy()])
        for layer, weight in enumerate(dynamics.weights):
            x = x / (1 + np.exp(-x)) if layer else x
            x = x @ weight[member].detach().double().numpy()
            x += dynamics.biases[layer].view(PARAMS.members, -1)[member].detach().double().numpy()
        mean, raw, logit = x[:, :3], x[:, 3:6], x[:, 6]
        log_variance = 0.5 - np.log1p(np.exp(0.5 - raw))
        log_variance = -10 + np.log1p(np.exp(log_variance + 10))
        std = np.exp(log_variance / 2)
        density = -((targets - mean) ** 2) / (2 * std**2) - np.log(std * math.sqrt(2 * math.pi))
        for row, ended in enumerate(batch.terminated_B.tolist()):
            probability = 1 / (1 + math.exp(-logit[row]))
            known = density[row, 2:] if ended else density[row]  # the successor of the last step is not known
            expected[member, row] = known.sum() + math.log(probability if ended else 1 - probability)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_members_learn_as_if_each_was_alone(recorded: Transitions) -> None:
    dynamics, batch = random_ensemble(recorded), recorded.batch(torch.arange(50))
    dynamics.loss(batch)["loss"].backward()
    together = [weight.grad.clone() for weight in dynamics.weights if weight.grad is not None]
    for member in range(PARAMS.members):
        alone = torch.autograd.grad(-dynamics.log_likelihood(batch)[member].mean(), [*dynamics.weights])
        for both, own in zip(together, alone, strict=True):
            torch.testing.assert_close(both[member], own[member])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_beta_weights_the_errors_by_the_variance(recorded: Transitions, beta: float) -> None:
    """The gradient of a mean is its error times variance^(beta - 1): with a beta of 1, that of half the squared error."""
    dynamics = constant_ensemble(recorded, reward=[0.5, -1, 2, 0], end=[0, 0, 0, 0])
    log_variance = torch.tensor([-3.0, -1.0, 0.0, 0.3])  # of the reward, as the network has it before it is bounded
    with torch.no_grad():
        dynamics.biases[-1].view(PARAMS.members, -1)[:, 5] = log_variance
    batch = recorded.batch(torch.arange(50))
    dynamics.log_likelihood(batch, beta).mean(dim=1).sum().backward()
    assert dynamics.biases[-1].grad is not None
    found = dynamics.biases[-1].grad.view(PARAMS.members, -1)[:, 2]

    rewards = recorded.batch(torch.arange(len(recorded))).reward_B
    target = ((batch.reward_B - rewards.mean()) / rewards.std()).mean().item()
    for member, (mean, raw) in enumerate(zip([0.5, -1, 2, 0], log_variance.tolist(), strict=True)):
        variance = math.exp(-10 + math.log1p(math.exp(0.5 - math.log1p(math.exp(0.5 - raw)) + 10)))
        assert found[member].item() == pytest.approx((target - mean) * variance ** (beta - 1), rel=1e-3)


def test_bounds_of_the_variance_hold_and_are_drawn_together(recorded: Transitions) -> None:
    dynamics = random_ensemble(recorded)
    batch = recorded.batch(torch.arange(50))
    with torch.no_grad():
        dynamics.biases[-1].view(PARAMS.members, -1)[0, 3:6] = 1e4
        dynamics.biases[-1].view(PARAMS.members, -1)[1, 3:6] = -1e4
    _, log_variance_EBT, _ = dynamics(batch.observation_BO, batch.action_BA)
    torch.testing.assert_close(log_variance_EBT[0].exp(), torch.full((50, 3), math.exp(0.5)), rtol=1e-3, atol=0)
    torch.testing.assert_close(log_variance_EBT[1], torch.full((50, 3), -10.0), rtol=1e-4, atol=0)

    dynamics = random_ensemble(recorded)
    likelihood = dynamics.log_likelihood(batch).sum(dim=0).mean().item()
    assert dynamics.loss(batch)["loss"].item() + likelihood == pytest.approx(0.01 * 3 * 10.5, rel=1e-3)


def test_uncertainty_is_the_largest_norm_in_raw_units() -> None:
    """Of members with standard deviations (3, 4, 0) and (0, 0, 6) in raw units, where a normalised reward of 2 is a raw one."""
    episodes = oscillations(20, seed=0)
    recorded = transitions(episodes, scale=2.0)
    dynamics = DynamicsEnsemble(PARAMS, recorded, CPU)
    spread = episodes.observations.std(axis=0)
    std_EBT = torch.tensor([[[3 / spread[0], 4 / spread[1], 0.0]], [[0.0, 0.0, 6 * 2]]])
    assert dynamics.uncertainty(std_EBT).tolist() == pytest.approx([6], rel=1e-5)
    assert dynamics.uncertainty(std_EBT[:1]).tolist() == pytest.approx([5], rel=1e-5)


def test_the_elites_are_the_best_on_held_out_transitions(recorded: Transitions, held_out: Transitions) -> None:
    """Held-out rewards are the recorded ones' mean, so members that predict it, or nearly, are the best."""
    dynamics = constant_ensemble(recorded, reward=[3.0, -0.5, 0.1, -4.0], end=[0, 0, 0, 0])
    dynamics.choose_elites(held_out)
    assert dynamics.elites.tolist() == [2, 1]


def test_only_elites_act_and_are_asked_how_sure_they_are(recorded: Transitions) -> None:
    dynamics, batch = (
        constant_ensemble(recorded, reward=[0, 50, 0, 80], end=[99, 99, -99, 99]),
        recorded.batch(torch.arange(500)),
    )
    with torch.no_grad():
        outputs = dynamics.biases[-1].view(PARAMS.members, -1)
        outputs[:, 3:6] = torch.tensor([0.5, -9, -9, -9])[:, None]
    dynamics.elites.copy_(torch.tensor([1, 2]))
    torch.manual_seed(0)
    found = dynamics.step(batch.observation_BO, batch.action_BA)
    rewards = recorded.batch(torch.arange(len(recorded))).reward_B
    by_1 = found.reward_B > rewards.mean() + 25 * rewards.std()
    assert 200 < by_1.sum() < 300
    assert torch.equal(found.terminated_B, by_1)  # the same member draws all of a step
    assert found.reward_B.max() < rewards.mean() + 52 * rewards.std()
    assert found.uncertainty_B.max() < 0.1


def test_states_stay_in_the_range_of_the_data(fitted: DynamicsEnsemble, recorded: Transitions) -> None:
    """From a state at its end, pushed beyond it by an action that the data does not have."""
    torch.manual_seed(0)
    normalizer, layout = recorded.normalizer, recorded.layout
    low, high = normalizer.support_bounds(layout.observation)
    state = normalizer.normalize(torch.from_numpy(high.astype(np.float32))[None], layout.observation).expand(200, -1)
    for _ in range(10):
        state = fitted.step(state, torch.full((200, 1), 50.0)).next_observation_BO
        found = normalizer.denormalize(state, layout.observation).numpy()
        assert (found > low - 1e-4).all() and (found < high + 1e-4).all()
    assert (found > high - 1e-4).any()


def test_it_learns_a_system_to_its_noise(fitted: DynamicsEnsemble, held_out: Transitions) -> None:
    """No density is likelier, on average, than the true one."""
    batch = held_out.batch(torch.arange(len(held_out)))
    goes_on = ~batch.terminated_B
    raw = held_out.normalizer.std[held_out.layout.observation] * fitted._targets.std[:2]
    noise = np.append(NOISE / raw, REWARD_NOISE / fitted._targets.std[2])
    best = -np.log(noise * math.sqrt(2 * math.pi * math.e)).sum()  # the negative entropy
    with torch.no_grad():
        found = fitted.log_likelihood(batch)[:, goes_on].mean(dim=1)
    assert (found > best - 0.25).all() and (found < best + 0.05).all()


def test_it_learns_where_the_episode_ends(fitted: DynamicsEnsemble, held_out: Transitions) -> None:
    batch = held_out.batch(torch.arange(len(held_out)))
    _, _, end_EB = fitted.predict(batch.observation_BO, batch.action_BA)
    ends = batch.terminated_B.sum().item()
    assert ends > 20
    assert end_EB[:, batch.terminated_B].mean() > 0.35 > 10 * end_EB[:, ~batch.terminated_B].mean()
    assert end_EB.sum(dim=1).tolist() == pytest.approx([ends, ends], rel=0.25)


def test_rollouts_spread_as_the_system_does(fitted: DynamicsEnsemble, recorded: Transitions) -> None:
    """From one state and with the same actions, mean and standard deviation of 2,000 rollouts after five steps."""
    torch.manual_seed(0)
    rng, normalizer, layout = np.random.default_rng(0), recorded.normalizer, recorded.layout
    states = np.tile([-0.5, 0.4], (2000, 1))
    normal = normalizer.normalize(torch.from_numpy(states).float(), layout.observation)
    for action in (0.8, -0.3, 0.5, 0.1, -0.9):
        states, _ = move(states, np.full(2000, action), rng)
        raw_action = torch.full((2000, 1), action)
        normal = fitted.step(normal, normalizer.normalize(raw_action, layout.action)).next_observation_BO
    found = normalizer.denormalize(normal, layout.observation).numpy()
    np.testing.assert_allclose(found.mean(axis=0), states.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(found.std(axis=0), states.std(axis=0), rtol=0.15)


def test_uncertainty_grows_away_from_the_data(fitted: DynamicsEnsemble, recorded: Transitions) -> None:
    near = recorded.batch(torch.arange(200))
    far = Batch(20 * near.observation_BO, near.action_BA, *(near.reward_B,) * 3)
    inside, outside = (fitted.step(each.observation_BO, each.action_BA).uncertainty_B.median() for each in (near, far))
    assert outside > 3 * inside
