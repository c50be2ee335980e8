"""Stage fetch: a dataset's files, downloaded if needed -> data/raw/DATASET: episodes as arrays, and a validation report.

Example: python -m pipelines.stages.fetch hopper-medium-replay
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.command_line import Dataset, main
from pipelines.stages.params import FetchStage, require_safe
from tap.data.action_bounds import with_params
from tap.data.catalog import DatasetInfo, with_environment
from tap.data.download import obtain
from tap.data.recording import Recording, open_recording
from tap.data.validation import validate
from tap.envs.trial import check_environment
from tap.settings import FetchParams, Runtime


def run(dataset: Dataset) -> None:
    stage, folder = FetchStage.read(dataset), Path("data/raw") / dataset
    with recording_of(stage.info, stage.params) as recording:
        validation = validate(recording)
        # Written last, so that a report always describes the arrays next to it.
        (folder / "validation.json").unlink(missing_ok=True)
        recording.save(folder / "episodes")
    validation.write(folder / "validation.json")
    length = validation.length
    rewards = f"mean return {validation.episode_return.mean:.1f}" if validation.has_rewards else "no rewards"
    print(
        f"{dataset}: {validation.transitions} transitions in {validation.episodes} episodes of {length.min} to "
        f"{length.max} steps, {rewards}, from {validation.source} {validation.origin}"
    )
    for warning in validation.warnings:
        print(f"{dataset}: note: {warning}")


@contextmanager
def recording_of(info: DatasetInfo, fetch: FetchParams) -> Iterator[Recording]:
    """A dataset's file, opened and checked against its environment. Raises ValueError."""
    require_safe(info)
    runtime = Runtime()
    shared = runtime.minari_datasets_path if info.source == "minari" else runtime.d4rl_dataset_dir
    source = obtain(info, shared.expanduser(), Path("datasets.lock.json"))
    with open_recording(source, info, fetch) as recording:
        recording = _in_own_environment(recording)
        bounds = check_environment(recording.info, recording.table.observation_dim, recording.table.action_dim)
        if bounds is not None:
            recording = replace(recording, action_bounds=with_params(bounds, fetch, info.id))
        if fetch.clip_actions and np.isinf(recording.action_bounds).all():
            key = f"datasets.{info.id}.fetch"
            raise ValueError(f"{key}.clip_actions: actions have no bounds: set {key}.action_low and action_high, or remove it")
        yield recording


def _in_own_environment(recording: Recording) -> Recording:
    """The recording with the environment that its dataset names, if it can be made and params name none."""
    table, info = recording.table, recording.info
    found, notes = table.facts.environment, list(table.facts.notes)
    if found is not None and info.environment is None:
        named = with_environment(info, found)
        try:
            check_environment(named, table.observation_dim, table.action_dim)
            return replace(recording, info=named)
        except ValueError as error:
            notes.append(f"it was recorded in {found.environment}, in which no policy can be evaluated here: {error}")
    return replace(recording, table=replace(table, facts=replace(table.facts, environment=None, notes=notes)))


if __name__ == "__main__":
    main(run)
