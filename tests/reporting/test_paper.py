"""The tables of the paper's numbers against the means that the paper prints."""

import csv
import statistics

import pytest
from conftest import ROOT

from tap.reporting.paper import paper_dataset, paper_scores, read_paper
from tap.reporting.studies import STUDIES


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


def test_paper_ablations_give_the_means_that_the_paper_prints() -> None:
    printed = {
        "latent_step": {"1": 60.6, "2": 73.6, "3": 82.5, "4": 82.1},
        "horizon": {"3": 71.9, "9": 81.6, "15": 82.5, "21": 82.4},
        "beta": {"1e-5": 57.6, "0.002": 80.5, "0.01": 81.0, "0.05": 82.5, "0.1": 82.8, "0.5": 65.8},
        "sampling": {"beam": 82.5, "prior": 78.3, "uniform": 51.3},
        "unconditional": {"1": 21.7, "2": 22.4, "3": 21.4},
        "attention": {"beam": 82.5, "prior": 78.3, "attention": 80.9},
    }
    scores: dict[tuple[str, str], dict[str, float]] = {}
    with (ROOT / "tap/reporting/paper_ablations.csv").open() as file:
        for line in csv.DictReader(file):
            scores.setdefault((line["table"], line["column"]), {})[line["dataset"]] = float(line["score"])
    assert scores.keys() == {(table, column) for table, means in printed.items() for column in means}
    main = {line["dataset"] for line in read_paper("scores") if line["table"] == "locomotion"}
    for (table, column), by_dataset in scores.items():
        assert by_dataset.keys() == main
        assert statistics.fmean(by_dataset.values()) == pytest.approx(printed[table][column], abs=0.05 + 1e-9)


def test_the_papers_own_setting_scores_alike_in_all_its_tables() -> None:
    main = {line["dataset"]: float(line["score"]) for line in read_paper("scores") if line["method"] == "TAP"}
    own = {("latent_step", "3"), ("horizon", "15"), ("beta", "0.05"), ("sampling", "beam"), ("attention", "beam")}
    for line in read_paper("ablations"):
        if (line["table"], line["column"]) in own:
            assert float(line["score"]) == pytest.approx(main[line["dataset"]], abs=0.051)


def test_every_column_of_the_papers_tables_has_its_place() -> None:
    published = {(line["table"], line["column"]) for line in read_paper("ablations")}
    assert published == {(study.name, column.paper) for study in STUDIES for column in study.columns if column.paper}


def test_the_papers_number_needs_the_paper_dataset() -> None:
    assert str(paper_scores("hopper-medium-replay-v2", "d4rl")["TAP"]) == "87.3 ± 2.3"
    assert str(paper_scores("hopper-medium-replay-v2", "file")["TAP"]) == "87.3 ± 2.3"
    assert str(paper_scores("door-human-v0", "d4rl")["TAP"]) == "8.8 ± 1.1"
    for dataset, source in [
        ("hopper-medium-replay-v2", "bundled"),
        ("hopper-medium-replay-v2", "recollected"),
        ("hopper-medium-replay", "d4rl"),
        ("hopper-medium-replay-v1", "d4rl"),
        ("stochastic-hopper-medium-replay", "file"),
    ]:
        assert paper_scores(dataset, source) == {}


def test_another_version_is_the_same_task_and_another_name_is_not() -> None:
    assert paper_dataset("pen-expert-v1") == "pen-expert-v0"
    assert paper_dataset("hopper-medium-replay") == "hopper-medium-replay-v2"
    assert paper_dataset("hopper-medium-v2") == "hopper-medium-v2"
    assert paper_dataset("antmaze-umaze-v2") is None
    assert paper_dataset("stochastic-hopper-medium-replay") is None
    assert paper_dataset("my-point") is None
