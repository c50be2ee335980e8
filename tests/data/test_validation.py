import json
from dataclasses import replace

import numpy as np
import pytest
from recordings import Data, fetch, table

from tap.data.catalog import lookup
from tap.data.episodes import Episodes
from tap.data.recording import open_recording
from tap.data.validation import validate


@pytest.mark.parametrize("noise", [0.0, 1e-13])
def test_equal_returns_have_a_histogram(data: Data, noise: float) -> None:
    columns = table([1, 1, 1], terminal=[True] * 3, timeout=[False] * 3)
    columns["rewards"] = np.array([1000.0, 1000.0 + 1e-4, 1000.0]) if noise else np.full(3, 1000.0)
    _, report = data.load(columns)
    assert sum(report["return_histogram"]["counts"]) == 3
    assert len(report["return_histogram"]["edges"]) == 21


def test_constant_dimensions_are_listed(data: Data) -> None:
    columns = table([20], terminal=[True], timeout=[False])
    columns["observations"][:, 1] = 3.0
    columns["actions"][:, 0] = 0.0
    _, report = data.load(columns)
    assert (report["constant_observation_dims"], report["constant_action_dims"]) == ([1], [0])


def test_actions_out_of_range_are_reported_and_clipped_on_demand_alone(data: Data) -> None:
    columns = table([20], terminal=[True], timeout=[False])
    columns["actions"][[3, 4]] = [[1.5, -2.0], [0.0, -1.25]]
    for clip, largest in ((False, 2.0), (True, 1.0)):
        episodes, report = data.load(columns, clip_actions=clip)
        assert np.abs(episodes.actions).max() == largest
        assert (report["actions_out_of_range"], report["action_max_abs"]) == (2, 2.0)
        assert any("2 of 20 actions reach outside [-1, 1], to 2" in warning for warning in report["warnings"])


def test_the_report_is_json_and_complete(data: Data) -> None:
    columns = table([20, 30], terminal=[True, False], timeout=[False, True])
    _, report = data.load(columns, "hopper-medium-v2")
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    returns = [columns["rewards"][:20].sum(dtype=np.float64), columns["rewards"][20:].sum(dtype=np.float64)]
    assert report["return"]["mean"] == pytest.approx(np.mean(returns))
    assert report["normalized_score_mean"] == pytest.approx(100 * (np.mean(returns) + 20.272305) / (3234.3 + 20.272305))
    assert report["length"] == {"min": 20, "median": 25.0, "max": 30}
    assert (report["dataset"], report["source"], report["origin"]) == ("hopper-medium-v2", "file", "data.hdf5")
    assert (report["transitions"], report["episodes"], report["bytes"]) == (50, 2, data.path.stat().st_size)


def test_actions_are_judged_and_clipped_by_the_environments_bounds(data: Data) -> None:
    columns = table([20], terminal=[True], timeout=[False])
    columns["actions"] = columns["actions"] * [20, 1] + [25, 0]  # within [0, 50] and [-1, 1]
    columns["actions"][3, 0] = 60
    data.write(columns)
    bounds = np.array([0, -1], np.float32), np.array([50, 1], np.float32)
    for clip, largest, note in ((False, 60, "are kept"), (True, 50, "were clipped")):
        params = fetch(path=data.path, max_episode_steps=1000, clip_actions=clip)
        with open_recording(data.path, lookup("mine", params), params) as opened:
            recording = replace(opened, action_bounds=bounds)
            report = validate(recording)
            recording.save(data.path.parent / note)
        assert report.actions_out_of_range == 1
        (warning,) = [each for each in report.warnings if "actions" in each]
        assert warning == f"1 of 20 actions reach outside their bounds within [-1, 50], to 60, and {note}"
        assert Episodes.load(data.path.parent / note).actions.max() == largest


def test_dimensions_that_float32_rounds_are_named(data: Data) -> None:
    columns = table([50], terminal=[True], timeout=[False], dim=5)
    observations = columns["observations"].astype(np.float64)
    observations[:, 1] += 4.5e6  # UTM metres: steps of 0.5 m, of a walk within a few decimetres
    observations[:, 2] = 4.5e6  # constant, so nothing is lost
    observations[:, 3] = 1e9 + 0.5 * np.arange(50)  # varies, but not in float32
    observations[:, 4] = 1e5 * observations[:, 4] + 4.5e6
    episodes, report = data.load(columns | {"observations": observations})
    assert report["rounded_observation_dims"] == [1, 3]
    assert np.ptp(episodes.observations[:, 3]) == 0
    assert any(
        "float32 distinguishes fewer than 1000 values of observation dimensions 1, 3: subtract" in w for w in report["warnings"]
    )
    _, report = data.load(columns)
    assert report["rounded_observation_dims"] == []


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_a_simulator_state_that_contradicts_observations_is_noted(data: Data, hidden: int) -> None:
    columns, rng = table([50], terminal=[True], timeout=[False], dim=8), np.random.default_rng(0)
    qvel = 20 * rng.normal(size=(50, 4))
    qpos = np.concatenate([rng.normal(size=(50, hidden)), columns["observations"][:, :4]], axis=1)
    for velocities in (qvel, qvel.clip(-10, 10)):
        observations = np.concatenate([qpos[:, hidden:], velocities], axis=1)
        right = columns | {"observations": observations, "infos/qpos": qpos, "infos/qvel": qvel}
        _, report = data.load(right)
        assert not any("infos" in warning for warning in report["warnings"])
    for wrong in ({"infos/qpos": np.roll(qpos, 1, axis=0)}, {"observations": (observations - 1) / 3}):
        _, report = data.load(right | wrong)
        assert any("infos/qpos and infos/qvel contradict observations in 100.0% of the rows" in w for w in report["warnings"])
    for unrelated in ({"infos/qpos": qpos[:-1]}, {"infos/qvel": np.zeros((50, 9))}, {"infos/qpos": np.zeros(50)}):
        _, report = data.load(right | unrelated)
        assert not any("infos" in warning for warning in report["warnings"])
