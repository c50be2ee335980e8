import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import Data, adroit, antmaze, fetch, load_recording, table

from tap.data.catalog import lookup


@settings(deadline=None)  # writes a file each time
@given(flags=st.lists(st.sampled_from(["", "", "", "T", "U", "TU"]), min_size=1, max_size=40))
def test_boundaries_equal_a_loop_over_rows(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> None:
    expected, episode = [], 0
    for row, flag in enumerate(flags):
        episode += 1
        if flag or row == len(flags) - 1:
            expected.append((episode, "T" in flag and episode < 40))
            episode = 0
    columns = {
        "observations": np.zeros((len(flags), 1)),
        "actions": np.zeros((len(flags), 1)),
        "rewards": np.ones(len(flags)),
        "terminals": np.array(["T" in flag for flag in flags]),
        "timeouts": np.array(["U" in flag for flag in flags]),
    }
    episodes, report = Data(tmp_path_factory.mktemp("loop")).cut(columns, max_episode_steps=40)
    assert [*zip(episodes.lengths, ~episodes.truncated, strict=True)] == expected
    assert episodes.returns.tolist() == episodes.lengths.tolist()
    assert report["unfinished_last_episode"] == (not flags[-1])
    ends = report["boundaries"]
    assert ends["terminals"] + ends["timeouts"] + ends["end_of_file"] == len(expected)


def test_a_timeout_is_a_truncation_and_a_terminal_is_not(data: Data) -> None:
    columns = table([40, 30, 25], terminal=[False, True, True], timeout=[True, False, True])
    episodes, report = data.load(columns)
    assert episodes.lengths.tolist() == [40, 30, 25]
    assert episodes.truncated.tolist() == [True, False, False]
    assert np.flatnonzero(episodes.terminals).tolist() == [69, 94]
    assert report["truncated_episodes"] == 1


def test_a_terminal_at_the_limit_is_a_truncation(data: Data) -> None:
    columns = table([50, 50, 49], terminal=[True, True, True], timeout=[True, False, False])
    episodes, report = data.load(columns, max_episode_steps=50)
    assert episodes.truncated.tolist() == [True, True, False]
    assert (report["boundaries"]["terminals"], report["boundaries"]["timeouts"]) == (2, 1)


def test_an_unfinished_last_episode_is_kept_and_truncated(data: Data) -> None:
    episodes, report = data.load(table([20, 7], terminal=[True, False], timeout=[False, False]))
    assert episodes.lengths.tolist() == [20, 7]
    assert episodes.truncated.tolist() == [False, True]
    assert report["unfinished_last_episode"] and report["boundaries"]["end_of_file"] == 1
    assert "the last episode has no end in the file" in report["warnings"]


def test_without_timeouts_terminals_alone_can_suffice(data: Data) -> None:
    columns = table([20, 30], terminal=[True, True], timeout=[False, False]) | {"timeouts": None}
    episodes, report = data.load(columns, max_episode_steps=30)
    assert episodes.lengths.tolist() == [20, 30]
    assert "the file has no `timeouts`" in report["warnings"]


def test_without_timeouts_next_observations_show_the_ends(data: Data) -> None:
    columns = table([20, 30, 10, 30], terminal=[True, False, True, False], timeout=[False] * 4) | {"timeouts": None}
    after = np.concatenate([columns["observations"][1:], columns["observations"][:1]])
    for last in (19, 49, 59, 89):
        after[last] = columns["observations"][last] + 0.001
    episodes, report = data.load(columns | {"next_observations": after}, max_episode_steps=30)
    assert episodes.lengths.tolist() == [20, 30, 10, 30]
    assert episodes.truncated.tolist() == [False, True, False, True]
    assert report["boundaries"]["discontinuities"] == 1


def test_next_observations_find_the_seam_of_two_files(data: Data) -> None:
    columns = table([30, 12, 30], terminal=[False] * 3, timeout=[True, False, True])  # the second episode lost its end
    after = np.concatenate([columns["observations"][1:], columns["observations"][:1]])
    after[[29, 41, 71]] = 0.0
    episodes, _ = data.load(columns | {"next_observations": after}, max_episode_steps=30)
    assert episodes.lengths.tolist() == [30, 12, 30]


def test_without_timeouts_max_jump_shows_the_ends(data: Data) -> None:
    columns = table([20, 30, 30], terminal=[True, False, True], timeout=[False] * 3) | {"timeouts": None}
    episodes, report = data.load(columns, max_episode_steps=30, max_jump=1.0)
    assert episodes.lengths.tolist() == [20, 30, 30]
    assert report["boundaries"]["discontinuities"] == 1


def test_an_episode_longer_than_the_limit_is_an_error_with_its_rows_and_the_options(data: Data) -> None:
    columns = table([20, 30, 30], terminal=[True, False, True], timeout=[False] * 3)
    for changes in ({}, {"timeouts": None}):
        with pytest.raises(ValueError, match="rows 20 to 79 would be one episode of 60 steps") as error:
            data.load(columns | changes, max_episode_steps=30)
        for option in ("timeouts", "fetch.max_jump", "fetch.max_episode_steps", "after row 49"):
            assert option in str(error.value)


def test_an_episode_of_one_step(data: Data) -> None:
    episodes, report = data.load(table([1, 5, 1], terminal=[True, False, True], timeout=[False, True, False]))
    assert episodes.lengths.tolist() == [1, 5, 1]
    assert "2 of 3 episodes have a single step" in report["warnings"]


def test_a_file_of_one_row(data: Data) -> None:
    for dataset in ("mine", "door-human-v0"):
        episodes, _ = data.load(table([1], terminal=[True], timeout=[False]), dataset)
        assert episodes.lengths.tolist() == [1]


@pytest.mark.parametrize("apart", [4.0, 20.0])
def test_antmaze_resets_out_of_step_with_timeouts(data: Data, apart: float) -> None:
    columns = antmaze([50, 40, 60], timeout=[False] * 3, apart=apart)
    columns["timeouts"][[70, 100]] = True
    episodes, report = data.load(columns, "antmaze-medium-play-v0")
    assert episodes.lengths.tolist() == [50, 21, 19, 11, 49]
    within = np.delete(np.diff(episodes.observations[:, 0]), episodes.offsets[1:-1] - 1)
    assert within.max() < 0.31
    assert report["boundaries"]["discontinuities"] == 2
    wider, _ = data.load(columns, "antmaze-medium-play-v0", max_jump=100.0)
    assert wider.lengths.tolist() == [71, 30, 49]


def test_antmaze_a_new_goal_far_away_ends_an_episode(data: Data) -> None:
    columns = antmaze([50], timeout=[True])
    columns["infos/goal"][20:] += 8.0
    episodes, _ = data.load(columns, "antmaze-large-diverse-v2")
    assert episodes.lengths.tolist() == [20, 30]


@settings(deadline=None)
@given(data_=st.data())
def test_antmaze_goals_equal_a_loop_over_rows(tmp_path_factory: pytest.TempPathFactory, data_: st.DataObject) -> None:
    lengths = data_.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    columns = antmaze(lengths, timeout=[True] * len(lengths))
    goal = np.array(data_.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    flagged = np.array(data_.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    columns["rewards"], columns["terminals"] = goal.astype(np.float32), goal & flagged
    expected: list[list[int]] = []
    for last, length in zip(np.cumsum(lengths), lengths, strict=True):
        rows = list(range(last - length, last))
        goals = [row for row in rows if goal[row]]
        if goals:
            expected += [[row for row in rows if row <= goals[0]], [row for row in rows if row > goals[-1]]]
        else:
            expected.append(rows)
    expected = [rows for rows in expected if rows]
    episodes, report = Data(tmp_path_factory.mktemp("goals")).cut(columns, "antmaze-umaze-v2")
    assert episodes.lengths.tolist() == [len(rows) for rows in expected]
    np.testing.assert_array_equal(
        episodes.observations[:, :29], columns["observations"][[row for rows in expected for row in rows]]
    )
    assert episodes.returns.max() <= 1
    np.testing.assert_array_equal(~episodes.truncated, episodes.returns == 1)
    assert report["boundaries"]["dropped_goal_rows"] == sum(lengths) - report["transitions"]


def test_antmaze_terminals_without_reward_end_an_episode_too(data: Data) -> None:
    columns = antmaze([30], timeout=[True])
    columns["terminals"][10:20] = True
    episodes, report = data.load(columns, "antmaze-umaze-v2")
    assert (episodes.lengths.tolist(), report["boundaries"]["dropped_goal_rows"]) == ([11, 10], 9)


def test_adroit_timeouts_inside_a_demonstration_are_ignored(data: Data) -> None:
    columns = adroit([300, 260, 624])
    columns["terminals"][[299, 559, 1183]] = True
    columns["timeouts"][[199, 499, 759]] = True
    columns["observations"][200, 3] = -columns["observations"][199, 3]  # flips at the timeout
    episodes, report = data.load(columns, "hammer-human-v0")
    assert episodes.lengths.tolist() == [300, 260, 624]
    assert episodes.truncated.all()
    assert report["boundaries"]["ignored_timeouts"] == 3
    assert "3 of 3 episodes are longer than the limit of 200 steps, and kept whole" in report["warnings"]


def test_adroit_timeouts_at_a_reset_end_an_episode(data: Data) -> None:
    columns = adroit([200, 200, 80, 200])
    columns["timeouts"][[199, 399, 679]] = True
    columns["terminals"][479] = True
    episodes, report = data.load(columns, "door-cloned-v1")
    assert episodes.lengths.tolist() == [200, 200, 80, 200]
    assert episodes.truncated.tolist() == [True, True, False, True]
    assert report["boundaries"]["ignored_timeouts"] == 0


def test_adroit_without_timeouts(data: Data) -> None:
    episodes, report = data.load(adroit([200, 200, 150]) | {"timeouts": None}, "pen-expert-v0")
    assert episodes.lengths.tolist() == [200, 200, 150]
    assert report["boundaries"]["discontinuities"] == 2


def test_adroit_episode_of_hundred_thousands_of_steps_is_an_error(data: Data) -> None:
    columns = adroit([1001])
    with pytest.raises(ValueError, match="rows 0 to 1000 would be one episode of 1001 steps, but the limit is 200"):
        data.load(columns, "door-human-v0")


def test_the_original_door_human_file(extra_data: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(extra_data / "door-human-v0.hdf5", tmp_path))
    params = fetch(path=file)
    episodes, report = load_recording(file, lookup("door-human-v0", params), params, tmp_path)
    assert (episodes.num_episodes, len(episodes.rewards)) == (25, 6729)
    assert episodes.lengths.max() == 300
    assert report["return"]["mean"] == pytest.approx(795.7, abs=0.05)
    assert report["normalized_score_mean"] == pytest.approx(29.0, abs=0.05)
    assert report["boundaries"]["ignored_timeouts"] == 25


def test_a_jump_too_far_for_float32s_squares_ends_an_episode_without_a_warning(data: Data) -> None:
    columns = antmaze([20, 10], timeout=[False, True])
    columns["observations"][20:, 0] += 1e30
    with warnings.catch_warnings(action="error"):
        episodes, _ = data.cut(columns, "antmaze-umaze-v2")
    assert episodes.lengths.tolist() == [20, 10]
