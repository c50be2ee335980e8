"""What training will do with a dataset, by its params, in words."""

import numpy as np

from tap.data.episodes import Episodes
from tap.data.profile import Profile
from tap.reporting.page import counted
from tap.results import ValidationReport
from tap.settings import Params

NO_REWARDS = "None: the data is imitated, plans are chosen by their likelihood alone, and no returns are reported."


def treatment(profile: Profile, validation: ValidationReport, params: Params) -> dict[str, str]:
    """A sentence or two about each quantity, by its name."""
    return {
        "observations": _observations(profile, params),
        "actions": _actions(validation, params),
        "rewards": _rewards(profile, params) if validation.has_rewards else NO_REWARDS,
        **({"ends of episodes": _ends(profile, params)} if validation.has_rewards else {}),
        "windows": _windows(profile, params),
        "held-out episodes": _held_out(profile, params),
        "sampling": _sampling(validation, params),
    }


def _observations(profile: Profile, params: Params) -> str:
    if not params.train_vqvae.windows.normalize:
        return "Kept in their units: train_vqvae.windows.normalize is off."
    constant = int(profile.observations.constant.sum())
    return (
        "Normalised: the mean over the training episodes is subtracted, and the rest divided by their standard deviation. "
        f"{counted(constant, 'constant dimension') + ' only shifted. ' if constant else ''}Nothing is clipped."
    )


def _actions(validation: ValidationReport, params: Params) -> str:
    bounds, out = validation.action_bounds, validation.actions_out_of_range
    then = "Then normalised like observations." if params.train_vqvae.windows.normalize else "Not normalised."
    if bounds == "none":
        return f"Kept as recorded: they have no bounds. {then}"
    if not out:
        return f"All lie within {bounds}. {then}"
    if params.fetch.clip_actions:
        return f"Clipped to {bounds}, which changes {counted(out, 'row')}. {then}"
    return f"Kept as recorded, {counted(out, 'row')} outside {bounds} (fetch.clip_actions is off). {then}"


def _rewards(profile: Profile, params: Params) -> str:
    windows, ended = params.train_vqvae.windows, int(profile.terminated.sum())
    words = f"Summed to returns-to-go, with discount {windows.discount:g}."
    if windows.termination_penalty is None or not ended:
        return words
    penalty = f"{windows.termination_penalty:g} (train_vqvae.windows.termination_penalty)"
    return f"{words} The last reward of {counted(ended, 'terminated episode')} is replaced by {penalty}."


def _ends(profile: Profile, params: Params) -> str:
    cut = int((~profile.terminated).sum())
    if not cut:
        return "All are terminated: no reward follows their end."
    if params.train_vqvae.windows.bootstrap_truncated:
        return (
            f"Returns-to-go of {counted(cut, 'episode')} not terminated go on beyond the end, at the episode's mean reward "
            "(train_vqvae.windows.bootstrap_truncated)."
        )
    return f"{counted(cut, 'episode')} not terminated, but no reward follows their end either (bootstrap_truncated is off)."


def _windows(profile: Profile, params: Params) -> str:
    length = params.train_vqvae.windows.length
    short = int((profile.lengths < length).sum())
    padded = f"; {counted(short, 'episode')} shorter than that, and padded" if short else ""
    return f"One of {counted(length, 'step')} begins at each row: {int(profile.lengths.sum()):,} in all{padded}."


def _held_out(profile: Profile, params: Params) -> str:
    episodes, share = len(profile.lengths), params.train_vqvae.fit.held_out
    nothing = np.zeros((0, 0), np.float32)
    whole = Episodes(nothing, nothing, nothing, nothing, np.arange(episodes + 1))  # a split depends on their number alone
    held_out = len(whole.split(share, np.random.default_rng(0))[1].indices)
    if not held_out:
        why = "train_vqvae.fit.held_out is 0" if share == 0 else "there is only one episode"
        return f"None, because {why}: overfitting will not show."
    return (
        f"{held_out:,} of {episodes:,}, drawn by each seed, are not trained on, but measure the loss "
        f"(train_vqvae.fit.held_out is {share:g})."
    )


def _sampling(validation: ValidationReport, params: Params) -> str:
    share = params.train_vqvae.fit.effective_share
    if share == 1 or not validation.has_rewards:
        return "All windows are drawn alike."
    return (
        "Windows of episodes with high returns are drawn more often: their effective number is "
        f"{share:g} of all (train_vqvae.fit.effective_share)."
    )
