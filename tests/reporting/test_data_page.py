"""The page of `tap validate --html`, made from files with and without faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny_tree
from recordings import Data, table
from test_report import Page

from tap.data.catalog import lookup
from tap.data.profile import profile
from tap.data.recording import open_recording
from tap.data.validation import validate
from tap.reporting.data_page import write_data_page
from tap.reporting.findings import numbers
from tap.settings import load_params

FAULTLESS = "Nothing was found"


@pytest.fixture
def page_of(data: Data, tmp_path: Path, params_yaml_with: Callable[..., Path]) -> Callable[..., Page]:
    """Writes a file with some columns, and the page about it; `overrides` are of the dataset's params, by stage."""

    def write(columns: dict[str, Any], **overrides: Any) -> Page:
        data.write(columns)
        fetch = {"path": str(data.path), "max_episode_steps": 1000} | overrides.pop("fetch", {})
        params = load_params(
            params_yaml_with(datasets={"mine": tiny_tree() | {"fetch": fetch} | overrides}), "mine", scale="cpu"
        )
        with open_recording(data.path, lookup("mine", params.fetch), params.fetch) as recording:
            rng = np.random.default_rng(0)
            seen = profile(recording.chunks(), recording.boundaries.lengths, recording.timestamps(), rng)
            write_data_page(tmp_path / "page.html", validate(recording), seen, recording.boundaries, params)
        page = Page(tmp_path / "page.html")
        page.words = " ".join(page.words.split())
        return page

    return write


def faultless(episodes: int = 40, length: int = 30, dim: int = 3) -> dict[str, Any]:
    terminal = np.arange(episodes) % 4 == 0
    return table([length] * episodes, terminal=terminal.tolist(), timeout=(~terminal).tolist(), dim=dim)


def attention(page: Page) -> str:
    """The words about what deserves attention."""
    return page.words.partition("What deserves attention")[2].partition("Notes of the checks")[0]


def constant(columns: dict[str, Any]) -> str:
    columns["observations"][:, 1] = 2.5
    return "Constant observation dimension 1: at 2.5. Nothing to do"


def saturated(columns: dict[str, Any]) -> str:
    columns["actions"][:, 0] = columns["actions"][:, 0].clip(-0.5, 0.75)
    low, high = (np.mean(columns["actions"][:, 0] == bound) for bound in (-0.5, 0.75))
    return (
        "Saturated action dimension 0: at least 5% of the rows are at one end of the range. "
        f"0 at -0.5 in {low:.1%} of the rows; 0 at 0.75 in {high:.1%} of the rows. Nothing to do"
    )


def jumping(columns: dict[str, Any]) -> str:
    columns["observations"][5 * 30 + 11 : 6 * 30, 2] += 100
    step = np.abs(np.diff(columns["observations"][5 * 30 : 6 * 30, 2])).max()
    return (
        "Jumping observation dimension 2: in a step within an episode, the value changes more than 10 times as far as usual. "
        f"Largest: 2 by {step:.4g} after step 10 of episode 5, while 99 % of its steps are at most 0.0"
    )


def drifting(columns: dict[str, Any]) -> str:
    columns["observations"][:, 0] += np.linspace(0, 4000, 1200)
    means = columns["observations"][:, 0].astype(np.float64).reshape(10, -1).mean(axis=1)
    return (
        "Drifting observation dimension 0: the means of tenths of the file differ by more than 1 standard deviation. "
        f"0 from {means[0]:.4g} to {means[-1]:,.0f} (std"
    )


def copied(columns: dict[str, Any]) -> str:
    for values in (columns["observations"], columns["actions"], columns["rewards"]):
        values[30 * 7 : 30 * 8] = values[:30]
    return "1 duplicate episode of 40: 7 equals 0. Remove the copies."


def repeated(columns: dict[str, Any]) -> str:
    for values in (columns["observations"], columns["actions"], columns["rewards"]):
        values[101:103] = values[100]
    return "2 duplicate rows: observation, action and reward equal another row's."


def late(columns: dict[str, Any]) -> str:
    columns["timestamps"] = np.arange(1200) * 0.02
    columns["timestamps"][30 * 9 + 4 :] += 1.5
    return (
        "1 gap in the timestamps: more than 1.5 times the usual 0.02 from row to row. Largest: 1.52 after step 3 of episode 9."
    )


def unrewarded(columns: dict[str, Any]) -> str:
    columns["rewards"][:] = 0
    return "All rewards are 0. Add rewards"


def equally_rewarded(columns: dict[str, Any]) -> str:
    columns["rewards"][:] = -0.1
    return (
        "All rewards are -0.1: returns differ by the lengths of episodes alone. Nothing to do if shorter episodes are better."
    )


@pytest.mark.parametrize(
    "plant", [constant, saturated, jumping, drifting, copied, repeated, late, unrewarded, equally_rewarded]
)
def test_a_planted_fault_is_named_with_its_remedy_and_no_other(
    page_of: Callable[..., Page], plant: Callable[[dict[str, Any]], str]
) -> None:
    columns = faultless()
    expected = plant(columns)
    words = attention(page_of(columns))
    assert words.strip().startswith(expected)
    starts = ("Constant", "Saturated", "Jumping", "Drifting", "duplicate", "gap in", "All rewards")
    assert [start for start in starts if start in words] == [start for start in starts if start in expected]
    assert FAULTLESS not in words


def test_a_faultless_file_needs_no_attention(page_of: Callable[..., Page]) -> None:
    assert attention(page_of(faultless())).strip().startswith(FAULTLESS)


def test_numbers_are_those_of_the_file(page_of: Callable[..., Page]) -> None:
    columns = faultless()
    words = page_of(columns).words
    assert "40 episodes, 1,200 steps, 3 observation and 2 action dimensions" in words
    assert "terminated 10 truncated 30 unknown 0 repeated 0 episodes, 0 rows of others" in words
    returns = columns["rewards"].astype(np.float64).reshape(40, 30).sum(axis=1)
    assert f"return {returns.min():.4g} to {returns.max():.4g}, mean {returns.mean():.4g}" in words
    for name in ("observations", "actions"):
        for dim, values in enumerate(columns[name].astype(np.float64).T):
            steps = np.abs(np.diff(values.reshape(40, 30), axis=1))
            row = [f"{value:.4g}" for value in (values.min(), values.mean(), values.max(), values.std())]
            row += ["0.1%, 0.1%", f"{np.quantile(steps, 0.99):.3g}, {steps.max():.3g}"]
            assert f" {dim} {' '.join(row)} " in words


def test_training_is_described_by_the_datasets_params(page_of: Callable[..., Page]) -> None:
    columns = faultless()
    columns["actions"][3] = 2
    words = page_of(columns).words
    for sentence in (
        "Kept as recorded, 1 row outside [-1, 1] (fetch.clip_actions is off). Then normalised like observations.",
        "Returns-to-go of 30 episodes not terminated go on beyond the end",
        "One of 6 steps begins at each row: 1,200 in all.",
        "4 of 40, drawn by each seed, are not trained on, but measure the loss (train_vqvae.fit.held_out is 0.1).",
    ):
        assert sentence in words
    windows = {"termination_penalty": -7.0, "bootstrap_truncated": False, "normalize": False, "length": 60}
    fit = tiny_tree()["train_vqvae"]["fit"] | {"held_out": 0.0, "effective_share": 1}
    changed = {"train_vqvae": tiny_tree()["train_vqvae"] | {"windows": windows, "fit": fit}, "fetch": {"clip_actions": True}}
    words = page_of(columns, **changed).words
    for sentence in (
        "Clipped to [-1, 1], which changes 1 row. Not normalised.",
        "The last reward of 10 terminated episodes is replaced by -7",
        "30 episodes not terminated, but no reward follows their end either",
        "40 episodes shorter than that, and padded",
        "None, because train_vqvae.fit.held_out is 0",
        "All windows are drawn alike.",
    ):
        assert sentence in words


def test_without_rewards_no_returns_are_described(page_of: Callable[..., Page]) -> None:
    columns = faultless()
    del columns["rewards"]
    page = page_of(columns, fetch={"reward": "none", "action_low": [None, None], "action_high": [None, None]})
    for sentence in (
        "return imitation, no rewards length",
        "rewards None: the data is imitated, plans are chosen by their likelihood alone, and no returns are reported.",
        "All windows are drawn alike.",
        "actions Kept as recorded: they have no bounds. Then normalised like observations.",
        "it has no rewards: its behaviour is imitated, good or bad",
    ):
        assert sentence in page.words
    assert not any(word in page.words for word in ("Returns", "episode return", "Reward", "effective_share", "All rewards are"))
    assert FAULTLESS in page.words


def test_the_page_fetches_nothing_and_is_well_formed(page_of: Callable[..., Page], tmp_path: Path) -> None:
    page = page_of(faultless())
    assert page.fetched == [] and page.open == []
    assert "url(" not in (tmp_path / "page.html").read_text().replace("url(#", "")
    assert page.drawings == len(page.alts) == 2 + 3 + 2 + 1  # returns and lengths, and each dimension
    assert not any(word in page.words for word in ("None ", "nan", "inf,", "Undefined", "{{"))
    first = (tmp_path / "page.html").read_bytes()
    page_of(faultless())
    assert (tmp_path / "page.html").read_bytes() == first


def test_names_from_the_file_are_escaped(page_of: Callable[..., Page], data: Data, tmp_path: Path) -> None:
    data.path = tmp_path / "<img src=x onerror=alert(1)>&.hdf5"
    page = page_of(faultless())
    assert "<img src=x onerror=alert(1)>&.hdf5" in page.words
    assert "<img" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("length", [1, 2, 300])
def test_a_single_episode_has_a_page(page_of: Callable[..., Page], length: int) -> None:
    words = page_of(faultless(episodes=1, length=length)).words
    assert f"1 episode, {length:,} steps" in words
    assert "None, because there is only one episode" in words


def test_extreme_numbers_have_a_page(page_of: Callable[..., Page]) -> None:
    columns = faultless()
    columns["observations"][:, 0] = np.random.default_rng(0).choice([-3e38, 0, 3e38], 1200)
    columns["observations"][:, 1] = 4e8 + 32 * (np.arange(1200) % 2)  # two neighbours in float32
    columns["observations"][:, 2] = 1e-30 * (np.arange(1200) % 50)
    assert "few values" in page_of(columns).words


def test_wide_data_has_a_small_page(page_of: Callable[..., Page], tmp_path: Path) -> None:
    columns = faultless(episodes=60, length=100, dim=111)
    columns["observations"][:, 27:] = 0
    words = page_of(columns).words
    assert "Constant observation dimensions 27 to 110: at 0." in words
    assert (tmp_path / "page.html").stat().st_size < 1e6
    page = page_of(faultless(episodes=1500, length=4, dim=111))
    assert len(page.alts) == 2 + 111 + 2 + 1
    assert (tmp_path / "page.html").stat().st_size < 2e6


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([4], "4"), ([0, 1], "0, 1"), ([0, 3, 4, 5, 9, 10], "0, 3 to 5, 9, 10")]
)
def test_runs_of_numbers_are_short(values: list[int], expected: str) -> None:
    assert numbers(values) == expected
