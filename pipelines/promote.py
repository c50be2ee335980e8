"""Which policy serves: each evaluated policy is a version of the registered model tap-DATASET; the alias champion names one.

`promote` makes the best evaluation the challenger, and the challenger champion where it is strictly better under the same
protocol; `rollback` undoes that. What was decided, and why, is written on the version as tags.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tap.files import read_json
from tap.registry import Registry, Version, open_registry
from tap.settings import Runtime, load_params, read_params_file
from tap.store import public

EVALUATIONS = Path("data/metrics/evaluate")
PREFIX = "tap-"
CHAMPION, CHALLENGER = "champion", "challenger"
# Scores compare only between versions that agree in all of these.
PROTOCOL = ("dataset_digest", "environment", "episodes", "environment_seed", "protocol", "score_metric")


@dataclass(frozen=True)
class Decision:
    """What `promote` or `rollback` did to a version, and why."""

    model: str
    version: str
    outcome: Literal["promoted", "refused", "already champion"]
    reason: str


@dataclass(frozen=True)
class ModelRow:
    """One registered version."""

    name: str
    version: str
    aliases: list[str]
    score: float  # NaN where it has none
    seed: str
    promotion_reason: str


def promote(dataset: str, params_path: Path) -> Decision:
    """Make the best evaluated seed of a dataset the challenger, and the champion if it deserves to be.

    Raises ValueError where nothing is evaluated, the evaluations do not compare, or the registry does not know the best one.
    """
    path, facts, run_id = _best_evaluation(dataset, params_path)
    name, tracking_uri = PREFIX + dataset, Runtime().tracking_uri
    with open_registry(tracking_uri) as registry:
        challenger = registry.version_of_run(name, run_id) if run_id else None
        if challenger is None:
            lack = f"run {run_id} has no version of {name} at {public(tracking_uri)}" if run_id else "its run is not tracked"
            raise ValueError(f"{path}: {lack}: run `dvc repro --force -s evaluate@{path.stem}`")
        champion = registry.alias(name, CHAMPION)
        if champion is not None and champion.version == challenger.version:
            return Decision(name, challenger.version, "already champion", "no other evaluation is better")
        if challenger.tags.get("promotion") == "rolled back":
            reason = f"it was rolled back; `dvc repro --force -s evaluate@{path.stem}` makes a new version of it"
            return Decision(name, challenger.version, "refused", reason)
        registry.set_alias(challenger, CHALLENGER)
        registry.set_tags(challenger, facts)
        refusal = _compare(facts, champion) or _try_out(registry, challenger)
        if refusal:
            registry.set_tags(challenger, {"promotion": "refused", "promotion_reason": refusal})
            return Decision(name, challenger.version, "refused", refusal)
        reason = f"{facts['score_metric']} {facts['score']:.6g} "
        reason += f"is above {_score(champion):.6g} of version {champion.version}" if champion else "is the first"
        _crown(registry, challenger, reason, previous_champion=champion.version if champion else "none")
        return Decision(name, challenger.version, "promoted", reason)


def rollback(dataset: str) -> Decision:
    """Give the alias champion back to the version that held it before. Raises ValueError where there is none that works."""
    name = PREFIX + dataset
    with open_registry(Runtime().tracking_uri) as registry:
        champion = registry.alias(name, CHAMPION)
        if champion is None:
            raise ValueError(f"{name} has no champion to roll back: run `tap promote {dataset}`")
        number = champion.tags.get("previous_champion", "none")
        previous = None if number == "none" else registry.version(name, number)
        if previous is None:
            raise ValueError(f"{name} version {champion.version} has no earlier champion (previous_champion: {number})")
        if broken := _try_out(registry, previous):
            raise ValueError(f"{name} stays at version {champion.version}: {broken}")
        registry.set_tags(champion, {"promotion": "rolled back", "promotion_reason": f"rolled back to version {number}"})
        reason = f"restored by a rollback from version {champion.version}"
        _crown(registry, previous, reason)
        return Decision(name, previous.version, "promoted", reason)


def models() -> list[ModelRow]:
    """All registered versions, by name and number."""
    with open_registry(Runtime().tracking_uri) as registry:
        return [
            ModelRow(
                name=version.name,
                version=version.version,
                aliases=aliases,
                score=_score(version),
                seed=version.tags.get("seed", ""),
                promotion_reason=version.tags.get("promotion_reason", ""),
            )
            for version, aliases in registry.versions(PREFIX)
        ]


def _best_evaluation(dataset: str, params_path: Path) -> tuple[Path, dict[str, Any], str | None]:
    """The file of the highest finite score among all seeds, what is compared of it, and the id of its run."""
    load_params(params_path, dataset)  # says what is wrong with a dataset that is not there
    paths = [EVALUATIONS / f"{dataset}-{seed}.json" for seed in read_params_file(params_path).seeds]
    evaluations = {path: read_json(path) for path in paths if path.exists()}
    if not evaluations:
        raise ValueError(f"{paths[0]} does not exist, nor any other seed's: run `dvc repro`")
    facts = {path: _facts(metrics) for path, metrics in evaluations.items()}
    first, *others = facts
    for path in others:
        for key in PROTOCOL:
            if facts[path][key] != facts[first][key]:
                raise ValueError(f"{first} and {path} differ in {key}, so their scores do not compare: run `dvc repro`")
    finite = [path for path in facts if math.isfinite(facts[path]["score"])]
    if not finite:
        raise ValueError(f"{first}: neither it nor another seed has a finite score: look into its returns")
    best = max(finite, key=lambda path: float(facts[path]["score"]))
    return best, facts[best], evaluations[best]["runs"]["evaluate"]


def _facts(metrics: dict[str, Any]) -> dict[str, Any]:
    """What promotion compares, and keeps as tags of the version."""
    metric = "return_mean" if metrics["normalized_score"] is None else "normalized_score"
    same = {key: metrics[key] for key in ("environment", "episodes", "environment_seed", "protocol", "seed")}
    score = math.nan if metrics[metric] is None else float(metrics[metric])
    return {**same, "dataset_digest": metrics["digest"], "score_metric": metric, "score": score}


def _score(version: Version) -> float:
    try:
        return float(version.tags["score"])
    except (KeyError, ValueError):
        return math.nan


def _compare(facts: dict[str, Any], champion: Version | None) -> str | None:
    """Why these facts do not beat the champion; None where they do."""
    if champion is None:
        return None
    for key in PROTOCOL:
        if champion.tags.get(key) != str(facts[key]):
            return (
                f"champion version {champion.version} was evaluated under another {key} ({champion.tags.get(key)}, not "
                f"{facts[key]}): evaluate its policy again and promote that, or take the alias from it"
            )
    score = _score(champion)
    if not math.isfinite(score):
        return f"champion version {champion.version} has no finite score: take the alias away from it"
    if facts["score"] <= score:
        return f"{facts['score_metric']} {facts['score']:.6g} is not above {score:.6g} of champion version {champion.version}"
    return None


def _try_out(registry: Registry, version: Version) -> str | None:
    """Why a version cannot serve; None where it loads and acts."""
    try:
        actions = registry.act_once(version)
    except Exception as error:  # whatever a stored model raises, it cannot serve
        return f"version {version.version} does not load and act: {error}"
    return None if np.isfinite(actions).all() else f"version {version.version} acts with NaN or infinite actions"


def _crown(registry: Registry, version: Version, reason: str, **tags: str) -> None:
    """Make a version champion. The alias moves last: a process that dies before leaves the old champion, and can run again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    registry.set_tags(version, {"promotion": "promoted", "promotion_reason": reason, "promoted_at": now, **tags})
    registry.set_alias(version, CHAMPION)
