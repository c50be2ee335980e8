"""Promotion: each evaluated policy is a version of its family's registered model; the alias `champion` marks the one to serve.

A version is the policy of one method and training seed. Versions of one *recipe* (method, params, data, simulator, protocol;
the tag `recipe`) that differ in the training seed are the evidence about that recipe.

A version's tags can be edited by whoever may write to the registry. So they count only if they are what was measured: those of
the current recipes are compared with the metrics files in this folder, which DVC keeps, and those of other versions with the
record in their runs. The files of the model must be those that the evaluation logged.

Each method of params.yaml has a current recipe. `promote` makes the best seed of the one with the highest mean score the
challenger. The challenger becomes champion if

- there is no champion yet,
- or the bootstrap interval, over seeds and episodes (tap/evaluation/bootstrap.py), of its recipe's mean score less that of the
  champion's recipe lies above 0,
- or, if both have the same recipe, the interval of the two policies' scores, over episodes, lies above 0: the question then
  is not what to train, but which trained policy to serve,

and if it passes a load test. `rollback` moves the alias back to the previous champion. Each decision is tagged on the version
and added to the history of the registered model.

Scores of a dataset without a simulator are action errors on held-out episodes. Less is better: their negatives are compared.
"""

import getpass
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tap.estimates import Estimate
from tap.evaluation.bootstrap import Difference, difference
from tap.reporting.held_out import in_thousandths
from tap.reporting.rows import SOURCES
from tap.results import ACTION_ERROR, AnyEvaluation, instance_key, metrics_path, read_evaluation
from tap.settings import Runtime, load_params, read_params_file
from tap.tracking import run as tracking
from tap.tracking.mlflow_store import redact_credentials
from tap.tracking.model_card import with_promotion
from tap.tracking.registry import METRICS, MODEL_DIGEST, PREFIX, Registry, Version, model_name, open_registry

DATA = Path("data")
CHAMPION, CHALLENGER = "champion", "challenger"
# Scores of two versions are comparable only if these are equal.
PROTOCOL = ("dataset_digest", "environment", "simulator", "episodes", "environment_seed", "score_metric")
HELD_OUT_PROTOCOL = ("dataset_digest", "held_out", "episodes", "score_metric")  # of a dataset without a simulator
FIELDS = {"dataset_digest": "digest"}  # of an Evaluation, where the tag has another name
TOLERANCE = 1e-3  # of an action: larger than rounding on another machine, smaller than the difference to another plan


@dataclass(frozen=True)
class Decision:
    """The outcome of `promote` or `rollback` for a version, and its reason."""

    model: str
    version: str
    outcome: Literal["promoted", "refused", "restored", "already champion"]
    reason: str
    champion: str | None  # the version that was champion before
    difference: Difference | None = None  # from the champion's scores, if they were compared


@dataclass(frozen=True)
class Comparison:
    """Whether a challenger's scores are good enough to replace the champion, and the reason."""

    passed: bool
    reason: str
    difference: Difference | None = None  # from the champion's scores, if they are comparable


@dataclass(frozen=True)
class ModelRow:
    """One registered version. Fields without evidence are None or empty."""

    name: str
    version: str
    aliases: list[str]
    score: str | None  # ± over episodes
    latency_ms: float | None
    method: str
    seed: str
    source: str
    reason: str  # of the last decision


def promote(dataset: str, params_path: Path) -> Decision:
    """Make the best policy of a dataset, of whichever method, the challenger, and champion if the evidence supports it.

    Raises ValueError if a method or a seed of params.yaml is not evaluated or not registered, if seeds of a method differ in
    recipe or methods in protocol.
    """
    name = model_name(dataset)
    with open_registry(Runtime().tracking_uri) as registry:
        recipes = _evaluated(registry, name, dataset, params_path)
        champion = registry.alias(name, CHAMPION)
        before = champion.version if champion else None
        evaluated = {path: version for recipe in recipes for path, version in recipe.items()}
        for path, version in evaluated.items():
            if wrong := _missing_evidence(version) or _contradiction(version, read_evaluation(path), f"{path}"):
                remedy = f"`dvc repro --force -s {_instance(path)}` registers a new version"
                return _refuse(registry, version, f"{wrong}: {remedy}", before)
        _check_alike(evaluated, _protocol(next(iter(evaluated.values()))))
        for recipe in recipes:
            _check_alike(recipe, ("recipe",))
        versions = max(([*recipe.values()] for recipe in recipes), key=lambda some: float(_merits(*some).mean()))
        best = max(versions, key=lambda version: float(_merits(version).mean()))
        if best.version == before:
            return Decision(name, best.version, "already champion", "no other evaluation is better", before)
        if best.tags.get("promotion") == "rolled back":
            (path,) = (path for path, version in evaluated.items() if version is best)
            remedy = f"`dvc repro --force -s {_instance(path)}` registers a new version"
            return _refuse(registry, best, f"it was rolled back; {remedy}", before)
        registry.set_alias(best, CHALLENGER)
        comparison = _compare(registry, versions, best, champion)
        if not comparison.passed:
            return _refuse(registry, best, comparison.reason, before, comparison.difference)
        if failure := _load_test_failure(registry, best):
            return _refuse(registry, best, failure, before, comparison.difference)
        decision = Decision(name, best.version, "promoted", comparison.reason, before, comparison.difference)
        registry.describe(best, with_promotion(best.description, decision.reason, _seed_scores(versions)))
        _set_champion(registry, best, decision, previous_champion=before or "none")
        return decision


def rollback(dataset: str) -> Decision:
    """Move the alias champion back to the previous champion. Raises ValueError if none exists or it fails its load test."""
    name = model_name(dataset)
    with open_registry(Runtime().tracking_uri) as registry:
        champion = registry.alias(name, CHAMPION)
        if champion is None:
            raise ValueError(f"{name} has no champion to roll back: run `tap promote {dataset}`")
        number = champion.tags.get("previous_champion", "none")
        previous = None if number == "none" else registry.version(name, number)
        if previous is None:
            raise ValueError(f"{name} version {champion.version} has no earlier champion (previous_champion: {number})")
        if failure := _load_test_failure(registry, previous):
            _record(registry, Decision(name, number, "refused", f"not restored: {failure}", champion.version))
            raise ValueError(f"{name} stays at version {champion.version}: {failure}")
        registry.set_tags(champion, {"promotion": "rolled back", "promotion_reason": f"rolled back to version {number}"})
        reason = f"rolled back from version {champion.version}"
        decision = Decision(name, previous.version, "restored", reason, champion.version)
        _set_champion(registry, previous, decision)
        return decision


def history(dataset: str) -> list[dict[str, Any]]:
    """All decisions about a dataset's family, oldest first: the fields of a Decision with `time`, `by` and `git_commit`."""
    with open_registry(Runtime().tracking_uri) as registry:
        return registry.history(model_name(dataset))


def models() -> list[ModelRow]:
    """All registered versions, by name and number."""
    with open_registry(Runtime().tracking_uri) as registry:
        return [_row(version, aliases) for version, aliases in registry.versions(PREFIX)]


def _row(version: Version, aliases: list[str]) -> ModelRow:
    tags = version.tags
    return ModelRow(
        name=version.name,
        version=version.version,
        aliases=aliases,
        score=None if _missing_evidence(version) else _score(version),
        latency_ms=float(tags["latency_ms"]) if "latency_ms" in tags else None,
        method=tags.get("method", "tap"),  # versions of early releases, all TAP's, have no such tag
        seed=tags.get("seed", ""),
        source=SOURCES.get(tags.get("source", ""), ""),
        reason=tags.get("promotion_reason", ""),
    )


def _evaluated(registry: Registry, name: str, dataset: str, params_path: Path) -> list[dict[Path, Version]]:
    """For each method of params.yaml, the registered version of each of its seeds, by its metrics file."""
    load_params(params_path, dataset)  # raises ValueError if the dataset is not listed
    file = read_params_file(params_path)
    keys = [instance_key(dataset, seed) for seed in file.seeds]
    of_tap = {metrics_path(DATA, "evaluate", key): "evaluate" for key in keys}
    others = [{metrics_path(DATA, "methods", f"{key}-{method}"): "methods" for key in keys} for method in file.methods]
    return [
        {path: _version(registry, name, path, stage, params_path) for path, stage in paths.items()}
        for paths in (of_tap, *others)
    ]


def _version(registry: Registry, name: str, path: Path, stage: str, params_path: Path) -> Version:
    """The version of the evaluation in a metrics file, which `stage` has written."""
    if not path.exists():
        raise ValueError(
            f"{path} does not exist, but promotion compares all methods and seeds of {params_path.name}: run `dvc repro`"
        )
    run_id = read_evaluation(path).runs[stage]
    assert run_id is not None, path
    version = registry.version_of_run(name, run_id)
    if version is None:
        store = redact_credentials(Runtime().tracking_uri)
        raise ValueError(
            f"{path}: run {run_id} has no version of {name} at {store}: if MLflow was down, run `tap sync` on the machine "
            f"of the evaluation; else `dvc repro --force -s {_instance(path)}`"
        )
    return version


def _instance(path: Path) -> str:
    """The stage, with the item of its matrix, that wrote a metrics file."""
    return f"{path.parent.name}@{path.stem}"


def _missing_evidence(version: Version) -> str | None:
    """What a version lacks to be compared with others, in a sentence; None if it lacks nothing."""
    if missing := [key for key in _evidence_tags(version) if key not in version.tags]:
        return f"version {version.version} lacks {' and '.join(missing)}"
    scores = _scores(version)
    if not np.isfinite(scores).all():
        return f"version {version.version} has scores that are not finite"
    if scores.shape[1] != int(version.tags["episodes"]):
        return f"version {version.version} has scores of {scores.shape[1]} episodes instead of {version.tags['episodes']}"
    if version.tags.get("held_out") == str(False):
        return f"version {version.version} was evaluated on the episodes that it was trained on, because none was held out"
    return None


def _contradiction(version: Version, measured: AnyEvaluation | None, where: str) -> str | None:
    """Which tag of a version, that lacks none, is not what `where` says was measured, in a sentence; None if all are."""
    if measured is None:
        return f"version {version.version} has no {where}"
    facts = {key: str(getattr(measured, FIELDS.get(key, key), None)) for key in (*_evidence_tags(version), MODEL_DIGEST)}
    # Early releases have recorded no digest, neither in the tag nor in the metrics.
    tags = {MODEL_DIGEST: "None"} | version.tags | {"scores": str(json.loads(version.tags["scores"]))}
    for key, fact in facts.items():
        if tags[key] != fact:
            return f"the tag {key} of version {version.version} is {tags[key]:.100}, but {where} has {fact:.100}"
    return None


def _unfounded(registry: Registry, version: Version) -> str | None:
    """Why a version's tags are no evidence, in a sentence; None if they are what its run recorded."""
    if missing := _missing_evidence(version):
        return missing
    return _contradiction(version, registry.evaluation(version), f"record of its evaluation ({METRICS} of its run)")


def _check_alike(evaluated: dict[Path, Version], keys: Sequence[str]) -> None:
    (first, version), *others = evaluated.items()
    for path, other in others:
        for key in keys:
            if other.tags[key] != version.tags[key]:
                raise ValueError(
                    f"{first} and {path} differ in {key}, so their scores are not comparable: run `dvc repro`, and if nothing "
                    f"is stale `dvc repro --force -s {_instance(first)} {_instance(path)}`"
                )


def _compare(registry: Registry, versions: list[Version], best: Version, champion: Version | None) -> Comparison:
    """Compare the scores of the challenger `best`, one of `versions` of a recipe, with the champion's."""
    if champion is None:
        return Comparison(True, "there was no champion")
    if obstacle := _incomparable(registry, best, champion):
        return Comparison(False, obstacle)
    mine, theirs = versions, _evidence(registry, champion)
    if best.tags["recipe"] == champion.tags["recipe"]:
        mine, theirs = [best], [champion]
    compared = difference(_merits(*mine), _merits(*theirs))
    metric = best.tags["score_metric"].replace("_", " ") + (", less is better," if _is_error(best) else "")
    scores = f"{metric} {_describe_scores(mine)} against {_describe_scores(theirs)} of champion version {champion.version}"
    if compared.low > 0:
        return Comparison(True, f"{scores}: {compared}", compared)
    place = "lies below 0" if compared.high < 0 else "contains 0: evaluate more seeds or episodes"
    return Comparison(False, f"{scores}: {compared} {place}", compared)


def _incomparable(registry: Registry, best: Version, champion: Version) -> str | None:
    """Why the champion's scores are not comparable with the challenger's, and the remedy; None if they are."""
    remove = f"remove its alias on MLflow's page of {champion.name}"
    if wrong := _unfounded(registry, champion):
        return f"champion {wrong}: {remove}"
    for key in ("score_metric", *_protocol(best)):
        theirs, mine = champion.tags[key], best.tags[key]
        if theirs != mine:
            remedy = f"evaluate its policy again and promote that version, or {remove}"
            return f"champion version {champion.version} was evaluated under another {key} ({theirs}, not {mine}): {remedy}"
    return None


def _evidence(registry: Registry, champion: Version) -> list[Version]:
    """The champion, and the newest comparable version of each other seed of its recipe."""
    seeds = {version.tags["seed"]: version for version in registry.same_recipe(champion) if not _unfounded(registry, version)}
    return [*(seeds | {champion.tags["seed"]: champion}).values()]


def _scores(*versions: Version) -> np.ndarray:
    """(S, E): one row per version, one column per episode."""
    return np.array([json.loads(version.tags["scores"]) for version in versions], dtype=np.float64)


def _merits(*versions: Version) -> np.ndarray:
    """(S, E): the scores, or the negatives of errors: more is better."""
    return -_scores(*versions) if _is_error(versions[0]) else _scores(*versions)


def _is_error(version: Version) -> bool:
    return version.tags.get("score_metric") == ACTION_ERROR


def _protocol(version: Version) -> tuple[str, ...]:
    """The tags in which versions must agree, to be compared with this one."""
    return HELD_OUT_PROTOCOL if _is_error(version) else PROTOCOL


def _evidence_tags(version: Version) -> tuple[str, ...]:
    return (*_protocol(version), "recipe", "seed", "scores")


def _describe_scores(versions: list[Version]) -> str:
    scores = _scores(*versions)
    seeds, episodes = scores.shape
    return f"{scores.mean():.4g} ({seeds} seed{'s' * (seeds > 1)} x {episodes} episodes)"


def _seed_scores(versions: Iterable[Version]) -> dict[str, str]:
    return {version.tags["seed"]: _score(version) for version in versions}


def _score(version: Version) -> str:
    """The mean, ± over episodes."""
    score = Estimate.of(_scores(version)[0])
    return in_thousandths(score) if _is_error(version) else str(score)


def _load_test_failure(registry: Registry, version: Version) -> str | None:
    """Why a version fails its load test; None if it loads, repeats its recorded actions and meets its latency budget."""
    name, tags = f"version {version.version}", version.tags
    if missing := [key for key in ("example_actions", "latency_budget_ms") if key not in tags]:
        return f"{name} lacks {' and '.join(missing)} for a load test"
    try:
        trial = registry.load_test(version)
    except Exception as error:  # a stored model may raise anything
        return f"{name} fails to load or act: {(str(error).splitlines() or [type(error).__name__])[0][:500]}"
    if not np.isfinite(trial.actions).all():
        return f"{name} returns NaN or infinite actions"
    recorded = np.array(json.loads(tags["example_actions"]))
    if trial.actions.shape != recorded.shape or not np.allclose(trial.actions, recorded, rtol=0, atol=TOLERANCE):
        return f"{name} does not return the actions that it returned for its example when it was registered"
    budget = float(tags["latency_budget_ms"])
    if not trial.latency_ms <= budget:
        return f"{name} takes {trial.latency_ms:.4g} ms per decision here, more than its budget of {budget:.4g} ms"
    return None


def _refuse(
    registry: Registry, version: Version, reason: str, champion: str | None, compared: Difference | None = None
) -> Decision:
    decision = Decision(version.name, version.version, "refused", reason, champion, compared)
    _record(registry, decision)
    if version.tags.get("promotion") != "rolled back":
        registry.set_tags(version, {"promotion": "refused", "promotion_reason": reason})
    return decision


def _set_champion(registry: Registry, version: Version, decision: Decision, **tags: str) -> None:
    """Make a version champion. The alias moves last, so that a crash before it keeps the old champion and promote can rerun."""
    time = _record(registry, decision)
    registry.set_tags(
        version, {"promotion": decision.outcome, "promotion_reason": decision.reason, "promoted_at": time, **tags}
    )
    registry.set_alias(version, CHAMPION)


def _record(registry: Registry, decision: Decision) -> str:
    """Add a decision to its model's history; returns its time there."""
    facts = {key: value for key, value in asdict(decision).items() if key != "model"}
    return registry.record(decision.model, facts | {"by": _user(), "git_commit": tracking.git_state()[0]})


def _user() -> str:
    """The user who decides: the login at MLflow's server if there is one, else the user of this machine."""
    with suppress(KeyError, OSError):  # a container's user id may have no name
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return "unknown"
