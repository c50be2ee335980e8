"""What DVC runs: the instances of the stages in dvc.yaml, which of them are stale, and one `dvc` command at a time."""

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import yaml

from pipelines.orchestration import process
from tap.files import write_atomically
from tap.settings import read_params_file
from tap.yaml_file import require_no_conflict

PARAMS = Path("params.yaml")
DVC_FOLDER, CACHE, LOCK_FILE = Path(".dvc/tmp"), Path(".dvc/cache"), Path("dvc.lock")
# What DVC prints after each stage: repeated advice about git and remotes.
ADVICE = re.compile(
    r"(Generating|Updating) lock file|To (track the changes|enable auto staging)|\t(git add|dvc config)|Use `dvc push`"
)
NO_GIT = "is not a git repository"  # in DVC's words
# What resolves a conflict of a merge in the files that DVC reads besides params.yaml.
RESOLUTIONS = {
    Path("dvc.yaml"): "keep one version, and remove the markers",
    LOCK_FILE: "run `git checkout --ours dvc.lock`, or delete it; the next run renews it",
}
T = TypeVar("T")
LOG_PROGRESS_EVERY = 30  # seconds; a terminal shows every step of a progress bar instead


@dataclass(frozen=True)
class Instance:
    """One stage of dvc.yaml for one value of its matrix."""

    stage: str
    dataset: str | None = None
    seed: int | None = None
    variant: str | None = None  # an ablation, or a method other than TAP

    @property
    def _key(self) -> tuple[str | int | None, ...]:
        return (self.dataset, self.seed, self.variant)

    def __str__(self) -> str:
        """DVC's name for it: STAGE@DATASET-SEED-VARIANT."""
        key = "-".join(str(part) for part in self._key if part is not None)
        return f"{self.stage}@{key}" if key else self.stage

    def builds_on(self, earlier: "Instance") -> bool:
        """Whether this one reads what `earlier` writes: the report reads everything, others what BUILDS_ON says.

        The stage `params` does not count: it writes one file for each instance, which `dvc status` compares.
        """
        if self.stage == "report":
            return earlier not in (self, PARAMS_STAGE)
        shared = zip(earlier._key, self._key, strict=True)
        return earlier.stage in BUILDS_ON[self.stage] and all(theirs in (None, mine) for theirs, mine in shared)


PARAMS_STAGE = Instance("params")
TAP = ("train_vqvae", "train_prior", "train_critic", "train_actor", "evaluate")
OTHER_METHOD = ("train_methods", "methods")  # after `teacher`
MODEL_ABLATION = ("ablation_vqvae", "ablation_prior", "ablation_critic", "ablation_actor", "model_ablations")
# The stages of the same dataset, seed and variant whose results each stage reads, as `deps` and `outs` of dvc.yaml say.
BUILDS_ON = {
    "params": (),
    "fetch": (),
    "train_vqvae": ("fetch",),
    "train_prior": ("train_vqvae",),
    "train_critic": ("train_vqvae",),
    "train_actor": ("train_vqvae",),
    "evaluate": ("train_prior", "train_critic", "train_actor"),
    "diagnose": ("evaluate",),
    "teacher": ("train_prior", "train_critic", "train_actor"),
    "train_methods": ("fetch", "teacher"),
    "methods": ("train_methods",),
    "ablations": ("train_prior", "train_critic", "train_actor"),
    "ablation_vqvae": ("fetch",),
    "ablation_prior": ("ablation_vqvae",),
    "ablation_critic": ("ablation_vqvae",),
    "ablation_actor": ("ablation_vqvae",),
    "model_ablations": ("ablation_prior", "ablation_critic", "ablation_actor"),
}


def instances(datasets: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Instance]:
    """Every stage to run for `datasets` and `seeds` (None: all of params.yaml), each after what it builds on.

    Raises ValueError if params.yaml does not list one of them: DVC has stages only for what it lists; and if a merge left a
    conflict in one of DVC's files.
    """
    for path, remedy in RESOLUTIONS.items():
        if path.exists():
            require_no_conflict(path, path.read_text(errors="replace"), remedy)
    file = read_params_file(PARAMS)
    chosen = [PARAMS_STAGE]
    for dataset in _listed("datasets", datasets, list(file.datasets)):
        chosen.append(Instance("fetch", dataset))
        for seed in _listed("seeds", seeds, file.seeds):
            chosen += [Instance(stage, dataset, seed) for stage in TAP]
            chosen.append(Instance("teacher", dataset, seed))
            chosen += [Instance(stage, dataset, seed, method) for method in file.methods for stage in OTHER_METHOD]
            if seed == file.seeds[0]:
                chosen.append(Instance("diagnose", dataset, seed))
            if dataset in file.ablate.datasets:
                chosen += [Instance("ablations", dataset, seed, ablation) for ablation in file.ablate.planners]
                for ablation in file.ablate.models:
                    chosen += [Instance(stage, dataset, seed, ablation) for stage in MODEL_ABLATION]
    return [*chosen, Instance("report")]


def _listed(key: str, wanted: Sequence[T] | None, listed: list[T]) -> list[T]:
    for value in wanted or ():
        if value not in listed:
            raise ValueError(
                f"{PARAMS}: {key}: {value!r} is not listed; add it there, or choose from {', '.join(map(str, listed))}"
            )
    return list(dict.fromkeys(wanted)) if wanted else listed


def stale(chosen: Sequence[Instance]) -> set[Instance]:
    """The instances whose command, params, inputs or outputs changed since their last run, and all that build on them.

    If the stage `params` is stale, it runs first, because the others depend on its files. One `dvc status` for all takes as
    long as `dvc repro` of a single fresh stage. Raises ValueError if params are invalid, or DVC fails.
    """
    if PARAMS_STAGE in chosen:
        _resolve_params()
    lines: list[str] = []
    if dvc("status", "--json", *map(str, chosen), show=lambda line, _: lines.append(line)):
        raise ValueError(_remedy(lines) or "\n".join(["`dvc status` failed:", *lines]))
    changed = json.loads(next(line for line in lines if line.startswith("{")))
    found: set[Instance] = set()
    for instance in chosen:
        if str(instance) in changed or any(instance.builds_on(earlier) for earlier in found):
            found.add(instance)
    return found


def _resolve_params() -> None:
    lines: list[str] = []
    if dvc("repro", "--single-item", str(PARAMS_STAGE), show=lambda line, _: lines.append(line)):
        output = "\n".join(line for line in lines if not line.startswith(("Running stage", "> ", "ERROR: failed to reproduce")))
        raise ValueError(_remedy(lines) or output.strip().removeprefix("error: "))


def _remedy(lines: Sequence[str]) -> str | None:
    """What to do about an error of DVC that does not say so."""
    if any(NO_GIT in line for line in lines):
        here = Path.cwd()
        return (
            f"{here} {NO_GIT}, which DVC needs: run `git init` here; or `dvc config --local core.no_scm true`, to do without it"
        )
    return None


def dvc(*arguments: str, show: Callable[[str, bool], None], environment: Mapping[str, str] | None = None) -> int:
    """Run one `dvc` command, once no other flow in this folder is running one; see `process.run`.

    Threads of this process can run several at once, of different stage instances.
    """
    with TURN.taken(show) as lock:
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
        return process.run(command, show, environment, keep_open=[lock])


def _repair() -> None:
    """Undo what a DVC that was killed leaves in this folder, and what would stop every later one."""
    _remove_dead_locks()
    _restore_lock_file()
    _clean_cache()


def _clean_cache() -> None:
    """Remove what a DVC leaves in its cache where it is killed or the disk fails, unless one is at work there now."""
    DVC_FOLDER.mkdir(parents=True, exist_ok=True)
    with (DVC_FOLDER / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as DVC does
        except BlockingIOError:
            return
        for entry in CACHE.glob("runs/*/*"):
            with suppress(OSError):  # it is not empty
                entry.rmdir()  # DVC fails where an entry of its run cache is empty
        for part in CACHE.glob("files/md5/*/.*.tmp"):
            with suppress(OSError):  # it is another user's
                part.unlink()


def _remove_dead_locks() -> None:
    """DVC considers a killed run's lock active if another process now has its id, as in a restarted container."""
    rwlock = DVC_FOLDER / "rwlock"
    if rwlock.exists() and not any(_is_dvc(int(pid)) for pid in re.findall(r'"pid": (\d+)', rwlock.read_text())):
        rwlock.unlink(missing_ok=True)


def _restore_lock_file() -> None:
    """DVC writes dvc.lock in place, and a kill leaves a part of it: keep a copy of a whole one, and put it back for a part.

    What was computed since the copy is in DVC's run cache. A file with git's conflict markers is left to the user.
    """
    copy = DVC_FOLDER / LOCK_FILE.name
    content = LOCK_FILE.read_bytes() if LOCK_FILE.exists() else None
    if content is None or b"<<<<<<<" in content or (copy.exists() and content == copy.read_bytes()):
        return
    if _is_whole(content):
        write_atomically(copy, content)
        return
    print(f"{LOCK_FILE} is not complete, as a kill or a full disk leaves it: what it lacks is restored from DVC's cache")
    if copy.exists():
        write_atomically(LOCK_FILE, copy.read_bytes())
    else:
        LOCK_FILE.unlink()


def _is_whole(content: bytes) -> bool:
    """Whether a dvc.lock is complete, as far as its form shows: a part of a valid file may be valid YAML."""
    if not content.endswith(b"\n"):  # half of a digest may stand at its end
        return False
    try:
        stages = yaml.load(content, yaml.CSafeLoader)["stages"].values()
        files = [file for stage in stages if stage["cmd"] for file in (*stage.get("deps", ()), *stage.get("outs", ()))]
        return all(isinstance(file["path"], str) for file in files)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return False


TURN = process.Turn(DVC_FOLDER / "tap.lock", _repair)


def _is_dvc(pid: int) -> bool:
    try:
        return any(Path(part).name == "dvc" for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


_passing: dict[str, str] = {}  # the last passing line of each running command, by its label; for the terminal


def terminal_or_log(log: Callable[[str], None], label: str = "") -> Callable[[str, bool], None]:
    """A `show` for `process.run`: lines go to `log`; passing ones are shown in place on a terminal, at intervals in a log.

    Passing lines of commands that run at the same time share the terminal's last line.
    """
    terminal = sys.stderr.isatty() and "CI" not in os.environ
    logged = time.monotonic()

    def show(line: str, passing: bool) -> None:
        nonlocal logged
        if terminal:
            _passing.pop(label, None)
            if passing:
                _passing[label] = line
            bars = list(_passing.copy().values())
            width = (shutil.get_terminal_size().columns - 1) // max(1, len(bars))
            print(f"\r\033[K{''.join(f'{bar:{width}.{width}}' for bar in bars)}", end="", file=sys.stderr, flush=True)
        elif passing:
            passing = time.monotonic() < logged + LOG_PROGRESS_EVERY
            logged = logged if passing else time.monotonic()
        if line.strip() and not passing and not ADVICE.match(line):
            log(line)

    return show
