import itertools
import math

import numpy as np
import pytest
import torch

from tap.model.actor import Actor
from tap.model.critic import Critic
from tap.planning.planner import (
    MAX_BATCH_STATES,
    batch_sizes,
    likelihood_penalty,
    predicted_return,
    sample_codes,
    sample_distinct_codes,
)
from tap.planning.policy import Policy
from tap.settings import Params, TrainActorParams, TrainCriticParams


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def with_planner(policy: Policy, **changes: object) -> Policy:
    params = policy.params.model_copy(update=changes)
    return Policy(policy.vqvae, policy.normalizer, policy.prior, params, policy.device, policy.critic, policy.actor)


def with_critic(policy: Policy, params: TrainCriticParams, **changes: object) -> Policy:
    """The policy with a random critic, and changes of its planner's params."""
    torch.manual_seed(1)
    critic = Critic(params, policy.vqvae).eval()
    critic.held_out_error = 0.8
    joined = Policy(policy.vqvae, policy.normalizer, policy.prior, policy.params, policy.device, critic)
    return with_planner(joined, **{"search": "critic_weighted"} | changes)


def with_actor(policy: Policy, params: TrainActorParams) -> Policy:
    """The policy with a random actor, which its planner uses."""
    torch.manual_seed(2)
    planner = policy.params.model_copy(update={"actor": True})
    actor = Actor(params, policy.vqvae.layout).eval()
    return Policy(policy.vqvae, policy.normalizer, policy.prior, planner, policy.device, policy.critic, actor)


def exhaustive(policy: Policy, observation: np.ndarray) -> tuple[tuple[int, ...], float, np.ndarray]:
    """The best of all code sequences, by brute force: with whole sequences; no code is shared with the planner."""
    vqvae, params, layout = policy.vqvae, policy.params, policy.vqvae.layout
    mean, std = policy.normalizer.mean, policy.normalizer.std
    state = torch.from_numpy((observation - mean[layout.observation]) / std[layout.observation]).float()[None]
    num_codes = params.horizon // vqvae.params.latent_step
    best: tuple[tuple[int, ...], float, np.ndarray] | None = None
    for codes in itertools.product(range(vqvae.params.codebook.size), repeat=num_codes):
        with torch.no_grad():
            steps, _ = vqvae.decode(torch.tensor([codes]), state)
            log_probability = float(policy.prior.log_probabilities(torch.tensor([codes]), state).sum())
        raw = steps.transitions_BTX[0].numpy() * std + mean
        discount, last = vqvae.params.windows.discount, params.horizon - 1
        rewards = sum(discount**t * raw[t, layout.reward] for t in range(last))
        predicted = rewards + discount**last * raw[last, layout.return_to_go]
        likely = min(log_probability, num_codes * math.log(params.likelihood_threshold))
        score = predicted + params.likelihood_weight * likely
        if best is None or score > best[1]:
            best = codes, score, raw[:, layout.action]
    assert best is not None
    return best


def test_predicted_return_by_hand() -> None:
    rewards, returns_to_go = torch.tensor([[1.0, 2.0, 100.0]]), torch.tensor([[50.0, 60.0, 8.0]])
    # the last reward is part of the last return-to-go, so it does not count again
    torch.testing.assert_close(predicted_return(rewards, returns_to_go, 0.5), torch.tensor([1 + 0.5 * 2 + 0.25 * 8]))


def test_a_predicted_end_stops_the_sum() -> None:
    rewards, returns_to_go = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 0.0, 8.0])
    end = torch.tensor([0.0, 0.5, 0.5])
    torch.testing.assert_close(predicted_return(rewards, returns_to_go, 1.0, end), torch.tensor(1 + 0.5 * 2 + 0.25 * 8))


def test_the_penalty_by_hand(tiny_params: Params) -> None:
    params = tiny_params.evaluate.planner.model_copy(update={"likelihood_weight": 500.0, "likelihood_threshold": 0.05})
    likely, unlikely = math.log(0.5), math.log(1e-4)
    penalty = likelihood_penalty(torch.tensor([likely, unlikely], dtype=torch.float64), 2, params)
    torch.testing.assert_close(penalty, torch.tensor([500 * 2 * math.log(0.05), 500 * unlikely], dtype=torch.float64))


def test_samples_have_the_frequencies_of_the_distribution() -> None:
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.0, 0.0, 0.0, 1.0]])
    noise = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(0))
    codes = sample_codes(probabilities.log(), noise)
    frequencies = torch.stack([torch.bincount(row, minlength=4) / 20_000 for row in codes])
    torch.testing.assert_close(frequencies, probabilities, atol=0.01, rtol=0)
    assert sample_codes(probabilities.log(), torch.tensor([[0.0], [0.9999999]])).tolist() == [[0], [3]]


def test_distinct_codes_are_sampled_without_replacement() -> None:
    """Each pair is as frequent as when one code is sampled, then another from the rest."""
    p = [0.1, 0.2, 0.7]
    noise = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    pairs = sample_distinct_codes(torch.tensor(p).log().expand(20_000, 3), noise, 2).sort(dim=1).values
    for i, j in itertools.combinations(range(3), 2):
        expected = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        assert float((pairs == torch.tensor([i, j])).all(dim=1).float().mean()) == pytest.approx(expected, abs=0.01)
    assert len(set(sample_distinct_codes(torch.tensor([[0.0, -50.0, -90.0]]), torch.zeros(1, 3), 3)[0].tolist())) == 3


def test_without_replacement_no_two_candidates_are_the_same(tiny_policy: Policy) -> None:
    observation = np.random.default_rng(6).normal(size=(1, 11)).astype(np.float32)
    policy = with_planner(tiny_policy, replacement=False, beam_width=2, expansion_factor=4, likelihood_weight=2.0)
    (codes,) = policy.candidates(observation, generators(0)).codes
    assert len(np.unique(codes, axis=0)) == len(codes) == 8
    repeating = with_planner(policy, replacement=True).candidates(observation, generators(0)).codes[0]
    assert len(np.unique(repeating, axis=0)) < len(repeating)


def test_without_replacement_a_beam_wider_than_all_plans_is_the_exhaustive_search(tiny_policy: Policy) -> None:
    """Also if it asks for more distinct codes than there are, as the paper does for Adroit: 1024 of 512."""
    size = tiny_policy.vqvae.params.codebook.size
    policy = with_planner(tiny_policy, replacement=False, beam_width=size**2, expansion_factor=size + 1, likelihood_weight=2.0)
    observation = np.random.default_rng(8).normal(size=11).astype(np.float32)
    found = policy.candidates(observation[None], generators(0)).codes[0]
    assert sorted(map(tuple, found)) == list(itertools.product(range(size), repeat=2))
    codes, score, _ = exhaustive(policy, observation)
    best = policy.plan(observation[None], generators(0))
    assert tuple(best.codes[0]) == codes
    assert best.score[0] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize("search", ["beam", "prior_sampling"])
def test_the_plan_is_the_best_of_its_candidates(tiny_policy: Policy, search: str) -> None:
    policy = with_planner(tiny_policy, search=search)
    observations = np.random.default_rng(7).normal(size=(3, 11)).astype(np.float32)
    every, best = policy.candidates(observations, generators(0, 1, 2)), policy.plan(observations, generators(0, 1, 2))
    assert every.actions.shape == (3, 8 if search == "beam" else 16, 6, 3)
    for n, c in enumerate(every.score.argmax(axis=1)):
        np.testing.assert_array_equal(every.codes[n, c], best.codes[n])
        np.testing.assert_array_equal(every.actions[n, c], best.actions[n])


@pytest.mark.parametrize("likelihood_threshold", [0.05, 0.9])
def test_a_wide_beam_finds_the_exhaustive_optimum(tiny_policy: Policy, likelihood_threshold: float) -> None:
    # Sampled codes repeat, and in a narrow beam, repeats of the best partial plan would displace all others.
    policy = with_planner(
        tiny_policy, beam_width=3000, expansion_factor=1, likelihood_weight=2.0, likelihood_threshold=likelihood_threshold
    )
    rng = np.random.default_rng(0)
    for seed in range(4):
        observation = rng.normal(size=11).astype(np.float32)
        codes, score, actions = exhaustive(policy, observation)
        found = policy.plan(observation[None], generators(seed))
        assert tuple(found.codes[0]) == codes
        assert found.score[0] == pytest.approx(score, rel=1e-4)
        np.testing.assert_allclose(found.actions[0], actions, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("search", "wide"), [("beam", {"beam_width": 3000, "expansion_factor": 1}), ("prior_sampling", {"samples": 3000})]
)
def test_without_rewards_the_likeliest_plan_is_found(tiny_policy: Policy, search: str, wide: dict[str, int]) -> None:
    """By brute force over all codes; returns, even large ones, change nothing."""
    policy = with_planner(tiny_policy, search=search, objective="likelihood", **wide)
    layout, size = policy.vqvae.layout, policy.vqvae.params.codebook.size
    policy.normalizer.std[[layout.reward, layout.return_to_go]] = 1e6
    for seed, observation in enumerate(np.random.default_rng(1).normal(size=(3, 11)).astype(np.float32)):
        state = policy.normalizer.normalize(torch.from_numpy(observation[None]), layout.observation)
        every = list(itertools.product(range(size), repeat=2))
        with torch.no_grad():
            likelihoods = [float(policy.prior.log_probabilities(torch.tensor([codes]), state).sum()) for codes in every]
        best = int(np.argmax(likelihoods))
        found = policy.plan(observation[None], generators(seed))
        assert tuple(found.codes[0]) == every[best]
        assert found.score[0] == pytest.approx(likelihoods[best], rel=1e-4) and found.predicted_return[0] == 0


def test_the_mean_under_the_prior_is_the_same_without_rewards(tiny_policy: Policy) -> None:
    observations = np.random.default_rng(3).normal(size=(3, 11)).astype(np.float32)
    plans = [
        with_planner(tiny_policy, search="prior_mean", objective=objective).plan(observations, generators(0, 1, 2))
        for objective in (None, "likelihood")
    ]
    np.testing.assert_array_equal(plans[0].actions, plans[1].actions)


def test_many_samples_find_the_exhaustive_optimum(tiny_policy: Policy) -> None:
    observation = np.random.default_rng(1).normal(size=11).astype(np.float32)
    for search in ("prior_sampling", "uniform_sampling"):
        policy = with_planner(tiny_policy, search=search, samples=3000, likelihood_weight=2.0)
        codes, score, _ = exhaustive(policy, observation)
        found = policy.plan(observation[None], generators(0))
        assert tuple(found.codes[0]) == codes
        assert found.score[0] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize("search", ["beam", "prior_sampling", "uniform_sampling", "critic_weighted", "prior_mean"])
def test_planning_for_many_states_equals_planning_for_each_alone(tiny_policy: Policy, tiny_params: Params, search: str) -> None:
    policy = with_critic(tiny_policy, tiny_params.train_critic, search=search)
    observations = np.random.default_rng(2).normal(size=(5, 11)).astype(np.float32)
    together = policy.plan(observations, generators(*range(5)))
    for n in range(5):
        alone = policy.plan(observations[n : n + 1], generators(n))
        np.testing.assert_array_equal(together.codes[n], alone.codes[0])
        np.testing.assert_allclose(together.actions[n], alone.actions[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(together.score[n], alone.score[0], rtol=1e-4)


def test_the_plans_numbers_are_those_of_its_codes(tiny_policy: Policy) -> None:
    observations = np.random.default_rng(3).normal(size=(3, 11)).astype(np.float32)
    found = tiny_policy.plan(observations, generators(0, 1, 2))
    layout = tiny_policy.vqvae.layout
    state = tiny_policy.normalizer.normalize(torch.from_numpy(observations), layout.observation)
    codes = torch.from_numpy(found.codes)
    with torch.no_grad():
        steps, _ = tiny_policy.vqvae.decode(codes, state)
        log_probability = tiny_policy.prior.log_probabilities(codes, state).sum(dim=1)
    raw = tiny_policy.normalizer.denormalize(steps.transitions_BTX)
    np.testing.assert_allclose(found.observations, raw[..., layout.observation], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.rewards, raw[..., layout.reward], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.log_probability, log_probability, rtol=1e-4)


def test_the_partial_threshold_changes_which_beams_are_kept_but_not_the_final_score(tiny_policy: Policy) -> None:
    observations = np.random.default_rng(4).normal(size=(30, 11)).astype(np.float32)
    choices = {"beam_width": 1, "expansion_factor": 8, "likelihood_weight": 5.0, "likelihood_threshold": 0.3}
    full = with_planner(tiny_policy, partial_threshold=False, **choices).plan(observations, generators(*range(30)))
    partial = with_planner(tiny_policy, partial_threshold=True, **choices).plan(observations, generators(*range(30)))
    assert (full.codes != partial.codes).any()
    for found in (full, partial):
        score = found.predicted_return + 5.0 * np.minimum(found.log_probability, 2 * math.log(0.3))
        np.testing.assert_allclose(found.score, score, rtol=1e-4)


def test_no_search_follows_the_prior(tiny_policy: Policy) -> None:
    """Beam width 1 and expansion 1: one sample from the prior, whatever its return."""
    policy = with_planner(tiny_policy, beam_width=1, expansion_factor=1)
    observation = np.random.default_rng(5).normal(size=(1, 11)).astype(np.float32)
    states = np.repeat(observation, 2000, axis=0)
    codes = policy.plan(states, generators(*range(2000))).codes
    state = policy.normalizer.normalize(torch.from_numpy(observation), policy.vqvae.layout.observation)
    with torch.no_grad():
        log_probs, _ = policy.prior(torch.tensor([[policy.prior.start]]), state)
    frequencies = np.bincount(codes[:, 0], minlength=8) / 2000
    np.testing.assert_allclose(frequencies, log_probs[0, 0].exp(), atol=0.035)


@pytest.mark.parametrize("choices", [{}, {"replacement": False, "expansion_factor": 1}, {"search": "prior_sampling"}])
def test_a_search_never_waits_for_a_value(tiny_policy: Policy, choices: dict[str, object]) -> None:
    """As a CUDA graph requires. Tested with meta tensors, which have a shape but no values."""
    policy = with_planner(tiny_policy, **choices)
    policy.vqvae.to("meta"), policy.prior.to("meta")
    noise = policy.planner.noise(generators(0, 1)).to("meta")
    search = policy.planner.sample_plans if policy.params.search == "prior_sampling" else policy.planner.beam_search
    found = search(torch.empty(2, 11, device="meta"), noise)
    assert len(found.score_R) == 2 * (16 if policy.params.search == "prior_sampling" else 4 * policy.params.expansion_factor)


def mean_by_hand(policy: Policy, observation: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Weights of all first codes, the mean of their plans, predicted return and score: code by code, from whole plans."""
    vqvae, params, layout = policy.vqvae, policy.params, policy.vqvae.layout
    mean, std = policy.normalizer.mean.astype(float), policy.normalizer.std.astype(float)
    state = torch.from_numpy((observation - mean[layout.observation]) / std[layout.observation]).float()[None]
    priors, values, plans = [], [], []
    discount = vqvae.params.windows.discount
    for code in range(vqvae.params.codebook.size):
        codes = torch.tensor([[code, 0]])  # the decoder is causal: what follows a code does not change its steps
        with torch.no_grad():
            steps, _ = vqvae.decode(codes, state)
            priors.append(math.exp(float(policy.prior.log_probabilities(codes, state)[0, 0])))
            plans.append(steps.transitions_BTX[0, :3].double().numpy() * std + mean)
            if params.search == "critic_weighted":
                assert policy.critic is not None
                members = policy.critic(state, torch.tensor([code]))[:, 0].double().numpy()
                values.append(members.mean() * std[layout.return_to_go] + mean[layout.return_to_go])
            else:
                rewards, returns = plans[-1][:, layout.reward], plans[-1][:, layout.return_to_go]
                values.append(rewards[0] + discount * rewards[1] + discount**2 * returns[2])
    tau = params.temperature * policy.critic.held_out_error if policy.critic else math.inf
    tilted = [p * math.exp((value - max(values)) / tau) for p, value in zip(priors, values, strict=True)]
    weights = np.array(tilted) / sum(tilted)
    plan = sum(w * plan for w, plan in zip(weights, plans, strict=True))
    score = max(values) + tau * math.log(sum(tilted)) if policy.critic else float(weights @ values)
    return weights, plan, float(weights @ values), score


@pytest.mark.parametrize("search", ["critic_weighted", "prior_mean"])
def test_a_mean_over_codes_is_the_one_computed_code_by_code(tiny_policy: Policy, tiny_params: Params, search: str) -> None:
    weighted = with_critic(tiny_policy, tiny_params.train_critic)
    policy = weighted if search == "critic_weighted" else with_planner(tiny_policy, search=search)
    observations = np.random.default_rng(0).normal(size=(4, 11)).astype(np.float32)
    found, layout = policy.plan(observations, generators(0, 1, 2, 3)), policy.vqvae.layout
    assert found.actions.shape == (4, 3, 3) and found.codes.shape == (4, 1)
    for n, observation in enumerate(observations):
        weights, plan, predicted, score = mean_by_hand(policy, observation)
        assert weights.max() < 0.95  # no single code decides
        np.testing.assert_allclose(found.actions[n], plan[:, layout.action], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.observations[n], plan[:, layout.observation], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.rewards[n], plan[:, layout.reward], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.returns_to_go[n], plan[:, layout.return_to_go], rtol=1e-3, atol=1e-4)
        assert found.codes[n, 0] == weights.argmax()
        assert found.predicted_return[n] == pytest.approx(predicted, rel=1e-4)
        assert found.score[n] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize("search", ["critic_weighted", "prior_mean"])
def test_a_mean_over_codes_is_moved_to_the_actor(tiny_policy: Policy, tiny_params: Params, search: str) -> None:
    """Of the prior's mean, the first action is the actor's; critic weights change it as they change the prior's mean."""
    mean = with_planner(tiny_policy, search="prior_mean")
    plain = with_critic(tiny_policy, tiny_params.train_critic) if search == "critic_weighted" else mean
    moved, layout = with_actor(plain, tiny_params.train_actor), tiny_policy.vqvae.layout
    observations = np.random.default_rng(6).normal(size=(5, 11)).astype(np.float32)
    states = moved.normalizer.normalize(torch.from_numpy(observations), layout.observation)
    assert moved.actor
    with torch.no_grad():
        acted = moved.normalizer.denormalize(moved.actor(states), layout.action).numpy()
    before, after, of_prior = (policy.plan(observations, generators(*range(5))) for policy in (plain, moved, mean))
    expected = acted + before.actions[:, 0] - of_prior.actions[:, 0]
    np.testing.assert_allclose(after.actions[:, 0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(after.actions[:, 1:], before.actions[:, 1:])
    np.testing.assert_array_equal(after.observations, before.observations)


def test_an_actor_that_is_asked_for_must_be_there(tiny_policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"planner.actor needs an actor: run the stage train_actor"):
        with_planner(tiny_policy, search="prior_mean", actor=True)


def test_no_other_weights_have_a_higher_objective(tiny_policy: Policy, tiny_params: Params) -> None:
    """sum_k w_k Q_k - tau KL(w || p), of random weights near and far."""
    policy = with_critic(tiny_policy, tiny_params.train_critic)
    observation, rng = np.random.default_rng(1).normal(size=(1, 11)).astype(np.float32), np.random.default_rng(2)
    every, best = policy.candidates(observation, generators(0)), policy.plan(observation, generators(0))
    values, log_prior, tau = every.predicted_return[0], every.log_probability[0], 0.5 * 0.8
    for concentration in (0.3, 1.0, 10.0):
        for weights in rng.dirichlet(concentration * np.exp(log_prior), size=200) + 1e-12:
            assert weights @ values - tau * weights @ (np.log(weights) - log_prior) <= best.score[0] + 1e-4


def test_candidates_of_a_mean_are_all_codes_or_the_likeliest(tiny_policy: Policy, tiny_params: Params) -> None:
    policy = with_critic(tiny_policy, tiny_params.train_critic)
    observations = np.random.default_rng(3).normal(size=(2, 11)).astype(np.float32)
    every, mean = policy.candidates(observations, generators(0, 1)), policy.plan(observations, generators(0, 1))
    assert every.actions.shape == (2, 8, 3, 3) and np.sort(every.codes[..., 0]).tolist() == [list(range(8))] * 2
    np.testing.assert_allclose(np.exp(every.log_probability).sum(axis=1), 1, rtol=1e-5)
    assert (np.diff(every.log_probability) <= 0).all()
    policy = with_critic(tiny_policy, tiny_params.train_critic, likeliest_codes=3)
    few, mean_of_few = policy.candidates(observations, generators(0, 1)), policy.plan(observations, generators(0, 1))
    for name in ("codes", "log_probability", "score"):
        np.testing.assert_allclose(getattr(few, name), getattr(every, name)[:, :3], rtol=1e-5)
    weights = np.exp((few.score - few.score.max(axis=1, keepdims=True)) / (0.5 * 0.8))
    for n in range(2):
        expected = np.average(every.actions[n, :3], axis=0, weights=weights[n])
        np.testing.assert_allclose(mean_of_few.actions[n], expected, rtol=1e-4, atol=1e-5)
    for n, c in enumerate(every.score.argmax(axis=1)):
        assert mean.codes[n, 0] == every.codes[n, c, 0] and mean.log_probability[n] == every.log_probability[n, c]


def test_a_high_temperature_is_the_priors_mean(tiny_policy: Policy, tiny_params: Params) -> None:
    observations = np.random.default_rng(4).normal(size=(5, 11)).astype(np.float32)
    prior_mean = with_planner(tiny_policy, search="prior_mean").act(observations, generators(*range(5)))

    def distance(temperature: float) -> float:
        policy = with_critic(tiny_policy, tiny_params.train_critic, temperature=temperature)
        return float(np.abs(policy.act(observations, generators(*range(5))) - prior_mean).max())

    assert distance(1e6) < 1e-4 < distance(10) < distance(0.5)


def test_a_code_of_high_value_is_executed_and_one_of_low_value_is_not(tiny_policy: Policy, tiny_params: Params) -> None:
    policy = with_critic(tiny_policy, tiny_params.train_critic)
    observation = np.random.default_rng(5).normal(size=(1, 11)).astype(np.float32)
    every = policy.candidates(observation, generators(0))
    assert policy.critic is not None
    for place, code in enumerate(every.codes[0, :, 0]):
        policy.critic.values = lambda state, codes, code=code: 50.0 * (codes == code)  # type: ignore[method-assign, misc]
        found = with_planner(policy).plan(observation, generators(0))  # a planner keeps its trace
        np.testing.assert_allclose(found.actions[0], every.actions[0, place], rtol=1e-4, atol=1e-5)
        policy.critic.values = lambda state, codes, code=code: -50.0 * (codes == code)  # type: ignore[method-assign, misc]
        others = np.exp(every.log_probability[0]) * (np.arange(8) != place)
        without = np.einsum("k,kha->ha", others / others.sum(), every.actions[0])
        found = with_planner(policy).plan(observation, generators(0))
        np.testing.assert_allclose(found.actions[0], without, rtol=1e-3, atol=1e-4)


def test_a_mean_needs_no_random_numbers(tiny_policy: Policy, tiny_params: Params) -> None:
    policy = with_critic(tiny_policy, tiny_params.train_critic)
    observation, (generator,) = np.zeros((1, 11), np.float32), generators(0)
    before = generator.get_state()
    np.testing.assert_array_equal(policy.act(observation, [generator]), policy.act(observation, generators(7)))
    assert torch.equal(generator.get_state(), before)


def test_a_search_without_the_critic_it_needs_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ValueError, match="critic_weighted needs a critic: run the stage train_critic"):
        with_planner(tiny_policy, search="critic_weighted")


def test_a_mean_never_waits_for_a_value(tiny_policy: Policy, tiny_params: Params) -> None:
    """As `test_a_search_never_waits_for_a_value`."""
    policy = with_critic(tiny_policy, tiny_params.train_critic)
    assert policy.critic is not None
    for model in (policy.vqvae, policy.prior, policy.critic):
        model.to("meta")
    policy.normalizer._tensors[torch.device("meta")] = (torch.empty(16, device="meta"), torch.empty(16, device="meta"))
    for best, plans in ((True, 2), (False, 2 * 8)):
        fields = policy.planner.solve(torch.empty(2, 11, device="meta"), torch.empty(2, 0, device="meta"), best)
        assert math.prod(fields[-1].shape) == plans


@pytest.mark.parametrize(
    "states", [1, 2, 3, MAX_BATCH_STATES - 1, MAX_BATCH_STATES, MAX_BATCH_STATES + 1, 5 * MAX_BATCH_STATES + 7]
)
def test_batches_are_bounded_and_recorded_ones_have_few_sizes(states: int) -> None:
    for recorded in (False, True):
        sizes = batch_sizes(states, recorded)
        assert sum(sizes) == states and max(sizes) <= MAX_BATCH_STATES
        assert not recorded or all(size in (1, 2, 4, 8, 16) for size in sizes)


def test_more_states_than_a_batch_holds_get_the_plans_that_they_get_alone(tiny_policy: Policy) -> None:
    states = 2 * MAX_BATCH_STATES + 3
    observations = np.random.default_rng(0).normal(size=(states, 11))
    together = tiny_policy.plan(observations, generators(*range(states)))
    for i in (0, MAX_BATCH_STATES - 1, MAX_BATCH_STATES, states - 1):
        alone = tiny_policy.plan(observations[i : i + 1], generators(i))
        np.testing.assert_array_equal(together.codes[i], alone.codes[0])
        np.testing.assert_allclose(together.actions[i], alone.actions[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"search": "prior_sampling"}, {"stop_at_end": True, "replacement": False}])
def test_a_trace_finds_the_plan_of_its_operations_to_the_bit(tiny_policy: Policy, changes: dict[str, object]) -> None:
    """For other states than it was recorded with, also once TorchScript has optimised it, which is at its third call."""
    planner = with_planner(tiny_policy, **changes).planner
    for observations in np.random.default_rng(3).normal(size=(6, 1, 11)).astype(np.float32):
        states = torch.from_numpy(observations)
        with torch.no_grad():
            fields = planner.solve(states, planner.noise(generators(1)), best=True)
        for name, expected in zip(vars(planner.plan(states, generators(1))).items(), fields, strict=True):
            np.testing.assert_array_equal(name[1], expected.numpy(), err_msg=name[0])


def test_a_trace_of_a_mean_finds_the_plan_of_its_operations_to_the_bit(tiny_policy: Policy, tiny_params: Params) -> None:
    planner = with_actor(with_critic(tiny_policy, tiny_params.train_critic), tiny_params.train_actor).planner
    for observations in np.random.default_rng(4).normal(size=(6, 1, 11)).astype(np.float32):
        states = torch.from_numpy(observations)
        with torch.no_grad():
            fields = planner.solve(states, torch.empty(1, 0), best=True)
        for name, expected in zip(vars(planner.plan(states, generators(1))).items(), fields, strict=True):
            np.testing.assert_array_equal(name[1], expected.numpy(), err_msg=name[0])
