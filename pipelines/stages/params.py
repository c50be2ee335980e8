"""Stage params: params.yaml and the catalog -> data/params: the params of each stage, merged and validated.

The other stages read these files, and depend on them instead of on params.yaml. So a stage goes stale if one of its own params
changes, in whichever layer of params.yaml, but not if a dataset is added or another stage's params change.

    data/params/DATASET/STAGE.json             fetch, train_vqvae, train_prior, train_critic, train_actor, evaluate
    data/params/DATASET/train_METHOD.json      of each method that params.yaml lists, with digests of its code
    data/params/DATASET/methods_METHOD.json
    data/params/DATASET/ABLATION/STAGE.json    evaluate; for an ablation that trains models also the stages that train them

Example: python -m pipelines.stages.params
"""

import ast
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from pipelines.command_line import main
from tap.data.catalog import DatasetInfo, lookup
from tap.files import read_json, sha256, write_json
from tap.methods.catalog import CATALOG
from tap.settings import (
    METHODS,
    EvaluateParams,
    FetchParams,
    ProtocolParams,
    Scale,
    Section,
    TrainActorParams,
    TrainCriticParams,
    TrainPriorParams,
    TrainVqvaeParams,
    load_params,
    params_section,
    read_params_file,
)

PARAMS, FOLDER = Path("params.yaml"), Path("data/params")
# The folders that stages write into: DVC removes a stage's files before it runs, and `make clean` all of them.
OUTPUTS = tuple(
    Path("data") / name
    for name in (
        "raw",
        "vqvae",
        "prior",
        "critic",
        "actor",
        "teacher",
        *METHODS,
        "metrics",
        "params",
        "lineage",
        "plots",
        "report",
        "scores",
    )
)
# Prefixes of the modules that methods do not all share.
METHOD_CODE = (
    "tap.methods.",
    "tap.data.history",
    "tap.model.",
    "tap.planning.",
    "tap.traced",
    "pipelines.stages.train_",
)


class StageParams(Section):
    """The params of one stage for one dataset, or for one of its ablations or methods."""

    stage: ClassVar[str]

    @classmethod
    def path(cls, dataset: str, variant: str | None = None) -> Path:
        """The file, which the stage `params` writes. The variant is an ablation; of MethodsStage, a method."""
        return FOLDER / dataset / (variant or "") / f"{cls.stage}.json"

    @classmethod
    def read(cls, dataset: str, variant: str | None = None) -> Self:
        """Read the file. Raises ValueError if the stage `params` has not written it."""
        if "DVC_STAGE" not in os.environ:  # DVC runs the stage `params` first; if a stage is run by hand, it is run here
            run()
        path = cls.path(dataset, variant)
        try:
            return cls.model_validate(read_json(path))
        except (FileNotFoundError, ValidationError) as error:
            where = f"{dataset}, {variant}" if variant else dataset
            raise ValueError(
                f"{path} has no valid params of {where} ({type(error).__name__}): check that {PARAMS} lists it, "
                "and run `dvc repro params`"
            ) from None


class FetchStage(StageParams):
    """Where the dataset comes from, what it is, and how it is cut into episodes."""

    stage: ClassVar[str] = "fetch"
    info: DatasetInfo
    params: FetchParams


class TrainVqvaeStage(StageParams):
    """The VQ-VAE's params; the scale is only recorded."""

    stage: ClassVar[str] = "train_vqvae"
    scale: Scale
    params: TrainVqvaeParams


class TrainPriorStage(StageParams):
    """The prior's params; the scale is only recorded."""

    stage: ClassVar[str] = "train_prior"
    scale: Scale
    params: TrainPriorParams


class TrainCriticStage(StageParams):
    """The critic's params; the scale is for people to see."""

    stage: ClassVar[str] = "train_critic"
    scale: Scale
    params: TrainCriticParams


class TrainActorStage(StageParams):
    """The actor's params; the scale is for people to see."""

    stage: ClassVar[str] = "train_actor"
    scale: Scale
    params: TrainActorParams


class TrainMethodStage(StageParams):
    """A method's params, and the digests of its code; the scale is for people to see.

    The module that trains the method has a subclass, with `stage` train_METHOD and the type of `params`.
    """

    scale: Scale
    params: Any  # a Section with `fit`
    code: dict[str, str]


class EvaluateStage(StageParams):
    """The environment, the planner and the protocol, without the location of the dataset's file."""

    stage: ClassVar[str] = "evaluate"
    scale: Scale
    info: DatasetInfo
    fetch: FetchParams
    params: EvaluateParams
    trains: bool  # whether an ablation trains its own models


class MethodsStage(StageParams):
    """The environment and the protocol, as for `evaluate`, and the digests of the code of a method's policy."""

    stage: ClassVar[str] = "methods"
    scale: Scale
    info: DatasetInfo
    fetch: FetchParams
    params: ProtocolParams
    code: dict[str, str]

    @classmethod
    def path(cls, dataset: str, variant: str | None = None) -> Path:
        return FOLDER / dataset / f"methods_{variant}.json"


def run() -> None:
    """Write the params of every dataset and of every ablation that params.yaml lists under `ablate`, and no others."""
    resolved = dict(resolve(PARAMS))  # all, before anything is written
    for path, params in resolved.items():
        write_json(path, params.model_dump(mode="json"))
    for path in set(FOLDER.rglob("*.json")) - resolved.keys():  # which DVC keeps: see dvc.yaml
        path.unlink()


def require_safe(info: DatasetInfo) -> None:
    """Raise ValueError if a dataset's file lies where stages write: it would be removed."""
    if info.path is None:
        return
    for place in (info.path.absolute(), info.path.resolve()):
        for folder in OUTPUTS:
            if place.is_relative_to(folder.absolute()) or place.is_relative_to(folder.resolve()):
                raise ValueError(
                    f"datasets.{info.id}.fetch.path in {PARAMS}: {info.path} lies in {folder}, where stages replace and remove "
                    f"files: move it, for example to data/{info.path.name}"
                )


def resolve(params_yaml: Path) -> Iterator[tuple[Path, StageParams]]:
    """All files of the stage, with their content. Raises ValueError with the path of the invalid key in params.yaml."""
    file = read_params_file(params_yaml)
    for dataset in file.datasets:
        ablations = [*file.ablate.planners, *file.ablate.models] if dataset in file.ablate.datasets else []
        for ablation in (None, *ablations):
            params = load_params(params_yaml, dataset, ablation=ablation)
            info = lookup(dataset, params.fetch)
            require_safe(info)
            simulated = replace(info, path=None, url=None)
            fetch = params.fetch.model_copy(update={"source": None, "path": None})
            trains = ablation is not None and file.ablations[ablation].trains
            stages: list[StageParams] = [
                EvaluateStage(scale=params.scale, info=simulated, fetch=fetch, params=params.evaluate, trains=trains)
            ]
            if ablation is None:
                protocol = ProtocolParams.model_validate(params.evaluate.model_dump(include=set(ProtocolParams.model_fields)))
                stages.append(FetchStage(info=info, params=params.fetch))
                for method in file.methods:
                    section, policy = params_section(method), f"tap.methods.{CATALOG[method].module}"
                    code = code_of(f"pipelines.stages.{section}", policy)
                    trained = TrainMethodStage(scale=params.scale, params=getattr(params, section), code=code)
                    yield FOLDER / dataset / f"train_{method}.json", trained
                    evaluated = MethodsStage(
                        scale=params.scale, info=simulated, fetch=fetch, params=protocol, code=code_of(policy)
                    )
                    yield MethodsStage.path(dataset, method), evaluated
            if ablation is None or trains:
                stages.append(TrainVqvaeStage(scale=params.scale, params=params.train_vqvae))
                stages.append(TrainPriorStage(scale=params.scale, params=params.train_prior))
                stages.append(TrainCriticStage(scale=params.scale, params=params.train_critic))
                stages.append(TrainActorStage(scale=params.scale, params=params.train_actor))
            for stage in stages:
                yield stage.path(dataset, ablation), stage


def code_of(*modules: str) -> dict[str, str]:
    """The SHA-256 of each of the modules, and of those of METHOD_CODE that they import, directly or not.

    So an edit of one method's code leaves the others up to date. dvc.yaml lists the code that all methods share.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or not name.startswith(METHOD_CODE):
            continue
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin, name
        found[name] = sha256(Path(spec.origin))
        nodes = ast.walk(ast.parse(Path(spec.origin).read_text()))
        waiting += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main(run)
