"""The stages joined: a tiny `dvc repro` in a copy of the project, and what dvc.yaml says against what the modules import."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import EPISODE_LENGTHS, metrics, random_episodes, run
from mlflow import MlflowClient
from mlflow.entities import Run

from tap.data.episodes import Episodes, Selection
from tap.data.windows import Windows
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.model import vqvae
from tap.planning.policy import Policy
from tap.settings import PlannerParams

pytestmark = pytest.mark.xdist_group("pipeline")  # one finished project for all


def test_codes_do_not_depend_on_how_many_windows_are_encoded_at_once(tiny_policy: Policy, monkeypatch: Any) -> None:
    windows = Windows(
        random_episodes([30, 5, 40], 11, 3), tiny_policy.vqvae.params.windows, tiny_policy.normalizer, torch.device("cpu")
    )
    alone = torch.cat([vqvae.encode_windows(tiny_policy.vqvae, windows, torch.tensor([start])) for start in range(75)])
    monkeypatch.setattr(vqvae, "ENCODED_AT_ONCE", 20)
    torch.testing.assert_close(vqvae.encode_windows(tiny_policy.vqvae, windows), alone)
    assert len(alone.unique(dim=0)) > 5


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
    assert {"actor_error", "advantage_slope"} <= set(drawn["offline"])  # although the planner uses neither model
    assert "my-hopper" in (reproduced / "data/report/index.html").read_text()
    assert (reproduced / "data/report/my-hopper-candidates.png").exists()


def test_behaviour_cloning_is_evaluated_beside_tap(reproduced: Path) -> None:
    (tap,), (cloned,) = metrics(reproduced).values(), metrics(reproduced, "methods").values()
    assert (tap["method"], cloned["method"]) == ("tap", "bc")
    same = (
        "dataset",
        "digest",
        "environment",
        "simulator",
        "seed",
        "environment_seed",
        "episodes",
        "behaviour",
        "score_metric",
    )
    assert {key: cloned[key] for key in same} == {key: tap[key] for key in same}
    assert tap.keys() - cloned.keys() == {
        *("search_value_mean", "log_probability_mean", "state_prediction_error", "planner", "latent_step", "window_length")
    }
    scores = json.loads((reproduced / "data/scores/my-hopper.json").read_text())
    assert scores["bc_score"] == round(cloned["normalized_score"], 2)
    assert "behaviour cloning" in (reproduced / "data/report/results.md").read_text()


def test_all_methods_train_on_the_same_episodes(reproduced: Path) -> None:
    """The statistics of the training episodes, which differ for every split, are the VQ-VAE's."""
    vqvae, cloned = (
        json.loads((reproduced / f"data/{name}/my-hopper-3/{name}.json").read_text())["normalizer"] for name in ("vqvae", "bc")
    )
    columns = slice(0, 11 + 3)  # rewards and returns-to-go are the VQ-VAE's own
    for statistic in ("mean", "std", "min", "max"):
        assert cloned[statistic][columns] == vqvae[statistic][columns]
    everything = np.load(reproduced / "data/raw/my-hopper/episodes/observations.npy").mean(axis=0)
    assert not np.allclose(cloned["mean"][:11], everything, atol=1e-3)


def test_behaviour_cloning_is_tracked_and_registered_beside_tap(reproduced: Path) -> None:
    (evaluation,) = tracked_runs(reproduced, "tags.dvc_stage = 'methods@my-hopper-3-bc'")
    (cloned,) = metrics(reproduced, "methods").values()
    assert evaluation.data.metrics["normalized_score"] == pytest.approx(cloned["normalized_score"])
    assert "search_value_mean" not in evaluation.data.metrics
    (training,) = tracked_runs(reproduced, f"tags.run_key = '{evaluation.data.tags['run_train_bc']}'")
    assert training.data.tags["dvc_stage"] == "train_bc@my-hopper-3-bc"
    assert training.data.tags["method"] == evaluation.data.tags["method"] == "bc"
    script = (
        "import json, mlflow, numpy as np;"
        "(version,) = mlflow.MlflowClient().search_model_versions(\"name = 'tap-my-hopper' and tags.method = 'bc'\");"
        "uri = f'models:/tap-my-hopper/{version.version}';"
        "model = mlflow.pyfunc.load_model(uri, model_config={'device': 'cpu'});"
        "print(json.dumps([version.tags, model.predict(np.asarray(model.input_example)).tolist()]))"
    )
    tags, actions = json.loads(run(reproduced, sys.executable, "-c", script).stdout.splitlines()[-1])
    np.testing.assert_allclose(actions, json.loads(tags["example_actions"]), atol=1e-5)
    policy = BehaviourCloning.load(reproduced / "data/bc/my-hopper-3")
    states = np.load(reproduced / "data/raw/my-hopper/episodes/observations.npy")[:2]
    np.testing.assert_allclose(actions, policy.act(states, []), atol=1e-5)
    assert tags["recipe"] == cloned["recipe"] and tags["seed"] == "3"


def test_the_critics_error_is_that_of_its_values_on_held_out_episodes(reproduced: Path) -> None:
    """Recomputed one episode after another, with the critic that a policy loads."""
    result = metrics(reproduced, "train_critic")["my-hopper-3.json"]
    folders = [reproduced / f"data/{model}/my-hopper-3" for model in ("vqvae", "prior", "critic", "actor")]
    planner = json.loads((reproduced / "data/params/my-hopper/evaluate.json").read_text())["params"]["planner"]
    params = PlannerParams.model_validate(planner | {"search": "critic_weighted"})
    policy = Policy.join(*folders, params, torch.device("cpu"))
    assert policy.critic is not None
    episodes = Episodes.load(reproduced / "data/raw/my-hopper/episodes")
    _, held_out = episodes.split(0.1, np.random.default_rng(3))
    errors = []
    for episode in held_out.indices:
        windows = Windows(
            Selection(episodes, np.array([episode])), policy.vqvae.params.windows, policy.normalizer, torch.device("cpu")
        )
        tokens, _ = windows.gather(torch.arange(len(windows)))  # whole windows, of which the stage encodes the beginning
        codes, layout = policy.vqvae.encode(tokens)[:, 0], policy.vqvae.layout
        with torch.no_grad():
            values = policy.critic.values(tokens[:, 0, layout.observation], codes[:, None].long())[:, 0]
        rewards = episodes.rewards[episodes.offsets[episode] : episodes.offsets[episode + 1]].astype(float)
        returns = [sum(0.99**i * reward for i, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
        std, mean = (array[layout.return_to_go] for array in (policy.normalizer.std, policy.normalizer.mean))
        errors.append(values.numpy() * std + mean - returns)
    assert result["held_out_error"] == pytest.approx(np.sqrt(np.mean(np.concatenate(errors) ** 2)), rel=1e-3)
    assert result["first_state_error"] == pytest.approx(np.sqrt(np.mean([error[0] ** 2 for error in errors])), rel=1e-3)
    assert policy.critic.held_out_error == result["held_out_error"] and result["return_std"] > 0


def test_lineage_lies_beside_the_weights(reproduced: Path) -> None:
    commit = run(reproduced, "git", "rev-parse", "HEAD").stdout.strip()
    for folder in ("vqvae", "prior", "critic", "bc"):
        lineage = json.loads((reproduced / f"data/lineage/train_{folder}/my-hopper-3.json").read_text())
        assert lineage["git_commit"] == commit
        assert lineage["dataset_digest"] == metrics(reproduced)["my-hopper-3.json"]["digest"]


def test_a_second_repro_does_nothing(reproduced: Path) -> None:
    assert "Data and pipelines are up to date." in run(reproduced, "dvc", "repro").stdout


def tracked_runs(folder: Path, condition: str) -> list[Run]:
    return list(MlflowClient(f"sqlite:///{folder}/mlflow.db").search_runs(["1"], condition))


def test_runs_carry_what_is_compared(reproduced: Path) -> None:
    (evaluation,) = tracked_runs(reproduced, "tags.dvc_stage = 'evaluate@my-hopper-3'")
    result = metrics(reproduced)["my-hopper-3.json"]
    for name in ("normalized_score", "normalized_score_standard_error"):
        assert evaluation.data.metrics[name] == pytest.approx(result[name])
    perplexity = metrics(reproduced, "train_vqvae")["my-hopper-3.json"]["codebook_perplexity"]
    assert evaluation.data.metrics["codebook_perplexity"] == pytest.approx(perplexity)
    assert evaluation.data.metrics["latency_ms_median"] > 0
    (training,) = tracked_runs(reproduced, f"tags.run_key = '{evaluation.data.tags['run_train_vqvae']}'")
    assert training.data.tags["dvc_stage"] == "train_vqvae@my-hopper-3"
    (diagnosis,) = tracked_runs(reproduced, "tags.dvc_stage = 'diagnose@my-hopper-3'")
    drawn = metrics(reproduced, "diagnose")["my-hopper-3.json"]
    assert diagnosis.data.metrics["prior_distinct_plans"] == pytest.approx(drawn["prior"]["distinct_plans"])


def test_the_policy_is_registered_with_its_evidence(reproduced: Path) -> None:
    script = (
        "import mlflow, json; client = mlflow.MlflowClient();"
        "found = client.search_model_versions(\"name = 'tap-my-hopper'\");"
        "print(json.dumps([(v.tags, v.description, v.version) for v in found]))"
    )
    registered = json.loads(run(reproduced, sys.executable, "-c", script).stdout.splitlines()[-1])
    ((tags, card, _),) = (each for each in registered if each[0]["method"] == "tap")
    result = metrics(reproduced)["my-hopper-3.json"]
    assert tags["seed"] == "3" and tags["recipe"] == result["recipe"] and tags["latency_budget_ms"] == "200.0"
    assert json.loads(tags["returns"]) == result["returns"] and json.loads(tags["scores"]) == pytest.approx(result["returns"])
    assert json.loads(tags["validation"])["episodes"] == len(EPISODE_LENGTHS)
    assert card.startswith("# TAP policy for my-hopper, training seed 3\n") and result["digest"] in card
    promoted = run(reproduced, sys.executable, "-m", "pipelines.cli", "promote", "my-hopper").stdout
    _, _, best = max(registered, key=lambda each: float(each[0]["score"]))
    # So it acts as when it was registered.
    assert f"tap-my-hopper version {best}: promoted (there was no champion)" in promoted


def test_a_stage_killed_hard_and_run_again_ends_in_the_same_metrics(reproduced: Path) -> None:
    """The models are trained again from nothing; kill -9 strikes when the first checkpoint has appeared."""
    stages = ("train_vqvae", "train_prior", "train_critic", "train_actor", "train_bc", "evaluate", "methods")
    expected = [metrics(reproduced, stage) for stage in stages]
    shutil.rmtree(reproduced / ".checkpoints")
    for stage, instance in (
        ("train_vqvae", "train_vqvae@my-hopper-3"),
        ("train_prior", "train_prior@my-hopper-3"),
        ("train_critic", "train_critic@my-hopper-3"),
        ("train_actor", "train_actor@my-hopper-3"),
        ("train_bc", "train_methods@my-hopper-3-bc"),
    ):
        module, method = ("train_methods", [stage.removeprefix("train_")]) if instance.endswith("-bc") else (stage, [])
        environment = os.environ | {"PYTHONPATH": str(reproduced), "OMP_NUM_THREADS": "1"}
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{reproduced}/mlflow.db"
        command = [sys.executable, "-m", f"pipelines.stages.{module}", "my-hopper", "3", *method]
        process = subprocess.Popen(command, cwd=reproduced, env=environment)
        while not list((reproduced / ".checkpoints").glob(f"{stage}-*/checkpoint.pt")):
            assert process.poll() is None, "the stage ended before its first checkpoint was seen"
        process.kill()
        process.wait()
        run(reproduced, "dvc", "repro", "-f", "-s", instance)
    run(reproduced, "dvc", "repro", "-f", "-s", "evaluate@my-hopper-3", "methods@my-hopper-3-bc")
    assert not tracked_runs(reproduced, "attributes.status != 'FINISHED'") and not list((reproduced / ".tracking").iterdir())
    assert [metrics(reproduced, stage) for stage in stages] == expected


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
    results = [
        run(project, sys.executable, "-m", *command, check=False)
        for command in (("pipelines.stages.fetch", dataset), ("pipelines.cli", "run"))
    ]
    (project / "params.yaml").write_text(text)
    for result in results:
        assert result.returncode == 1
        assert message in result.stderr and "Traceback" not in result.stderr
