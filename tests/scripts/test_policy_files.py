"""Published policies read from .npz files, against numbers computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from scripts.policy_files import read_policies


def act(file: Path, observation: list[float], actions: int) -> np.ndarray:
    (policy,) = read_policies(file, len(observation), actions).values()
    samples = [policy.act(np.array(observation), rng) for rng in [np.random.default_rng(0)] * 4000]
    return np.array(samples)


def test_a_gaussian_policy_standardises_and_has_the_stored_std(tmp_path: Path) -> None:
    arrays = {
        "weight_0": [[1.0, -2.0]], "bias_0": [0.5], "weight_1": [[3.0]], "bias_1": [0.25],
        "in_shift": [1.0, 2.0], "in_scale": [2.0, 4.0], "log_std": [np.log(0.1)],
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in arrays.items()})
    # (3 - 1) / 2 = 1 and (4 - 2) / 4 = 0.5, so the hidden unit is tanh(1 - 1 + 0.5)
    samples = act(tmp_path / "a.npz", [3.0, 4.0], 1)
    assert samples.mean() == pytest.approx(3 * np.tanh(0.5) + 0.25, abs=0.01)
    assert samples.std() == pytest.approx(0.1, rel=0.05)
    np.savez(tmp_path / "b.npz", **{k: np.array(v) for k, v in arrays.items()}, out_shift=[-1.0], out_scale=[2.0])
    assert act(tmp_path / "b.npz", [3.0, 4.0], 1).mean() == pytest.approx(2 * (3 * np.tanh(0.5) + 0.25) - 1, abs=0.01)


def test_a_squashed_policy_has_a_relu_network_and_actions_within_one(tmp_path: Path) -> None:
    arrays = {
        "weight_0": [[1.0], [-1.0]], "bias_0": [0.0, 0.0], "weight_1": [[0.5, 9.0]], "bias_1": [0.1],
        "log_std_weight": [[-1.0, 9.0]], "log_std_bias": [0.0],
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in arrays.items()})
    # hidden units (2, 0): the mean is 0.5 * 2 + 0.1 and the std exp(-2)
    before_tanh = np.arctanh(act(tmp_path / "a.npz", [2.0], 1))
    assert before_tanh.mean() == pytest.approx(1.1, abs=0.01)
    assert before_tanh.std() == pytest.approx(np.exp(-2), rel=0.05)


def test_snapshots_are_read_by_iteration(tmp_path: Path) -> None:
    arrays = {"iterations": np.array([0, 20])}
    for index in range(2):
        arrays |= {f"{index}/{name}": np.zeros(1) for name in ("in_shift", "bias_0")} | {f"{index}/in_scale": np.ones(1)}
        arrays |= {f"{index}/weight_0": np.full((1, 1), index + 1.0), f"{index}/log_std": np.full(1, -50.0)}
    np.savez(tmp_path / "a.npz", **arrays)
    policies = read_policies(tmp_path / "a.npz", 1, 1)
    actions = {key: policy.act(np.ones(1), np.random.default_rng(0))[0] for key, policy in policies.items()}
    assert list(actions) == [0, 20] and list(actions.values()) == pytest.approx([1, 2], rel=1e-5)


def test_mistakes_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    with pytest.raises(ValueError, match=r"a\.npz does not contain a policy's weights .*scripts/policy_files\.py"):
        read_policies(file, 1, 1)
    np.savez(file, other=np.zeros(3))
    with pytest.raises(ValueError, match="does not contain a policy's weights"):
        read_policies(file, 1, 1)
    np.savez(file, weight_0=np.zeros((1, 2)), bias_0=np.zeros(1), log_std_weight=np.zeros((1, 2)), log_std_bias=np.zeros(1))
    with pytest.raises(ValueError, match=r"from 2 observation dimensions to 1 action dimensions, .* has 11 and 3"):
        read_policies(file, 11, 3)
