"""Planning within a budget of time: the best plan that is found until then.

First comes the plan of the fastest search, so that there always is one; then that of the widest search which fits in the time
left. How long each takes is measured before the first plan, and scaled by how slow the machine has been since. What is found
depends on time, so it is not reproducible.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch

from tap.planning.plan import Planned
from tap.settings import PlannerParams

WARM_UP, MEASURED = 3, 5  # calls of each search before the first plan; TorchScript optimises a trace at its first calls
REMEMBERED = 9  # plans, whose median says how slow the machine is: one that other work interrupted does not count

P = TypeVar("P", bound=Planned)


class Anytime(Generic[P]):
    """Searches from the fastest to the widest, of which each plan uses what its budget allows.

    A search plans for one raw observation (1, O) with a random generator.
    """

    def __init__(
        self,
        searches: Mapping[str, Callable[[np.ndarray, torch.Generator], P]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.searches, self.clock = searches, clock
        self.seconds: dict[str, float] = {}  # that each search takes
        self.slowdowns: deque[float] = deque([1.0], REMEMBERED)  # what to multiply them by, of the last plans

    def plan(self, observation: np.ndarray, generator: torch.Generator, seconds: float) -> dict[str, P]:
        """The plans of the searches that fit in `seconds`, by name, the fastest first: there are one or two.

        The first call measures before it plans: its budget begins after that.
        """
        if not self.seconds:
            self.measure(observation)
        start, (fastest, *others) = self.clock(), self.searches
        found = {fastest: self.searches[fastest](observation, generator)}
        taken = self.clock() - start
        slowdown = max(statistics.median(self.slowdowns), taken / self.seconds[fastest])
        if fitting := [name for name in others if taken + self.seconds[name] * slowdown <= seconds]:
            found[fitting[-1]] = self.searches[fitting[-1]](observation, generator)
        self.slowdowns.append((self.clock() - start) / sum(self.seconds[name] for name in found))
        return found

    def measure(self, observation: np.ndarray) -> None:
        """Measure how long each search takes."""
        for name, search in self.searches.items():
            seconds = []
            for _ in range(WARM_UP + MEASURED):
                start = self.clock()
                search(observation, torch.Generator().manual_seed(0))
                seconds.append(self.clock() - start)
            self.seconds[name] = statistics.median(seconds[WARM_UP:])


def searches_within(params: PlannerParams) -> dict[str, PlannerParams]:
    """The params of the searches that a budget chooses from, the fastest first, by what a plan says of its search.

    "prior" is the prior's plan: one that is drawn from it, or the mean of first codes under it. "beam-W" is a beam search of
    width W. The last are `params` themselves, or plan as they do.
    """
    if params.averages:
        prior = params.model_copy(update={"search": "prior_mean"})
        return {"prior": prior} | ({} if prior == params else {params.search: params})
    drawn = {"prior": params.model_copy(update={"search": "prior_sampling", "samples": 1})}
    if params.search != "beam":
        return drawn | {params.search: params}
    if params.beam_width * params.expansion_factor == 1:  # which draws one plan, too
        return drawn
    widths = [2**power for power in range(1, params.beam_width.bit_length()) if 2**power < params.beam_width]
    return drawn | {f"beam-{width}": params.model_copy(update={"beam_width": width}) for width in (*widths, params.beam_width)}
