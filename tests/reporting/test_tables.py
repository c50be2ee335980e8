import csv
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from test_report import Page, metrics, result, validation, write

from tap.reporting.figures import (
    ablation_figure,
    dimension_latency_figure,
    horizon_latency_figure,
    latent_step_figure,
    relative_figure,
)
from tap.reporting.report import experiment_pictures, write_report
from tap.reporting.results import Diagnosis, Estimate, Row, load_diagnoses, mean_of, read_paper, table_rows
from tap.reporting.tables import (
    STUDIES,
    Line,
    Table,
    compare,
    complete,
    departures_table,
    drawn_plans_table,
    experiment_tables,
    main_tables,
    markdown,
    papers_dataset,
    study_table,
)

BASE = {"search": "beam", "horizon": 12, "beam_width": 16, "likelihood_threshold": 0.1}
STUDY = {study.name: study for study in STUDIES}


def rows_of(dataset: str = "hopper-medium-replay-v2", source: str = "recollected", **scores: Any) -> list[Row]:
    """The base, and ablations by name with their planner, each with a score for seeds 0, 1 and so on."""
    scores.setdefault("base", ({}, [40.0, 60.0]))
    facts: dict[str, Any] = {"dataset": dataset, "source": source}
    return table_rows(
        [
            result(
                **facts,
                seed=seed,
                normalized_score=score,
                planner=BASE | {key: value for key, value in changes.items() if key != "latent_step"},
                latent_step=changes.get("latent_step", 3),
                ablation=None if name == "base" else name.replace("_", "-"),
            )
            for name, (changes, values) in scores.items()
            for seed, score in enumerate(values)
        ]
    )


def columns_of(table: Table | None) -> dict[str, tuple[str, ...]]:
    """The table's columns, top to bottom."""
    assert table is not None
    return dict(zip(table.head, zip(*(line.cells for line in table.lines), strict=True), strict=True))


# ---------------------------------------------------------------- the paper's numbers


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


# ---------------------------------------------------------------- numbers by hand


def test_the_mean_over_datasets_carries_their_errors() -> None:
    mean = mean_of([Estimate(10, 3.0), Estimate(20, 4.0)])
    assert (mean.mean, mean.standard_error) == (15, 2.5)  # sqrt(9 + 16) / 2
    assert mean_of([Estimate(10, 3.0), Estimate(20, None)]).standard_error is None


def test_differences_are_paired_by_seed() -> None:
    rows = rows_of(base=({}, [40.0, 60.0, 80.0]), stop_at_end=({"stop_at_end": True}, [41.0, 63.0, 85.0]))
    columns = columns_of(departures_table(rows))
    # Differences 1, 3, 5: mean 3, s = 2, error 2 / sqrt(3), where unpaired scores would err by 17.
    assert columns["difference"] == ("+3.0 ± 1.2",)
    assert (columns["score"], columns["base's score"]) == (("63.0 ± 12.7",), ("60.0 ± 11.5",))


def test_only_common_seeds_are_compared() -> None:
    rows = rows_of(base=({}, [40.0, 60.0]), no_search=({"beam_width": 1}, [30.0]))
    columns = columns_of(departures_table(rows))
    assert columns["difference"] == ("-10.0",)
    assert columns["score"] == ("30.0 ± 1.5 (1 seed, ± over episodes)",)


# ---------------------------------------------------------------- which row stands in which column


def test_the_base_is_the_column_of_its_own_setting() -> None:
    rows = rows_of(beta_1e_2=({"likelihood_threshold": 0.01}, [20.0, 30.0]), horizon_3=({"horizon": 3}, [10.0, 10.0]))
    assert columns_of(study_table(STUDY["beta"], rows)) == {
        "β = 0.01": ("25.0 ± 5.0", "93.2"),
        "β = 0.1": ("50.0 ± 10.0", "97.0"),
    }
    assert columns_of(study_table(STUDY["horizon"], rows)) == {"H = 3": ("10.0 ± 0.0", "29.39"), "H = 12": ("50.0 ± 10.0", "–")}


def test_latent_steps_are_compared_at_one_horizon() -> None:
    one = {"latent_step": 1}
    assert columns_of(study_table(STUDY["latent_step"], rows_of(latent_step_1=(one, [5.0, 5.0])))).keys() == {"L = 1", "L = 3"}
    far = rows_of(base=({"horizon": 15}, [40.0, 60.0]), latent_step_1=(one, [5.0, 5.0]))
    assert columns_of(study_table(STUDY["latent_step"], far)).keys() == {"L = 1"}
    both = rows_of(base=({"horizon": 15}, [40.0, 60.0]), latent_step_1=(one, [5.0, 5.0]), horizon_12=({}, [7.0, 7.0]))
    assert columns_of(study_table(STUDY["latent_step"], both))["L = 3"] == ("7.0 ± 0.0", "87.3")


def test_an_ablation_that_did_something_else_is_in_no_column() -> None:
    rows = rows_of(beta_1e_2=({"likelihood_threshold": 0.3}, [20.0, 30.0]))
    assert study_table(STUDY["beta"], rows) is None


def test_what_only_stands_beside_makes_no_table() -> None:
    sampled = {"search": "prior_sampling"}
    rows = rows_of(prior_sampling=(sampled, [30.0, 30.0]), horizon_12=({}, [7.0, 7.0]))
    assert {study.name for study in STUDIES if study_table(study, rows)} == {"sampling"}
    rows = rows_of(prior_sampling=(sampled, [30.0, 30.0]), attention_bottleneck=(sampled, [35.0, 35.0]))
    assert columns_of(study_table(STUDY["attention"], rows)) == {
        "beam search": ("50.0 ± 10.0", "87.3"),
        "pooling, sample prior": ("30.0 ± 0.0", "79.0"),
        "attention, sample prior": ("35.0 ± 0.0", "79.7"),
    }
    assert [table.title for table in experiment_tables(rows_of(), [])] == ["Locomotion: results"]


def test_means_are_over_datasets_with_all_columns() -> None:
    sampled: dict[str, Any] = {"search": "prior_sampling"}
    uniform: dict[str, Any] = {"search": "uniform_sampling"}
    rows = [
        *rows_of("hopper-medium-v2", prior_sampling=(sampled, [10.0, 20.0]), uniform_sampling=(uniform, [1.0, 3.0])),
        *rows_of("ant-medium-v2", prior_sampling=(sampled, [30.0, 40.0]), uniform_sampling=(uniform, [5.0, 7.0])),
        *rows_of("walker2d-medium-v2", prior_sampling=(sampled, [90.0, 90.0])),
    ]
    table = study_table(STUDY["sampling"], rows)
    assert table is not None
    ours, paper = table.lines[-2:]
    assert ours.cells == ("50.0 ± 7.1", "25.0 ± 3.5", "4.0 ± 0.7")  # errors sqrt(2) * 10, 5 and 1, over 2
    assert paper.cells == ("77.7", "76.5", "64.7")  # (63.4 + 92.0) / 2, (64.3 + 88.8) / 2, (39.6 + 89.8) / 2
    assert (ours.note, paper.label) == ("of the 2 datasets with all columns", "mean of the paper, on D4RL's 2 datasets")


def test_unlike_datasets_have_no_mean() -> None:
    other = {"search": "prior_sampling"}
    mine = rows_of("hopper-medium-v2", prior_sampling=(other, [10.0, 20.0]))
    for dataset, source in (("hopper-medium-v2", "d4rl"), ("hopper-medium", "recollected"), ("ant-medium-v2", "d4rl")):
        rows = [*mine, *rows_of(dataset, source, prior_sampling=(other, [10.0, 20.0]))]
        assert not any(line.label.startswith("mean") for table in experiment_tables(rows, []) for line in table.lines)
    _, comparisons = compare(STUDY["sampling"], [*mine, *rows_of("ant-medium-v2", "d4rl", prior_sampling=(other, [1.0, 2.0]))])
    assert [each.base.first.dataset for each in complete(comparisons)] == ["hopper-medium-v2"]


# ---------------------------------------------------------------- honest labels


def test_another_version_is_the_same_task_and_another_name_is_not() -> None:
    assert papers_dataset("pen-expert-v1") == "pen-expert-v0"
    assert papers_dataset("hopper-medium-replay") == "hopper-medium-replay-v2"
    assert papers_dataset("hopper-medium-v2") == "hopper-medium-v2"
    assert papers_dataset("antmaze-umaze-v2") is None
    assert papers_dataset("my-point") is None


@pytest.mark.parametrize(
    ("source", "label"), [("recollected", "recollected, not D4RL's data"), ("bundled", "bundled, not D4RL's")]
)
def test_the_papers_numbers_are_never_without_the_label_of_their_data(source: str, label: str) -> None:
    one = {"likelihood_threshold": 0.01}
    rows = rows_of(
        "hopper-medium-replay-v2", source, beta_1e_2=(one, [20.0, 30.0]), latent_step_1=({"latent_step": 1}, [5.0, 5.0])
    )
    tables = experiment_tables(rows, [])
    papers_texts = {"87.3 ± 2.3", "93.2", "97.0", "61.9", "95.0", "94.7"}
    found = set()
    for table in tables:
        over = [group for group, count in table.groups for _ in range(count)] or [""] * len(table.head)
        for line in table.lines:
            assert not line.ours or label in line.note
            for group, cell in zip(over, line.cells, strict=True):
                if cell in papers_texts:
                    found.add(cell)
                    assert "D4RL's" in (group if line.ours else line.label)
    assert found == papers_texts
    for text in map(markdown, tables):
        for line in text.splitlines():
            if any(f"| {number} |" in line for number in papers_texts):
                assert "D4RL's hopper-medium-replay-v2" in line


def test_the_main_table_is_by_suite_with_all_methods_of_the_papers() -> None:
    rows = [*rows_of("hopper-medium-v2"), *rows_of("pen-expert-v1"), *rows_of("antmaze-umaze-v2"), *rows_of("my-point", "file")]
    tables = main_tables(rows)
    assert [table.title.removesuffix(": results") for table in tables] == [
        "Locomotion",
        "Adroit hands",
        "AntMaze",
        "Other datasets",
    ]
    assert [table.head[3:] for table in tables] == [
        ("TAP", "BC", "CQL", "IQL", "DT", "MOReL", "TT"),
        ("TAP", "BC", "CQL", "MOPO", "Opt-MOPO", "TT"),  # no IQL on pen-expert
        (),
        (),
    ]
    assert tables[0].lines[0].cells == (
        "50.0 ± 10.0",
        "22.1",
        "51.5",
        "63.4 ± 1.4",
        "63.9",
        "58.0",
        "66.3",
        "67.6",
        "95.4",
        "61.1",
    )
    assert "the paper's: D4RL's pen-expert-v0" in tables[1].lines[0].note
    assert "paper" not in tables[2].caption + tables[3].caption


def test_returns_are_not_called_scores() -> None:
    unknown = {"normalized_score": None, "normalized_score_standard_error": None, "dataset": "my-point", "source": "file"}
    (table,) = main_tables(table_rows([result(**unknown)]))
    assert table.lines[0].cells[:2] == ("1200.0 ± 152.8", "700.0")
    assert "returns, no reference scores" in table.lines[0].note


# ---------------------------------------------------------------- Markdown and page


def test_markdown_escapes_what_would_be_markup() -> None:
    text = markdown(Table("T", "", ("a", "b"), (Line("x|y", "<i>", ("1", "2")),), (("ours", 1), ("theirs", 1))))
    assert text.splitlines()[2:] == ["|  | a (ours) | b (theirs) |", "| :-- | --: | --: |", "| x\\|y<br>&lt;i> | 1 | 2 |"]


def diagnosis_metrics(**changes: Any) -> dict[str, Any]:
    """A metrics file of the stage diagnose."""
    drawn = {"predicted_return_deviation": 74.27, "state_prediction_error_median": 0.08443, "rank_correlation": -0.2}
    facts = {"dataset": "hopper-medium-v2", "source": "recollected", "scale": "cpu", "seed": 0, "protocol": "26 plans"}
    return facts | {"prior": drawn, "uniform": drawn | {"rank_correlation": 0.469}} | changes


def test_drawn_plans_of_prior_and_codebook_stand_side_by_side() -> None:
    table = drawn_plans_table([Diagnosis.model_validate(diagnosis_metrics())])
    assert table is not None
    (line,) = table.lines
    assert line.cells == ("0.0844", "74.3", "-0.20", "0.0844", "74.3", "+0.47")
    assert line.note == "recollected, not D4RL's data; cpu scale; seed 0; 26 plans"
    assert table.groups == (("from the prior", 3), ("uniform", 3))
    assert drawn_plans_table([]) is None


def test_diagnoses_are_read_in_order_and_broken_ones_named(tmp_path: Path) -> None:
    for dataset, seed in (("pen-human-v0", 0), ("hopper-medium-v2", 10), ("hopper-medium-v2", 9)):
        write(tmp_path / f"diagnose/{dataset}-{seed}.json", diagnosis_metrics(dataset=dataset, seed=seed))
    order = [("hopper-medium-v2", 9), ("hopper-medium-v2", 10), ("pen-human-v0", 0)]
    assert [(each.dataset, each.seed) for each in load_diagnoses(tmp_path)] == order
    write(tmp_path / "diagnose/x-0.json", diagnosis_metrics(prior={}))
    with pytest.raises(ValueError, match=r"x-0\.json is no result \(prior.predicted_return_deviation: .*dvc repro --force"):
        load_diagnoses(tmp_path)


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
        write(data / f"raw/{dataset}/validation.json", validation() | facts | {"action_dim": 3 * (place + 1)})
        write(data / f"metrics/diagnose/{dataset}-0.json", diagnosis_metrics(dataset=dataset))
        for seed in (0, 1):
            own = facts | {"seed": seed, "latent_step": 3, "planner": BASE, "normalized_score": 40.0 + 20 * seed}
            write(data / f"metrics/evaluate/{dataset}-{seed}.json", metrics(**own))
            changed = {"no-search": ({"beam_width": 1}, 3)} | (ablations if place == 0 else {})
            for name, (planner, step) in changed.items():
                ablated = own | {"ablation": name, "planner": BASE | planner, "latent_step": step}
                write(data / f"metrics/ablations/{dataset}-{seed}-{name}.json", metrics(**ablated))


@pytest.mark.parametrize("datasets", [1, 4])
def test_page_and_markdown_hold_the_same_tables(tmp_path: Path, datasets: int) -> None:
    write_experiments(tmp_path, datasets)
    page = Page(write_report(tmp_path, tmp_path / "report"))
    assert page.open == [] and page.fetched == []
    assert page.words.index("Results") < page.words.index("Experiments beside the paper")
    text = (tmp_path / "report/results.md").read_text()
    titles = [title for title in re.findall(r"^### (.*)$", text, re.MULTILINE) if title != "What was evaluated"]
    assert {study.title for study in STUDIES} | {"Drawn plans"} < set(titles)
    for title in titles:
        assert title in page.words
    for word in ("None", "nan", "Undefined"):
        assert word not in text and word not in page.words
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert len(pictures) == (4 if datasets == 1 else 5)  # scores relative to baselines need several action dimensions
    assert all((tmp_path / "report" / picture).exists() for picture in pictures)
    for fact in ("c0ffeec0ff", "mujoco 4.0.0", "seeds 1000-1002", "cpu scale", "Hopper-v4", "abababababab"):
        assert fact in text


# ---------------------------------------------------------------- figures


def test_bars_stand_at_the_means_and_the_papers_beside_them() -> None:
    rows = rows_of("hopper-medium-v2", prior_sampling=({"search": "prior_sampling"}, [10.0, 20.0]))
    columns, comparisons = compare(STUDY["sampling"], rows)
    axes = ablation_figure([(STUDY["sampling"], columns, comparisons)]).axes
    heights = [bar.get_height() for bar in axes[0].patches]  # type: ignore[attr-defined]
    assert heights == [50, 15, 63.4, 64.3]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["beam search", "sample prior"]
    assert "hopper-medium-v2" in axes[0].get_title(loc="left")
    assert not axes[1].axison  # no second panel


def test_a_bar_that_the_paper_lacks_is_left_empty() -> None:
    columns, comparisons = compare(STUDY["horizon"], rows_of(horizon_6=({"horizon": 6}, [10.0, 20.0])))
    heights = [bar.get_height() for bar in ablation_figure([(STUDY["horizon"], columns, comparisons)]).axes[0].patches]  # type: ignore[attr-defined]
    assert heights[:2] == [15, 50]
    assert np.isnan(heights[2:]).all()


def test_latent_steps_are_drawn_as_means_over_datasets() -> None:
    one, two = rows_of("hopper-medium-v2"), rows_of("ant-medium-v2", base=({}, [10.0, 10.0]))
    score, value, error = latent_step_figure([(1, one), (3, [*one, *two])], [(1, two)]).axes
    conditional, unconditional = score.lines
    assert conditional.get_xydata().tolist() == [[1, 50], [3, 30]]
    assert unconditional.get_xydata().tolist() == [[1, 10]]
    assert value.lines[0].get_ydata().tolist() == [210, 210]
    assert error.lines[0].get_ydata().tolist() == [0.02, 0.02]


def test_relative_scores_are_over_the_papers_baselines() -> None:
    """Against the paper's printed scores; ours is 50 everywhere. Adroit's expert data and baselines near zero are left out."""
    names = ("hopper-medium-v2", "hopper-medium-replay-v2", "pen-human-v1", "pen-expert-v1", "relocate-human-v0", "my-point")
    dims = dict(zip(names, (3, 3, 24, 24, 30, 2), strict=True))
    rows = [row for name in names for row in rows_of(name)]
    validations = {dataset: validation() | {"action_dim": dim} for dataset, dim in dims.items()}
    (picture,) = (each for each in experiment_pictures(rows, validations) if each.name == "experiments-dimensions")
    tt, cql, iql = 100 / (61.1 + 91.5), 100 / (58.5 + 95.0), 100 / (66.3 + 94.7)
    assert f"TT 3: {tt:.2f}, 24: {50 / 36.4:.2f}; " in picture.alt
    assert f"CQL 3: {cql:.2f}, 24: {50 / 37.5:.2f}; IQL 3: {iql:.2f}, 24: {50 / 71.5:.2f}." in picture.alt
    one, two = relative_figure({"TT": [(3, 0.5, 0.7), (6, 0.9, 0.8)], "CQL": [(3, 1.5, 1.2)]}).axes
    assert [line.get_xydata().tolist() for line in one.lines[1:]] == [[[3, 0.7], [6, 0.8]], [[3, 0.5], [6, 0.9]]]
    assert two.lines[2].get_xydata().tolist() == [[3, 1.5]]


def test_latencies_stand_beside_the_papers() -> None:
    (row,) = rows_of()
    ours, tt, tap = dimension_latency_figure([(16, row)]).axes[0].lines
    assert ours.get_xydata().tolist() == [[16, 0.02]]
    assert tt.get_xydata().tolist() == [[14, 1.5], [71, 32]]
    assert tap.get_xydata().tolist() == [[dim, 0.05] for dim in (14, 23, 37, 71)]
    ours, papers = horizon_latency_figure({"hopper-medium-replay-v2": [(3, row), (12, row)]}).axes[0].lines
    assert ours.get_xydata().tolist() == [[3, 0.02], [12, 0.02]]
    assert papers.get_xydata().tolist() == [[33, 0.25]]
