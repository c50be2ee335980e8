"""The page of `tap validate --html`: a dataset as a person should see it before training. It needs no network."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tap.data.boundaries import Boundaries
from tap.data.profile import JUDGED_EPISODES, SAMPLED, DimensionStatistics, Profile
from tap.files import write_atomically
from tap.reporting.data_figures import dimension_figure, episodes_figure
from tap.reporting.findings import findings, numbers
from tap.reporting.page import template
from tap.reporting.pictures import Picture
from tap.reporting.rows import SOURCES
from tap.reporting.treatment import treatment
from tap.results import IMITATION, ValidationReport
from tap.settings import Params

KINDS = ("saturated", "jumping", "drifting", "discrete")
MARKS = {"Observations": KINDS, "Actions": KINDS, "Reward": KINDS[-1:]}  # rewards may jump, and drift as behaviour improves
NUMBERS = ("min", "mean", "max", "std", "at_min", "at_max", "usual_step", "largest_step")  # of a dimension, in the table


def write_data_page(path: Path, validation: ValidationReport, profile: Profile, boundaries: Boundaries, params: Params) -> None:
    """Write the page to `path`. Equal inputs give equal bytes."""
    groups = {"Observations": profile.observations, "Actions": profile.actions}
    groups |= {"Reward": profile.rewards} if validation.has_rewards else {}
    page = template("data_page.html").render(
        validation=validation,
        profile=profile,
        findings=findings(profile, validation.has_rewards),
        ends=_ends(profile, boundaries),
        pictures=_episode_pictures(profile, validation.has_rewards),
        imitation=IMITATION,
        groups={name: _lines(statistics, MARKS[name]) for name, statistics in groups.items()},
        constant={name: numbers(np.flatnonzero(statistics.constant).tolist()) for name, statistics in groups.items()},
        treatment=treatment(profile, validation, params),
        sources=SOURCES,
        sampled=min(SAMPLED, validation.transitions),
        judged_episodes=JUDGED_EPISODES,
    )
    write_atomically(path, page)


def _ends(profile: Profile, boundaries: Boundaries) -> dict[str, str]:
    """How many episodes end how."""
    counts, terminated = boundaries.describe(), int(profile.terminated.sum())
    limit = counts["terminals"] - terminated
    at_limit = f", of which {limit:,} have a terminal at the time limit" if limit else ""
    unknown = {"jumps": counts["discontinuities"], "the end of the file": counts["end_of_file"]}
    found = ", ".join(f"{count:,} at {name}" for name, count in unknown.items() if count)
    return {
        "terminated": f"{terminated:,}",
        "truncated": f"{counts['timeouts'] + limit:,}{at_limit}",
        "unknown": f"{sum(unknown.values()):,}" + (f" ({found}), treated as truncated" if found else ""),
    }


def _episode_pictures(profile: Profile, has_rewards: bool) -> list[Picture]:
    shown = {"Returns": ("episode return (sum of rewards, undiscounted)", profile.returns)} if has_rewards else {}
    shown["Lengths"] = ("episode length (steps)", profile.lengths)
    pictures = []
    for title, (label, values) in shown.items():
        extent = f"from {values.min():,.6g} to {values.max():,.6g}, mean {values.mean():,.6g}"
        alt = f"{label.capitalize()} of {len(values):,} episodes, {extent}: histogram, and in the file's order."
        pictures.append(Picture(title.lower(), title, "", alt, episodes_figure(values, label)))
    return pictures


def _lines(statistics: DimensionStatistics, kinds: Sequence[str]) -> list[dict[str, object]]:
    """A line of the table for each dimension that varies."""
    marks = {kind: getattr(statistics, kind) for kind in kinds}
    return [
        {
            "dim": dim,
            "figure": dimension_figure(statistics, dim),
            "marks": [kind for kind in kinds if marks[kind][dim]],
            **{name: float(getattr(statistics, name)[dim]) for name in NUMBERS},
        }
        for dim in np.flatnonzero(~statistics.constant).tolist()
    ]
