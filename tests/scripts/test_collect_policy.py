"""The script that collects datasets from published policies, with policies of random weights."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT
from recordings import load_recording

from scripts.collect_policy import collect
from tap.data.catalog import lookup
from tap.envs.make import make_environment
from tap.envs.trial import check_environment
from tap.settings import load_params

DATASET = "stochastic-hopper-medium-replay"


def random_policy(rng: np.random.Generator, log_std: float = -1.0) -> dict[str, np.ndarray]:
    shapes = {"weight_0": (8, 11), "bias_0": 8, "weight_1": (3, 8), "bias_1": 3}
    arrays = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return arrays | {"in_shift": np.zeros(11), "in_scale": np.ones(11), "log_std": np.full(3, log_std)}


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """Three snapshots, whose actions are ever more random."""
    rng, arrays = np.random.default_rng(0), {"iterations": np.array([0, 20, 40])}
    for index in range(3):
        arrays |= {f"{index}/{name}": values for name, values in random_policy(rng, log_std=index - 4.0).items()}
    np.savez(tmp_path / "snapshots.npz", **arrays)
    return tmp_path / "snapshots.npz"


def read(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {key: file[key][:] for key in ("observations", "actions", "rewards", "terminals", "timeouts")}


def test_collected_data_loads_as_episodes_and_is_reproducible(snapshots: Path, tmp_path: Path, params_yaml_with) -> None:
    first, again, other = (tmp_path / f"{name}.hdf5" for name in ("first", "again", "other"))
    environment, policy = "tap/StochasticHopper-v0", [str(snapshots)]
    provenance = collect(environment, first, policy=policy, transitions=300, seed=5)
    collect(environment, again, policy=policy, transitions=300, seed=5)
    collect(environment, other, policy=policy, transitions=300, seed=6)
    assert json.loads(first.with_suffix(".json").read_text()) == provenance
    columns = read(first)
    for key, values in read(again).items():
        np.testing.assert_array_equal(values, columns[key])
    assert not np.array_equal(read(other)["actions"][:10], columns["actions"][:10])
    assert provenance["policies"][0]["iterations"] == [0, 20, 40]
    assert provenance["environment"] == environment and "random force of up to 5 N" in provenance["simulator"]

    fetch = load_params(params_yaml_with(datasets={DATASET: {"fetch": {"path": str(first)}}}), DATASET).fetch
    info = lookup(DATASET, fetch)
    episodes, report = load_recording(first, info, fetch, tmp_path / "arrays")
    assert report["source"] == "recollected" and report["transitions"] == provenance["transitions"] >= 300
    assert report["episodes"] == provenance["finished_episodes"] == (columns["terminals"] | columns["timeouts"]).sum()
    assert episodes.returns.mean() == pytest.approx(provenance["return"]["mean"], rel=1e-5)
    check_environment(info, episodes.observation_dim, episodes.action_dim)


def test_rows_are_the_transitions_of_the_environment(snapshots: Path, tmp_path: Path, params_yaml_with) -> None:
    """The first episode's actions, repeated in the evaluation's environment, give its rows."""
    collect("tap/StochasticHopper-v0", tmp_path / "a.hdf5", policy=[str(snapshots)], transitions=20, seed=5)
    columns = read(tmp_path / "a.hdf5")
    fetch = load_params(params_yaml_with(datasets={DATASET: {"fetch": {"path": "a.hdf5"}}}), DATASET).fetch
    env = make_environment(lookup(DATASET, fetch))
    observation, _ = env.reset(seed=int(np.random.default_rng(5).integers(2**31)))
    for row, action in enumerate(columns["actions"][: np.flatnonzero(columns["terminals"])[0] + 1]):
        np.testing.assert_array_equal(columns["observations"][row], observation.astype(np.float32))
        observation, reward, terminated, _, _ = env.step(action)
        assert (columns["rewards"][row], columns["terminals"][row]) == (np.float32(reward), terminated)


def test_policies_collect_equal_shares_in_order(snapshots: Path, tmp_path: Path) -> None:
    out, calm = tmp_path / "a.hdf5", tmp_path / "calm.npz"
    np.savez(calm, **random_policy(np.random.default_rng(1), log_std=-9.0))
    provenance = collect("Hopper-v4", out, policy=[f"{snapshots}:20-40", str(calm)], transitions=900, seed=0)
    assert [each["iterations"] for each in provenance["policies"]] == [[20, 40], []]
    assert [each["file"] for each in provenance["policies"]] == ["snapshots.npz", "calm.npz"]
    changes = np.abs(np.diff(read(out)["actions"], axis=0))
    spreads = [np.median(changes[rows]) for rows in (slice(0, 290), slice(400, 590), slice(700, 900))]
    # std exp(-3), exp(-2) and exp(-9): the difference of two samples has median 0.95 times their std
    assert spreads[0] == pytest.approx(0.95 * np.exp(-3), rel=0.2) and spreads[1] == pytest.approx(0.95 * np.exp(-2), rel=0.2)
    assert spreads[2] < 0.3 * spreads[0]


def test_the_environments_limit_is_a_timeout(tmp_path: Path) -> None:
    """Pendulum has no terminals, a limit of 200 steps and actions within 2."""
    weights = {"weight_0": np.array([[0.0, 0.0, 0.0]]), "bias_0": np.array([9.0])}
    standard = {"in_shift": np.zeros(3), "in_scale": np.ones(3), "log_std": np.zeros(1)}
    np.savez(tmp_path / "policy.npz", **weights, **standard)
    collect("Pendulum-v1", tmp_path / "a.hdf5", policy=[str(tmp_path / "policy.npz")], transitions=201, seed=0)
    columns = read(tmp_path / "a.hdf5")
    assert np.flatnonzero(columns["timeouts"]).tolist() == [199, 399] and not columns["terminals"].any()
    assert (columns["actions"] == 2).all()


def test_the_rows_are_those_of_another_implementation(extra_data: Path, tmp_path: Path) -> None:
    if not (extra_data / "recollect.py").exists():
        pytest.skip("TAP_EXTRA_DATA has no recollect.py")
    ours, theirs = tmp_path / "ours.hdf5", tmp_path / "theirs.hdf5"
    policy = extra_data / "policies/locomotion-hopper-trpo-snapshots.npz"
    collect("Hopper-v4", ours, policy=[f"{policy}:0-40"], transitions=1000, seed=7)
    command = [
        sys.executable,
        extra_data / "recollect.py",
        "hopper-medium-replay",
        theirs,
        "--transitions",
        "1000",
        "--seed",
        "7",
    ]
    subprocess.run(command, check=True, capture_output=True)
    expected = read(theirs)
    for key, values in read(ours).items():
        np.testing.assert_array_equal(values, expected[key], err_msg=key)


@pytest.mark.parametrize(
    ("environment", "suffix", "words"),
    [
        ("tap/StochasticHopper-v0", ":50", r"snapshots\.npz has no such iteration: choose among 0, 20, 40"),
        ("tap/StochasticWalker2d-v0", "", "the environment has 17 and 6: use a policy of this environment"),
        ("tap/StochasticHoper-v0", "", "gymnasium cannot make 'tap/StochasticHoper-v0'"),
        ("no_such_package:Hopper-v4", "", "gymnasium cannot make"),
        ("CartPole-v1", "", "both must be flat boxes"),
    ],
)
def test_mistakes_are_explained(snapshots: Path, tmp_path: Path, environment: str, suffix: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        collect(environment, tmp_path / "a.hdf5", policy=[f"{snapshots}{suffix}"], transitions=1, seed=0)
    assert not (tmp_path / "a.hdf5").exists()


def test_the_command_line_collects_and_ends_with_one_message(snapshots: Path, tmp_path: Path) -> None:
    def run(policy: str) -> subprocess.CompletedProcess[str]:
        command = ["scripts.collect_policy", "tap/StochasticHopper-v0", str(tmp_path / "a.hdf5"), "--transitions", "5"]
        return subprocess.run([sys.executable, "-m", *command, "--policy", policy], cwd=ROOT, capture_output=True, text=True)

    wrong = run(f"{tmp_path}/other.npz")
    assert wrong.returncode == 1 and "other.npz does not contain a policy's weights" in wrong.stderr
    assert "Traceback" not in wrong.stderr and not (tmp_path / "a.hdf5").exists()
    right = run(str(snapshots))
    assert right.returncode == 0 and json.loads(right.stdout)["transitions"] == len(read(tmp_path / "a.hdf5")["rewards"]) >= 5
