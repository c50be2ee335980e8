"""What the evaluating stages share: provenance of a policy, what is logged of its evaluation, its registration."""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.stages.params import EvaluateStage, MethodsStage
from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes
from tap.data.score import normalized_score
from tap.envs.make import require_environment, simulator, versions
from tap.planning.plan import Remembering, Timed
from tap.results import Behaviour, Evaluation, Lineage, Provenance, ValidationReport, lineage_path
from tap.serving.policy import ActingPolicy, load_policy, row_generators
from tap.tracking import run as tracking
from tap.tracking.model_card import model_card
from tap.tracking.registry import METRICS, MODEL_DIGEST, log_policy

DATA = Path("data")


def run_ids(stages: Iterable[str], key: str) -> dict[str, str | None]:
    """The runs that trained the models called `key`, by stage. They do not affect scores, so DVC does not depend on them."""
    return {stage: known.run_id if known else None for stage, known in _lineages(stages, key).items()}


def training_minutes(stages: Iterable[str], key: str) -> float | None:
    """How long it took to train the models called `key`; None if that of one is unknown."""
    minutes = [known.minutes if known else None for known in _lineages(stages, key).values()]
    times = [each for each in minutes if each is not None]
    return sum(times) if len(times) == len(minutes) else None


def _lineages(stages: Iterable[str], key: str) -> dict[str, Lineage | None]:
    paths = {stage: lineage_path(stage, key) for stage in stages}
    return {stage: Lineage.read(path) if path.exists() else None for stage, path in paths.items()}


def provenance(resolved: EvaluateStage | MethodsStage, validation: ValidationReport, seed: int) -> Provenance:
    """What every number about a trained policy states: data, scale, simulator, seed."""
    environment = require_environment(resolved.info)
    return Provenance(
        dataset=resolved.info.id,
        source=validation.source,
        digest=validation.digest,
        scale=resolved.scale,
        environment=environment,
        simulator=simulator(environment),
        versions=versions(),
        seed=seed,
    )


def tags_of(facts: Provenance, runs: dict[str, str | None]) -> dict[str, object]:
    """The tags of a run about a trained policy: its provenance, and the runs that trained it by their stages."""
    tags = facts.model_dump(include={"dataset", "source", "scale", "environment", "seed"})
    return tags | {"dataset_digest": facts.digest} | {f"run_{stage}": key for stage, key in runs.items()}


def log(tracked: tracking.Run, evaluation: Evaluation) -> None:
    """Log what runs are compared by: scores and latency."""
    tracked.log_metrics(0, {key: value for key, value in evaluation if isinstance(value, float)})
    tracked.log_metrics(0, {f"latency_ms_{key}": value for key, value in evaluation.latency_ms})
    tracked.log_json(evaluation.as_json(), METRICS)


def behaviour(episodes: Episodes, info: DatasetInfo) -> Behaviour:
    """How the dataset's own episodes score: all, the best tenth of them, the last tenth; None without reference scores."""
    returns, tenth = episodes.returns, max(1, episodes.num_episodes // 10)

    def score(some: np.ndarray) -> float | None:
        known = info.reference_min_score is not None and info.reference_max_score is not None
        return float(normalized_score(info, some).mean()) if known else None

    return Behaviour(
        episodes=episodes.num_episodes,
        mean_return=float(returns.mean()),
        mean_normalized_score=score(returns),
        best_tenth_normalized_score=score(np.sort(returns)[-tenth:]),
        last_tenth_normalized_score=score(returns[-tenth:]),
    )


def digest(parts: dict[str, Any], facts: Provenance) -> str:
    """A digest of a recipe: params in `parts`, data and simulator."""
    recipe = parts | facts.model_dump(include={"digest", "environment", "simulator"})
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def register(
    run: tracking.Run,
    name: str,
    policy: ActingPolicy,
    example_observations: np.ndarray,
    evaluation: Evaluation,
    validation: ValidationReport,
    latency_budget_ms: float,
) -> Evaluation:
    """Log the policy as a model and make it a version of `name`, with its card and the evidence for promotion.

    Returns the evaluation with the digest of the model's files.
    """
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy")
        # On a CPU, as in the load test: a GPU rounds differently, and may choose another plan.
        on_cpu = load_policy(Path(folder) / "policy", "cpu")
        example_actions = on_cpu.act(example_observations, row_generators(0, len(example_observations))).astype(np.float32)
        model_digest = log_policy(
            run,
            Path(folder) / "policy",
            example_observations,
            policy.action_dim,
            remembers=isinstance(policy, Remembering),
            budget_ms=policy.budget_ms if isinstance(policy, Timed) else None,
        )
    git_dirty = tracking.git_state()[1]
    same = (
        "method",
        "dataset",
        "source",
        "scale",
        "seed",
        "environment",
        "simulator",
        "episodes",
        "environment_seed",
        "protocol",
    )
    tags = {key: getattr(evaluation, key) for key in (*same, "score_metric", "recipe", "git_commit")}
    tags |= {f"run_{stage}": run_id for stage, run_id in evaluation.runs.items()}
    facts = {key: validation.as_json()[key] for key in ("transitions", "episodes", "return", "warnings")}
    tags |= {
        "git_dirty": git_dirty,
        MODEL_DIGEST: model_digest,
        "dataset_digest": evaluation.digest,
        "validation": json.dumps(facts),
        "score": float(np.mean(evaluation.scores)),
        "scores": json.dumps(evaluation.scores),
        "returns": json.dumps(evaluation.returns),
        "latency_ms": evaluation.latency_ms.median,
        "latency_budget_ms": latency_budget_ms,
        "example_actions": json.dumps(example_actions.tolist()),
    }
    card = model_card(name, evaluation, validation, latency_budget_ms=latency_budget_ms, git_dirty=git_dirty)
    run.register(name, tags, card)
    return evaluation.model_copy(update={"model_digest": model_digest})
