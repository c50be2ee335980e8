"""Figures of one dataset with their titles, captions and descriptions in words."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tap.files import read_json
from tap.reporting.figures import (
    SEARCHES,
    candidates_figure,
    codebook_figure,
    distribution_figure,
    loss_figure,
    plan_figure,
    read_curves,
    returns_figure,
    score_figure,
)
from tap.results import Evaluation, ValidationReport, seed_files


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it; `alt` describes it in words."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    wide: bool = False  # as wide as the page


def dataset_pictures(
    dataset: str, evaluations: Sequence[Evaluation], validation: ValidationReport | None, plots: Path
) -> list[Picture]:
    """The figures of one dataset, as many as there are files for in the folder `plots`."""
    found = []
    if evaluations:
        found.append(_score_picture(dataset, evaluations, validation))
    for seed, path in _first(seed_files(plots / "evaluate", dataset, "json")):
        if examples := read_json(path)["examples"]:  # there are none without a simulator
            found.append(_plan_picture(dataset, seed, examples))
    for seed, path in _first(seed_files(plots / "diagnose", dataset, "json")):
        diagnosis = read_json(path)
        if diagnosis["plans"]:
            found.append(_distribution_picture(dataset, seed, diagnosis["distributions"]))
            found.append(_candidates_picture(dataset, seed, diagnosis["plans"]))
    return found + _training_pictures(dataset, plots, validation is None or validation.has_rewards)


def _first(files: dict[int, Path]) -> list[tuple[int, Path]]:
    return list(files.items())[:1]


def returns_picture(dataset: str, validation: ValidationReport) -> Picture:
    """The dataset's returns."""
    alt = _histogram_in_words(validation).capitalize()
    return Picture(f"{dataset}-returns", "Episode returns", "", alt, returns_figure(validation))


def _histogram_in_words(validation: ValidationReport) -> str:
    returns = validation.episode_return
    return (
        f"histogram of the returns of the dataset's {validation.episodes} episodes, "
        f"from {returns.min:,.0f} to {returns.max:,.0f}, mean {returns.mean:,.0f}."
    )


def _score_picture(dataset: str, evaluations: Sequence[Evaluation], validation: ValidationReport | None) -> Picture:
    validation = validation if validation and validation.has_rewards else None
    means = ", ".join(f"{statistics.fmean(each.returns):,.0f} for seed {each.seed}" for each in evaluations)
    caption = "Dots are TAP's episodes, bars the means of seeds."
    alt = f"Returns of {sum(len(each.returns) for each in evaluations)} evaluated episodes; mean {means}."
    if validation:
        caption += " Below: the data it was trained on, with TAP's overall mean in blue."
        alt += f" Below: {_histogram_in_words(validation)}"
    return Picture(f"{dataset}-scores", "Score against the data", caption, alt, score_figure(evaluations, validation))


def _plan_picture(dataset: str, seed: int, examples: Sequence[dict[str, Any]]) -> Picture:
    caption = (
        f"Seed {seed}. The simulator starts at the plan's state and executes the plan's actions without re-planning. "
        "Shown: the observations that moved most, in the simulator's units."
    )
    alt = f"Planned and simulated observations and rewards: {'; '.join(example['title'] for example in examples)}."
    return Picture(f"{dataset}-plan", "A plan against the simulator", caption, alt, plan_figure(examples))


def _distribution_picture(dataset: str, seed: int, distributions: dict[str, Any]) -> Picture:
    caption = (
        f"Seed {seed}. Plans sampled from the episodes' first states: predicted return against the mean squared error of the "
        "plan's states, measured in the simulator executing the plan's actions. Bluer: more plans."
    )
    medians = ", ".join(
        f"{statistics.median(plans['state_prediction_errors']):.2g} {name}" for name, plans in distributions.items()
    )
    alt = f"Predicted return against state error of sampled plans; median errors: {medians}."
    title = "Sampled plans: predicted returns and errors"
    return Picture(f"{dataset}-distribution", title, caption, alt, distribution_figure(distributions))


def _candidates_picture(dataset: str, seed: int, plans: Sequence[dict[str, Any]]) -> Picture:
    caption = f"Seed {seed}. Lines are predicted states, bluer for plans of higher score; dots are steps."
    if any(each["frames"] for each in plans):
        caption += " Below: the simulator at the beginning, middle and end of the chosen plan."
    searches = " and ".join(SEARCHES[search].lower() for search in plans[0]["searches"])
    shown = "; ".join(f"{each['title']} in observations {' and '.join(map(str, each['dimensions']))}" for each in plans)
    alt = f"All candidate plans of {searches}, with the chosen one and its simulation, from {shown}."
    return Picture(f"{dataset}-candidates", "The plans a search chooses from", caption, alt, candidates_figure(plans))


def _training_pictures(dataset: str, plots: Path, has_rewards: bool) -> list[Picture]:
    """Losses and codebook; without rewards not the critic's, which has nothing to learn."""
    vqvae = [read_curves(path) for path in seed_files(plots / "train_vqvae", dataset, "csv").values()]
    prior = [read_curves(path) for path in seed_files(plots / "train_prior", dataset, "csv").values()]
    critic = [read_curves(path) for path in seed_files(plots / "train_critic", dataset, "csv").values() if has_rewards]
    actor = [read_curves(path) for path in seed_files(plots / "train_actor", dataset, "csv").values()]
    every, found = [*vqvae, *prior, *critic, *actor], []
    if every:
        caption = "One pair of lines per seed. The held-out loss is of all held-out episodes alike."
        if has_rewards:
            caption += (
                " Where training draws episodes with high returns more often (effective_share below 1), it is higher even "
                "without overfitting; look for a rise."
            )
        if not any("held_out_loss" in curves for curves in every):
            caption = "One line per seed, of the training loss: no episode is held out, so overfitting would not show."
        last = ", ".join(f"{curves['loss'][-1]:.3g}" for curves in every)
        alt = f"Losses of all models against updates; last training losses by model and seed: {last}."
        found.append(Picture(f"{dataset}-losses", "Losses", caption, alt, loss_figure(vqvae, prior, critic, actor)))
    if vqvae:
        caption = "One line per seed. A codebook with few codes in use has collapsed: its plans hardly differ."
        last = ", ".join(f"{curves['codebook_usage'][-1]:.0%}" for curves in vqvae)
        alt = f"Share of codes in use and codebook perplexity against updates; last shares by seed: {last}."
        found.append(Picture(f"{dataset}-codebook", "Codebook", caption, alt, codebook_figure(vqvae)))
    return found
