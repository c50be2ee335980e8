"""What in a dataset deserves a person's attention before training, in words, each with its remedy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tap.data.profile import DRIFT, GAP, JUMP, SATURATED, Clock, DimensionStatistics, Profile
from tap.reporting.page import counted, number

LISTED = 6  # dimensions or episodes whose numbers stand in a sentence


@dataclass(frozen=True)
class Finding:
    """A sentence about the data, and what to do about it."""

    what: str
    remedy: str


def findings(profile: Profile, has_rewards: bool) -> list[Finding]:
    """All findings, those that harm training most first; none about rewards that the dataset does not have."""
    found = [*_copies(profile), *_repeated_rows(profile), *_timestamps(profile.clock)]
    found += _rewards(profile) if has_rewards else []
    for kind, words in KINDS.items():
        for name, statistics in (("observation", profile.observations), ("action", profile.actions)):
            if dims := np.flatnonzero(getattr(statistics, kind)).tolist():
                noun = f"{name} dimension{'s' * (len(dims) > 1)}"
                found.append(
                    Finding(f"{kind.capitalize()} {noun} {numbers(dims)}: {words(statistics, dims)}", REMEDIES[kind][name])
                )
    return found


def numbers(values: Sequence[int]) -> str:
    """Ascending whole numbers, runs of them by their first and last: 0, 3 to 5, 9."""
    runs = np.split(values, np.flatnonzero(np.diff(values) > 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _listed(details: Sequence[str]) -> str:
    """The first details, as the end of a sentence."""
    more = len(details) - LISTED
    return "; ".join(details[:LISTED]) + (f"; and {more:,} more" if more > 0 else "") + "."


# ---------------------------------------------------------------- dimensions


def _jumps(statistics: DimensionStatistics, dims: Sequence[int]) -> str:
    details = [
        f"{dim} by {number(statistics.largest_step[dim])} after step {step} of episode {episode}, while 99 % of its steps are "
        f"at most {number(statistics.usual_step[dim])}"
        for dim, (episode, step) in zip(dims, statistics.largest_at.T[dims].tolist(), strict=True)
    ]
    return (
        f"in a step within an episode, the value changes more than {JUMP:g} times as far as usual. Largest: {_listed(details)}"
    )


def _drifts(statistics: DimensionStatistics, dims: Sequence[int]) -> str:
    low, high, std = statistics.part_mean.min(axis=0), statistics.part_mean.max(axis=0), statistics.std
    details = [f"{dim} from {number(low[dim])} to {number(high[dim])} (std {number(std[dim])})" for dim in dims]
    return f"the means of tenths of the file differ by more than {DRIFT:g} standard deviation. {_listed(details)}"


def _saturations(statistics: DimensionStatistics, dims: Sequence[int]) -> str:
    ends = ((statistics.min, statistics.at_min), (statistics.max, statistics.at_max))
    details = [
        f"{dim} at {number(value[dim])} in {share[dim]:.1%} of the rows"
        for dim in dims
        for value, share in ends
        if share[dim] >= SATURATED
    ]
    return f"at least {SATURATED:.0%} of the rows are at one end of the range. {_listed(details)}"


def _constants(statistics: DimensionStatistics, dims: Sequence[int]) -> str:
    low, high = statistics.min[dims].min(), statistics.min[dims].max()
    return f"at {number(low)}." if low == high else f"at values from {number(low)} to {number(high)}."


KINDS: dict[str, Callable[[DimensionStatistics, Sequence[int]], str]] = {
    "jumping": _jumps,
    "drifting": _drifts,
    "saturated": _saturations,
    "constant": _constants,
}
CHANGED = (
    "Nothing to do if the behaviour changed during the recording, as in a replay buffer: held-out episodes are drawn from all "
    "of the file."
)
REMEDIES = {
    "jumping": {
        "observation": "If another episode begins there, mark the end by a timeout in the file, or set fetch.max_jump. If it "
        "is an angle that wraps around, replace it by its sine and cosine, in the file and in the environment. If the value is "
        "faulty, cut the episode there: it widens the standard deviation that all values are divided by.",
        "action": "Nothing to do if such a command was executed. If the value is faulty, cut the episode there: policies "
        "imitate it.",
    },
    "drifting": {
        "observation": f"{CHANGED} If a sensor was moved or calibrated again, correct its values.",
        "action": f"{CHANGED} If the unit of the commands changed, convert them to one.",
    },
    "saturated": {
        "observation": "Nothing to do if the quantity rests there, or the simulator clips it. If a sensor's range is too "
        "small, widen it: states beyond it look the same to a policy.",
        "action": "Nothing to do if that is the actuator's limit. If the recorder clipped larger commands, record those that "
        "were executed.",
    },
    "constant": {
        "observation": "Nothing to do: training leaves their unit as it is. If one should vary, check how it is recorded.",
        "action": "Nothing to do if they move nothing: policies send this value. If one should vary, check how it is recorded.",
    },
}


# ---------------------------------------------------------------- episodes and rows


def _copies(profile: Profile) -> list[Finding]:
    if not profile.copies:
        return []
    pairs = _listed([f"{copy} equals {earlier}" for copy, earlier in profile.copies])
    what = f"{counted(len(profile.copies), 'duplicate episode')} of {len(profile.lengths):,}: {pairs}"
    remedy = (
        "Remove the copies. If a copy is held out and its original trained on, held-out losses are too low; and what is "
        "repeated counts more."
    )
    return [Finding(what, remedy)]


def _repeated_rows(profile: Profile) -> list[Finding]:
    if not profile.repeated_rows:
        return []
    rows = counted(profile.repeated_rows, "duplicate row")
    what = f"{rows}: observation, action and reward equal another row's. Duplicate episodes are not counted."
    remedy = (
        "Nothing to do if the system stood still. If the recorder wrote old values again, or a part of the file is in it "
        "twice, remove the rows."
    )
    return [Finding(what, remedy)]


def _timestamps(clock: Clock | None) -> list[Finding]:
    found = []
    if clock and clock.backwards:
        what = f"{counted(clock.backwards, 'timestamp')} not later than the row before, in the same episode."
        found.append(Finding(what, "Sort the rows of each episode by time, and remove those that were written twice."))
    if clock and clock.gaps:
        episode, step = clock.largest_at
        what = (
            f"{counted(clock.gaps, 'gap')} in the timestamps: more than {GAP:g} times the usual {number(clock.usual)} from row "
            f"to row. Largest: {number(clock.largest)} after step {step} of episode {episode}."
        )
        remedy = (
            "All steps count as equally long: fill in lost rows by interpolation, or end the episode at a long gap, by a "
            "timeout in the file. Nothing to do about single rows that came late."
        )
        found.append(Finding(what, remedy))
    return found


def _rewards(profile: Profile) -> list[Finding]:
    if not profile.rewards.constant[0]:
        return []
    if (value := profile.rewards.min[0]) == 0:
        remedy = "Add rewards that tell a good episode from a bad one: without them, policies can only imitate the data."
        return [Finding("All rewards are 0.", remedy)]
    remedy = (
        f"Nothing to do if {'longer' if value > 0 else 'shorter'} episodes are better. If not, add rewards that tell a good "
        "episode from a bad one: search for a high return has nothing else to go by."
    )
    return [Finding(f"All rewards are {number(value)}: returns differ by the lengths of episodes alone.", remedy)]
