"""Which policy serves: an evaluated policy is a version of its family's registered model; the alias champion names one.

A version is one training seed's policy. Versions that share a *recipe* (params, data, simulator, protocol; the tag `recipe`)
and differ in the training seed are the evidence about that recipe.

`promote` makes the best seed of a dataset's present recipe the challenger, and the challenger champion

- where there is no champion yet;
- or where its recipe's mean score is above that of the champion's recipe, and the bootstrap interval of the difference, over
  seeds and episodes (tap/evaluation/bootstrap.py), lies above 0;
- or, if the champion is of the same recipe, where that interval of the two policies' own scores does, over episodes: the
  question is then not what to train, but which of the trained policies serves;

and where it then passes a load test. `rollback` gives the alias back. Every decision is written on the version, and added to
the history of the registered model.
"""

import getpass
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tap.evaluation.bootstrap import Difference, difference
from tap.files import read_json
from tap.reporting.results import SOURCES, Estimate, mean_and_standard_error
from tap.settings import Runtime, load_params, read_params_file
from tap.tracking import run as tracking
from tap.tracking.mlflow_store import redact_credentials
from tap.tracking.model_card import with_promotion
from tap.tracking.registry import PREFIX, Registry, Version, model_name, open_registry

EVALUATIONS = Path("data/metrics/evaluate")
CHAMPION, CHALLENGER = "champion", "challenger"
# Scores compare only between versions that agree in all of these.
PROTOCOL = ("dataset_digest", "environment", "simulator", "episodes", "environment_seed", "protocol", "score_metric")
EVIDENCE = (*PROTOCOL, "recipe", "seed", "scores")
TOLERANCE = 1e-3  # of an action: another machine's rounding, but not another plan


@dataclass(frozen=True)
class Decision:
    """What `promote` or `rollback` did to a version, and why."""

    model: str
    version: str
    outcome: Literal["promoted", "refused", "restored", "already champion"]
    reason: str
    champion: str | None  # the version that was champion before
    difference: Difference | None = None  # to the champion's scores, where they were compared


@dataclass(frozen=True)
class ModelRow:
    """One registered version. What it has no evidence of is None or empty."""

    name: str
    version: str
    aliases: list[str]
    score: Estimate | None  # ± over episodes
    latency_ms: float | None
    seed: str
    source: str
    reason: str  # of the last decision about it


def promote(dataset: str, params_path: Path) -> Decision:
    """Make the best seed of a dataset's evaluations the challenger, and the champion if it deserves to be.

    Raises ValueError where a seed of params.yaml is not evaluated or not registered, or where seeds differ in recipe or
    protocol: then there is nothing to decide on.
    """
    name = model_name(dataset)
    with open_registry(Runtime().tracking_uri) as registry:
        evaluated = _evaluated(registry, name, dataset, params_path)
        champion = registry.alias(name, CHAMPION)
        before = champion.version if champion else None

        def refuse(version: Version, reason: str, compared: Difference | None = None) -> Decision:
            decision = Decision(name, version.version, "refused", reason, before, compared)
            _record(registry, decision)
            if version.tags.get("promotion") != "rolled back":
                registry.set_tags(version, {"promotion": "refused", "promotion_reason": reason})
            return decision

        for path, version in evaluated.items():
            if lack := _lack(version):
                return refuse(version, f"{lack}: `dvc repro --force -s evaluate@{path.stem}` makes a version of it anew")
        _check_alike(evaluated)
        best = max(evaluated.values(), key=lambda version: float(_scores(version).mean()))
        if best.version == before:
            return Decision(name, best.version, "already champion", "no other evaluation is better", before)
        if best.tags.get("promotion") == "rolled back":
            seed = best.tags["seed"]
            return refuse(
                best, f"it was rolled back; `dvc repro --force -s evaluate@{dataset}-{seed}` makes a new version of it"
            )
        registry.set_alias(best, CHALLENGER)
        reason, compared = "is the first", None
        if champion:
            if obstacle := _incomparable(best, champion):
                return refuse(best, obstacle)
            mine, theirs = [*evaluated.values()], _evidence(registry, champion)
            if best.tags["recipe"] == champion.tags["recipe"]:
                mine, theirs = [best], [champion]
            compared = difference(_scores(*mine), _scores(*theirs))
            metric = best.tags["score_metric"].replace("_", " ")
            reason = f"{metric} {_told(mine)} against {_told(theirs)} of champion version {champion.version}: {compared}"
            if compared.low <= 0:
                holds = "lies below 0" if compared.high < 0 else "holds 0: more seeds or episodes can tell"
                return refuse(best, f"{reason} {holds}", compared)
        if broken := _fails(registry, best):
            return refuse(best, broken, compared)
        decision = Decision(name, best.version, "promoted", reason, before, compared)
        registry.describe(best, with_promotion(best.description, reason, _seed_scores(evaluated.values())))
        _crown(registry, best, decision, previous_champion=before or "none")
        return decision


def rollback(dataset: str) -> Decision:
    """Give the alias champion back to the version that held it before. Raises ValueError where there is none that works."""
    name = model_name(dataset)
    with open_registry(Runtime().tracking_uri) as registry:
        champion = registry.alias(name, CHAMPION)
        if champion is None:
            raise ValueError(f"{name} has no champion to roll back: run `tap promote {dataset}`")
        number = champion.tags.get("previous_champion", "none")
        previous = None if number == "none" else registry.version(name, number)
        if previous is None:
            raise ValueError(f"{name} version {champion.version} has no earlier champion (previous_champion: {number})")
        if broken := _fails(registry, previous):
            _record(registry, Decision(name, number, "refused", f"not restored: {broken}", champion.version))
            raise ValueError(f"{name} stays at version {champion.version}: {broken}")
        registry.set_tags(champion, {"promotion": "rolled back", "promotion_reason": f"rolled back to version {number}"})
        reason = f"rolled back from version {champion.version}"
        decision = Decision(name, previous.version, "restored", reason, champion.version)
        _crown(registry, previous, decision)
        return decision


def history(dataset: str) -> list[dict[str, Any]]:
    """All decisions about a dataset's family, oldest first, with `time`, `by`, `git_commit` and what a Decision has."""
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
        score=None if _lack(version) else mean_and_standard_error(_scores(version)[0].tolist()),
        latency_ms=float(tags["latency_ms"]) if "latency_ms" in tags else None,
        seed=tags.get("seed", ""),
        source=SOURCES.get(tags.get("source", ""), ""),
        reason=tags.get("promotion_reason", ""),
    )


def _evaluated(registry: Registry, name: str, dataset: str, params_path: Path) -> dict[Path, Version]:
    """The registered version of each seed of params.yaml, by its metrics file."""
    load_params(params_path, dataset)  # says what is wrong with a dataset that is not there
    found = {}
    for seed in read_params_file(params_path).seeds:
        path = EVALUATIONS / f"{dataset}-{seed}.json"
        if not path.exists():
            raise ValueError(f"{path} does not exist, but promotion weighs all seeds of {params_path.name}: run `dvc repro`")
        run_id = read_json(path)["runs"]["evaluate"]
        version = registry.version_of_run(name, run_id)
        if version is None:
            raise ValueError(
                f"{path}: run {run_id} has no version of {name} at {redact_credentials(Runtime().tracking_uri)}: run `tap sync`, where it "
                f"was evaluated, if MLflow was away; else `dvc repro --force -s evaluate@{path.stem}`"
            )
        found[path] = version
    return found


def _lack(version: Version) -> str | None:
    """Why a version is no evidence; None where it is."""
    if missing := [key for key in EVIDENCE if key not in version.tags]:
        return f"version {version.version} has no {' and no '.join(missing)} on record"
    scores = _scores(version)
    if not np.isfinite(scores).all():
        return f"version {version.version} has scores that are not finite"
    if scores.shape[1] != int(version.tags["episodes"]):
        return f"version {version.version} has scores of {scores.shape[1]} episodes, not of {version.tags['episodes']}"
    return None


def _check_alike(evaluated: dict[Path, Version]) -> None:
    (first, version), *others = evaluated.items()
    for path, other in others:
        for key in (*PROTOCOL, "recipe"):
            if other.tags[key] != version.tags[key]:
                raise ValueError(f"{first} and {path} differ in {key}, so their scores do not compare: run `dvc repro`")


def _incomparable(best: Version, champion: Version) -> str | None:
    """Why the champion's scores do not compare with these, and what to do; None where they do."""
    take_away = f"take its alias away, on MLflow's page of {champion.name}"
    if lack := _lack(champion):
        return f"champion {lack}: {take_away}"
    for key in PROTOCOL:
        theirs, mine = champion.tags[key], best.tags[key]
        if theirs != mine:
            remedy = f"evaluate its policy again and promote that, or {take_away}"
            return f"champion version {champion.version} was evaluated under another {key} ({theirs}, not {mine}): {remedy}"
    return None


def _evidence(registry: Registry, champion: Version) -> list[Version]:
    """The champion, and the newest sound version of each other seed of its recipe."""
    seeds = {version.tags["seed"]: version for version in registry.same_recipe(champion) if not _lack(version)}
    return [*(seeds | {champion.tags["seed"]: champion}).values()]


def _scores(*versions: Version) -> np.ndarray:
    """(S, E): a row a version, a column an episode."""
    return np.array([json.loads(version.tags["scores"]) for version in versions], dtype=np.float64)


def _told(versions: list[Version]) -> str:
    scores = _scores(*versions)
    seeds, episodes = scores.shape
    return f"{scores.mean():.4g} ({seeds} seed{'s' * (seeds > 1)} x {episodes} episodes)"


def _seed_scores(versions: Iterable[Version]) -> dict[str, str]:
    return {version.tags["seed"]: str(mean_and_standard_error(_scores(version)[0].tolist())) for version in versions}


def _fails(registry: Registry, version: Version) -> str | None:
    """Why a version fails its load test; None where it loads, acts as on record, and within its latency budget."""
    name, tags = f"version {version.version}", version.tags
    if missing := [key for key in ("example_actions", "latency_budget_ms") if key not in tags]:
        return f"{name} has no {' and no '.join(missing)} on record to test it by"
    try:
        trial = registry.load_test(version)
    except Exception as error:  # whatever a stored model raises, it cannot serve
        return f"{name} does not load and act: {(str(error).splitlines() or [type(error).__name__])[0][:500]}"
    if not np.isfinite(trial.actions).all():
        return f"{name} acts with NaN or infinite actions"
    recorded = np.array(json.loads(tags["example_actions"]))
    if trial.actions.shape != recorded.shape or not np.allclose(trial.actions, recorded, rtol=0, atol=TOLERANCE):
        return f"{name} does not act on its example as it did when it was registered"
    budget = float(tags["latency_budget_ms"])
    if not trial.latency_ms <= budget:
        return f"{name} takes {trial.latency_ms:.4g} ms for a decision here, more than its budget of {budget:.4g} ms"
    return None


def _crown(registry: Registry, version: Version, decision: Decision, **tags: str) -> None:
    """Make a version champion. The alias moves last: a process that dies before leaves the old champion, and can run again."""
    time = _record(registry, decision)
    registry.set_tags(
        version, {"promotion": decision.outcome, "promotion_reason": decision.reason, "promoted_at": time, **tags}
    )
    registry.set_alias(version, CHAMPION)


def _record(registry: Registry, decision: Decision) -> str:
    """Add a decision to its model's history; the time that it has there."""
    facts = {key: value for key, value in asdict(decision).items() if key != "model"}
    return registry.record(decision.model, facts | {"by": _user(), "git_commit": tracking.git_state()[0]})


def _user() -> str:
    """Who decides: the user at MLflow's server where it asks for one, or on this machine."""
    with suppress(KeyError, OSError):  # a container may run under a number without a name
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return "unknown"
