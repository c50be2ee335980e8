import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rows_of import BASE
from stage_files import (
    PRIOR_CSV,
    VQVAE_CSV,
    cloned_json,
    diagnosis_json,
    diagnosis_plots,
    evaluation_json,
    examples,
    held_out_json,
    validation_json,
    write,
)

from tap.files import write_json
from tap.reporting.page import number
from tap.reporting.report import write_report
from tap.reporting.studies import STUDIES
from tap.reporting.tables import NOTHING

PAPER_TAP = "87.3 ± 2.3"  # hopper-medium-replay-v2


def write_data(data: Path) -> None:
    """All that the stages write for one dataset and two seeds, with the ablation no-search."""
    dataset = "hopper-medium-replay"
    for seed in (0, 1):
        key = f"{dataset}-{seed}"
        write(data / f"metrics/evaluate/{key}.json", evaluation_json(seed=seed, normalized_score=40.0 + 20 * seed))
        ablated = evaluation_json(seed=seed, normalized_score=31.25, ablation="no-search")
        write(data / f"metrics/ablations/{key}-no-search.json", ablated)
        write(data / f"metrics/methods/{key}-bc.json", cloned_json(seed=seed, normalized_score=17.5 + 2 * seed))
        write(data / f"metrics/train_vqvae/{key}.json", {"step": 150, "loss": 0.5, "codebook_usage": 0.9, "parameters": 123456})
        write(data / f"plots/train_vqvae/{key}.csv", VQVAE_CSV)
        write(data / f"plots/train_prior/{key}.csv", PRIOR_CSV)
        write(data / f"plots/evaluate/{key}.json", {"examples": examples()})
    write(data / f"plots/diagnose/{dataset}-0.json", diagnosis_plots())
    write(data / f"raw/{dataset}/validation.json", validation_json())


def write_experiments(data: Path, datasets: int) -> None:
    """Two seeds of some datasets; the first has every kind of ablation, all have no-search."""
    ids = ("hopper-medium-v2", "walker2d-medium-v2", "pen-expert-v1", "door-expert-v1")[:datasets]
    sampled: dict[str, Any] = {"search": "prior_sampling"}
    ablations: dict[str, tuple[dict[str, Any], int]] = {
        "horizon-3": ({"horizon": 3}, 3),
        "beta-5e-1": ({"likelihood_threshold": 0.5}, 3),
        "prior-sampling": (sampled, 3),
        "uniform-sampling": ({"search": "uniform_sampling"}, 3),
        "latent-step-1": ({}, 1),
        "unconditional": ({}, 3),
        "unconditional-latent-step-1": ({}, 1),
        "attention-bottleneck": (sampled, 3),
        "without-replacement": ({"replacement": False}, 3),
    }
    for place, dataset in enumerate(ids):
        facts: dict[str, Any] = {"dataset": dataset, "source": "recollected"}
        write(data / f"raw/{dataset}/validation.json", validation_json() | facts | {"action_dim": 3 * (place + 1)})
        write(data / f"metrics/diagnose/{dataset}-0.json", diagnosis_json(dataset=dataset))
        for seed in (0, 1):
            own = facts | {"seed": seed, "latent_step": 3, "planner": BASE, "normalized_score": 40.0 + 20 * seed}
            write(data / f"metrics/evaluate/{dataset}-{seed}.json", evaluation_json(**own))
            changed = {"no-search": ({"beam_width": 1}, 3)} | (ablations if place == 0 else {})
            for name, (planner, step) in changed.items():
                ablated = own | {"ablation": name, "planner": BASE | planner, "latent_step": step}
                write(data / f"metrics/ablations/{dataset}-{seed}-{name}.json", evaluation_json(**ablated))


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


@pytest.mark.parametrize(("source", "label", "shown"), [("bundled", "not D4RL's data", False), ("d4rl", "original D4RL", True)])
def test_the_results_show_the_papers_number_for_the_papers_data_only(
    tmp_path: Path, source: str, label: str, shown: bool
) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", evaluation_json(dataset="hopper-medium-replay-v2", source=source))
    words = Page(write_report(tmp_path, tmp_path / "report")).words
    results, _, beside_the_paper = words.partition("Experiments with the paper's numbers")
    assert (PAPER_TAP in results) == shown
    assert ("paper's TAP" in results) == shown
    assert label in results
    assert beside_the_paper.index("the paper, on D4RL's data") < beside_the_paper.index(PAPER_TAP)


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
        "18.5 ± 1.0",  # behaviour cloning
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


def test_the_first_sentence_names_the_best_of_the_other_methods(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_report(tmp_path, tmp_path / "report")
    page = Page(tmp_path / "report/index.html")
    assert "TAP scores 50.0 ± 10.0 , and behaviour cloning 18.5 ± 1.0 ; the episodes" in page.words
    for seed in (0, 1):
        better = cloned_json(seed=seed, method="iql", normalized_score=70.0, recipe="another")
        write(tmp_path / f"metrics/methods/hopper-medium-replay-{seed}-iql.json", better)
    write_report(tmp_path, tmp_path / "report")
    page = Page(tmp_path / "report/index.html")
    assert "TAP scores 50.0 ± 10.0 , and IQL, the best of the other methods, 70.0 ± 0.0 ; the episodes" in page.words


def test_figures_are_saved_beside_the_page(data: Path) -> None:
    names = {path.name for path in (data / "report").iterdir()}
    figures = ("scores", "plan", "distribution", "candidates", "losses", "codebook", "returns")
    pages = {"index.html", "results.md", "summary.json", "experiments-latency.png"}
    assert names == pages | {f"hopper-medium-replay-{name}.png" for name in figures}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (data / "report").glob("*.png"))


def test_equal_inputs_give_equal_bytes(data: Path, tmp_path: Path) -> None:
    write_report(data, tmp_path)
    for path in (data / "report").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def write_held_out(data: Path) -> None:
    """TAP with two seeds and behaviour cloning of arms, without a simulator and without rewards."""
    seeds = [held_out_json(), held_out_json(seed=1, action_error=0.3, scores=[0.2, 0.3, 0.4], error_ahead=[0.3, 0.5])]
    cloned = held_out_json(method="bc", error_ahead=[0.2], recipe="other")
    cloned |= {key: cloned[key][:1] for key in ("hold_error_ahead", "rmse", "hold_rmse")}
    for key in ("planner", "latent_step", "window_length"):
        del cloned[key]
    for each in seeds:
        write_json(data / f"metrics/evaluate/arms-{each['seed']}.json", each)
    write_json(data / "metrics/methods/arms-0-bc.json", cloned)
    facts = {"dataset": "arms", "source": "lerobot", "has_rewards": False, "action_names": ["elbow", "wrist"]}
    write_json(data / "raw/arms/validation.json", validation_json() | facts)
    write_json(data / "plots/evaluate/arms-0.json", {"examples": []})
    write_json(data / "plots/diagnose/arms-0.json", {"distributions": {}, "plans": []})


def test_held_out_actions_stand_beside_holding_the_last_action(tmp_path: Path) -> None:
    write_held_out(tmp_path)
    page = write_report(tmp_path, tmp_path / "report").read_text()
    results = (tmp_path / "report/results.md").read_text()
    for line in (
        "| arms: TAP<br>your own, in LeRobot's layout; imitation, no rewards; cpu scale; 2 seeds, each with 60 decisions in 3 "
        "held-out episodes, last checkpoint | 0.250 ± 0.050 | 0.400 | 20 ms |",
        "| 0.200 ± 0.058 | – | 20 ms |",
        "| arms: hold the last action | 0.400 | 0.600 | – |",
        "| elbow | 2 | 1 (0.25) | 1 (0.25) | 1.5 (0.56) |",
        "| wrist | 0.5 | 0.1 (0.04) | 0.1 (0.04) | 0.3 (0.36) |",
    ):
        assert line in results
    assert "What was evaluated" not in results and "return" not in results.partition("The paper is")[2].lower()
    assert "arms</strong> (imitation, no rewards) the action error on held-out episodes is" in " ".join(page.split())
    assert (tmp_path / "report/arms-action-error.png").exists() and not (tmp_path / "report/arms-returns.png").exists()
    assert json.loads((tmp_path / "report/summary.json").read_text())["arms (your own, in LeRobot's layout)"] == {
        "tap": {
            "action_error": 0.25,
            "standard_error": pytest.approx(0.05),
            "seeds": [0, 1],
            "episodes": 3,
            "decision_ms": 20.0,
        },
        "bc": {
            "action_error": pytest.approx(0.2),
            "standard_error": pytest.approx(0.1 / 3**0.5),
            "seeds": [0],
            "episodes": 3,
            "decision_ms": 20.0,
        },
        "hold": {"action_error": 0.4},
    }


def test_results_in_simulation_and_on_held_out_episodes_stand_on_one_page(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    write_held_out(tmp_path / "data")
    page = write_report(tmp_path / "data", tmp_path / "report").read_text()
    assert "evaluated in simulation and on held-out episodes." in page
    assert 'id="held-out"' in page and 'id="protocol"' in page and "<th>TAP's score</th>" in page


def test_missing_parts_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", evaluation_json(runs={"train_vqvae": None, "evaluate": "3" * 32}))
    page = Page(write_report(tmp_path, tmp_path / "report"))
    assert page.drawings == 1
    assert not any(
        word in page.words
        for word in ("All ablations", "without search", "One thing changed", "Offline checks", "None", "Undefined")
    )


@pytest.mark.parametrize("datasets", [1, 4])
def test_page_and_markdown_hold_the_same_tables(tmp_path: Path, datasets: int) -> None:
    write_experiments(tmp_path, datasets)
    page = Page(write_report(tmp_path, tmp_path / "report"))
    assert page.open == [] and page.fetched == []
    assert page.words.index("Results") < page.words.index("Experiments with the paper's numbers")
    text = (tmp_path / "report/results.md").read_text()
    titles = [title for title in re.findall(r"^### (.*)$", text, re.MULTILINE) if title != "What was evaluated"]
    assert {study.title for study in STUDIES} | {"Sampled plans"} < set(titles)
    for title in titles:
        assert title in page.words
    for word in ("None", "nan", "Undefined"):
        assert word not in text and word not in page.words
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert len(pictures) == (4 if datasets == 1 else 5)  # scores relative to baselines need several action dimensions
    assert all((tmp_path / "report" / picture).exists() for picture in pictures)
    for fact in ("c0ffeec0ff", "mujoco 4.0.0", "seeds 1000-1002", "cpu scale", "Hopper-v4", "abababababab"):
        assert fact in text


def test_text_from_files_cannot_become_markup(tmp_path: Path) -> None:
    write(tmp_path / "metrics/evaluate/x-0.json", evaluation_json(protocol="<script>alert(1)</script>"))
    assert "<script" not in write_report(tmp_path, tmp_path / "report").read_text()


def test_the_report_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, tap.reporting.report; sys.exit('torch' in sys.modules)"], check=True)


def test_numbers_are_never_written_as_powers_of_ten_because_they_are_round() -> None:
    assert [number(value, 2) for value in (0.0123, 9.96, 12.3, 100.4, 1234.5, 7)] == ["0.012", "10", "12", "100", "1,234", "7"]
    assert [number(value) for value in (1234.56, 12.3456, None)] == ["1,235", "12.35", NOTHING]
