"""Offline checks in words: does it imitate, do its returns rank, does search pay, and what to change."""

from collections.abc import Sequence

from tap.reporting.rows import SOURCES
from tap.reporting.tables import NOTHING, Line, Table
from tap.results import Diagnosis, OfflineChecks

COARSE = 0.2  # share of the variance of actions that codes may lose
SMALL_GAIN = 0.02  # share of the std of returns
CERTAIN = 2  # standard errors
FAR_WORSE = 1.5  # times the error; by less, actions can still lead further in the simulator


def offline_checks_table(diagnoses: Sequence[Diagnosis]) -> Table | None:
    """What the offline checks measured, with a sentence on each question; None if nothing was checked."""
    checked = [(each, each.offline) for each in diagnoses if each.offline]
    lines = [
        Line(each.dataset, f"{_extent(each, offline)}. {' '.join(advice(offline))}", _cells(offline))
        for each, offline in checked
    ]
    caption = (
        "How the models do on recorded windows, drawn as in training; no simulator is used. Errors: squared errors of first "
        "actions, as shares of the variance of the recorded actions, which contain noise that nothing can predict. Worth of an "
        "advantage: how much more return followed in the data per unit that the critic promised (1: as promised). Gain: the "
        "return that the critic's weights promise over the prior's."
    )
    head = ("own code", "prior's mean", "one drawn code", "actor", "worth of an advantage", "promised gain")
    groups = (("error of the action", 4), ("critic", 2))
    return Table("Offline checks", caption, head, tuple(lines), groups) if lines else None


def advice(offline: OfflineChecks) -> list[str]:
    """A sentence for each of the three questions."""
    if offline.return_std == 0:
        return [_imitation(offline), "Returns: all are the same, so plans cannot be chosen by them; are the rewards recorded?"]
    return [_imitation(offline), *_ranking(offline), *_search(offline)]


def _imitation(offline: OfflineChecks) -> str:
    if offline.own_code_error > COARSE:
        return (
            f"Imitation: codes lose {offline.own_code_error:.0%} of the actions; train the VQ-VAE longer, or raise "
            "codebook.size or loss_weights.first_action."
        )
    if offline.mean_error >= 1:
        return "Imitation: the prior knows no more than the mean of all actions; train it longer, and look at its losses."
    explained = f"Imitation: the prior's mean explains {1 - offline.mean_error:.0%} of the actions' variance"
    if offline.actor_error is None:
        return f"{explained}; if behaviour cloning acts better, train the prior longer."
    if offline.actor_error > FAR_WORSE * offline.mean_error:
        return f"{explained}, the actor only {1 - offline.actor_error:.0%}; train it longer, or set planner.actor to false."
    return f"{explained}, the actor {1 - offline.actor_error:.0%}; if behaviour cloning acts better, train the actor longer."


def _ranking(offline: OfflineChecks) -> list[str]:
    worth, error = offline.advantage_slope, offline.advantage_slope_error
    if worth is None or error is None:
        return []
    if worth < CERTAIN * error:
        return ["Returns: the critic's advantages do not show in the data; get more episodes, or train_critic.members."]
    if worth < 0.5:
        return [f"Returns: advantages are worth {worth:.0%} of what they promise; raise planner.temperature."]
    return ["Returns: the critic's advantages show in the data."]


def _search(offline: OfflineChecks) -> list[str]:
    gain, std = offline.predicted_gain, offline.return_std
    if gain is None or std is None:
        if offline.drawn_code_error > FAR_WORSE * offline.mean_error:
            return ["Search: one drawn code errs far more than the mean; compare planner.search prior_mean."]
        return [] if std is None else ["Search: compare planner.search prior_mean and critic_weighted."]
    if gain < SMALL_GAIN * std:
        return ["Search: the critic's weights promise little here; planner.search prior_mean is simpler and should do as well."]
    return [
        f"Search: the critic's weights promise {gain / std:.0%} of the std of returns per decision; compare planner.search "
        "critic_weighted."
    ]


def _extent(diagnosis: Diagnosis, offline: OfflineChecks) -> str:
    source = SOURCES.get(diagnosis.source, diagnosis.source)
    of = "held-out episodes" if offline.held_out else "training episodes, none being held out"
    return f"{source}; {diagnosis.scale} scale; seed {diagnosis.seed}; {offline.windows} windows of {of}"


def _cells(offline: OfflineChecks) -> tuple[str, ...]:
    worth, error, gain = offline.advantage_slope, offline.advantage_slope_error, offline.predicted_gain
    errors = (offline.own_code_error, offline.mean_error, offline.drawn_code_error, offline.actor_error)
    return (
        *(NOTHING if each is None else f"{each:.2f}" for each in errors),
        NOTHING if worth is None or error is None else f"{worth:.2f} ± {error:.2f}",
        NOTHING if gain is None else f"{gain:.3g} of {offline.return_std:.3g}",
    )
