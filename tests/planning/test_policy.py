import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tap.model.critic import Critic
from tap.planning.policy import Policy
from tap.settings import Params


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(n) for n in range(count)]


def test_a_saved_policy_plans_the_same(tiny_policy: Policy, tiny_policy_folder: Path) -> None:
    loaded = Policy.load(tiny_policy_folder)
    observations = np.random.default_rng(0).normal(size=(4, 11))
    expected, found = tiny_policy.plan(observations, generators(4)), loaded.plan(observations, generators(4))
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.actions, expected.actions)
    assert (loaded.observation_dim, loaded.action_dim) == (11, 3)


def test_a_saved_policy_holds_no_pickle(tiny_policy_folder: Path) -> None:
    assert {file.suffix for file in tiny_policy_folder.iterdir()} == {".json", ".safetensors"}


def test_a_saved_policy_has_the_critic_that_its_search_needs(tiny_policy: Policy, tiny_params: Params, tmp_path: Path) -> None:
    critic = Critic(tiny_params.train_critic, tiny_policy.vqvae).eval()
    critic.held_out_error = 2.0
    params = tiny_policy.params.model_copy(update={"search": "critic_weighted", "temperature": 0.25})
    policy = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device, critic)
    folder = tmp_path / "policy"
    policy.save(folder)
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}
    observations = np.random.default_rng(0).normal(size=(4, 11))
    found, expected = Policy.load(folder).plan(observations, generators(4)), policy.plan(observations, generators(4))
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), array)
    (folder / "critic.json").unlink()
    with pytest.raises(ValueError, match=r"critic\.json does not exist"):
        Policy.load(folder)


@pytest.mark.parametrize("shape", [(11,), (2, 12), (2, 3, 11)])
def test_wrong_shapes_are_refused(tiny_policy: Policy, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"this policy needs \(n, 11\)"):
        tiny_policy.plan(np.zeros(shape), generators(2))


def test_nan_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ValueError, match="NaN"):
        tiny_policy.plan(np.full((1, 11), np.nan), generators(1))


def test_a_missing_policy_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"planner\.json does not exist"):
        Policy.load(tmp_path)


def test_no_observation_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ValueError, match="no observation"):
        tiny_policy.plan(np.zeros((0, 11)), [])


def test_a_folder_of_an_earlier_version_is_explained(tiny_policy_folder: Path) -> None:
    file = tiny_policy_folder / "vqvae.json"
    description = json.loads(file.read_text())
    description["normalizer"]["deviation"] = description["normalizer"].pop("std")
    file.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"vqvae\.json was written by an earlier version .*lacks std.* train again"):
        Policy.load(tiny_policy_folder)


def test_reasons_by_hand(tiny_policy: Policy, tiny_policy_folder: Path) -> None:
    low, high = np.full(16, -1.0, np.float32), np.full(16, 3.0, np.float32)
    policy = Policy.load(tiny_policy_folder)
    policy.normalizer = replace(policy.normalizer, min=low, max=high)
    observations = np.zeros((5, 11))
    observations[1, 4] = 3.39  # the range is 4 wide: a tenth beyond it is still within the support
    observations[2, 4] = 3.41
    observations[3, 2], observations[3, 9] = -1.5, -30.0  # the farther one is reported
    plan = policy.plan(observations, generators(5))
    assert policy.planner.num_codes == 2 and policy.params.likelihood_threshold == 0.05
    plan = replace(plan, log_probability=np.log([0.0026, 0.0026, 0.0026, 0.0026, 0.0024]))  # the threshold is 0.0025
    allowed = "far outside the training data, which allows -1.4 to 3.4"
    assert policy.ood_reasons(observations, plan) == [
        {},
        {},
        {"state": f"observation[4] is 3.41, {allowed}"},
        {"state": f"observation[9] is -30, {allowed}"},
        {"plan": "the plan has probability 0.0024, less than the threshold 0.05^2 = 0.0025"},
    ]


def test_a_plan_is_out_of_distribution_where_its_score_is_penalised(tiny_policy: Policy) -> None:
    """The reason and the penalty use the same threshold: the score of a plan without the reason is not lowered."""
    params = tiny_policy.params.model_copy(update={"likelihood_threshold": 0.3, "likelihood_weight": 1.0})
    policy = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device)
    observations = np.random.default_rng(0).normal(size=(20, 11))
    plan = policy.plan(observations, generators(20))
    penalties = plan.score - plan.predicted_return
    unlikely = np.array(["plan" in reasons for reasons in policy.ood_reasons(observations, plan)])
    assert unlikely.any() and not unlikely.all()
    np.testing.assert_allclose(penalties[~unlikely], penalties.max(), atol=1e-3)
    assert (penalties[unlikely] < penalties.max() - 1e-3).all()


@pytest.mark.parametrize("search", ["beam", "prior_mean"])
def test_a_plan_in_int8_does_not_depend_on_other_states(tiny_policy: Policy, search: str) -> None:
    params = tiny_policy.params.model_copy(update={"precision": "int8", "search": search})
    policy = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device)
    observations = np.random.default_rng(0).normal(size=(4, 11)) * [[0.1], [1], [10], [1]]
    together = policy.plan(observations, generators(4))
    for row, generator in enumerate(generators(4)):
        alone = policy.plan(observations[row : row + 1], [generator])
        np.testing.assert_array_equal(together.actions[row], alone.actions[0])
        np.testing.assert_array_equal(together.codes[row], alone.codes[0])


def test_a_policy_in_int8_is_saved_in_float32(tiny_policy: Policy, tmp_path: Path) -> None:
    params = tiny_policy.params.model_copy(update={"precision": "int8"})
    policy = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device)
    observations = np.random.default_rng(0).normal(size=(4, 11))
    expected = policy.plan(observations, generators(4))
    policy.save(tmp_path)
    loaded = Policy.load(tmp_path)
    for name, tensor in tiny_policy.vqvae.state_dict().items():
        assert torch.equal(loaded.vqvae.state_dict()[name], tensor), name
    np.testing.assert_array_equal(loaded.plan(observations, generators(4)).actions, expected.actions)
    assert (expected.actions != tiny_policy.plan(observations, generators(4)).actions).any()
