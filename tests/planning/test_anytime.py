"""Planning within a budget, by a clock that searches advance: nothing is timed."""

import math

import numpy as np
import pytest
import torch

from tap.methods.policy import Action
from tap.planning import reference
from tap.planning.anytime import Anytime, searches_within
from tap.planning.plan import Plan
from tap.planning.policy import Policy
from tap.settings import Params

COSTS = {"prior": 1.0, "beam-2": 2.5, "beam-4": 4.0, "beam-8": 9.0}  # seconds
STATE = np.zeros((1, 1))


class Machine:
    """A clock, and searches that take their COSTS by it, times how slow the machine is."""

    def __init__(self) -> None:
        self.now, self.slow = 0.0, 1.0

    def clock(self) -> float:
        return self.now

    def search(self, name: str) -> Action:
        self.now += self.slow * COSTS[name]
        return Action(np.zeros((1, 1, 1)))

    def anytime(self) -> Anytime[Action]:
        return Anytime({name: lambda *_, name=name: self.search(name) for name in COSTS}, self.clock)


def seconds_and_searches(machine: Machine, anytime: Anytime[Action], budget: float) -> tuple[float, list[str]]:
    start = machine.now
    found = anytime.plan(STATE, torch.Generator(), budget)
    return machine.now - start, list(found)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0, 3.4, 3.5, 4.9, 5.0, 9.99, 10.0, 100.0, math.inf])
def test_the_widest_search_that_fits_is_made_and_the_budget_kept(budget: float) -> None:
    machine = Machine()
    anytime = machine.anytime()
    anytime.measure(STATE)
    taken, searches = seconds_and_searches(machine, anytime, budget)
    fitting = [name for name, cost in COSTS.items() if name != "prior" and COSTS["prior"] + cost <= budget]
    assert searches == ["prior", *fitting[-1:]]
    assert taken <= max(budget, COSTS["prior"])


def test_the_first_plan_measures_before_its_budget_begins() -> None:
    machine = Machine()
    _, searches = seconds_and_searches(machine, machine.anytime(), 5.0)
    assert searches == ["prior", "beam-4"]


def test_a_machine_that_becomes_slow_makes_no_plan_late_and_searches_widen_when_it_is_fast_again() -> None:
    machine = Machine()
    anytime = machine.anytime()
    anytime.measure(STATE)
    assert seconds_and_searches(machine, anytime, 11.0) == (10.0, ["prior", "beam-8"])
    for machine.slow, widest in ((2.0, "beam-4"), (3.0, "beam-2"), (12.0, "prior")):
        for _ in range(5):
            taken, searches = seconds_and_searches(machine, anytime, 11.0)
            assert searches[-1] == widest and taken <= max(11.0, machine.slow)
    machine.slow = 1.0
    assert [seconds_and_searches(machine, anytime, 11.0)[1][-1] for _ in range(10)][-1] == "beam-8"
    machine.slow = 50.0  # other work interrupts one plan
    assert seconds_and_searches(machine, anytime, 11.0)[1] == ["prior"]
    machine.slow = 1.0
    assert seconds_and_searches(machine, anytime, 11.0) == (10.0, ["prior", "beam-8"])


def test_the_searches_of_each_planner_from_the_priors_plan_to_its_own(tiny_params: Params) -> None:
    params = tiny_params.evaluate.planner

    def names(**changes: object) -> list[str]:
        searches = searches_within(params.model_copy(update=changes))
        assert len(searches) == 1 or list(searches.values())[-1] == params.model_copy(update=changes)
        return list(searches)

    assert names(search="beam", beam_width=16) == ["prior", "beam-2", "beam-4", "beam-8", "beam-16"]
    assert names(search="beam", beam_width=12) == ["prior", "beam-2", "beam-4", "beam-8", "beam-12"]
    assert names(search="beam", beam_width=1, expansion_factor=1) == ["prior"]
    assert names(search="beam", beam_width=1, expansion_factor=2) == ["prior", "beam-1"]
    assert names(search="prior_sampling") == ["prior", "prior_sampling"]
    assert names(search="uniform_sampling") == ["prior", "uniform_sampling"]
    assert names(search="critic_weighted") == ["prior", "critic_weighted"]
    assert names(search="prior_mean") == ["prior"]


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_without_time_the_plan_is_the_priors_and_with_all_time_the_best_of_it_and_the_search(tiny_policy: Policy) -> None:
    """Both by the plain planner, from the same random numbers."""
    observations = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    drawn, whole = (
        tiny_policy._planner(tiny_policy.params.model_copy(update=changes))
        for changes in ({"beam_width": 1, "expansion_factor": 1}, {})
    )

    def same(found: Plan, row: int, expected: Plan) -> None:
        np.testing.assert_array_equal(found.codes[row], expected.codes[0])
        np.testing.assert_allclose(found.actions[row], expected.actions[0], rtol=1e-4, atol=1e-5)

    at_once = tiny_policy.plan_within(observations, generators(0, 1, 2), 0.0)
    at_length = tiny_policy.plan_within(observations, generators(0, 1, 2), math.inf)
    assert at_once.searched.tolist() == ["prior"] * 3
    assert at_length.searched.tolist() == [f"beam-{tiny_policy.params.beam_width}"] * 3
    for row in range(3):
        state, (generator,) = torch.from_numpy(observations[row : row + 1]), generators(row)
        prior, found = (reference.plan(planner, state, [generator]) for planner in (drawn, whole))
        same(at_once, row, prior)
        same(at_length, row, max(prior, found, key=lambda plan: float(plan.score[0])))


def test_a_budget_in_params_is_kept_and_without_one_nothing_changes(tiny_policy: Policy) -> None:
    observation = np.random.default_rng(1).normal(size=(1, 11)).astype(np.float32)
    assert type(tiny_policy.plan(observation, generators(0))) is Plan and tiny_policy.budget_ms == 0
    params = tiny_policy.params.model_copy(update={"budget_ms": 1e-6})
    assert "budget_ms" in params.model_dump() and "budget_ms" not in tiny_policy.params.model_dump()
    hurried = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device)
    plan = hurried.plan(observation, generators(0))
    assert plan.searched.tolist() == ["prior"]  # type: ignore[attr-defined]
