from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import custom_dataset
from recordings import Data, fetch, table
from stage_files import validation

from tap.data.action_bounds import known_bounds, load_bounds, save_bounds, unit_bounds, with_params
from tap.data.validation import _in_numbers


@pytest.mark.parametrize(
    ("params", "low", "high"),
    [
        ({}, [-1, -1], [1, 1]),
        ({"action_low": 0.0}, [0, 0], [1, 1]),
        ({"action_low": [None, -3], "action_high": [50, None]}, [-np.inf, -3], [50, np.inf]),
    ],
)
def test_params_override_bounds(params: dict[str, Any], low: list[float], high: list[float]) -> None:
    np.testing.assert_array_equal(with_params(unit_bounds(2), fetch(**params), "mine"), [low, high])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"action_low": [0.0]}, r"datasets\.mine\.fetch\.action_low has 1 values, but actions have 2 dimensions: list 2"),
        (
            {"action_low": [0.0, 2.0]},
            r"datasets\.mine\.fetch: the bounds of action dimension 1 are 2 and 1: correct action_low",
        ),
    ],
)
def test_bounds_that_make_no_sense_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_params(unit_bounds(2), fetch(**params), "mine")


def wide() -> dict[str, Any]:
    columns = table([20], terminal=[True], timeout=[False])
    columns["actions"] = columns["actions"] * [20, 1] + [25, 0]  # within [5, 45] and [-1, 1]
    columns["actions"][[3, 7], 0] = [60, -10]
    return columns


def test_actions_are_counted_and_clipped_by_one_sided_bounds_of_each_dimension(data: Data) -> None:
    bounds = {"action_low": [None, -1.0], "action_high": [50.0, None]}
    episodes, report = data.load(wide(), **bounds)
    assert report["actions_out_of_range"] == 1 and report["action_low"] == [None, -1] and report["action_high"] == [50, None]
    assert any(each.endswith("are kept: fetch.clip_actions would clip them") for each in report["warnings"])
    clipped, _ = data.load(wide(), clip_actions=True, **bounds)
    expected = episodes.actions.copy()
    expected[3, 0] = 50
    np.testing.assert_array_equal(clipped.actions, expected)


def test_no_hint_would_clip_actions_to_bounds_that_nobody_stated(data: Data) -> None:
    """The first word of the id selects D4RL's locomotion suite, but the data is another robot's."""
    _, report = data.load(wide(), "ant-arms", max_episode_steps=1000)
    (warning,) = [each for each in report["warnings"] if "actions" in each]
    assert warning.endswith("and are kept")


@pytest.mark.parametrize(
    ("stated", "environment", "source", "low", "high"),
    [
        ({}, None, "file", -np.inf, np.inf),  # [-1, 1] is a guess
        ({"action_low": -2.0}, None, "file", -2, np.inf),
        ({"action_high": 2.0}, None, "file", -np.inf, 2),
        ({}, "Hopper-v4", "file", -1, 1),
        ({"action_low": -2.0}, "Hopper-v4", "file", -2, 1),
        ({}, None, "minari", -1, 1),
    ],
)
def test_policies_are_clipped_to_bounds_that_are_known(
    stated: dict[str, Any], environment: str | None, source: str, low: float, high: float, tmp_path: Path
) -> None:
    params = fetch(**stated)
    fetched = with_params(unit_bounds(2), params, "mine")
    report = validation(**_in_numbers(fetched), action_dim=2)
    info = replace(custom_dataset("mine", "Hopper-v4", 10), environment=environment, source=source)
    bounds = known_bounds(report, info, params)
    np.testing.assert_array_equal(bounds, [[low] * 2, [high] * 2])
    save_bounds(tmp_path, bounds)
    np.testing.assert_array_equal(load_bounds(tmp_path, 2), bounds)


def test_one_sided_bounds_of_each_dimension_are_known(tmp_path: Path) -> None:
    params = fetch(action_low=[None, -3.0], action_high=[50.0, None])
    report = validation(action_low=[None, -3.0], action_high=[50.0, None], action_dim=2)
    info = replace(custom_dataset("mine", "Hopper-v4", 10), environment=None, source="lerobot")
    bounds = known_bounds(report, info, params)
    np.testing.assert_array_equal(bounds, [[-np.inf, -3], [50, np.inf]])
    save_bounds(tmp_path, bounds)
    np.testing.assert_array_equal(load_bounds(tmp_path, 2), bounds)


def test_a_policy_of_an_early_release_has_no_bounds(tmp_path: Path) -> None:
    np.testing.assert_array_equal(load_bounds(tmp_path, 2), [[-np.inf] * 2, [np.inf] * 2])
