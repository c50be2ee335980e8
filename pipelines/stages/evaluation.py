"""What the evaluating stages share: provenance of a policy, what is logged of its evaluation, its registration."""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipelines.stages.params import EvaluateStage, MethodsStage
from tap.data.action_bounds import ActionBounds, save_bounds
from tap.data.catalog import DatasetInfo, with_environment
from tap.data.episodes import Episodes
from tap.data.score import normalized_score
from tap.envs.make import simulator, versions
from tap.evaluation.held_out import held_out_errors
from tap.evaluation.rollout import BatchPlanner
from tap.planning.plan import Remembering, Timed
from tap.results import (
    IMITATION,
    AnyEvaluation,
    Behaviour,
    Evaluation,
    HeldOutEvaluation,
    Lineage,
    Provenance,
    ValidationReport,
    lineage_path,
)
from tap.serving.policy import ActingPolicy, load_policy, row_generators
from tap.tracking import run as tracking
from tap.tracking.model_card import model_card
from tap.tracking.registry import METRICS, MODEL_DIGEST, log_policy

DATA = Path("data")
Resolved = TypeVar("Resolved", EvaluateStage, MethodsStage)


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


def with_own_environment(resolved: Resolved, validation: ValidationReport) -> Resolved:
    """The params of a stage with the environment that the dataset itself names, where the stage fetch chose it."""
    return resolved.model_copy(update={"info": with_environment(resolved.info, validation.own_environment)})


def provenance(resolved: EvaluateStage | MethodsStage, validation: ValidationReport, seed: int) -> Provenance:
    """What every number about a trained policy states: data, scale, simulator, seed."""
    environment = resolved.info.environment
    return Provenance(
        dataset=resolved.info.id,
        source=validation.source,
        digest=validation.digest,
        scale=resolved.scale,
        environment=environment,
        simulator=simulator(environment) if environment else "",
        versions=versions(),
        seed=seed,
    )


def tags_of(facts: Provenance, runs: dict[str, str | None], has_rewards: bool) -> dict[str, object]:
    """The tags of a run about a trained policy: its provenance, and the runs that trained it by their stages."""
    tags = facts.model_dump(include={"dataset", "source", "scale", "environment", "seed"})
    tags |= {} if has_rewards else {"rewards": IMITATION}
    return tags | {"dataset_digest": facts.digest} | {f"run_{stage}": key for stage, key in runs.items()}


def log(tracked: tracking.Run, evaluation: AnyEvaluation) -> None:
    """Log what runs are compared by: scores and latency."""
    tracked.log_metrics(0, {key: value for key, value in evaluation if isinstance(value, float)})
    if isinstance(evaluation, HeldOutEvaluation):
        ahead = zip(evaluation.error_ahead, evaluation.hold_error_ahead, strict=True)
        for steps, (error, hold_error) in enumerate(ahead):
            tracked.log_metrics(steps, {"error_ahead": error, "hold_error_ahead": hold_error})
    tracked.log_metrics(0, {f"latency_ms_{key}": value for key, value in evaluation.latency_ms})
    tracked.log_json(evaluation.as_json(), METRICS)


def held_out_actions(
    policy: BatchPlanner, episodes: Episodes, fraction: float, seed: int, bounds: ActionBounds, validation: ValidationReport
) -> dict[str, Any]:
    """The metrics of a `HeldOutEvaluation`: actions in the `fraction` of episodes that was held out from training with `seed`.

    If none was held out, in those of training.
    """
    training, held_out = episodes.split(fraction, np.random.default_rng(seed))
    is_held_out = len(held_out.indices) > 0
    found = held_out_errors(policy, held_out if is_held_out else training, bounds, seed).summarize()
    several = "s" * (found["episodes"] != 1)
    kind = f"held-out episode{several}" if is_held_out else f"episode{several} of training, none being held out"
    return found | {
        "has_rewards": validation.has_rewards,
        "held_out": is_held_out,
        "protocol": f"{found['decisions']} decisions in {found['episodes']} {kind}, last checkpoint",
    }


def behaviour(episodes: Episodes, info: DatasetInfo, has_rewards: bool) -> Behaviour:
    """How the dataset's own episodes score: all, the best tenth of them, the last tenth; None without reference scores.

    Without rewards, returns are None, too.
    """
    returns, tenth = episodes.returns, max(1, episodes.num_episodes // 10)

    def score(some: np.ndarray) -> float | None:
        known = has_rewards and info.reference_min_score is not None and info.reference_max_score is not None
        return float(normalized_score(info, some).mean()) if known else None

    return Behaviour(
        episodes=episodes.num_episodes,
        mean_return=float(returns.mean()) if has_rewards else None,
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
    bounds: ActionBounds,
    example_observations: np.ndarray,
    evaluation: AnyEvaluation,
    validation: ValidationReport,
    latency_budget_ms: float,
) -> AnyEvaluation:
    """Log the policy as a model and make it a version of `name`, with its card and the evidence for promotion.

    Where it acts, its actions are clipped to `bounds`. Returns the evaluation with the digest of the model's files.
    """
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy")
        save_bounds(Path(folder) / "policy", bounds)
        # On a CPU, as in the load test: a GPU rounds differently, and may choose another plan.
        on_cpu = load_policy(Path(folder) / "policy", "cpu")
        example_actions = on_cpu.act(example_observations, row_generators(0, len(example_observations))).astype(np.float32)
        example_actions = example_actions.clip(*bounds)
        model_digest = log_policy(
            run,
            Path(folder) / "policy",
            example_observations,
            policy.action_dim,
            remembers=isinstance(policy, Remembering),
            budget_ms=policy.budget_ms if isinstance(policy, Timed) else None,
        )
    git_dirty = tracking.git_state()[1]
    same = ("method", "dataset", "source", "scale", "seed", "episodes", "protocol", "score_metric", "recipe", "git_commit")
    where = ("held_out",) if isinstance(evaluation, HeldOutEvaluation) else ("environment", "simulator", "environment_seed")
    tags = {key: getattr(evaluation, key) for key in (*same, *where)}
    tags |= {f"run_{stage}": run_id for stage, run_id in evaluation.runs.items()}
    returns = ("return",) if validation.has_rewards else ()
    facts = {key: validation.as_json()[key] for key in ("transitions", "episodes", *returns, "warnings")}
    tags |= {
        "git_dirty": git_dirty,
        MODEL_DIGEST: model_digest,
        **({} if validation.has_rewards else {"rewards": IMITATION}),
        "dataset_digest": evaluation.digest,
        "validation": json.dumps(facts),
        "score": float(np.mean(evaluation.scores)),
        "scores": json.dumps(evaluation.scores),
        **({"returns": json.dumps(evaluation.returns)} if isinstance(evaluation, Evaluation) else {}),
        "latency_ms": evaluation.latency_ms.median,
        "latency_budget_ms": latency_budget_ms,
        "example_actions": json.dumps(example_actions.tolist()),
    }
    card = model_card(name, evaluation, validation, latency_budget_ms=latency_budget_ms, git_dirty=git_dirty)
    run.register(name, tags, card)
    return evaluation.model_copy(update={"model_digest": model_digest})
