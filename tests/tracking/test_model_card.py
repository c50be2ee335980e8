"""Model cards against facts written by hand."""

from typing import Any, get_args

import pytest
from stage_files import UNSCORED, cloned_json, evaluation_json, held_out_json, validation_json

from tap.results import Evaluation, HeldOutEvaluation, ValidationReport
from tap.settings import Source
from tap.tracking.model_card import model_card, with_promotion

BEHAVIOUR = evaluation_json()["behaviour"]
VALIDATION = validation_json() | {
    "origin": "hopper-medium-replay.hdf5",
    "transitions": 100909,
    "episodes": 321,
    "observation_dim": 11,
    "action_dim": 3,
    "return": {"mean": 612.34, "min": -1.25, "max": 3012.06},
    "warnings": ["the last episode has no end in the file"],
}
EVALUATION = evaluation_json(
    source="recollected",
    digest="d1ge57",
    versions={"torch": "2.13.0", "numpy": "2.4.6", "gymnasium": "1.4.0"},
    seed=7,
    episodes=4,
    protocol="4 episodes, seeds 1000-1003, re-planned every step, last checkpoint",
    scores=[10.0, 20.0, 30.0, 40.0],  # standard deviation 12.91, so a standard error of 6.45
    return_mean=801.26,
    behaviour=BEHAVIOUR | {"mean_normalized_score": 19.44},
    latency_ms={"median": 26.04, "p95": 31.51, "batch_median": 50.0},
    planner={"search": "beam", "beam_width": 16, "expansion_factor": 4, "samples": 256, "horizon": 12},
    recipe="rec1pe",
    git_commit="c0mm17",
    runs={"train_vqvae": "run-a", "train_prior": None, "evaluate": "run-c"},
)


CLONED = cloned_json(
    **{
        key: EVALUATION[key]
        for key in ("source", "digest", "versions", "seed", "episodes", "scores", "return_mean", "behaviour")
    }
)


def test_a_card_of_behaviour_cloning_claims_no_plans() -> None:
    text = model_card(
        "tap-hopper-medium-replay", Evaluation.model_validate(CLONED), ValidationReport.model_validate(VALIDATION),
        latency_budget_ms=200.0, git_dirty=False,
    )  # fmt: skip
    assert text.startswith("# Behaviour cloning policy for hopper-medium-replay, training seed 7\n")
    assert "imitates the data" in text and "far from them, its actions are meaningless" in text
    assert not any(word in text for word in ("Trajectory", "VQ-VAE", "predicted return", "plans", "None"))


def card(validation: dict[str, Any] = VALIDATION, git_dirty: bool = False, **changes: Any) -> str:
    return model_card(
        "tap-hopper-medium-replay",
        Evaluation.model_validate(EVALUATION | changes),
        ValidationReport.model_validate(validation),
        latency_budget_ms=200.0,
        git_dirty=git_dirty,
    )


def test_the_card_states_the_facts() -> None:
    text = " ".join(card().split())
    for fact in (
        "# TAP policy for hopper-medium-replay, training seed 7",
        "encodes 3 steps as one code",
        "beam search over codes (width 16, expansion 4, 12 steps)",
        "at cpu scale",
        "| 7 | 25.0 ± 6.5 | 801.3 | 4 |",
        "0 for a random policy and 100 for an expert",
        "the data's own episodes score 19.4 on average",
        "origin: hopper-medium-replay.hdf5, SHA-256 d1ge57",
        "100909 transitions in 321 episodes",
        "returns: -1.2 to 3012.1, mean 612.3",
        "validation warnings: the last episode has no end in the file",
        "simulator: Hopper-v4, gymnasium 1.4.0, mujoco 4.0.0; torch 2.13.0, numpy 2.4.6",
        "protocol: 4 episodes, seeds 1000-1003, re-planned every step, last checkpoint",
        "26.0 ms (median), 31.5 ms (95th percentile)",
        "the budget, served on a CPU, is 200 ms",
        "git commit c0mm17 - recipe rec1pe",
        "runs: train_vqvae run-a, train_prior untracked, evaluate run-c",
        "It was not tested on a real machine",
        "tap serve tap-hopper-medium-replay",
        'mlflow.pyfunc.load_model("models:/tap-hopper-medium-replay/VERSION")',
        'policy.predict(observations, params={"seed": 0})',
        "Observations are float64 (n, 11), actions float32 (n, 3)",
    ):
        assert fact in text


@pytest.mark.parametrize(("search", "weights"), [("prior_mean", "the prior"), ("critic_weighted", "the prior and the critic")])
def test_a_mean_over_codes_and_the_actor_are_named(search: str, weights: str) -> None:
    planner = {"search": search, "horizon": 12, "temperature": 1.0}
    text = card(planner=planner)
    assert f"a decision is the mean over the likeliest first codes, weighted by {weights}" in text and "actor" not in text
    assert "moved to the action of an ensemble of networks, the actor." in card(planner=planner | {"actor": True})


def test_a_paragraph_is_one_line() -> None:
    """MLflow shows a line's end inside a paragraph as a break."""
    prose = card().partition("```")[0]
    blocks = [block.split("\n") for block in prose.split("\n\n")]
    assert all(len(block) == 1 or all(line.startswith(("- ", "| ")) for line in block) for block in blocks)


@pytest.mark.parametrize(("source", "d4rls"), [("d4rl", True), ("file", False), ("recollected", False), ("bundled", False)])
def test_only_d4rls_own_data_is_called_d4rls(source: str, d4rls: bool) -> None:
    text = card(source=source)
    assert ("D4RL's original file" in text) == d4rls
    assert ("not D4RL's data: no score on it is a D4RL score" in text) == (source in ("recollected", "bundled"))


@pytest.mark.parametrize("source", get_args(Source))
def test_every_source_of_data_has_words(source: str) -> None:
    assert "- dataset: `" in card(source=source)


@pytest.mark.parametrize("has_rewards", [False, True])
def test_a_card_of_held_out_actions(has_rewards: bool) -> None:
    text = model_card(
        "tap-arms",
        HeldOutEvaluation.model_validate(
            held_out_json(**{key: EVALUATION[key] for key in ("versions", "planner")}, has_rewards=has_rewards)
        ),
        ValidationReport.model_validate(VALIDATION | {"has_rewards": has_rewards}),
        latency_budget_ms=200.0,
        git_dirty=False,
    )
    assert "| 0 | 0.200 ± 0.058 | 0.400 | 3 |" in text and "| training seed | action error |" in text
    assert "no simulator" in text and "It has not acted anywhere, in simulation or on a real machine." in text
    assert ("- returns: imitation, no rewards" in text) != has_rewards
    blocks = [block.split("\n") for block in text.partition("```")[0].split("\n\n")]
    assert all(len(block) == 1 or all(line.startswith(("- ", "| ")) for line in block) for block in blocks)


def test_a_card_without_rewards_has_no_score_of_the_data() -> None:
    nothing = dict.fromkeys(EVALUATION["behaviour"]) | {"episodes": 50}
    text = card(VALIDATION | {"has_rewards": False}, behaviour=nothing)
    assert text.count("imitation, no rewards") == 2 and "the data's own episodes score" not in text


def test_a_card_without_reference_scores_without_spread_and_of_changed_code() -> None:
    changes = {"score_metric": "return", "scores": [-3.04], "behaviour": UNSCORED["behaviour"] | {"mean_return": -7.06}}
    planner = {"search": "prior_sampling", "samples": 256, "horizon": 12}
    text = card(VALIDATION | {"warnings": []}, git_dirty=True, planner=planner, **changes)
    for fact in (
        "| 7 | -3.0 | 801.3 | 4 |",
        "score: undiscounted return;",
        "score -7.1 on average",
        "the best of 256 plans of 12 steps (prior sampling)",
        "c0mm17, with uncommitted changes",
        "validation warnings: none",
    ):
        assert fact in text


def test_the_last_promotion_ends_the_card() -> None:
    once = with_promotion(card(), "there was no champion", {"7": "25.0 ± 6.5"})
    twice = with_promotion(once, "is above", {"7": "25.0 ± 6.5", "8": "31.0 ± 2.0"})
    assert once.startswith(card()) and once.endswith("| 7 | 25.0 ± 6.5 |\n") and "there was no champion" in once
    assert twice.startswith(card()) and "there was no champion" not in twice and "| 8 | 31.0 ± 2.0 |" in twice


def test_a_long_card_fits_into_mlflows_description() -> None:
    warnings = ["a warning of quite some length, as long as the longest that a validation knows today" * 2] * 20
    text = card(VALIDATION | {"warnings": warnings}, git_dirty=True)
    seeds = {str(seed): "100.0 ± 10.0" for seed in range(20)}
    assert len(with_promotion(text, "because " * 40, seeds)) < 5000
