"""The stages joined: a tiny `dvc repro` in a copy of the project, and what dvc.yaml says against what the modules import."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grimp
import h5py
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, random_episodes, tiny_tree

from pipelines import train_prior
from tap.policy import Policy
from tap.windows import Windows

STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
EPISODE_LENGTHS = [25, 3, 40, 12, 60, 8, 31, 22, 17, 45, 5, 30]


@pytest.mark.parametrize("stage", STAGES)
def test_deps_name_every_module_that_the_stage_imports(stage: str) -> None:
    graph = grimp.build_graph("tap", "pipelines")
    commands = STAGES[stage]["cmd"]
    modules = {command.split()[2] for command in ([commands] if isinstance(commands, str) else commands)}
    imported = modules.union(*map(graph.find_upstream_modules, modules)) - {"tap", "pipelines"}
    files = {f"{name.replace('.', '/')}.py" for name in imported}
    deps = {dep for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert deps == files


def test_codes_do_not_depend_on_how_many_windows_are_encoded_at_once(tiny_policy: Policy, monkeypatch: Any) -> None:
    windows = Windows(
        random_episodes([30, 5, 40], 11, 3), tiny_policy.vqvae.params.windows, tiny_policy.normalizer, torch.device("cpu")
    )
    alone = torch.cat([train_prior.encode(tiny_policy.vqvae, windows, torch.tensor([start])) for start in range(75)])
    monkeypatch.setattr(train_prior, "ENCODED_AT_ONCE", 20)
    torch.testing.assert_close(train_prior.encode(tiny_policy.vqvae, windows), alone)
    assert len(alone.unique(dim=0)) > 5


def run(folder: Path, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    result = subprocess.run(
        command, cwd=folder, env=os.environ | settings | environment, capture_output=True, text=True, timeout=300
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project at tiny scale, with a dataset of its own: a random policy on Hopper, in D4RL's layout."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("tap", "pipelines", "data/bundled", ".dvc/config", ".gitignore", "dvc.yaml", "pyproject.toml"):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "params.yaml").write_text(yaml.safe_dump(tiny_params_file()))
    write_dataset(folder / "my-hopper.hdf5")
    run(folder, "git", "init", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "tiny")
    return folder


def tiny_params_file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    facts = {"environment": "Hopper-v4", "max_episode_steps": 100, "reference_min_score": 0.0, "reference_max_score": 100.0}
    fetch = {"source": "file", "path": "my-hopper.hdf5"} | facts
    ablate = {"datasets": ["my-hopper"], "planners": ["no-search"], "models": ["unconditional"]}
    return content | {"datasets": {"my-hopper": {"fetch": fetch} | tiny_tree()}, "seeds": [3], "ablate": ablate}


def write_dataset(path: Path) -> None:
    rng, rows = np.random.default_rng(0), sum(EPISODE_LENGTHS)
    terminals = np.zeros(rows, bool)
    terminals[np.cumsum(EPISODE_LENGTHS) - 1] = True
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(rows, 11))
        file["actions"] = rng.uniform(-1, 1, (rows, 3))
        file["rewards"] = rng.normal(1, 0.1, rows)
        file["terminals"] = terminals
        file["timeouts"] = np.zeros(rows, bool)


def metrics(folder: Path, stage: str = "evaluate") -> dict[str, Any]:
    """All metrics of a stage by file name, less what is of this machine's speed or names a run."""
    found = {}
    for file in sorted((folder / "data/metrics" / stage).glob("*.json")):
        content = json.loads(file.read_text())
        found[file.name] = {key: value for key, value in content.items() if key not in ("latency_ms", "runs")}
    return found


@pytest.fixture(scope="module")
def reproduced(project: Path) -> Path:
    run(project, "dvc", "repro")
    return project


def test_repro_makes_every_stages_results(reproduced: Path) -> None:
    assert list(metrics(reproduced)) == ["my-hopper-3.json"]
    result = metrics(reproduced)["my-hopper-3.json"]
    wanted = {
        "normalized_score",
        "returns",
        "episodes",
        "dataset",
        "source",
        "environment",
        "versions",
        "seed",
        "behaviour",
        "digest",
    }
    assert wanted <= set(result)
    assert (result["seed"], result["source"], result["dataset"], result["environment"]) == (3, "file", "my-hopper", "Hopper-v4")
    assert result["normalized_score"] == pytest.approx(np.mean(result["returns"]))  # reference scores 0 and 100
    assert result["behaviour"]["mean_return"] == pytest.approx(sum(EPISODE_LENGTHS) / len(EPISODE_LENGTHS), rel=0.05)
    assert list(metrics(reproduced, "ablations")) == ["my-hopper-3-no-search.json", "my-hopper-3-unconditional.json"]
    drawn = metrics(reproduced, "diagnose")["my-hopper-3.json"]
    assert drawn["protocol"].startswith("16 plans of 6 steps, 8 from the first state of each of 2 episodes, seeds 1000-1001")
    assert drawn["digest"] == result["digest"] and {"prior", "uniform"} <= set(drawn)
    assert "my-hopper" in (reproduced / "data/report/index.html").read_text()
    assert (reproduced / "data/report/my-hopper-candidates.png").exists()


def test_lineage_lies_beside_the_weights(reproduced: Path) -> None:
    commit = run(reproduced, "git", "rev-parse", "HEAD").stdout.strip()
    for folder in ("vqvae", "prior"):
        lineage = json.loads((reproduced / f"data/{folder}/my-hopper-3/run.json").read_text())
        assert lineage["git_commit"] == commit
        assert lineage["dataset_digest"] == metrics(reproduced)["my-hopper-3.json"]["digest"]


def test_a_second_repro_does_nothing(reproduced: Path) -> None:
    assert "Data and pipelines are up to date." in run(reproduced, "dvc", "repro").stdout


def test_a_changed_planner_evaluates_again_and_trains_nothing(reproduced: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (reproduced / "data").glob("*/my-hopper-*/*.safetensors")}
    text = (reproduced / "params.yaml").read_text()
    content = yaml.safe_load(text)
    content["evaluate"]["planner"]["likelihood_weight"] = 1.0
    (reproduced / "params.yaml").write_text(yaml.safe_dump(content))
    stale = json.loads(run(reproduced, "dvc", "status", "--json").stdout)
    (reproduced / "params.yaml").write_text(text)
    assert {name.split("@")[0] for name in stale} == {"evaluate", "ablations", "model_ablations", "diagnose"}
    assert before == {file: file.stat().st_mtime_ns for file in (reproduced / "data").glob("*/my-hopper-*/*.safetensors")}


def test_the_policy_is_registered_with_its_evidence(reproduced: Path) -> None:
    script = (
        "import mlflow, json; client = mlflow.MlflowClient();"
        "print(json.dumps([(v.tags, v.description) for v in client.search_model_versions(\"name = 'tap-my-hopper'\")]))"
    )
    ((tags, card),) = json.loads(run(reproduced, sys.executable, "-c", script).stdout.splitlines()[-1])
    result = metrics(reproduced)["my-hopper-3.json"]
    assert tags["seed"] == "3" and tags["recipe"] == result["recipe"] and tags["latency_budget_ms"] == "200.0"
    assert json.loads(tags["returns"]) == result["returns"] and json.loads(tags["scores"]) == pytest.approx(result["returns"])
    assert json.loads(tags["validation"])["episodes"] == len(EPISODE_LENGTHS)
    assert card.startswith("# TAP policy for my-hopper, training seed 3\n") and result["digest"] in card
    promoted = run(reproduced, sys.executable, "-m", "pipelines.cli", "promote", "my-hopper").stdout
    assert "tap-my-hopper version 1: promoted (is the first)" in promoted  # so it acts as it did when it was registered


def test_a_stage_killed_hard_and_run_again_ends_in_the_same_metrics(reproduced: Path) -> None:
    """The models are trained again from nothing; kill -9 strikes when the first checkpoint has appeared."""
    expected = [metrics(reproduced, stage) for stage in ("train_vqvae", "train_prior", "evaluate")]
    shutil.rmtree(reproduced / ".checkpoints")
    for stage in ("train_vqvae", "train_prior"):
        module = f"pipelines.{stage}"
        environment = os.environ | {"PYTHONPATH": str(reproduced), "OMP_NUM_THREADS": "1"}
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{reproduced}/mlflow.db"
        process = subprocess.Popen([sys.executable, "-m", module, "my-hopper", "3"], cwd=reproduced, env=environment)
        while not list((reproduced / ".checkpoints").glob(f"{stage}-*/checkpoint.pt")):
            assert process.poll() is None, "the stage ended before its first checkpoint was seen"
        process.kill()
        process.wait()
        run(reproduced, "dvc", "repro", "-f", "-s", f"{stage}@my-hopper-3")
    run(reproduced, "dvc", "repro", "-f", "-s", "evaluate@my-hopper-3")
    assert [metrics(reproduced, stage) for stage in ("train_vqvae", "train_prior", "evaluate")] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "papper"}, "scale"),
        ({"train_vqvae": {"latent_stepp": 3}}, "latent_stepp: unknown key"),
        ({"datasets": {"hopper-medum-v2": {}}, "ablate": {"datasets": [], "planners": [], "models": []}}, "hopper-medium-v2"),
    ],
)
def test_mistakes_in_params_stop_the_stage_with_one_message(project: Path, change: dict[str, Any], message: str) -> None:
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | change))
    dataset = next(iter(change.get("datasets", {"my-hopper": {}})))
    result = run(project, sys.executable, "-m", "pipelines.fetch", dataset, check=False)
    (project / "params.yaml").write_text(text)
    assert result.returncode == 1
    assert message in result.stderr and "Traceback" not in result.stderr
