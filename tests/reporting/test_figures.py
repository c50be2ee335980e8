from pathlib import Path

import numpy as np
import pytest
from stage_files import VQVAE_CSV, diagnosis_plots, evaluation, examples, validation, write

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
from tap.reporting.pictures import dataset_pictures


def test_curves_may_have_gaps(tmp_path: Path) -> None:
    write(tmp_path / "curve.csv", VQVAE_CSV)
    curves = read_curves(tmp_path / "curve.csv")
    np.testing.assert_array_equal(curves["held_out_loss"], [np.nan, 1.5, np.nan])
    training, held_out = loss_figure([curves], [], [], []).axes[0].lines
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
    results = [evaluation(seed=3), evaluation(seed=5, returns=[1.0, 2.0, 3.0])]
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


def test_candidate_plans_are_ranked_over_both_searches() -> None:
    sampling, beam, *frames, later, _ = candidates_figure(diagnosis_plots()["plans"]).axes
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
    uniform, prior = distribution_figure(diagnosis_plots()["distributions"]).axes
    assert "median error 0.25" in uniform.get_title(loc="left") and "median error 0.12" in prior.get_title(loc="left")
    assert uniform.get_xlim() == prior.get_xlim() and uniform.get_ylim() == prior.get_ylim()
    assert sum(prior.collections[0].get_array()) == 3


def test_plans_that_the_simulator_follows_exactly_and_equal_returns_are_plotted() -> None:
    same = {"predicted_returns": [2.0, 2.0], "state_prediction_errors": [0.0, 0.1]}
    axes = distribution_figure({"prior": same}).axes[0]
    assert sum(axes.collections[0].get_array()) == 2
    low, high = axes.get_xlim()
    assert low < 2 < high and axes.get_ylim()[0] < 1e-10


def test_axes_have_labels() -> None:
    curves = {name: np.arange(1.0, 4) for name in VQVAE_CSV.split("\n")[0].split(",")}
    for figure in (
        score_figure([evaluation()], validation()),
        returns_figure(validation()),
        loss_figure([curves], [curves], [curves], [curves]),
    ):
        assert all(axes.get_title(loc="left") for axes in figure.axes)
        assert figure.axes[-1].get_xlabel()


def test_a_dataset_is_not_taken_for_one_whose_id_begins_alike(tmp_path: Path) -> None:
    for key in ("hopper-medium-0", "hopper-medium-2", "hopper-medium-10", "hopper-medium-replay-0"):
        write(tmp_path / f"train_vqvae/{key}.csv", VQVAE_CSV)
    codebook = dataset_pictures("hopper-medium", [], None, tmp_path)[-1]
    assert codebook.name == "hopper-medium-codebook"
    assert len(codebook.figure.axes[0].lines) == 3


def test_the_losses_say_where_no_episode_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "train_prior/hopper-medium-0.csv", "step,loss\n1,2\n2,1\n")
    (losses,) = dataset_pictures("hopper-medium", [], None, tmp_path)
    assert losses.caption == "One line per seed, of the training loss: no episode is held out, so overfitting would not show."
    write(tmp_path / "train_prior/hopper-medium-1.csv", "step,loss,held_out_loss\n1,2,3\n2,1,2\n")
    (losses,) = dataset_pictures("hopper-medium", [], None, tmp_path)
    assert losses.caption.startswith("One pair of lines per seed. The held-out loss")
