"""Stage fetch: a dataset's file, from wherever it is -> data/raw/DATASET, validated.

Example: python -m pipelines.stages.fetch hopper-medium-replay
"""

from pathlib import Path
from typing import Any

from pipelines.command_line import Dataset, main
from pipelines.stages.params import FetchStage
from tap.data.catalog import DatasetInfo
from tap.data.download import obtain
from tap.data.episodes import Episodes
from tap.data.hdf5 import load_episodes
from tap.envs.make import make_environment
from tap.files import write_json
from tap.settings import FetchParams, Runtime


def run(dataset: Dataset) -> None:
    stage = FetchStage.read(dataset)
    episodes, validation = validate(stage.info, stage.params)
    folder = Path("data/raw") / dataset
    episodes.save(folder / "episodes")
    write_json(folder / "validation.json", validation)
    length, mean = validation["length"], validation["return"]["mean"]
    print(
        f"{dataset}: {validation['transitions']} transitions in {validation['episodes']} episodes of {length['min']} to "
        f"{length['max']} steps, mean return {mean:.1f}, from {validation['source']} {validation['origin']}"
    )
    for warning in validation["warnings"]:
        print(f"{dataset}: note: {warning}")


def validate(info: DatasetInfo, fetch: FetchParams) -> tuple[Episodes, dict[str, Any]]:
    """Get a dataset's file and cut it into episodes, which are checked: these, and the validation report. Raises ValueError."""
    source = obtain(info, Runtime().d4rl_dataset_dir.expanduser(), Path("datasets.lock.json"))
    episodes, validation = load_episodes(source, info, fetch)
    check_environment(info, episodes)
    return episodes, validation


def check_environment(info: DatasetInfo, episodes: Episodes) -> None:
    """Raise ValueError where the environment to evaluate in has other dimensions than the data, or cannot be made.

    A dataset without environment passes.
    """
    if info.environment is None:
        return
    environment = make_environment(info)
    try:
        for name, space, dim in (
            ("observations", environment.observation_space, episodes.observation_dim),
            ("actions", environment.action_space, episodes.action_dim),
        ):
            if space.shape != (dim,):
                raise ValueError(
                    f"{info.id}: {name} have {dim} dimensions in the data, but shape {space.shape} in {info.environment}: "
                    f"correct datasets.{info.id}.fetch.environment in params.yaml, or use a file of that environment"
                )
    finally:
        environment.close()


if __name__ == "__main__":
    main(run)
