"""The catalog: facts about each dataset, by id. They are D4RL's, unless params.yaml overrides them."""

import csv
import difflib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from tap.results import OwnEnvironment
from tap.settings import NO_REWARD, FetchParams, Source, Suite, Unset, suite_of

# Sources of a path whose files state where episodes end.
WITH_EPISODES = ("lerobot", "minari", "ogbench")
ANT_OBSERVATION_DIM = 27  # of D4RL's 111: the others, contact forces, are all zero


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about one dataset."""

    id: str
    suite: Suite
    source: Source
    path: Path | None  # of the file or folder; None if source is "d4rl", or "file" without a path
    url: str | None
    environment: str | None  # a gymnasium id, or "d4rl"
    max_episode_steps: int | None  # None for the environment's own limit
    reference_min_score: float | None  # D4RL's undiscounted return of a random policy
    reference_max_score: float | None  # and of an expert
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of the environment's constructor
    observations: Unset[tuple[str, ...]] = None  # keys of a Dict of observations that are observed; None for all


@cache
def known_datasets() -> dict[str, DatasetInfo]:
    """The datasets that need no facts from params.yaml, by id: D4RL's, the bundled one, and stochastic locomotion, which has
    no download and the reference scores of D4RL's deterministic task.

    URLs and reference scores come from the d4rl package if it is installed, else from d4rl_table.csv.
    """
    urls, minima, maxima = d4rl_facts()
    known = {}
    with Path(__file__).with_name("d4rl_table.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name, url = row["id"], urls.get(row["id"], row["url"]) or None
            assert row["suite"] in get_args(Suite)
            known[name] = DatasetInfo(
                id=name,
                suite=row["suite"],  # type: ignore[arg-type]
                source="d4rl" if url else "file",
                path=None,
                url=url,
                environment=row["environment"],
                max_episode_steps=int(row["max_episode_steps"]),
                reference_min_score=float(minima.get(name, row["min"])),
                reference_max_score=float(maxima.get(name, row["max"])),
            )
    name = "hopper-medium-replay"
    path = Path("data/bundled") / f"{name}.hdf5"
    known[name] = replace(known[f"{name}-v2"], id=name, source="bundled", path=path, url=None)
    return known


def d4rl_facts() -> tuple[dict[str, str], dict[str, float], dict[str, float]]:
    """URLs, minimum and maximum reference scores by dataset id, as the installed d4rl package has them; else empty.

    Its `infos.py` is loaded by its path: importing d4rl itself needs MuJoCo 2.1.
    """
    path = d4rl_file("d4rl/infos.py")
    if path is None:
        return {}, {}, {}
    spec = importlib.util.spec_from_file_location("d4rl_infos", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DATASET_URLS, module.REF_MIN_SCORE, module.REF_MAX_SCORE


def d4rl_file(name: str) -> Path | None:
    """The path of a file in the installed d4rl package, without importing d4rl; None if it is not installed."""
    try:
        files = importlib.metadata.files("d4rl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.as_posix() == name), None)


def lookup(dataset: str, fetch: FetchParams) -> DatasetInfo:
    """Facts about `dataset`: the catalog's, overridden by what `fetch` sets.

    Raises ValueError if the id is unknown and `fetch` does not set enough, or if `fetch` is inconsistent.
    """
    key = f"datasets.{dataset}.fetch"
    info = known_datasets().get(dataset)
    if info is None:
        if fetch.path is None or (fetch.max_episode_steps is None and fetch.source not in WITH_EPISODES):
            close = difflib.get_close_matches(dataset, known_datasets(), n=3)
            raise ValueError(
                f"unknown dataset {dataset!r}"
                + (f"; did you mean {' or '.join(map(repr, close))}?" if close else "")
                + "\nFor your own file, params.yaml must set its path and the maximal length of an episode:"
                + f"\n  datasets:\n    {dataset}:\n      fetch: {{path: FILE.hdf5, max_episode_steps: 1000}}"
                + "\nand, to evaluate, `environment` (a gymnasium id), `reference_min_score` and `reference_max_score`"
            )
        info = DatasetInfo(dataset, suite_of(dataset), "file", None, None, None, fetch.max_episode_steps, None, None)
    source = fetch.source or ("file" if fetch.path else info.source)
    if fetch.path is None and source in WITH_EPISODES:
        raise ValueError(f"{key}: source {source!r} needs a path: set `path` to the dataset's folder")
    if fetch.path is not None and source not in ("file", *WITH_EPISODES):
        raise ValueError(f"{key}: source {source!r} takes no path: remove `path`, or write `source: file`")
    if source == "bundled" and info.source != "bundled":
        raise ValueError(f"{key}.source: {dataset} is not bundled with the project: remove `source`")
    if info.url is None and (source == "d4rl" or (source == "file" and fetch.path is None)):
        raise ValueError(
            f"{key}: no download address of {dataset} is known: get its HDF5 file, or collect one as docs/d4rl.md describes, "
            f"and set {key}.path to it"
        )
    if fetch.observations is not None and source not in ("lerobot", "minari"):
        raise ValueError(f"{key}: source {source!r} takes no observations: remove `observations`")
    if fetch.reward is not None and source != "lerobot" and (source, fetch.reward) != ("file", NO_REWARD):
        raise ValueError(f"{key}: source {source!r} takes no reward: remove `reward`")
    facts = (
        *("suite", "environment", "environment_kwargs", "max_episode_steps", "reference_min_score", "reference_max_score"),
    )
    overrides = {name: value for name in facts if (value := getattr(fetch, name)) is not None}
    path = info.path if source == "bundled" else fetch.path and fetch.path.expanduser()
    observations = tuple(fetch.observations) if fetch.observations and source == "minari" else None
    info = replace(info, source=source, path=path, observations=observations, **overrides)
    low, high = info.reference_min_score, info.reference_max_score
    if (low is None) != (high is None) or (low is not None and high is not None and low >= high):
        raise ValueError(f"{key}: reference_min_score ({low}) and reference_max_score ({high}) must both be set, min below max")
    return info


def with_environment(info: DatasetInfo, found: OwnEnvironment | None) -> DatasetInfo:
    """`info` with the environment that the dataset itself names, if it names one; a limit of steps in `info` stays."""
    if found is None:
        return info
    limit = info.max_episode_steps or found.max_episode_steps
    return replace(info, environment=found.environment, environment_kwargs=found.environment_kwargs, max_episode_steps=limit)
