"""The numbers that the model and the planner gave when tests/golden was last regenerated; how and when: regenerate.py there."""

import torch
from golden import regenerate


def test_every_number_is_still_the_same() -> None:
    inputs, expected = regenerate.load()
    found = regenerate.computed(inputs)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_searches_of_the_golden_plans_differ() -> None:
    """Else a plan could not tell which search made it."""
    _, expected = regenerate.load()
    scores = {name: expected[f"plan.{name}.score"] for name in regenerate.SEARCHES}
    assert not torch.equal(scores["beam"], scores["beam_distinct"])
    assert not torch.equal(scores["prior_sampling"], scores["uniform_sampling"])
    assert not torch.equal(scores["beam"], scores["beam_stop_at_end"])
