"""Promotion of real policies in a real registry; only the scores are made up."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from pipelines.promote import models, promote, rollback
from tap import tracking
from tap.registry import log_policy
from tap.settings import Runtime
from tap.store import connect


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def logged() -> list[tuple[str, str]]:
    """Runs and the policies that they logged, (run, model URI), shared by this file's tests."""
    return []


@dataclass
class Project:
    """A folder with params.yaml and evaluations of one dataset."""

    dataset: str
    params: Path
    client: MlflowClient
    logged: list[tuple[str, str]]

    @property
    def name(self) -> str:
        return f"tap-{self.dataset}"

    def evaluate(self, seed: int, score: float | None, policy: int, **changes: Any) -> None:
        """What the stage `evaluate` leaves behind: metrics, and a version unless the policy was registered before."""
        run_id, model_uri = self.logged[policy]
        metrics = {"seed": seed, "environment": "Hopper-v4", "episodes": 2, "environment_seed": 1000, "protocol": "2 episodes"}
        metrics |= {"dataset": self.dataset, "digest": "abc", "normalized_score": score, "return_mean": 5.0}
        metrics |= {"runs": {"evaluate": run_id}} | changes
        path = Path(f"data/metrics/evaluate/{self.dataset}-{seed}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(metrics))
        if not self.client.search_model_versions(f"name = '{self.name}' and tags.run_key = '{run_id}'"):
            mlflow.register_model(model_uri, self.name, tags={"score": str(score), "seed": str(seed), "run_key": run_id})

    def promote(self) -> tuple[str, str]:
        decision = promote(self.dataset, self.params)
        assert decision.model == self.name and decision.reason
        return decision.outcome, decision.version

    def aliases(self) -> dict[str, str]:
        return {alias: str(version) for alias, version in self.client.get_registered_model(self.name).aliases.items()}

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, version).tags)


def log(client: MlflowClient, policy_folder: Path) -> tuple[str, str]:
    """A run that logs a policy, and the policy's URI."""
    tags = {"dataset": "tiny", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
    with tracking.start_run("evaluate", name="evaluate", params={}, tags=tags, runtime=Runtime()) as run:
        log_policy(run, policy_folder, np.zeros((1, 11)))
    (model,) = client.search_logged_models(["1"], f"tags.run_key = '{run.id}'")
    return run.id, f"models:/{model.model_id}"


@pytest.fixture
def project(
    store: str,
    logged: list[tuple[str, str]],
    tiny_policy_folder: Path,
    params_yaml_with: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    client = connect(store)
    while len(logged) < 3:
        logged.append(log(client, tiny_policy_folder))
    dataset = f"hopper-{request.node.name.removeprefix('test_').translate(str.maketrans('_[', '--', ']'))}"
    params = params_yaml_with(dataset, "hopper-other", seeds=[0, 1, 2])
    return Project(dataset, params, client, logged)


def test_the_first_policy_becomes_champion(project: Project) -> None:
    project.evaluate(0, 50.0, policy=0)
    assert project.promote() == ("promoted", "1")
    assert project.aliases() == {"champion": "1", "challenger": "1"}
    tags = project.tags("1")
    assert tags["promotion"] == "promoted" and tags["promotion_reason"] and tags["previous_champion"] == "none"
    assert tags["promoted_at"].endswith("+00:00") and tags["dataset_digest"] == "abc"
    before = project.tags("1")
    assert project.promote() == ("already champion", "1")
    assert project.tags("1") == before


def test_only_a_strictly_better_policy_moves_the_alias(project: Project) -> None:
    project.evaluate(0, 50.0, policy=0)
    project.promote()
    Path(f"data/metrics/evaluate/{project.dataset}-0.json").unlink()
    project.evaluate(1, 50.0, policy=1)
    assert project.promote() == ("refused", "2")
    assert project.aliases() == {"champion": "1", "challenger": "2"}
    assert project.tags("2")["promotion"] == "refused" and "50 is not above 50" in project.tags("2")["promotion_reason"]
    project.evaluate(2, 50.1, policy=2)  # now the best of two seeds
    assert project.promote() == ("promoted", "3")
    assert project.aliases()["champion"] == "3" and project.tags("3")["previous_champion"] == "1"


@pytest.mark.parametrize("key", ["environment", "episodes", "environment_seed", "protocol", "digest"])
def test_another_protocol_is_refused(project: Project, key: str) -> None:
    project.evaluate(0, 50.0, policy=0, **{key: "other"})
    project.promote()
    project.evaluate(0, 99.0, policy=1)
    outcome, version = project.promote()
    assert outcome == "refused" and key in project.tags(version)["promotion_reason"]
    assert project.aliases()["champion"] != version


def test_seeds_of_different_protocols_do_not_compare(project: Project) -> None:
    project.evaluate(0, 50.0, policy=0)
    project.evaluate(1, 60.0, policy=1, episodes=20)
    with pytest.raises(ValueError, match=r"-0\.json and .*-1\.json differ in episodes.*dvc repro"):
        project.promote()


def test_scores_that_are_not_finite_never_win(project: Project) -> None:
    project.evaluate(0, math.nan, policy=0)
    with pytest.raises(ValueError, match="finite"):
        project.promote()
    assert project.aliases() == {}
    project.evaluate(1, math.inf, policy=1)
    project.evaluate(2, 1.0, policy=2)
    outcome, version = project.promote()
    assert outcome == "promoted" and project.tags(version)["seed"] == "2"


def test_without_reference_scores_the_return_decides(project: Project) -> None:
    project.evaluate(0, None, policy=0, return_mean=10.0)
    project.evaluate(1, None, policy=1, return_mean=-3.0)
    assert project.promote() == ("promoted", "1")
    # Once there are reference scores, the two kinds of numbers are not compared.
    for seed in (0, 1):
        project.evaluate(seed, 99.0, policy=2)
    assert project.promote()[0] == "refused" and "score_metric" in project.tags("3")["promotion_reason"]


def test_a_policy_that_does_not_load_is_refused(project: Project, store: str, tiny_policy_folder: Path) -> None:
    project.evaluate(0, 50.0, policy=0)
    project.promote()
    project.logged.append(log(project.client, tiny_policy_folder))
    project.evaluate(1, 99.0, policy=-1)
    _, uri = project.logged.pop()
    artifacts = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts/models" / uri.removeprefix("models:/")
    shutil.rmtree(artifacts / "artifacts/artifacts")
    assert project.promote() == ("refused", "2")
    assert project.aliases()["champion"] == "1" and "does not load" in project.tags("2")["promotion_reason"]


def test_rollback_restores_one_champion_after_the_other(project: Project) -> None:
    with pytest.raises(ValueError, match="no champion to roll back"):
        rollback(project.dataset)
    for seed in range(3):
        project.evaluate(seed, 50.0 + seed, policy=seed)
        project.promote()
    assert project.aliases()["champion"] == "3"
    decision = rollback(project.dataset)
    assert decision.version == "2" and project.aliases()["champion"] == "2"
    assert project.tags("3")["promotion"] == "rolled back" and "version 2" in project.tags("3")["promotion_reason"]
    assert "from version 3" in project.tags("2")["promotion_reason"]
    # The next run of the pipeline does not undo it.
    assert project.promote() == ("refused", "3")
    assert project.aliases()["champion"] == "2" and project.tags("3")["promotion"] == "rolled back"
    rollback(project.dataset)
    assert project.aliases()["champion"] == "1"
    with pytest.raises(ValueError, match="no earlier champion"):
        rollback(project.dataset)


def test_errors_say_what_to_do(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another dataset's evaluation, whose name starts with this one's, does not count.
    other = Project(f"{project.dataset}-more", project.params, project.client, project.logged)
    other.evaluate(0, 50.0, policy=0)
    with pytest.raises(ValueError, match=r"-0\.json does not exist.*dvc repro"):
        project.promote()
    for run_id in ("0" * 32, None):
        project.evaluate(1, 50.0, policy=0, runs={"evaluate": run_id})
        with pytest.raises(ValueError, match=f"dvc repro --force -s evaluate@{project.dataset}-1"):
            project.promote()
    with pytest.raises(ValueError, match="did you mean 'hopper-other'"):
        promote("hopper-othr", project.params)
    project.evaluate(1, 50.0, policy=0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:1 failed .* check MLFLOW_TRACKING_URI"):
        project.promote()


def test_models_lists_every_version(project: Project) -> None:
    project.evaluate(0, 50.0, policy=0)
    project.promote()
    project.evaluate(1, 49.0, policy=1)
    first, second = (row for row in models() if row.name == project.name)
    assert (first.version, first.aliases, first.score, first.seed) == ("1", ["challenger", "champion"], 50.0, "0")
    assert (second.version, second.aliases, second.score, second.promotion_reason) == ("2", [], 49.0, "")
