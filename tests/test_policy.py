from pathlib import Path

import numpy as np
import pytest
import torch

from tap.policy import Policy


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


@pytest.mark.parametrize("shape", [(11,), (2, 12), (2, 3, 11)])
def test_wrong_shapes_are_refused(tiny_policy: Policy, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"this policy wants \(n, 11\)"):
        tiny_policy.plan(np.zeros(shape), generators(2))


def test_nan_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ValueError, match="NaN"):
        tiny_policy.plan(np.full((1, 11), np.nan), generators(1))


def test_a_missing_policy_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"planner\.json does not exist"):
        Policy.load(tmp_path)
