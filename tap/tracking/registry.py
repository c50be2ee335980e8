"""MLflow's registry: policies logged as models, their versions, aliases and tags.

A logged model contains the code that it runs with. So before a model is loaded, its files are compared with the digest that was
recorded when it was logged.
"""

import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import mlflow
import numpy as np
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.store.artifact.models_artifact_repo import REGISTERED_MODEL_META_FILE_NAME
from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType, Object, Property

from tap.data.history import History
from tap.files import folder_sha256
from tap.results import AnyEvaluation, read_evaluation
from tap.tracking.mlflow_store import connect, failure, remedy, unless_missing
from tap.tracking.run import Run

PREFIX = "tap-"
DECISION = "decision "  # prefix of the registered model's tags that are its history; MLflow's page of the model shows them
TIMED_DECISIONS = 5
MODEL_DIGEST = "model_digest"  # tag of a version: of all files of its model
METRICS = "metrics.json"  # an artifact of each run that evaluates: what its stage wrote


def model_name(dataset: str) -> str:
    """The registered model of a dataset's family, which is all releases of one task and kind of data: its id without `-vN`.

    Returns the name of a registered model unchanged.
    """
    return PREFIX + re.sub(r"-v\d+$", "", dataset.removeprefix(PREFIX))


def log_policy(
    run: Run,
    policy_folder: Path,
    example_observations: np.ndarray,
    action_dim: int,
    *,
    remembers: bool = False,
    budget_ms: float | None = None,
) -> str:
    """Log the policy of a folder as an MLflow model with the code that it needs; `Run.register` makes it a version.

    `example_observations` (n, O) become the input example. The model of a policy that `remembers` has the param `history`, and
    of one that plans within a time the param `budget_ms` with this default.
    Returns the digest of the model's files. Raises OSError if the outbox cannot be written.
    """
    params = [ParamSpec("seed", DataType.long, 0), ParamSpec("details", DataType.boolean, False)]
    params += [] if budget_ms is None else [ParamSpec("budget_ms", DataType.double, budget_ms)]
    # A param, because MLflow requires each named tensor of a signature. Of any type, because of lists of doubles MLflow refuses
    # integers, and takes 25 ms for 20 steps.
    lists = [Property(each.name, AnyType(), required=False) for each in fields(History)]  # type: ignore[no-untyped-call]
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.float64), (-1, example_observations.shape[1]))]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, action_dim))]),
        params=ParamSchema(params + ([ParamSpec("history", Object(lists), {})] if remembers else [])),
    )
    code, digest = Path(__file__).parents[1], ""

    def save(folder: Path) -> None:
        nonlocal digest
        try:
            mlflow.pyfunc.save_model(
                path=str(folder),
                python_model=str(code / "serving/policy.py"),
                artifacts={"policy": str(policy_folder)},
                code_paths=[str(code)],
                model_config={"device": None},  # MLflow overrides only keys that it finds here
                signature=signature,
                input_example=example_observations.astype(np.float64),
                pip_requirements=_requirements(),
            )
        except (MlflowException, shutil.Error) as error:  # of a tree's copy: the disk's error is left as a text
            if not (number := re.search(r"\[Errno (\d+)\]", f"{error} {error.__cause__}")):
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        digest = folder_sha256(folder)

    run.log_model(save)
    return digest


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str
    tags: dict[str, str]
    description: str
    mlflow_run: str  # MLflow's id of the run that registered it

    @classmethod
    def of(cls, found: ModelVersion) -> Self:
        """From MLflow's ModelVersion, whose number is an int in some stores and a string in others."""
        return cls(found.name, str(found.version), dict(found.tags), found.description or "", found.run_id or "")


@dataclass(frozen=True)
class Trial:
    """The measurements of a load test."""

    actions: np.ndarray  # (n, A), for its input example
    latency_ms: float  # median of TIMED_DECISIONS, for one state


class Registry:
    """Registered models, their versions, aliases and tags. Its methods raise MlflowException; see `open_registry`."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def version_of_run(self, name: str, key: str) -> Version | None:
        """The newest version of `name` that the run `key` registered."""
        found = self._client.search_model_versions(f"name = '{name}' and tags.run_key = '{key}'")
        return Version.of(max(found, key=_number)) if found else None

    def version(self, name: str, version: str) -> Version | None:
        """The version with that number."""
        return unless_missing(lambda: Version.of(self._client.get_model_version(name, version)))

    def alias(self, name: str, alias: str) -> Version | None:
        """The version that an alias points to."""
        return unless_missing(lambda: Version.of(self._client.get_model_version_by_alias(name, alias)))

    def set_alias(self, version: Version, alias: str) -> None:
        """Make an alias point to a version."""
        self._client.set_registered_model_alias(version.name, alias, version.version)

    def set_tags(self, version: Version, tags: Mapping[str, Any]) -> None:
        """Set tags of a version."""
        for key, value in tags.items():
            self._client.set_model_version_tag(version.name, version.version, key, str(value))

    def describe(self, version: Version, description: str) -> None:
        """Replace the description of a version."""
        self._client.update_model_version(version.name, version.version, description)

    def evaluation(self, version: Version) -> AnyEvaluation | None:
        """What the stage of a version's run measured; None if the run has no valid record of it."""
        with tempfile.TemporaryDirectory() as folder, suppress(MlflowException, OSError, ValueError):
            return read_evaluation(Path(self._client.download_artifacts(version.mlflow_run, METRICS, folder)))
        return None

    def download(self, version: Version, folder: Path) -> Path:
        """Download a version's model into `folder`, and return its path there.

        Raises ValueError if its files do not have the digest of the version's tag; versions of early releases have none.
        """
        model = Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}", dst_path=str(folder)))
        (model / REGISTERED_MODEL_META_FILE_NAME).unlink(missing_ok=True)  # which MLflow adds
        if folder_sha256(model) != version.tags.get(MODEL_DIGEST, folder_sha256(model)):
            raise ValueError(
                f"the files of {version.name} version {version.version} are not those that its evaluation logged, so none was "
                "run: find out who changed them, and evaluate the policy again"
            )
        return model

    def load_test(self, version: Version) -> Trial:
        """Load a version as a server does, on a CPU, and act on its input example.

        Raises ValueError as `download` does, and whatever the model raises.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = self.download(version, Path(folder))
            model = mlflow.pyfunc.load_model(str(path), model_config={"device": "cpu"})
            example = np.asarray(model.input_example)
            actions, seconds = np.asarray(model.predict(example)), []
            for _ in range(TIMED_DECISIONS):
                start = perf_counter()
                model.predict(example[:1])
                seconds.append(perf_counter() - start)
        return Trial(actions, 1000 * float(np.median(seconds)))

    def same_recipe(self, version: Version) -> list[Version]:
        """All versions of the same model that have this version's tag `recipe`, oldest first."""
        condition = f"name = '{version.name}' and tags.recipe = '{version.tags['recipe']}'"
        return [Version.of(found) for found in sorted(_pages(self._client.search_model_versions, condition), key=_number)]

    def record(self, name: str, decision: Mapping[str, Any]) -> str:
        """Add a decision, at most 4,900 characters of JSON, to a registered model's history; returns its `time`."""
        now = datetime.now(UTC)
        time, key = now.isoformat(timespec="seconds"), f"{DECISION}{now:%Y-%m-%d %H.%M.%S.%f}"  # two processes write two tags
        self._client.set_registered_model_tag(name, key, json.dumps({"time": time, **decision}))
        return time

    def history(self, name: str) -> list[dict[str, Any]]:
        """The decisions about a registered model, oldest first; empty if the model does not exist."""
        model = unless_missing(lambda: self._client.get_registered_model(name))
        return [json.loads(value) for key, value in sorted(model.tags.items()) if key.startswith(DECISION)] if model else []

    def versions(self, prefix: str) -> Iterator[tuple[Version, list[str]]]:
        """Every version with its aliases, by name and number, of the models whose name starts with `prefix`."""
        models = _pages(self._client.search_registered_models, f"name LIKE '{prefix}%'")
        for model in sorted(models, key=lambda model: str(model.name)):
            for found in sorted(_pages(self._client.search_model_versions, f"name = '{model.name}'"), key=_number):
                yield (
                    Version.of(found),
                    sorted(alias for alias, number in model.aliases.items() if int(number) == _number(found)),
                )


@contextmanager
def open_registry(tracking_uri: str) -> Iterator[Registry]:
    """The registry of a store. An MlflowException inside the context becomes a ValueError that names the store."""
    try:
        yield Registry(connect(tracking_uri))
    except MlflowException as error:
        raise ValueError(f"{failure(tracking_uri, error)}: {remedy(error)}") from error


def _number(version: ModelVersion) -> int:
    return int(version.version)


def _pages(search: Callable[..., Any], condition: str) -> Iterator[Any]:
    page = search(condition)
    yield from page
    while page.token:
        page = search(condition, page_token=page.token)
        yield from page


def _requirements() -> list[str]:
    """The library's dependencies, without extras, in their installed versions; MLflow adds itself."""
    declared = importlib.metadata.requires("tap-planner") or []
    names = [re.split(r"[^\w.-]", line)[0] for line in declared if "extra ==" not in line]
    return [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in names]  # no "+cpu": indexes lack it
