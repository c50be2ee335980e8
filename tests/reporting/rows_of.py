"""Rows made up: a base and its ablations."""

from typing import Any

from stage_files import evaluation

from tap.reporting.rows import Row, table_rows

BASE = {"search": "beam", "horizon": 12, "beam_width": 16, "likelihood_threshold": 0.1}


def rows_of(dataset: str = "hopper-medium-replay-v2", source: str = "recollected", **scores: Any) -> list[Row]:
    """The base, and ablations by name with their planner, each with a score for seeds 0, 1 and so on."""
    scores.setdefault("base", ({}, [40.0, 60.0]))
    facts: dict[str, Any] = {"dataset": dataset, "source": source}
    return table_rows(
        [
            evaluation(
                **facts,
                seed=seed,
                normalized_score=score,
                planner=BASE | {key: value for key, value in changes.items() if key != "latent_step"},
                latent_step=changes.get("latent_step", 3),
                ablation=None if name == "base" else name.replace("_", "-"),
            )
            for name, (changes, values) in scores.items()
            for seed, score in enumerate(values)
        ]
    )
