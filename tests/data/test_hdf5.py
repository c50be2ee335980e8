import csv
import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import random_episodes
from hypothesis import given
from hypothesis import strategies as st

import tap.data.catalog
from tap.data.catalog import DatasetInfo, d4rl_facts, known_datasets, lookup
from tap.data.episodes import Episodes
from tap.data.hdf5 import load_episodes
from tap.settings import FetchParams


def fetch(**changes: Any) -> FetchParams:
    return FetchParams(**({"clip_actions": False, "max_jump": None} | changes))


class Data:
    """Writes one HDF5 file and loads it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "data.hdf5"

    def write(self, columns: dict[str, Any]) -> None:
        with h5py.File(self.path, "w") as file:
            for key, values in columns.items():
                if values is not None:
                    file[key] = values

    def load(self, columns: dict[str, Any], dataset: str = "mine", **changes: Any) -> tuple[Episodes, dict[str, Any]]:
        self.write(columns)
        params = fetch(**({"path": self.path, "max_episode_steps": 1000 if dataset == "mine" else None} | changes))
        return load_episodes(self.path, lookup(dataset, params), params)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def walk(rng: np.random.Generator, length: int, start: np.ndarray) -> np.ndarray:
    """A trajectory of small steps (length, O), each dimension within 0.01 a step."""
    return start + np.cumsum(rng.uniform(-0.01, 0.01, (length, len(start))), axis=0)


def table(lengths: list[int], terminal: list[bool], timeout: list[bool], dim: int = 3, seed: int = 0) -> dict[str, Any]:
    """Columns of smooth episodes that start far from each other, each with the given flags on its last row."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    last = np.cumsum(lengths) - 1
    flags = {"terminals": np.zeros(rows, bool), "timeouts": np.zeros(rows, bool)}
    flags["terminals"][last], flags["timeouts"][last] = terminal, timeout
    starts = rng.permutation(len(lengths))[:, None] * 10.0 + rng.uniform(0, 1, (len(lengths), dim))
    return {
        "observations": np.concatenate([walk(rng, n, s) for n, s in zip(lengths, starts, strict=True)]).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        **flags,
    }


def test_the_committed_table_says_what_the_d4rl_package_says(monkeypatch: pytest.MonkeyPatch) -> None:
    urls, minima, maxima = d4rl_facts()
    if not urls:
        pytest.skip("the d4rl extra is not installed")
    installed = known_datasets()
    monkeypatch.setattr(tap.data.catalog, "d4rl_facts", lambda: ({}, {}, {}))
    committed = known_datasets.__wrapped__()
    assert committed == installed
    d4rl = [info for info in committed.values() if info.source == "d4rl"]
    assert len(d4rl) == 56
    assert all((info.url, info.reference_min_score) == (urls[info.id], minima[info.id]) for info in d4rl)
    assert all(info.reference_max_score == maxima[info.id] for info in d4rl)


def test_the_registry_knows_the_papers_datasets_and_their_limits() -> None:
    known = known_datasets()
    assert len(known) == 20 + 24 + 14 + 1
    assert (known["ant-random-v2"].environment, known["ant-random-v2"].max_episode_steps) == ("Ant-v4", 1000)
    assert (known["pen-cloned-v1"].environment, known["pen-cloned-v1"].max_episode_steps) == ("AdroitHandPen-v1", 100)
    assert known["door-human-v0"].max_episode_steps == 200
    steps = [
        known[f"antmaze-{name}-v0"].max_episode_steps for name in ("umaze-diverse", "medium-play", "large-play", "ultra-play")
    ]
    assert steps == [700, 1000, 1000, 2000]
    assert known["antmaze-ultra-play-v0"].url is None
    with (Path(tap.data.catalog.__file__).parent / "d4rl_table.csv").open(newline="") as file:
        assert {row["id"] for row in csv.DictReader(file)} == set(known) - {"hopper-medium-replay"}


def test_lookup_of_the_bundled_dataset() -> None:
    info = lookup("hopper-medium-replay", fetch())
    assert (info.source, info.path, info.environment) == (
        "bundled",
        Path("data/bundled/hopper-medium-replay.hdf5"),
        "Hopper-v4",
    )
    assert (info.reference_min_score, info.reference_max_score) == (-20.272305, 3234.3)


def test_lookup_applies_overrides() -> None:
    changes = {"path": "my.hdf5", "environment": "Hopper-v5", "max_episode_steps": 500, "suite": "custom"}
    info = lookup("hopper-medium-v2", fetch(**changes))
    assert (info.source, info.path, info.environment) == ("file", Path("my.hdf5"), "Hopper-v5")
    assert (info.max_episode_steps, info.suite, info.reference_max_score) == (500, "custom", 3234.3)
    own = lookup("mine", fetch(path="my.hdf5", max_episode_steps=50))
    assert own == DatasetInfo("mine", "custom", "file", Path("my.hdf5"), None, None, 50, None, None)


@pytest.mark.parametrize(
    ("dataset", "changes", "words"),
    [
        ("hoper-medium-v2", {}, ["did you mean 'hopper-medium-v2'", "path: FILE.hdf5"]),
        ("mine", {"path": "my.hdf5"}, ["max_episode_steps"]),
        ("mine", {"max_episode_steps": 10}, ["path"]),
        ("hopper-medium-v2", {"source": "d4rl", "path": "my.hdf5"}, ["source: file"]),
        ("hopper-medium-v2", {"source": "bundled"}, ["not bundled"]),
        ("antmaze-ultra-play-v0", {}, ["datasets.antmaze-ultra-play-v0.fetch.path"]),
        ("hopper-medium-replay", {"source": "d4rl"}, ["no download address"]),
        ("mine", {"path": "my.hdf5", "max_episode_steps": 10, "reference_min_score": 1.0}, ["reference_max_score"]),
        ("hopper-medium-v2", {"reference_max_score": -100.0}, ["min below max"]),
    ],
)
def test_lookup_explains_what_is_missing(dataset: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        lookup(dataset, fetch(**changes))
    assert all(word in str(error.value) for word in words)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), fraction=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_split_and_select_keep_episodes_whole(lengths: list[int], fraction: float, seed: int) -> None:
    episodes = random_episodes(lengths, 2, 1)
    parts = episodes.split(fraction, np.random.default_rng(seed))
    assert sum(part.num_episodes for part in parts) == len(lengths)
    assert parts[0].num_episodes >= 1
    assert (parts[1].num_episodes > 0) == (fraction > 0 and len(lengths) > 1)
    pieces = {piece.tobytes(): index for index, piece in enumerate(np.split(episodes.observations, episodes.offsets[1:-1]))}
    for part in parts:
        assert len(part.lengths) == len(part.returns) == len(part.truncated)
        for number in range(part.num_episodes):
            rows = slice(part.offsets[number], part.offsets[number + 1])
            index = pieces[part.observations[rows].tobytes()]
            assert part.returns[number] == pytest.approx(episodes.returns[index])
            assert part.truncated[number] == episodes.truncated[index]
            assert part.lengths[number] == lengths[index]
    again = episodes.split(fraction, np.random.default_rng(seed))
    assert np.array_equal(parts[1].rewards, again[1].rewards)


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
    episodes, report = Data(tmp_path_factory.mktemp("loop")).load(columns, max_episode_steps=40)
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


def test_without_timeouts_terminals_alone_may_do(data: Data) -> None:
    columns = table([20, 30], terminal=[True, True], timeout=[False, False]) | {"timeouts": None}
    episodes, report = data.load(columns, max_episode_steps=30)
    assert episodes.lengths.tolist() == [20, 30]
    assert "the file has no `timeouts`" in report["warnings"]


def test_without_timeouts_next_observations_tell_the_ends(data: Data) -> None:
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


def test_without_timeouts_max_jump_tells_the_ends(data: Data) -> None:
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


def test_float64_columns_of_width_one_and_float_flags(data: Data) -> None:
    columns = table([20, 30], terminal=[True, False], timeout=[False, True])
    plain, _ = data.load(columns)
    wide = {
        "observations": columns["observations"].astype(np.float64),
        "actions": columns["actions"].astype(np.float64),
        "rewards": columns["rewards"].astype(np.float64)[:, None],
        "terminals": columns["terminals"].astype(np.float32)[:, None],
        "timeouts": columns["timeouts"].astype(np.float32)[:, None],
        "metadata/algorithm": "SAC",
        "metadata/policy/weight": np.zeros((3, 3)),
        "infos": np.zeros(50),
    }
    episodes, _ = data.load(wide)
    for name in ("observations", "actions", "rewards", "terminals", "offsets"):
        np.testing.assert_array_equal(getattr(episodes, name), getattr(plain, name))
    assert {getattr(episodes, name).dtype for name in ("observations", "actions", "rewards")} == {np.dtype(np.float32)}
    assert episodes.terminals.dtype == bool


def test_returns_are_summed_in_float64(data: Data) -> None:
    columns = table([1000], terminal=[False], timeout=[True])
    columns["rewards"] = np.full(1000, 0.1, np.float32)
    columns["rewards"][0] = 1e7
    episodes, report = data.load(columns)
    assert report["return"]["mean"] == episodes.returns[0] == pytest.approx(1e7 + 999 * float(np.float32(0.1)), abs=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1e-13])
def test_equal_returns_have_a_histogram(data: Data, noise: float) -> None:
    columns = table([1, 1, 1], terminal=[True] * 3, timeout=[False] * 3)
    columns["rewards"] = np.array([1000.0, 1000.0 + 1e-4, 1000.0]) if noise else np.full(3, 1000.0)
    _, report = data.load(columns)
    assert sum(report["return_histogram"]["counts"]) == 3
    assert len(report["return_histogram"]["edges"]) == 21


@pytest.mark.parametrize("key", ["observations", "actions", "rewards", "terminals"])
def test_a_missing_key_is_named_with_what_is_there(data: Data, key: str) -> None:
    with pytest.raises(ValueError, match=f"no {key}, only .*timeouts"):
        data.load(table([5], terminal=[True], timeout=[False]) | {key: None})


def test_keys_of_different_lengths_are_listed_with_their_shapes(data: Data) -> None:
    columns = table([5], terminal=[True], timeout=[False])
    with pytest.raises(ValueError, match=r"observations \(5, 3\), actions \(4, 2\), rewards \(5,\)"):
        data.load(columns | {"actions": columns["actions"][:4]})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("observations", np.zeros((5, 4, 4, 3))),
        ("actions", np.zeros(())),
        ("rewards", np.zeros((5, 2))),
        ("terminals", np.array([b"no"] * 5)),
        ("observations", np.zeros((0, 3))),
    ],
)
def test_a_key_that_is_no_table_is_named(data: Data, key: str, values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=f"{key} is no table of numbers"):
        data.load(table([5], terminal=[True], timeout=[False]) | {key: values})


@pytest.mark.parametrize("key", ["observations", "actions", "rewards", "terminals"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_located(data: Data, key: str, value: float) -> None:
    columns = table([10], terminal=[True], timeout=[False])
    columns[key] = columns[key].astype(np.float64)
    columns[key][[4, 7]] = value
    count = columns[key][[4, 7]].size
    with pytest.raises(ValueError, match=f"{key} has {count} values .* row 4"):
        data.load(columns)


def test_a_file_that_is_no_whole_hdf5_file(data: Data) -> None:
    columns = table([500], terminal=[True], timeout=[False])
    data.write(columns)
    whole, info, params = data.path.read_bytes(), lookup("mine", fetch(path=data.path, max_episode_steps=500)), fetch()
    for content in (b"<html>404</html>", b"", whole[: len(whole) // 2]):
        data.path.write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.hdf5 is no whole HDF5 file .*: delete it and fetch it again"):
            load_episodes(data.path, info, params)
    data.path.unlink()
    with pytest.raises(ValueError, match="does not exist: run the fetch stage"):
        load_episodes(data.path, info, params)


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


def test_ant_keeps_its_first_27_dimensions(data: Data) -> None:
    columns = table([20, 10], terminal=[True, False], timeout=[False, True], dim=111)
    after = np.concatenate([columns["observations"][1:], columns["observations"][:1]])
    episodes, report = data.load(columns | {"next_observations": after}, "ant-medium-v2")
    np.testing.assert_array_equal(episodes.observations, columns["observations"][:, :27])
    assert report["observation_dim"] == 27


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


def antmaze(lengths: list[int], timeout: list[bool], apart: float = 20.0) -> dict[str, Any]:
    """Columns of ants that run 0.3 m a step and start `apart` from where the last one stopped; each episode has its goal."""
    rng, rows = np.random.default_rng(0), sum(lengths)
    columns = table(lengths, terminal=[False] * len(lengths), timeout=timeout, dim=29)
    step = np.full(rows, 0.3)
    step[np.cumsum(lengths)[:-1]] = apart
    columns["observations"][:, 0], columns["observations"][:, 1] = np.cumsum(step), 0.0
    columns["observations"][:, 15:] = rng.normal(scale=10, size=(rows, 14))  # velocities jump as they like
    columns["infos/goal"] = np.repeat(rng.uniform(0, 0.3, (len(lengths), 2)), lengths, axis=0).astype(np.float32)
    columns["rewards"] = np.zeros(rows, np.float32)
    return columns


def test_antmaze_appends_the_goal(data: Data) -> None:
    columns = antmaze([30, 30], timeout=[True, True])
    episodes, _ = data.load(columns, "antmaze-umaze-v2")
    np.testing.assert_array_equal(episodes.observations, np.hstack([columns["observations"], columns["infos/goal"]]))
    with pytest.raises(ValueError, match="no infos/goal"):
        data.load(columns | {"infos/goal": None}, "antmaze-umaze-v2")
    with pytest.raises(ValueError, match="no infos/goal"):
        data.load(columns | {"infos/goal": None, "infos": np.zeros((60, 2))}, "antmaze-umaze-v2")
    with pytest.raises(ValueError, match=r"observations \(N, 29\)"):
        data.load(columns | {"observations": columns["observations"][:, :27]}, "antmaze-umaze-v2")


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
    episodes, report = Data(tmp_path_factory.mktemp("goals")).load(columns, "antmaze-umaze-v2")
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


def adroit(lengths: list[int], seed: int = 0) -> dict[str, Any]:
    """Columns of a hand that moves smoothly, with a dimension that flips, and starts each episode somewhere else."""
    columns = table(lengths, terminal=[False] * len(lengths), timeout=[False] * len(lengths), dim=20, seed=seed)
    columns["observations"][:, 3] = np.where(np.random.default_rng(seed).random(sum(lengths)) < 0.02, 1.0, -1.0)
    return columns


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
    episodes, report = load_episodes(file, lookup("door-human-v0", params), params)
    assert (episodes.num_episodes, len(episodes.rewards)) == (25, 6729)
    assert episodes.lengths.max() == 300
    assert report["return"]["mean"] == pytest.approx(795.7, abs=0.05)
    assert report["normalized_score_mean"] == pytest.approx(29.0, abs=0.05)
    assert report["boundaries"]["ignored_timeouts"] == 25
