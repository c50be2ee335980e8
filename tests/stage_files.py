"""What the stages write, made up: for tests of what reads it."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave

from tap.results import Evaluation, ValidationReport


def evaluation_json(**changes: Any) -> dict[str, Any]:
    """What the stage `evaluate` writes, for 3 episodes of seed 0 unless changed."""
    values: dict[str, Any] = {
        "dataset": "hopper-medium-replay",
        "source": "bundled",
        "digest": "ab" * 32,
        "scale": "cpu",
        "environment": "Hopper-v4",
        "simulator": "gymnasium 1.4.0, mujoco 4.0.0",
        "versions": {"gymnasium": "1.4.0", "mujoco": "4.0.0", "torch": "2.13.0"},
        "seed": 0,
        "environment_seed": 1000,
        "episodes": 3,
        "protocol": "3 episodes, seeds 1000-1002, re-planned every step, last checkpoint",
        "normalized_score": 40.0,
        "normalized_score_standard_error": 1.5,
        "return_mean": 1200.0,
        "returns": [1000.0, 1100.0, 1500.0],
        "score_metric": "normalized_score",
        "scores": [30.0, 40.0, 50.0],
        "lengths": [300, 310, 400],
        "terminated": [True, True, False],
        "search_value_mean": 210.0,
        "log_probability_mean": -4.0,
        "state_prediction_error": 0.02,
        "latency_ms": {"median": 20.0, "p95": 30.0, "batch_median": 50.0},
        "behaviour": {
            "episodes": 50,
            "mean_return": 700.0,
            "mean_normalized_score": 22.1,
            "best_tenth_normalized_score": 51.5,
            "last_tenth_normalized_score": 44.4,
        },
        "planner": {"search": "beam", "horizon": 15, "beam_width": 16, "partial_threshold": False},
        "latent_step": 3,
        "window_length": 15,
        "recipe": "0123456789abcdef",
        "runs": {"train_vqvae": "1" * 32, "train_prior": "2" * 32, "evaluate": "3" * 32},
        "git_commit": "c0ffee" * 6 + "c0ff",
        "method": "tap",
    }
    return values | changes


def cloned_json(**changes: Any) -> dict[str, Any]:
    """What the stage `methods` writes for behaviour cloning, for 3 episodes of seed 0 unless changed."""
    of_plans = (
        "search_value_mean",
        "log_probability_mean",
        "state_prediction_error",
        "planner",
        "latent_step",
        "window_length",
    )
    values = {key: value for key, value in evaluation_json().items() if key not in of_plans}
    values |= {"protocol": "3 episodes, seeds 1000-1002, last checkpoint", "recipe": "fedcba9876543210", "method": "bc"}
    return values | {"normalized_score": 25.5, "runs": {"train_bc": "4" * 32, "methods": "5" * 32}} | changes


# What `evaluate` writes for a dataset without reference scores.
UNSCORED: dict[str, Any] = {
    "normalized_score": None,
    "normalized_score_standard_error": None,
    "score_metric": "return",
    "scores": [1000.0, 1100.0, 1500.0],
    "behaviour": {
        "episodes": 50,
        "mean_return": 700.0,
        "mean_normalized_score": None,
        "best_tenth_normalized_score": None,
        "last_tenth_normalized_score": None,
    },
}


def evaluation(**changes: Any) -> Evaluation:
    return Evaluation.model_validate(evaluation_json(**changes))


def held_out_json(**changes: Any) -> dict[str, Any]:
    """What the stage `evaluate` writes for a dataset without rewards and environment: 3 episodes, plans of 2 steps."""
    same = ("digest", "scale", "versions", "seed", "latency_ms", "planner", "latent_step", "window_length", "recipe", "runs")
    values = {key: evaluation_json()[key] for key in (*same, "git_commit", "method")}
    values |= {
        "dataset": "arms",
        "source": "lerobot",
        "has_rewards": False,
        "held_out": True,
        "episodes": 3,
        "decisions": 60,
        "protocol": "60 decisions in 3 held-out episodes, last checkpoint",
        "action_error": 0.2,
        "hold_error": 0.4,
        "error_ahead": [0.2, 0.3],
        "hold_error_ahead": [0.4, 0.6],
        "std": [2.0, 0.5],
        "rmse": [[1.0, 0.1], [1.2, 0.2]],
        "hold_rmse": [[1.5, 0.3], [1.8, 0.4]],
        "score_metric": "action_error",
        "scores": [0.1, 0.2, 0.3],
    }
    return values | changes


def validation_json() -> dict[str, Any]:
    """What `fetch` writes."""
    return {
        "dataset": "hopper-medium-replay",
        "suite": "locomotion",
        "source": "bundled",
        "origin": "data/some.hdf5",
        "digest": "ab" * 32,
        "bytes": 2_000_000,
        "transitions": 12_345,
        "episodes": 50,
        "observation_dim": 4,
        "action_dim": 2,
        "length": {"min": 5, "median": 200.0, "max": 1000},
        "return": {"mean": 700.0, "min": 10.0, "max": 2000.0},
        "normalized_score_mean": 22.1,
        "boundaries": {
            "terminals": 48,
            "timeouts": 1,
            "discontinuities": 0,
            "end_of_file": 1,
            "ignored_timeouts": 0,
            "dropped_goal_rows": 0,
            "how": "ends at 48 terminals",
        },
        "truncated_episodes": 2,
        "unfinished_last_episode": True,
        "constant_observation_dims": [3],
        "constant_action_dims": [],
        "actions_out_of_range": 0,
        "action_max_abs": 0.99,
        "non_finite": {"observations": 0},
        "return_histogram": {"counts": [30, 15, 5], "edges": [10.0, 600.0, 1300.0, 2000.0]},
        "warnings": ["the last episode has no end in the file"],
    }


def validation(**changes: Any) -> ValidationReport:
    return ValidationReport.model_validate(validation_json() | changes)


def diagnosis_json(**changes: Any) -> dict[str, Any]:
    """What the stage `diagnose` measures."""
    plans = {
        "predicted_return_median": 52.3,
        "predicted_return_deviation": 74.27,
        "state_prediction_error_median": 0.08443,
        "distinct_plans": 1.0,
        "rank_correlation": -0.2,
    }
    facts = {key: evaluation_json()[key] for key in ("digest", "environment", "simulator", "versions", "git_commit")}
    facts |= {"dataset": "hopper-medium-v2", "source": "recollected", "scale": "cpu", "seed": 0, "protocol": "26 plans"}
    return facts | {"prior": plans, "uniform": plans | {"rank_correlation": 0.469}} | changes


def examples() -> list[dict[str, Any]]:
    """Two plans of 6 steps; dimensions 1, 2 and 4 of 5 move most; the second plan outlives its episode."""
    steps = np.arange(6.0)[:, None]
    planned = steps * [0.0, 2.0, -3.0, 0.1, 1.0]
    plans = {"observations": planned.tolist(), "actions": [[0.0]] * 6, "rewards": [1.0] * 6}
    return [
        {"title": title, "planned": plans, "simulated": {"observations": (planned[:n] * 1.1).tolist(), "rewards": [0.9] * n}}
        for title, n in (("first state of episode 0", 6), ("step 7 of episode 0", 4))
    ]


def diagnosis_plots() -> dict[str, Any]:
    """Two plans each of a sampling and a beam, from two states: one with pictures of the simulator, one without."""
    pixels = io.BytesIO()
    imsave(pixels, np.zeros((2, 6, 3), np.uint8), format="png")
    picture = base64.b64encode(pixels.getvalue()).decode()
    plans = {
        "observations": [[[0, 0], [1, 1]], [[0, 0], [2, 3]]],
        "scores": [5.0, 7.0],
        "chosen": 1,
        "chosen_actions": [[0], [0]],
        "simulated": [[0, 0], [2, 2]],
    }
    searches = {"prior_sampling": plans, "beam": plans | {"scores": [8.0, 9.0]}}
    frames: dict[str, str] = dict.fromkeys(searches, picture)
    return {
        "distributions": {
            name: {"predicted_returns": [1.0, 2.0, 4.0], "state_prediction_errors": [0.1, error, 0.3]}
            for name, error in (("uniform", 0.25), ("prior", 0.125))
        },
        "plans": [
            {"title": title, "dimensions": [1, 4], "searches": searches, "frames": each, "walls": walls}
            for title, each, walls in (("first state of episode 0", frames, []), ("step 7 of episode 0", {}, [[4.0, -8.0]]))
        ],
    }


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


VQVAE_CSV = "step,loss,held_out_loss,codebook_usage,codebook_perplexity\n50,2.0,,0.5,20\n100,1.0,1.5,0.8,60\n150,0.5,,0.9,70\n"
PRIOR_CSV = "step,loss,held_out_loss\n50,4.0,\n100,3.0,3.5\n"
