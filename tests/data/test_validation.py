import json

import numpy as np
import pytest
from recordings import Data, table


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
