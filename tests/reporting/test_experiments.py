import numpy as np
from rows_of import rows_of
from stage_files import validation

from tap.reporting.experiment_figures import (
    ablation_figure,
    dimension_latency_figure,
    horizon_latency_figure,
    latent_step_figure,
    relative_figure,
)
from tap.reporting.experiments import experiment_pictures
from tap.reporting.studies import STUDIES, compare

STUDY = {study.name: study for study in STUDIES}


def test_bars_are_the_means_ours_and_the_papers() -> None:
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


def test_latent_steps_are_plotted_as_means_over_datasets() -> None:
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
    validations = {dataset: validation(action_dim=dim) for dataset, dim in dims.items()}
    (picture,) = (each for each in experiment_pictures(rows, validations) if each.name == "experiments-dimensions")
    tt, cql, iql = 100 / (61.1 + 91.5), 100 / (58.5 + 95.0), 100 / (66.3 + 94.7)
    assert f"TT 3: {tt:.2f}, 24: {50 / 36.4:.2f}; " in picture.alt
    assert f"CQL 3: {cql:.2f}, 24: {50 / 37.5:.2f}; IQL 3: {iql:.2f}, 24: {50 / 71.5:.2f}." in picture.alt
    one, two = relative_figure({"TT": [(3, 0.5, 0.7), (6, 0.9, 0.8)], "CQL": [(3, 1.5, 1.2)]}).axes
    assert [line.get_xydata().tolist() for line in one.lines[1:]] == [[[3, 0.7], [6, 0.8]], [[3, 0.5], [6, 0.9]]]
    assert two.lines[2].get_xydata().tolist() == [[3, 1.5]]


def test_latencies_are_shown_with_the_papers() -> None:
    (row,) = rows_of()
    ours, tt, tap = dimension_latency_figure([(16, row)]).axes[0].lines
    assert ours.get_xydata().tolist() == [[16, 0.02]]
    assert tt.get_xydata().tolist() == [[14, 1.5], [71, 32]]
    assert tap.get_xydata().tolist() == [[dim, 0.05] for dim in (14, 23, 37, 71)]
    ours, papers = horizon_latency_figure({"hopper-medium-replay-v2": [(3, row), (12, row)]}).axes[0].lines
    assert ours.get_xydata().tolist() == [[3, 0.02], [12, 0.02]]
    assert papers.get_xydata().tolist() == [[33, 0.25]]
