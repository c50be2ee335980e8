"""The numbers that models and planner gave when tests/golden was last regenerated; how and when: regenerate.py there."""

import itertools

import pytest
import torch
from golden import regenerate


@pytest.mark.parametrize("variant", regenerate.VARIANTS)
def test_every_number_is_still_the_same(variant: str) -> None:
    inputs, expected = regenerate.stored(variant)
    found = regenerate.computed(variant, inputs)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_golden_plans_tell_searches_and_variants_apart() -> None:
    _, base = regenerate.stored("base")
    scores = {name: base[f"plan.{name}.score"] for name in regenerate.SEARCHES}
    assert not torch.equal(scores["beam"], scores["beam_distinct"])
    assert not torch.equal(scores["prior_sampling"], scores["uniform_sampling"])
    assert not torch.equal(scores["beam"], scores["beam_stop_at_end"])
    variants = [regenerate.stored(variant)[1] for variant in regenerate.VARIANTS]
    assert all(len(variant["codes"].unique()) >= 3 for variant in variants)
    for one, other in itertools.combinations(variants, 2):
        assert not torch.equal(one["plan.prior_sampling.actions"], other["plan.prior_sampling.actions"])
