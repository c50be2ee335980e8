import math
from pathlib import Path

import numpy as np
import torch
from mlflow.pyfunc.model import PythonModelContext

from tap.methods.reflex import Reflex, decisions
from tap.planning.plan import Timed
from tap.planning.planner import MAX_BATCH_STATES
from tap.planning.policy import Policy
from tap.serving.policy import ServedPolicy
from tap.settings import Params

OBSERVATIONS = np.random.default_rng(0).normal(size=(2 * MAX_BATCH_STATES + 3, 11)).astype(np.float32)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def with_search(policy: Policy, search: str) -> Policy:
    params = policy.params.model_copy(update={"search": search})
    return Policy(policy.vqvae, policy.normalizer, policy.prior, params, policy.device)


def reflex_of(planner: Policy, params: Params) -> Reflex:
    torch.manual_seed(0)
    reflex = Reflex(params.train_reflex, planner.vqvae.layout, planner.normalizer).eval()
    reflex.planner = planner
    return reflex


def test_decisions_are_those_of_each_state_alone(tiny_policy: Policy) -> None:
    planner = with_search(tiny_policy, "prior_mean")
    alone = [planner.act(OBSERVATIONS[row : row + 1], generators(0))[0] for row in range(len(OBSERVATIONS))]
    np.testing.assert_allclose(decisions(planner, OBSERVATIONS, *generators(0)), alone, rtol=1e-4, atol=1e-5)


def test_a_distilled_reflex_acts_as_the_planner_does(tiny_policy: Policy, tiny_params: Params) -> None:
    planner = with_search(tiny_policy, "prior_mean")
    reflex, layout, expected = (
        reflex_of(planner, tiny_params),
        planner.vqvae.layout,
        decisions(planner, OBSERVATIONS, *generators(0)),
    )
    states = planner.normalizer.normalize(torch.from_numpy(OBSERVATIONS), layout.observation)
    actions = planner.normalizer.normalize(torch.from_numpy(expected), layout.action)
    optimizer = torch.optim.Adam(reflex.parameters(), lr=0.02)
    for _ in range(1000):
        optimizer.zero_grad()
        reflex.loss(states, actions)["loss"].backward()
        optimizer.step()
    found = reflex.act(OBSERVATIONS, [])
    assert np.mean((found - expected) ** 2) < 0.02 * expected.var(axis=0).mean()


def test_with_time_it_plans_and_without_it_acts_by_reflex(tiny_policy: Policy, tiny_params: Params, tmp_path: Path) -> None:
    reflex_of(tiny_policy, tiny_params).save(tmp_path)
    reflex = Reflex.load(tmp_path)
    assert isinstance(reflex, Timed)
    by_reflex, planned = reflex.act(OBSERVATIONS[:2], []), tiny_policy.act(OBSERVATIONS[:2], generators(0, 1))
    hurried = reflex.plan_within(OBSERVATIONS[:2], generators(0, 1), 0.0)
    assert hurried.searched.tolist() == ["reflex", "reflex"]
    np.testing.assert_allclose(hurried.actions[:, 0], by_reflex, rtol=1e-5)
    at_length = reflex.plan_within(OBSERVATIONS[:2], generators(0, 1), math.inf)
    assert at_length.searched.tolist() == [f"beam-{tiny_policy.params.beam_width}"] * 2
    np.testing.assert_allclose(at_length.actions[:, 0], planned, rtol=1e-4, atol=1e-5)
    assert np.abs(planned - by_reflex).max() > 0.01


def test_a_served_reflex_says_which_search_answered(tiny_policy: Policy, tiny_params: Params, tmp_path: Path) -> None:
    reflex = reflex_of(tiny_policy, tiny_params)
    reflex.save(tmp_path)
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tmp_path)}, model_config=None))
    np.testing.assert_allclose(model.predict(None, OBSERVATIONS[:3]), reflex.act(OBSERVATIONS[:3], []), rtol=1e-5)
    for budget_ms, searched in ((1e-6, "reflex"), (1e9, "beam-4")):
        records = model.predict(None, OBSERVATIONS[:3], {"details": True, "budget_ms": budget_ms})
        assert [record["searched"] for record in records] == [searched] * 3
    assert "searched" not in model.predict(None, OBSERVATIONS[:1], {"details": True})[0]
