"""MLflow's registry: policies logged as models, their versions, aliases and tags."""

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlflow
import numpy as np
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

from tap.files import read_json
from tap.store import connect, failure, unless_missing
from tap.tracking import Run


def log_policy(run: Run, policy_folder: Path, example_observations: np.ndarray) -> None:
    """Keep the policy of a folder as an MLflow model with all code that it needs; `Run.register` makes it a version.

    `example_observations` (n, O) are kept as the input example.
    """
    layout = read_json(policy_folder / "vqvae.json")["layout"]
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.float64), (-1, layout["observation_dim"]))]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, layout["action_dim"]))]),
        params=ParamSchema([ParamSpec("seed", DataType.long, 0), ParamSpec("details", DataType.boolean, False)]),
    )
    code = Path(__file__).parent
    run.log_model(
        lambda folder: mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=str(code / "serving.py"),
            artifacts={"policy": str(policy_folder)},
            code_paths=[str(code)],
            signature=signature,
            input_example=example_observations.astype(np.float64),
            pip_requirements=_requirements(),
        )
    )


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str
    tags: dict[str, str]

    @classmethod
    def of(cls, found: ModelVersion) -> Self:
        """From MLflow's own, whose number is an int in some stores and a string in others."""
        return cls(found.name, str(found.version), dict(found.tags))


class Registry:
    """Registered models, their versions, aliases and tags. Its methods raise MlflowException; see `open_registry`."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def version_of_run(self, name: str, key: str) -> Version | None:
        """The newest version of `name` that the run `key` registered."""
        found = self._client.search_model_versions(f"name = '{name}' and tags.run_key = '{key}'")
        return Version.of(max(found, key=_number)) if found else None

    def version(self, name: str, version: str) -> Version | None:
        """The version of that number."""
        return unless_missing(lambda: Version.of(self._client.get_model_version(name, version)))

    def alias(self, name: str, alias: str) -> Version | None:
        """The version that an alias points at."""
        return unless_missing(lambda: Version.of(self._client.get_model_version_by_alias(name, alias)))

    def set_alias(self, version: Version, alias: str) -> None:
        """Point an alias at a version."""
        self._client.set_registered_model_alias(version.name, alias, version.version)

    def set_tags(self, version: Version, tags: Mapping[str, Any]) -> None:
        """Set tags of a version."""
        for key, value in tags.items():
            self._client.set_model_version_tag(version.name, version.version, key, str(value))

    def act_once(self, version: Version) -> np.ndarray:
        """Load a version and let it act on its input example: (n, A)."""
        model = mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}")
        return np.asarray(model.predict(model.input_example))

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
    """The registry of a store. Inside, whatever MLflow raises becomes a ValueError that names the store."""
    try:
        yield Registry(connect(tracking_uri))
    except MlflowException as error:
        message = f"{failure(tracking_uri, error)}: check MLFLOW_TRACKING_URI, and that the server runs"
        raise ValueError(message) from error


def _number(version: ModelVersion) -> int:
    return int(version.version)


def _pages(search: Callable[..., Any], condition: str) -> Iterator[Any]:
    page = search(condition)
    yield from page
    while page.token:
        page = search(condition, page_token=page.token)
        yield from page


def _requirements() -> list[str]:
    """This package's own dependencies, without extras, as they are installed here; MLflow adds itself."""
    declared = importlib.metadata.requires("tap-planner") or []
    names = [re.split(r"[^\w.-]", line)[0] for line in declared if "extra ==" not in line]
    return [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in names]  # no "+cpu": indexes lack it
