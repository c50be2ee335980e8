import base64
import csv
import io
import json
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.image import imsave

from tap.reporting.figures import (
    candidates_figure,
    codebook_figure,
    distribution_figure,
    loss_figure,
    plan_figure,
    read_curves,
    returns_figure,
    score_figure,
)
from tap.reporting.report import pictures, write_report
from tap.reporting.results import Result, load_results, mean_and_standard_error, paper_scores, table_rows

PAPER_TAP = "87.3 ± 2.3"  # hopper-medium-replay-v2


def metrics(**changes: Any) -> dict[str, Any]:
    """What `evaluate` writes, for 3 episodes of seed 0 unless changed."""
    values: dict[str, Any] = {
        "dataset": "hopper-medium-replay",
        "source": "bundled",
        "digest": "ab" * 32,
        "scale": "cpu",
        "environment": "Hopper-v4",
        "simulator": "gymnasium 1.4.0, mujoco 4.0.0",
        "recipe": "0123456789abcdef",
        "versions": {"gymnasium": "1.4.0", "mujoco": "4.0.0", "torch": "2.13.0"},
        "seed": 0,
        "environment_seed": 1000,
        "episodes": 3,
        "protocol": "3 episodes, seeds 1000-1002, re-planned every step, last checkpoint",
        "normalized_score": 40.0,
        "normalized_score_standard_error": 1.5,
        "return_mean": 1200.0,
        "returns": [1000.0, 1100.0, 1500.0],
        "lengths": [300, 310, 400],
        "terminated": [True, True, False],
        "search_value_mean": 210.0,
        "log_probability_mean": -4.0,
        "state_prediction_error": 0.02,
        "latency_ms": {"median": 20.0, "p95": 30.0, "batch_median": 50.0},
        "behaviour": {
            "episodes": 50,
            "mean_return": 700.0,
            "mean_normalized_score": 22.1,
            "best_tenth_normalized_score": 51.5,
            "last_tenth_normalized_score": 44.4,
        },
        "planner": {"search": "beam", "horizon": 15, "beam_width": 16, "partial_threshold": False},
        "runs": {"train_vqvae": "1" * 32, "train_prior": "2" * 32, "evaluate": "3" * 32},
        "git_commit": "c0ffee" * 6 + "c0ff",
    }
    return values | changes


def result(**changes: Any) -> Result:
    return Result.model_validate(metrics(**changes))


def validation() -> dict[str, Any]:
    """What `fetch` writes."""
    return {
        "dataset": "hopper-medium-replay",
        "source": "bundled",
        "origin": "data/some.hdf5",
        "digest": "ab" * 32,
        "bytes": 2_000_000,
        "transitions": 12_345,
        "episodes": 50,
        "observation_dim": 4,
        "action_dim": 2,
        "length": {"min": 5, "median": 200.0, "max": 1000},
        "return": {"mean": 700.0, "min": 10.0, "max": 2000.0},
        "normalized_score_mean": 22.1,
        "boundaries": {"terminals": 48, "timeouts": 1, "discontinuities": 0, "end_of_file": 1, "how": "ends at 48 terminals"},
        "truncated_episodes": 2,
        "unfinished_last_episode": True,
        "constant_observation_dims": [3],
        "constant_action_dims": [],
        "actions_out_of_range": 0,
        "action_max_abs": 0.99,
        "non_finite": {"observations": 0},
        "return_histogram": {"counts": [30, 15, 5], "edges": [10.0, 600.0, 1300.0, 2000.0]},
        "warnings": ["the last episode has no end in the file"],
    }


def examples() -> list[dict[str, Any]]:
    """Two plans of 6 steps; dimensions 1, 2 and 4 of 5 move most; the second plan outlives its episode."""
    steps = np.arange(6.0)[:, None]
    planned = steps * [0.0, 2.0, -3.0, 0.1, 1.0]
    plans = {"observations": planned.tolist(), "actions": [[0.0]] * 6, "rewards": [1.0] * 6}
    return [
        {"title": title, "planned": plans, "simulated": {"observations": (planned[:n] * 1.1).tolist(), "rewards": [0.9] * n}}
        for title, n in (("first state of episode 0", 6), ("step 7 of episode 0", 4))
    ]


def diagnosis() -> dict[str, Any]:
    """Two plans each of a sampling and a beam, from two states: one with pictures of the simulator, one without."""
    pixels = io.BytesIO()
    imsave(pixels, np.zeros((2, 6, 3), np.uint8), format="png")
    picture = base64.b64encode(pixels.getvalue()).decode()
    plans = {
        "observations": [[[0, 0], [1, 1]], [[0, 0], [2, 3]]],
        "scores": [5.0, 7.0],
        "chosen": 1,
        "chosen_actions": [[0], [0]],
        "simulated": [[0, 0], [2, 2]],
    }
    searches = {"prior_sampling": plans, "beam": plans | {"scores": [8.0, 9.0]}}
    frames: dict[str, str] = dict.fromkeys(searches, picture)
    return {
        "distributions": {
            name: {"predicted_returns": [1.0, 2.0, 4.0], "state_prediction_errors": [0.1, error, 0.3]}
            for name, error in (("uniform", 0.25), ("prior", 0.125))
        },
        "plans": [
            {"title": title, "dimensions": [1, 4], "searches": searches, "frames": each, "walls": walls}
            for title, each, walls in (("first state of episode 0", frames, []), ("step 7 of episode 0", {}, [[4.0, -8.0]]))
        ],
    }


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


VQVAE_CSV = "step,loss,held_out_loss,codebook_usage,codebook_perplexity\n50,2.0,,0.5,20\n100,1.0,1.5,0.8,60\n150,0.5,,0.9,70\n"
PRIOR_CSV = "step,loss,held_out_loss\n50,4.0,\n100,3.0,3.5\n"


def write_data(data: Path) -> None:
    """All that the stages write for one dataset and two seeds, with the ablation no-search."""
    dataset = "hopper-medium-replay"
    for seed in (0, 1):
        key = f"{dataset}-{seed}"
        write(data / f"metrics/evaluate/{key}.json", metrics(seed=seed, normalized_score=40.0 + 20 * seed))
        ablated = metrics(seed=seed, normalized_score=31.25, ablation="no-search")
        write(data / f"metrics/ablations/{key}-no-search.json", ablated)
        write(data / f"metrics/train_vqvae/{key}.json", {"loss": 0.5, "codebook_usage": 0.9, "parameters": 123456})
        write(data / f"plots/train_vqvae/{key}.csv", VQVAE_CSV)
        write(data / f"plots/train_prior/{key}.csv", PRIOR_CSV)
        write(data / f"plots/evaluate/{key}.json", {"examples": examples()})
    write(data / f"plots/diagnose/{dataset}-0.json", diagnosis())
    write(data / f"raw/{dataset}/validation.json", validation())


class Page(HTMLParser):
    """What a browser would fetch, the figures with their texts, and the words on the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.alts: list[str] = []
        self.drawings = 0
        self.open: list[str] = []
        self.words = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        addresses = [values.get(key) or "#" for key in ("src", "href", "xlink:href", "srcset", "data")]
        self.fetched += [address for address in addresses if not address.startswith(("#", "data:"))]
        self.drawings += tag == "svg"
        if values.get("role") == "img":
            self.alts.append(values["aria-label"] or "")
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "text"):
            self.words += " " + " ".join(data.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    write_report(folder, folder / "report")
    return folder


# ---------------------------------------------------------------- numbers


def test_mean_and_standard_error_by_hand() -> None:
    estimate = mean_and_standard_error([50.0, 60.0, 70.0])  # deviations -10, 0, 10: s = sqrt(200 / 2) = 10
    assert estimate.mean == 60
    assert estimate.standard_error == pytest.approx(10 / 3**0.5)
    assert str(estimate) == "60.0 ± 5.8"
    assert mean_and_standard_error([3.0]).standard_error is None


def test_the_error_is_over_seeds_not_over_pooled_episodes() -> None:
    (row,) = table_rows([result(seed=0, normalized_score=40.0), result(seed=1, normalized_score=60.0)])
    assert (row.score.mean, row.score.standard_error, row.over) == (50, pytest.approx(10), "seeds")  # s = 200**0.5, n = 2
    (row,) = table_rows([result()])
    assert (row.score.mean, row.score.standard_error, row.over) == (40, 1.5, "episodes")


def test_without_reference_scores_the_score_is_the_return() -> None:
    unknown = {"normalized_score": None, "normalized_score_standard_error": None}
    (row,) = table_rows([result(**unknown)])
    assert not row.normalized
    assert row.score.mean == 1200
    assert row.score.standard_error == pytest.approx(((200**2 + 100**2 + 300**2) / 2 / 3) ** 0.5)
    (row,) = table_rows([result(**unknown), result(**unknown, seed=1, returns=[1600.0] * 3)])
    assert (row.score.mean, row.score.standard_error) == (1400, pytest.approx(200))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "cd" * 32},
        {"source": "file"},
        {"scale": "paper"},
        {"environment": "Hopper-v5"},
        {"environment_seed": 2000},
        {"episodes": 20},
        {"planner": {"search": "prior_sampling"}},
        {"simulator": "gymnasium 1.4.0, mujoco 3.0.0"},
        {"recipe": "another"},
    ],
)
def test_unlike_runs_are_not_averaged(change: dict[str, Any]) -> None:
    assert [len(row.results) for row in table_rows([result(), result(seed=1), result(seed=2, **change)])] == [2, 1]


def test_ablations_stand_beside_their_own_experiment() -> None:
    ablated = result(ablation="no-search", normalized_score=10.0, planner={"beam_width": 1})
    here, elsewhere = table_rows([result(), ablated, result(scale="paper")])
    found = here.ablation("no-search")
    assert found is not None and found.score.mean == 10
    assert elsewhere.ablations == ()


def test_latency_takes_the_worst_seed() -> None:
    seeds = enumerate([(10, 40), (20, 25), (60, 90)])
    (row,) = table_rows([result(seed=seed, latency_ms={"median": median, "p95": p95}) for seed, (median, p95) in seeds])
    assert (row.latency.median, row.latency.p95) == (20, 90)


# ---------------------------------------------------------------- the paper's numbers


def test_paper_scores_give_the_means_that_the_paper_prints() -> None:
    with (ROOT / "tap/reporting/paper_scores.csv").open() as file:
        lines = list(csv.DictReader(file))
    printed = {
        ("locomotion", 12): {"BC": 60.4, "CQL": 83.2, "IQL": 84.1, "DT": 81.5, "TT": 82.2, "TAP": 82.5},
        ("adroit", 12): {"BC": 36.7, "CQL": 40.3, "TT": 20.1, "TAP": 51.9},
        ("antmaze", 6): {"IQL": 42.0, "TT(+Q)": 62.2, "TAP": 61.2},
    }
    for (table, count), means in printed.items():
        for method, mean in means.items():
            scores = [float(line["score"]) for line in lines if (line["table"], line["method"]) == (table, method)]
            assert len(scores) == count
            assert statistics.fmean(scores) == pytest.approx(mean, abs=0.05 + 1e-9)


def test_the_papers_number_needs_the_papers_dataset() -> None:
    assert str(paper_scores("hopper-medium-replay-v2", "d4rl")["TAP"]) == PAPER_TAP
    assert str(paper_scores("hopper-medium-replay-v2", "file")["TAP"]) == PAPER_TAP
    assert str(paper_scores("door-human-v0", "d4rl")["TAP"]) == "8.8 ± 1.1"
    for dataset, source in [
        ("hopper-medium-replay-v2", "bundled"),
        ("hopper-medium-replay-v2", "recollected"),
        ("hopper-medium-replay", "d4rl"),
        ("hopper-medium-replay-v1", "d4rl"),
    ]:
        assert paper_scores(dataset, source) == {}


@pytest.mark.parametrize(("source", "label", "shown"), [("bundled", "not D4RL's data", False), ("d4rl", "original D4RL", True)])
def test_the_results_show_the_papers_number_for_the_papers_data_only(
    tmp_path: Path, source: str, label: str, shown: bool
) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", metrics(dataset="hopper-medium-replay-v2", source=source))
    words = Page(write_report(tmp_path, tmp_path / "report")).words
    results, _, beside_the_paper = words.partition("Experiments beside the paper")
    assert (PAPER_TAP in results) == shown
    assert ("paper's TAP" in results) == shown
    assert label in results
    assert beside_the_paper.index("the paper, on D4RL's data") < beside_the_paper.index(PAPER_TAP)


# ---------------------------------------------------------------- figures


def test_curves_may_have_gaps(tmp_path: Path) -> None:
    write(tmp_path / "curve.csv", VQVAE_CSV)
    curves = read_curves(tmp_path / "curve.csv")
    np.testing.assert_array_equal(curves["held_out_loss"], [np.nan, 1.5, np.nan])
    training, held_out = loss_figure([curves], []).axes[0].lines
    assert training.get_xydata().tolist() == [[50, 2], [100, 1], [150, 0.5]]
    assert held_out.get_xydata().tolist() == [[100, 1.5]]
    usage, perplexity = codebook_figure([curves, curves]).axes
    assert [line.get_ydata().tolist() for line in usage.lines] == [[0.5, 0.8, 0.9]] * 2
    assert perplexity.lines[0].get_ydata().tolist() == [20, 60, 70]


@pytest.mark.parametrize("content", ["", "step,loss\n1,nonsense\n", "step,loss\n1,2,3\n", "step,loss\n1,2\n3\n"])
def test_a_broken_curve_file_is_named(tmp_path: Path, content: str) -> None:
    write(tmp_path / "curve.csv", content)
    with pytest.raises(ValueError, match=r"curve\.csv.*dvc repro"):
        read_curves(tmp_path / "curve.csv")


def test_score_figure_shows_every_episode_over_the_datas_histogram() -> None:
    results = [result(seed=3), result(seed=5, returns=[1.0, 2.0, 3.0])]
    episodes, data = score_figure(results, validation()).axes
    dots = [line.get_xdata() for line in episodes.lines if line.get_marker() == "o"]
    assert [list(each) for each in dots] == [each.returns for each in results]
    assert [label.get_text() for label in episodes.get_yticklabels()] == ["seed 3", "seed 5"]
    assert list(data.patches[0].get_data().values) == [30, 15, 5]  # type: ignore[attr-defined]
    assert len(score_figure(results, None).axes) == 1


def test_plan_figure_shows_the_observations_that_move_most() -> None:
    axes = plan_figure(examples()).axes
    assert [each.get_ylabel() for each in axes[::2]] == ["obs. 1", "obs. 2", "obs. 4", "reward"]
    simulated, planned = axes[1].lines  # the second example, whose episode ends early
    assert (len(simulated.get_xdata()), len(planned.get_xdata())) == (4, 6)


def test_candidate_plans_are_ranked_over_both_searches_with_the_chosen_one_on_top() -> None:
    sampling, beam, *frames, later, _ = candidates_figure(diagnosis()["plans"]).axes
    assert len(frames) == 2 and all(each.images for each in frames)  # the second state has none
    assert sampling.get_title(loc="left") == "Sampling\nfirst state of episode 0"
    assert later.get_title(loc="left") == "Sampling\nstep 7 of episode 0"
    assert (sampling.get_xlabel(), sampling.get_ylabel()) == ("obs. 1", "obs. 4")
    assert [each.collections[0].get_array().tolist() for each in (sampling, beam)] == [[0, 0.25], [0.5, 0.75]]
    assert [patch.get_bbox().extents.tolist() for patch in later.patches] == [[2, -10, 6, -6]]
    assert later.get_ylim()[0] > -6  # a wall is seen only where plans come near
    chosen, simulated = beam.lines
    assert (list(chosen.get_ydata()), list(simulated.get_ydata())) == ([0, 3], [0, 2])


def test_distributions_share_their_axes_and_show_medians() -> None:
    uniform, prior = distribution_figure(diagnosis()["distributions"]).axes
    assert "median error 0.25" in uniform.get_title(loc="left") and "median error 0.12" in prior.get_title(loc="left")
    assert uniform.get_xlim() == prior.get_xlim() and uniform.get_ylim() == prior.get_ylim()
    assert sum(prior.collections[0].get_array()) == 3


def test_plans_that_the_simulator_follows_exactly_and_equal_returns_are_drawn() -> None:
    same = {"predicted_returns": [2.0, 2.0], "state_prediction_errors": [0.0, 0.1]}
    axes = distribution_figure({"prior": same}).axes[0]
    assert sum(axes.collections[0].get_array()) == 2
    low, high = axes.get_xlim()
    assert low < 2 < high and axes.get_ylim()[0] < 1e-10


def test_axes_have_labels() -> None:
    curves = {name: np.arange(1.0, 4) for name in VQVAE_CSV.split("\n")[0].split(",")}
    for figure in (score_figure([result()], validation()), returns_figure(validation()), loss_figure([curves], [curves])):
        assert all(axes.get_title(loc="left") for axes in figure.axes)
        assert figure.axes[-1].get_xlabel()


def test_a_dataset_is_not_taken_for_one_whose_id_begins_alike(tmp_path: Path) -> None:
    for key in ("hopper-medium-0", "hopper-medium-2", "hopper-medium-10", "hopper-medium-replay-0"):
        write(tmp_path / f"train_vqvae/{key}.csv", VQVAE_CSV)
    codebook = pictures("hopper-medium", [], None, tmp_path)[-1]
    assert codebook.name == "hopper-medium-codebook"
    assert len(codebook.figure.axes[0].lines) == 3


# ---------------------------------------------------------------- the page


def test_the_page_fetches_nothing_and_says_what_its_figures_show(data: Path) -> None:
    page = Page(data / "report/index.html")
    assert page.fetched == []
    assert "url(" not in (data / "report/index.html").read_text().replace("url(#", "")
    assert page.open == []  # every tag is closed
    assert page.drawings == len(page.alts) == 8
    assert all(len(alt) > 40 for alt in page.alts)
    assert not any(word in page.words for word in ("None", "nan", "Undefined", "{{"))


def test_the_page_holds_the_results(data: Path) -> None:
    words = Page(data / "report/index.html").words
    for expected in (
        "50.0 ± 10.0",
        "2 seeds \N{MULTIPLICATION SIGN} 3 episodes",
        "± over seeds",
        "31.2 ± 0.0",
        "22.1",
        "51.5",
        "44.4",
        "Hopper-v4, gymnasium 1.4.0, mujoco 4.0.0",
        "cpu scale",
        "seeds 1000-1002",
        "12,345 transitions",
        "ends at 48 terminals",
        "the last episode has no end in the file",
        "123,456",
        "1" * 32,
        "c0ffeec0ff",
    ):
        assert expected in words, expected


def test_figures_are_saved_beside_the_page(data: Path) -> None:
    names = {path.name for path in (data / "report").iterdir()}
    figures = ("scores", "plan", "distribution", "candidates", "losses", "codebook", "returns")
    pages = {"index.html", "results.md", "experiments-latency.png"}
    assert names == pages | {f"hopper-medium-replay-{name}.png" for name in figures}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (data / "report").glob("*.png"))


def test_equal_inputs_give_equal_bytes(data: Path, tmp_path: Path) -> None:
    write_report(data, tmp_path)
    for path in (data / "report").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_missing_parts_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", metrics(state_prediction_error=None, git_commit=None, runs={}))
    page = Page(write_report(tmp_path, tmp_path / "report"))
    assert page.drawings == 1
    assert not any(word in page.words for word in ("All ablations", "without search", "Departures", "None", "Undefined"))


def test_text_from_files_cannot_become_markup(tmp_path: Path) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", metrics(protocol="<script>alert(1)</script>"))
    assert "<script" not in write_report(tmp_path, tmp_path / "report").read_text()


def test_no_results_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dvc repro evaluate"):
        load_results(tmp_path)
    write(tmp_path / "ablations/x-0-no-search.json", metrics(ablation="no-search"))
    with pytest.raises(ValueError, match="dvc repro evaluate"):
        load_results(tmp_path)


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    content = metrics()
    del content["episodes"]
    write(tmp_path / "evaluate/x-0.json", content)
    with pytest.raises(ValueError, match=r"x-0\.json.*episodes"):
        load_results(tmp_path)


def test_the_report_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, tap.reporting.report; sys.exit('torch' in sys.modules)"], check=True)
