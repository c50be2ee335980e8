"""Promotion of real policies in a real registry; only their scores are made up."""

import json
import math
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from stage_files import evaluation, held_out_json
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.promote import PROTOCOL, Decision, history, models, promote, rollback
from pipelines.serving.serve import serve
from tap.planning.policy import Policy
from tap.results import ACTION_ERROR, AnyEvaluation, HeldOutEvaluation
from tap.settings import Runtime
from tap.tracking import run as tracking
from tap.tracking.mlflow_store import connect
from tap.tracking.registry import Version, log_policy, model_name, open_registry

EXAMPLE = np.random.default_rng(0).normal(size=(2, 11))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def logged() -> list[tuple[str, str, str]]:
    """Runs and the policies that they logged, (run, model URI, digest), shared by this file's tests."""
    return []


@dataclass
class Project:
    """A folder with params.yaml and evaluations of one dataset."""

    dataset: str
    params: Path
    client: MlflowClient
    logged: list[tuple[str, str, str]]
    example_actions: np.ndarray

    @property
    def name(self) -> str:
        return f"tap-{self.dataset}"

    def evaluate(self, seed: int, scores: float | Sequence[float], policy: int, method: str | None = None, **tags: Any) -> None:
        """What the stage `evaluate`, or that of another method, leaves behind: metrics, and a version of a logged policy.

        A mean stands for two scores.
        """
        stage, key = ("methods", f"{self.dataset}-{seed}-{method}") if method else ("evaluate", f"{self.dataset}-{seed}")
        run_id, model_uri, digest = self.logged[policy]
        scores = [scores - 1, scores + 1] if isinstance(scores, int | float) else list(scores)
        facts = {"environment": "Hopper-v4", "simulator": "mujoco 4.0.0", "episodes": len(scores), "environment_seed": 1000}
        if tags.get("score_metric") == ACTION_ERROR:
            facts = {"held_out": True, "episodes": len(scores)}
        facts |= {"protocol": "every step", "dataset_digest": "abc", "score_metric": "normalized_score", "source": "bundled"}
        facts |= {"seed": seed, "scores": scores, "recipe": "first", "model_digest": digest}
        measured = {"digest" if key == "dataset_digest" else key: value for key, value in (facts | tags).items()}
        measured |= {"scores": [score if math.isfinite(score) else 0.0 for score in scores], "runs": {stage: run_id}}
        of_policy = {key: measured.pop(key) for key in ("latency_budget_ms", "example_actions") if key in measured}
        result: AnyEvaluation = (
            HeldOutEvaluation.model_validate(held_out_json(**measured))
            if measured["score_metric"] == ACTION_ERROR
            else evaluation(**measured)
        )
        result.write(Path(f"data/metrics/{stage}/{key}.json"))
        (stored,) = self.client.search_runs(["1"], f"tags.run_key = '{run_id}'")
        self.client.log_text(stored.info.run_id, json.dumps(result.as_json()), "metrics.json")
        facts |= {"latency_ms": 3.4, "latency_budget_ms": 60_000, "example_actions": json.dumps(self.example_actions.tolist())}
        named = {"run_key": run_id} | ({"method": method} if method else {})
        texts = {key: str(value) for key, value in (facts | tags | of_policy | named).items()}
        version = mlflow.register_model(model_uri, self.name, tags=texts | {"scores": json.dumps(scores)})
        self.client.update_model_version(self.name, version.version, "# A card\n")

    def recipe(self, name: str, scores: Sequence[float | Sequence[float]], policies: Sequence[int], **tags: Any) -> None:
        """Evaluations of one recipe with seeds 0, 1, ..., which params.yaml gets: a mean score for each, or one an episode."""
        content = yaml.safe_load(self.params.read_text())
        self.params.write_text(yaml.safe_dump(content | {"seeds": list(range(len(scores)))}))
        for seed, (score, policy) in enumerate(zip(scores, policies, strict=True)):
            self.evaluate(seed, score, policy, recipe=name, **tags)

    def promote(self) -> Decision:
        decision = promote(self.dataset, self.params)
        assert decision.model == self.name and decision.reason
        return decision

    def aliases(self) -> dict[str, str]:
        return {alias: str(version) for alias, version in self.client.get_registered_model(self.name).aliases.items()}

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, version).tags)

    def card(self, version: str) -> str:
        return str(self.client.get_model_version(self.name, version).description)


def log(client: MlflowClient, policy_folder: Path) -> tuple[str, str, str]:
    """A run that logs a policy, the policy's URI, and the digest of its files."""
    tags = {"dataset": "tiny", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
    with tracking.start_run("evaluate", name="evaluate", params={}, tags=tags, runtime=Runtime()) as run:
        digest = log_policy(run, policy_folder, EXAMPLE, 3)
    (model,) = client.search_logged_models(["1"], f"tags.run_key = '{run.id}'")
    return run.id, f"models:/{model.model_id}", digest


@pytest.fixture
def project(
    store: str,
    logged: list[tuple[str, str, str]],
    tiny_policy: Policy,
    tiny_policy_folder: Path,
    params_yaml_with: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    client = connect(store)
    while len(logged) < 6:
        logged.append(log(client, tiny_policy_folder))
    seeds = [int(np.random.SeedSequence([0, row]).generate_state(1, np.uint64)[0]) for row in range(len(EXAMPLE))]
    actions = tiny_policy.act(EXAMPLE, [torch.Generator().manual_seed(seed) for seed in seeds])
    dataset = (
        "hopper-" + re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[-80:]
    )  # params.yaml takes 100
    return Project(dataset, params_yaml_with(dataset, "hopper-other", seeds=[0], methods=[]), client, logged, actions)


def test_a_family_is_a_dataset_id_without_its_release() -> None:
    assert model_name("hopper-medium-replay") == model_name("hopper-medium-replay-v2") == "tap-hopper-medium-replay"
    assert model_name("tap-hopper-medium-replay") == "tap-hopper-medium-replay"
    assert (
        model_name("antmaze-ultra-diverse-v0") == "tap-antmaze-ultra-diverse" and model_name("my-v2-data") == "tap-my-v2-data"
    )


def test_the_best_seed_of_the_first_recipe_becomes_champion(project: Project) -> None:
    project.recipe("first", [50.0, 60.0], policies=[0, 1])
    decision = project.promote()
    assert (decision.outcome, decision.version, decision.reason) == ("promoted", "2", "there was no champion")
    assert project.aliases() == {"champion": "2", "challenger": "2"}
    tags = project.tags("2")
    assert tags["promotion"] == "promoted" and tags["previous_champion"] == "none" and tags["promoted_at"].endswith("+00:00")
    assert project.card("1") == "# A card\n"
    assert project.card("2").startswith("# A card\n") and "| 0 | 50.0 ± 1.0 |\n| 1 | 60.0 ± 1.0 |" in project.card("2")
    before = project.tags("2"), history(project.dataset)
    assert project.promote().outcome == "already champion"
    assert (project.tags("2"), history(project.dataset)) == before and len(before[1]) == 1


def test_a_better_recipe_is_promoted_by_its_interval(project: Project) -> None:
    project.recipe("first", [50.0, 54.0], policies=[0, 1])
    project.promote()
    project.recipe("second", [66.0, 62.0], policies=[2, 3])
    decision = project.promote()
    assert (decision.outcome, decision.version, decision.champion) == ("promoted", "3", "2")
    assert decision.difference is not None and decision.difference.mean == pytest.approx(64 - 52)
    assert 5 < decision.difference.low < 12 < decision.difference.high < 19
    expected = (
        "normalized score 64 (2 seeds x 2 episodes) against 52 (2 seeds x 2 episodes) of champion version 2: difference 12"
    )
    assert decision.reason.startswith(expected) and "95 % interval" in decision.reason
    assert project.aliases() == {"champion": "3", "challenger": "3"} and project.tags("3")["previous_champion"] == "2"
    assert decision.reason in project.card("3")


def test_of_action_errors_less_is_better(project: Project) -> None:
    project.recipe("first", [[0.5, 0.6], [0.4, 0.5]], policies=[0, 1], score_metric=ACTION_ERROR)
    first = project.promote()
    assert (first.outcome, first.version) == ("promoted", "2") and "| 1 | 0.450 ± 0.050 |" in project.card("2")
    project.recipe("second", [[0.9, 0.8], [0.9, 0.9]], policies=[2, 3], score_metric=ACTION_ERROR)
    worse = project.promote()
    assert worse.outcome == "refused" and worse.reason.endswith("lies below 0")
    project.recipe("third", [[0.1, 0.2], [0.2, 0.3]], policies=[4, 5], score_metric=ACTION_ERROR)
    better = project.promote()
    assert (better.outcome, better.version, better.champion) == ("promoted", "5", "2")
    assert better.difference is not None and better.difference.mean == pytest.approx(0.5 - 0.2)
    assert better.reason.startswith("action error, less is better, 0.2 (2 seeds x 2 episodes) against 0.5")


def test_errors_on_the_episodes_of_training_are_no_evidence(project: Project) -> None:
    project.evaluate(0, [0.1, 0.2], policy=0, score_metric=ACTION_ERROR, held_out=False)
    decision = project.promote()
    assert decision.outcome == "refused" and "the episodes that it was trained on, because none was held out" in decision.reason


def test_errors_are_not_compared_with_returns(project: Project) -> None:
    project.recipe("first", [50.0], policies=[0])
    project.promote()
    project.recipe("second", [[0.1, 0.2]], policies=[1], score_metric=ACTION_ERROR)
    decision = project.promote()
    assert (
        decision.outcome == "refused"
        and "was evaluated under another score_metric (normalized_score, not action" in decision.reason
    )


def test_a_better_mean_without_support_by_the_seeds_is_refused(project: Project) -> None:
    project.recipe("first", [50.0, 54.0], policies=[0, 1])
    project.promote()
    project.recipe("second", [100.0, 40.0], policies=[2, 3])  # its best seed is far above the champion
    decision = project.promote()
    assert (decision.outcome, decision.version) == ("refused", "3")
    assert "difference 18, 95 % interval -1" in decision.reason
    assert decision.reason.endswith("contains 0: evaluate more seeds or episodes")
    assert (
        project.aliases() == {"champion": "2", "challenger": "3"} and project.tags("3")["promotion_reason"] == decision.reason
    )
    assert project.promote() == decision  # by the same numbers


def test_a_worse_recipe_is_refused(project: Project) -> None:
    project.recipe("first", [50.0, 54.0], policies=[0, 1])
    project.promote()
    project.recipe("second", [30.0, 33.0], policies=[2, 3])
    decision = project.promote()
    assert decision.outcome == "refused" and decision.reason.endswith("lies below 0")


def test_the_champions_recipe_has_the_newest_version_of_each_other_seed(project: Project) -> None:
    project.recipe("first", [20.0, 60.0], policies=[0, 1])
    project.promote()
    project.evaluate(0, 40.0, policy=2)  # evaluated again, as after a change of code
    project.evaluate(1, 10.0, policy=4)  # the champion's own seed: the champion's scores hold
    project.recipe("second", [80.0], policies=[3])
    decision = project.promote()
    assert decision.difference is not None and decision.difference.mean == pytest.approx(80 - (40 + 60) / 2)


def test_seeds_of_one_recipe_compete_over_their_own_episodes(project: Project) -> None:
    project.recipe("first", [[40.0, 50.0, 60.0, 50.0]], policies=[0])
    project.promote()
    project.recipe("first", [[40.0, 50.0, 60.0, 50.0], [45.0, 55.0, 65.0, 51.0]], policies=[0, 1])
    refused = project.promote()
    assert refused.outcome == "refused" and "contains 0" in refused.reason
    project.evaluate(1, [80.0, 90.0, 100.0, 90.0], policy=2)
    decision = project.promote()
    assert decision.outcome == "promoted" and project.tags(decision.version)["seed"] == "1"
    assert "90 (1 seed x 4 episodes) against 50 (1 seed x 4 episodes)" in decision.reason


@pytest.mark.parametrize("key", PROTOCOL)
def test_another_protocol_is_refused(project: Project, key: str) -> None:
    other: Any = {"episodes": 3, "environment_seed": 7}.get(key, "other")
    project.recipe("first", [[50.0, 50.0, 50.0] if key == "episodes" else 50.0], policies=[0], **{key: other})
    project.promote()
    project.recipe("second", [99.0], policies=[1])
    decision = project.promote()
    assert decision.outcome == "refused" and f"under another {key}" in decision.reason and "MLflow's page" in decision.reason
    assert project.aliases()["champion"] == "1"


def test_seeds_of_different_recipes_or_protocols_are_not_comparable(project: Project) -> None:
    project.recipe("first", [50.0, 60.0], policies=[0, 1])
    for key, other in (("recipe", "other"), ("environment_seed", 7)):
        project.evaluate(1, 60.0, policy=1, **{key: other})
        with pytest.raises(ValueError, match=rf"-0\.json and .*-1\.json differ in {key}.*dvc repro"):
            project.promote()
    assert project.aliases() == {}


def test_the_champion_is_of_the_method_with_the_best_recipe(project: Project) -> None:
    """Behaviour cloning wins by its mean over seeds, although TAP's seed 1 is the best policy alone."""
    project.recipe("plans", [10.0, 70.0], policies=[0, 1])
    content = yaml.safe_load(project.params.read_text())
    project.params.write_text(yaml.safe_dump(content | {"methods": ["bc", "iql"]}))
    for seed, (cloned, valued) in enumerate([(50.0, 1.0), (60.0, 2.0)]):
        project.evaluate(seed, cloned, policy=2 + seed, method="bc", recipe="imitates")
        project.evaluate(seed, valued, policy=4 + seed, method="iql", recipe="values")
    decision = project.promote()
    assert decision.outcome == "promoted"
    assert (project.tags(decision.version)["method"], project.tags(decision.version)["seed"]) == ("bc", "1")
    assert {row.method for row in models() if row.name == project.name} == {"tap", "bc", "iql"}
    assert project.promote().outcome == "already champion"

    project.recipe("better plans", [90.0, 92.0], policies=[0, 1])
    decision = project.promote()
    assert decision.outcome == "promoted" and "method" not in project.tags(decision.version)
    assert "91 (2 seeds x 2 episodes) against 55 (2 seeds x 2 episodes)" in decision.reason


def test_every_method_of_params_yaml_must_be_evaluated_under_one_protocol(project: Project) -> None:
    project.recipe("plans", [10.0], policies=[0])
    content = yaml.safe_load(project.params.read_text())
    project.params.write_text(yaml.safe_dump(content | {"methods": ["bc"]}))
    with pytest.raises(ValueError, match=r"metrics/methods/.*-0-bc\.json does not exist.*all methods.*dvc repro"):
        project.promote()
    project.evaluate(0, 50.0, policy=1, method="bc", recipe="imitates", environment_seed=7)
    with pytest.raises(ValueError, match=r"differ in environment_seed.*evaluate@.*-0 methods@.*-0-bc"):
        project.promote()
    assert project.aliases() == {}


def test_every_seed_of_params_yaml_must_be_evaluated(project: Project) -> None:
    project.recipe("first", [50.0, 60.0], policies=[0, 1])
    Path(f"data/metrics/evaluate/{project.dataset}-0.json").unlink()
    with pytest.raises(
        ValueError, match=r"-0\.json does not exist, but promotion compares all methods and seeds of params.yaml.*dvc repro"
    ):
        project.promote()
    assert project.aliases() == {}


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(project: Project, score: float) -> None:
    project.recipe("first", [[50.0, 50.0], [score, 99.0]], policies=[0, 1])
    decision = project.promote()
    assert (decision.outcome, decision.version) == ("refused", "2") and "not finite" in decision.reason
    assert f"evaluate@{project.dataset}-1" in decision.reason and project.aliases() == {}
    project.recipe("first", [50.0], policies=[2])
    assert project.promote().outcome == "promoted"
    project.client.set_model_version_tag(project.name, "3", "scores", json.dumps([score, 1.0]))
    project.recipe("second", [60.0], policies=[3])
    decision = project.promote()
    assert decision.outcome == "refused" and "champion version 3 has scores that are not finite" in decision.reason


def test_missing_evidence_is_refused(project: Project) -> None:
    project.recipe("first", [50.0], policies=[0])
    for key in ("scores", "recipe", "simulator"):
        kept = project.tags("1")[key]
        project.client.delete_model_version_tag(project.name, "1", key)
        decision = project.promote()
        assert decision.outcome == "refused" and f"version 1 lacks {key}" in decision.reason
        project.client.set_model_version_tag(project.name, "1", key, kept)
    project.client.set_model_version_tag(project.name, "1", "scores", "[50.0]")
    assert "scores of 1 episodes instead of 2" in project.promote().reason


@pytest.mark.parametrize(("tag", "value"), [("scores", "[100.0, 100.0]"), ("seed", "7"), ("model_digest", "0" * 64)])
def test_tags_that_were_edited_are_refused(project: Project, tag: str, value: str) -> None:
    project.recipe("first", [50.0], policies=[0])
    project.client.set_model_version_tag(project.name, "1", tag, value)
    decision = project.promote()
    assert decision.outcome == "refused" and "champion" not in project.aliases()
    assert f"the tag {tag} of version 1 is {value:.100}, but data/metrics/evaluate/" in decision.reason


def test_edited_tags_of_a_champion_are_refused_and_of_its_recipe_ignored(project: Project) -> None:
    project.recipe("first", [20.0, 60.0], policies=[0, 1])
    project.promote()
    project.client.set_model_version_tag(project.name, "1", "scores", "[-1000.0, -1000.0]")
    project.recipe("second", [50.0], policies=[2])
    decision = project.promote()
    assert decision.difference is not None and decision.difference.mean == pytest.approx(50 - 60)
    project.client.set_model_version_tag(project.name, "2", "scores", "[0.0, 0.0]")
    decision = project.promote()
    assert decision.outcome == "refused" and "champion the tag scores of version 2 is [0.0, 0.0]" in decision.reason
    assert "metrics.json of its run) has [59.0, 61.0]" in decision.reason and project.aliases()["champion"] == "2"


def test_only_a_policy_that_was_evaluated_without_a_digest_needs_none(project: Project) -> None:
    """As by an early release."""
    project.recipe("first", [50.0], policies=[0], model_digest=None)
    project.client.delete_model_version_tag(project.name, "1", "model_digest")
    assert project.promote().outcome == "promoted"
    project.recipe("second", [90.0], policies=[1])
    assert project.promote().outcome == "promoted" and project.aliases()["champion"] == "2"
    project.client.delete_model_version_tag(project.name, "2", "model_digest")
    project.recipe("third", [95.0], policies=[2])
    assert "champion the tag model_digest of version 2 is None, but" in project.promote().reason


@pytest.mark.parametrize(
    "file", ["MLmodel", "policy.py", "code/tap/planning/policy.py", "code/tap/new.py", "artifacts/policy/link"]
)
def test_a_model_whose_files_were_changed_is_not_run(project: Project, store: str, tiny_policy_folder: Path, file: str) -> None:
    """Neither by a promotion, nor by a rollback, nor by `tap serve`."""
    project.logged.append(log(project.client, tiny_policy_folder))
    project.recipe("first", [50.0], policies=[-1])
    _, uri, _ = project.logged.pop()
    models, witness = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts/models", tiny_policy_folder / "witness"
    changed = models / uri.removeprefix("models:/") / "artifacts" / file
    # MLflow itself downloads no link.
    refusal = (
        "failures occurred" if file.endswith("link") else "version 1 are not those that its evaluation logged, so none was"
    )
    if file == "MLmodel":  # another loader, which is imported by name
        (models.parent / "evil.py").write_text("")
        changed.write_text(changed.read_text().replace("mlflow.pyfunc.loaders.code_model", "evil"))
    elif file.endswith("link"):
        changed.symlink_to("/etc/passwd")
    else:
        with changed.open("a") as code:
            code.write(f"\nimport os\nos.mkdir({str(witness)!r})\n")
    assert re.search(f"version 1 fails to load or act: .*{refusal}", project.promote().reason)
    first = project.client.get_model_version(project.name, "1")
    with open_registry(store) as registry:
        for refuse in (registry.load_test, lambda version: registry.download(version, tiny_policy_folder)):
            with pytest.raises((ValueError, MlflowException), match=refusal):
                refuse(Version.of(first))
    project.client.set_registered_model_alias(project.name, "champion", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ValueError, match=refusal):
        serve(project.name, "champion", "127.0.0.1", port, None, store)
    assert not witness.exists()


def test_without_reference_scores_the_return_decides(project: Project) -> None:
    project.recipe("first", [10.0, -3.0], policies=[0, 1], score_metric="return")
    assert project.promote().version == "1"
    project.recipe("second", [1000.0, 1001.0], policies=[2, 3], score_metric="return")
    assert "return 1000 (2 seeds x 2 episodes) against 3.5" in project.promote().reason


def test_the_load_test_is_on_a_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAP_DEVICE", "cuda:99")  # on which nothing loads
    project.recipe("first", [50.0], policies=[0])
    assert project.promote().outcome == "promoted"


def test_a_policy_that_does_not_load_is_refused(project: Project, store: str, tiny_policy_folder: Path) -> None:
    project.recipe("first", [50.0], policies=[0])
    project.promote()
    project.logged.append(log(project.client, tiny_policy_folder))
    project.recipe("second", [99.0], policies=[-1])
    _, uri, _ = project.logged.pop()
    artifacts = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts/models" / uri.removeprefix("models:/")
    shutil.rmtree(artifacts / "artifacts/artifacts")
    decision = project.promote()
    assert (decision.outcome, decision.version) == ("refused", "2") and "version 2 fails to load or act" in decision.reason
    assert project.aliases()["champion"] == "1"


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"example_actions": "[[0, 0, 0], [0, 0, 0]]"}, "does not return the actions that it returned for its example"),
        ({"example_actions": "[[0, 0, 0]]"}, "does not return the actions that it returned for its example"),
        ({"latency_budget_ms": 1e-3}, "ms per decision here, more than its budget of 0.001 ms"),
    ],
)
def test_a_policy_with_other_actions_or_too_slow_is_refused(project: Project, tag: dict[str, Any], reason: str) -> None:
    project.recipe("first", [50.0], policies=[0], **tag)
    decision = project.promote()
    assert decision.outcome == "refused" and reason in decision.reason and "champion" not in project.aliases()


def test_a_policy_without_a_record_for_its_load_test_is_refused(project: Project) -> None:
    project.recipe("first", [50.0], policies=[0])
    project.client.delete_model_version_tag(project.name, "1", "latency_budget_ms")
    assert "lacks latency_budget_ms for a load test" in project.promote().reason


def test_rollback_restores_one_champion_after_the_other(project: Project) -> None:
    with pytest.raises(ValueError, match="no champion to roll back"):
        rollback(project.dataset)
    for policy, recipe in enumerate(("first", "second", "third")):
        project.recipe(recipe, [50.0 + 10 * policy], policies=[policy])
        project.promote()
    assert project.aliases()["champion"] == "3"
    decision = rollback(project.dataset)
    assert (decision.outcome, decision.version, decision.champion) == ("restored", "2", "3")
    assert project.aliases()["champion"] == "2"
    assert project.tags("3")["promotion"] == "rolled back" and "version 2" in project.tags("3")["promotion_reason"]
    assert "from version 3" in project.tags("2")["promotion_reason"]
    # The next run of the pipeline does not undo it.
    assert project.promote().outcome == "refused"
    assert project.aliases()["champion"] == "2" and project.tags("3")["promotion"] == "rolled back"
    rollback(project.dataset)
    assert project.aliases()["champion"] == "1"
    with pytest.raises(ValueError, match="no earlier champion"):
        rollback(project.dataset)
    outcomes = [(made["outcome"], made["version"], made["champion"]) for made in history(project.dataset)]
    assert outcomes == [
        ("promoted", "1", None),
        ("promoted", "2", "1"),
        ("promoted", "3", "2"),
        ("restored", "2", "3"),
        ("refused", "3", "2"),
        ("restored", "1", "2"),
    ]


def test_a_rollback_to_a_version_that_fails_its_load_test_is_refused(project: Project) -> None:
    for policy, recipe in enumerate(("first", "second")):
        project.recipe(recipe, [50.0 + 10 * policy], policies=[policy])
        project.promote()
    project.client.set_model_version_tag(project.name, "1", "latency_budget_ms", "0.001")
    with pytest.raises(ValueError, match=r"stays at version 2: version 1 takes .* budget"):
        rollback(project.dataset)
    assert project.aliases()["champion"] == "2" and history(project.dataset)[-1]["reason"].startswith("not restored: version 1")


def test_the_audit_trail_says_who_decided_what_by_which_numbers(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret-of-ada")
    project.recipe("first", [50.0], policies=[0])
    project.promote()
    project.recipe("second", [[40.0, 64.0]], policies=[1])
    decision = project.promote()
    first, second = history(project.dataset)
    assert (first["by"], first["outcome"], first["difference"]) == ("ada", "promoted", None)
    assert (second["outcome"], second["version"], second["champion"]) == ("refused", "2", "1")
    assert second["difference"] == {"mean": pytest.approx(2), "low": pytest.approx(-11), "high": pytest.approx(15)}
    assert second["reason"] == decision.reason and second["git_commit"] == tracking.git_state()[0]
    assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(second["time"])
    # It lives in the registry, where MLflow's page of the model shows it, and holds no secret.
    stored = project.client.get_registered_model(project.name).tags
    assert len(stored) == 2 and "secret" not in str(stored) and max(map(len, stored.values())) < 2000
    result = CliRunner().invoke(app, ["promote", project.dataset, "--history"], catch_exceptions=False)
    assert "ada" in result.stdout and "contains 0" in result.stdout and project.aliases()["champion"] == "1"


def test_errors_say_what_to_do(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another dataset's evaluation, whose name starts with this one's, does not count.
    other = Project(f"{project.dataset}-more", project.params, project.client, project.logged, project.example_actions)
    other.evaluate(0, 50.0, policy=0)
    with pytest.raises(ValueError, match=r"-0\.json does not exist.*dvc repro"):
        project.promote()
    metrics = Path(f"data/metrics/evaluate/{project.dataset}-0.json")
    evaluation(runs={"evaluate": "0" * 32}).write(metrics)
    with pytest.raises(ValueError, match=f"dvc repro --force -s evaluate@{project.dataset}-0"):
        project.promote()
    with pytest.raises(ValueError, match="did you mean 'hopper-other'"):
        promote("hopper-othr", project.params)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:1 failed .* check MLFLOW_TRACKING_URI"):
        project.promote()


def test_models_lists_every_version(project: Project) -> None:
    project.recipe("first", [50.0], policies=[0])
    project.promote()
    project.recipe("second", [49.0], policies=[1])
    mlflow.register_model(project.logged[2][1], project.name, tags={"source": "recollected"})  # by hand, without evidence
    first, second, third = (row for row in models() if row.name == project.name)
    assert (first.version, first.aliases, str(first.score)) == ("1", ["challenger", "champion"], "50.0 ± 1.0")
    assert (first.seed, first.latency_ms, first.source) == ("0", 3.4, "bundled, not D4RL's data")
    assert (second.version, second.aliases, str(second.score), second.reason) == ("2", [], "49.0 ± 1.0", "")
    assert (third.score, third.latency_ms, third.source) == (None, None, "recollected, not D4RL's data")
    text = CliRunner().invoke(app, ["models"], catch_exceptions=False).stdout
    assert "50.0 ± 1.0" in text and "there was no champion" in text and "3 ms" in text
