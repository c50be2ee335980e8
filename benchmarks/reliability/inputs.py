"""Users' files, made at random: each is read right, or refused in one sentence that names it, in bounded memory and time.

A dataset that is read is compared with a plain reader, and params.yaml with what DVC reads. A case that ends in any other way,
a traceback, a crash or a hang, is reduced to the smallest such case, printed, and ends the program. Prints JSON: the number of
cases by their outcome, and seconds.
"""

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from tqdm import tqdm

from benchmarks.reliability import dataset_files, params_files
from benchmarks.reliability.isolated import outcome_of
from pipelines.stages.params import resolve
from tap.data.catalog import lookup
from tap.data.recording import open_recording
from tap.data.validation import validate
from tap.settings import FetchParams, read_params_file

ALLOWANCE = 64 << 20  # bytes that reading a file may take beyond 4 times the file's size
SECONDS = 20  # that a file may take; most take milliseconds
LONGEST = 1000  # characters of a line of a message
PLAIN_RULES = ("mine", "ant-medium-v2")  # datasets whose episodes end at flags and next_observations alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", type=int, default=10_000, help="dataset files (default: %(default)s; 0: none)")
    parser.add_argument("--params", type=int, default=10_000, help="files params.yaml (default: %(default)s; 0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: %(default)s)")
    options = parser.parse_args()
    checks = {
        "datasets": (dataset_files.cases(), check_dataset, options.datasets),
        "params": (params_files.cases(), check_params, options.params),
    }
    result = {name: campaign(*check, options.seed) for name, check in checks.items() if check[-1]}
    print(json.dumps(result, indent=2))


def campaign(cases: SearchStrategy[Any], check: Callable[[Any, Path], str], count: int, seed: int) -> dict[str, Any]:
    """Check `count` cases; the number of each outcome, and seconds. Raises AssertionError with the smallest case that fails."""
    outcomes, start = Counter[str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as root, tqdm(total=count, desc=check.__name__, disable=None) as bar:
        folder = Path(root) / "case"

        @hypothesis.seed(seed)
        @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
        @given(cases)
        def every_case(case: Any) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            outcome = check(case, folder)
            assert outcome in ("read", "refused"), outcome
            outcomes[outcome] += 1
            bar.update()

        every_case()
    return {"cases": outcomes.total(), **outcomes, "seconds": round(time.perf_counter() - start)}


PHASES = (Phase.generate, Phase.shrink)


def check_dataset(case: dataset_files.Case, folder: Path) -> str:
    """Make one dataset's file and read it: "read", "refused", or what is wrong."""
    path = folder / "data.hdf5"
    outcome = _outcome(lambda: dataset_files.write(case, path), lambda: _read_dataset(case, path), path)
    if case.valid and case.dataset in PLAIN_RULES and outcome != "read":
        return f"a valid file is not read: {outcome}"
    return verdict(outcome, path)


def _read_dataset(case: dataset_files.Case, path: Path) -> str:
    warnings.simplefilter("error")  # a user would see them
    fetch = FetchParams(path=path, max_episode_steps=case.limit, clip_actions=False, max_jump=None)
    try:
        with open_recording(path, lookup(case.dataset, fetch), fetch) as recording:
            json.dumps(validate(recording).as_json(), allow_nan=False)
            episodes = [part.select([number]) for part in recording.chunks() for number in range(part.num_episodes)]
    except ValueError as error:
        return f"refused: {error}"
    if case.dataset in PLAIN_RULES:
        plain = dataset_files.plain_episodes(path, case.limit)
        if len(plain) != len(episodes):
            return f"{len(episodes)} episodes, but there are {len(plain)}"
        for number, (mine, expected) in enumerate(zip(episodes, plain, strict=True)):
            for name, values in expected.items():
                if not np.array_equal(getattr(mine, name), values):
                    return f"{name} of episode {number} are {getattr(mine, name)}, but in the file {values}"
    return "read"


def check_params(case: params_files.Case, folder: Path) -> str:
    """Make one params.yaml and read it: "read", "refused", or what is wrong."""
    path = folder / "params.yaml"
    outcome = _outcome(lambda: params_files.write(case, path), lambda: _read_params(path), path)
    return verdict(outcome, path) if case.edits else outcome


def _read_params(path: Path) -> str:
    try:
        file, resolved = read_params_file(path), dict(resolve(path))
    except ValueError as error:
        return f"refused: {error}"
    return params_files.disagreement(file, resolved, params_files.plain_tree(path)) or "read"


def _outcome(write: Callable[[], None], read: Callable[[], str], path: Path) -> str:
    return outcome_of(write, read, lambda: ALLOWANCE + 4 * path.stat().st_size, SECONDS)


def verdict(outcome: str, path: Path) -> str:
    """An outcome, or what is wrong with the message of a refusal: each mistake is one line, and the first names the file."""
    kind, _, message = outcome.partition(": ")
    if kind != "refused":
        return outcome
    lines = message.split("\n")
    if path.name not in message or len(lines) > 100 or max(map(len, lines)) > LONGEST or not "".join(lines).isprintable():
        return f"not one sentence that names the file: {message!r}"
    return "refused"


if __name__ == "__main__":
    main()
