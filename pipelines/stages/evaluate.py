"""Stage evaluate: a trained policy, in simulators of its dataset's environment -> scores; the policy goes to the registry.

Example: python -m pipelines.stages.evaluate hopper-medium-replay 0
"""

import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.stages.command_line import main
from pipelines.stages.training import output_folder
from tap.data.catalog import DatasetInfo, lookup, normalized_score
from tap.data.episodes import Episodes
from tap.data.hdf5 import load_episodes
from tap.envs.make import make_environment, simulator, versions
from tap.evaluation.rollout import rollout, summarize
from tap.files import read_json, write_json
from tap.planning.policy import Policy
from tap.results import Evaluation, ValidationReport, instance_key
from tap.serving.policy import row_generators
from tap.settings import Params, Runtime, load_params, read_params_file
from tap.tracking import run as tracking
from tap.tracking.model_card import model_card
from tap.tracking.registry import log_policy, model_name
from tap.training import choose_device


def run(dataset: str, seed: int) -> None:
    evaluate("evaluate", dataset, seed)


def evaluate(stage: str, dataset: str, seed: int, ablation: str | None = None) -> None:
    """Roll the policy out, write its metrics, plots and run; without an ablation, also log and register it as a model."""
    params, runtime = load_params(Path("params.yaml"), dataset, ablation=ablation), Runtime()
    name = instance_key(dataset, seed, ablation)
    own_models = ablation is not None and read_params_file(Path("params.yaml")).ablations[ablation].trains
    info = lookup(dataset, params.fetch)
    episodes, validation = load_episodes(Path("data/raw") / dataset / "dataset.hdf5", info, params.fetch)
    models = name if own_models else instance_key(dataset, seed)
    vqvae, prior = (output_folder(part, models) for part in ("train_vqvae", "train_prior"))
    policy = Policy.join(vqvae, prior, params.evaluate.planner, choose_device(runtime.device))
    runs = {f"train_{folder.parent.name}": read_json(folder / "run.json")["run_id"] for folder in (vqvae, prior)}
    facts = provenance(params, info, validation, seed)
    tags = tags_of(facts, runs) | ({"ablation": ablation} if ablation else {})
    with tracking.start_run(
        stage,
        name=f"{stage} {name}",
        params=params.evaluate.model_dump(mode="json"),
        tags=tags,
        runtime=runtime,
    ) as tracked:
        result = rollout(
            policy,
            partial(make_environment, info),
            episodes=params.evaluate.episodes,
            environment_seed=params.evaluate.seed,
            planner_seed=seed,
            plan_every=params.evaluate.plan_every,
        )
        summary = summarize(result, info)
        metrics = (
            facts
            | summary
            | {
                "behaviour": behaviour(episodes, info),
                "planner": params.evaluate.planner.model_dump(mode="json"),
                "latent_step": policy.vqvae.params.latent_step,
                "window_length": policy.vqvae.params.windows.length,
                "recipe": recipe(params, policy, facts),
                "runs": runs | {"evaluate": tracked.id},
                "git_commit": tracking.git_state()[0],
            }
        )
        if ablation:
            metrics["ablation"] = ablation
        tracked.log_metrics(0, {key: value for key, value in summary.items() if isinstance(value, float)})
        tracked.log_metrics(0, {f"latency_ms_{key}": value for key, value in summary["latency_ms"].items()})
        training = Path(f"data/metrics/train_vqvae/{models}.json")
        if training.exists():  # shown beside the scores, so no input of this stage
            tracked.log_metrics(0, {"codebook_perplexity": read_json(training)["codebook_perplexity"]})
        tracked.log_json(metrics, "metrics.json")
        if not ablation:
            write_json(
                Path(f"data/plots/evaluate/{name}.json"), {"examples": [example.as_json() for example in result.examples]}
            )
            register(tracked, policy, episodes.observations[:2], metrics, validation, params.evaluate.latency_budget_ms)
        write_json(Path(f"data/metrics/{stage}/{name}.json"), metrics)


def provenance(params: Params, info: DatasetInfo, validation: dict[str, Any], seed: int) -> dict[str, Any]:
    """What every number about a trained policy states: data, scale, simulator, seed."""
    return {
        "dataset": info.id,
        "source": validation["source"],
        "digest": validation["digest"],
        "scale": params.scale,
        "environment": info.environment,
        "simulator": simulator(info.environment),
        "versions": versions(),
        "seed": seed,
    }


def tags_of(facts: dict[str, Any], runs: dict[str, str]) -> dict[str, Any]:
    """The tags of a run about a trained policy: what `provenance` says, and the runs that trained it by their stages."""
    tags = {key: facts[key] for key in ("dataset", "source", "scale", "environment", "seed")}
    return tags | {"dataset_digest": facts["digest"]} | {f"run_{stage}": key for stage, key in runs.items()}


def behaviour(episodes: Episodes, info: DatasetInfo) -> dict[str, Any]:
    """How the dataset's own episodes score: all, the best tenth of them, the last tenth; None without reference scores."""
    returns, tenth = episodes.returns, max(1, episodes.num_episodes // 10)
    groups = {"mean": returns, "best_tenth": np.sort(returns)[-tenth:], "last_tenth": returns[-tenth:]}
    known = info.reference_min_score is not None and info.reference_max_score is not None
    scores = {
        f"{name}_normalized_score": float(normalized_score(info, group).mean()) if known else None
        for name, group in groups.items()
    }
    return {"episodes": episodes.num_episodes, "mean_return": float(returns.mean())} | scores


def recipe(params: Params, policy: Policy, facts: dict[str, Any]) -> str:
    """A digest of all that decides a score but the training seed and the code: params of models as trained, data, protocol."""
    parts = {
        "fetch": params.fetch.model_dump(mode="json", exclude={"source", "path"}),  # the digest says which data
        "train_vqvae": policy.vqvae.params.model_dump(mode="json"),
        "train_prior": policy.prior.params.model_dump(mode="json"),
        "evaluate": params.evaluate.model_dump(mode="json", exclude={"latency_budget_ms"}),
    } | {key: facts[key] for key in ("digest", "environment", "simulator")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def register(
    run: tracking.Run,
    policy: Policy,
    example_observations: np.ndarray,
    metrics: dict[str, Any],
    validation: dict[str, Any],
    latency_budget_ms: float,
) -> None:
    """Log the policy as a model and make it a version of its family, with its card and the evidence that promotion weighs."""
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy")
        # On a CPU, as in the load test: a GPU rounds otherwise, and may choose another plan.
        on_cpu = Policy.load(Path(folder) / "policy", "cpu")
        example_actions = on_cpu.act(example_observations, row_generators(0, len(example_observations))).astype(np.float32)
        log_policy(run, Path(folder) / "policy", example_observations)
    name, git_dirty = model_name(metrics["dataset"]), tracking.git_state()[1]
    keys = ("dataset", "source", "scale", "seed", "environment", "simulator", "episodes", "environment_seed", "protocol")
    tags = {key: metrics[key] for key in (*keys, "score_metric", "recipe", "git_commit")}
    tags |= {f"run_{stage}": run_id for stage, run_id in metrics["runs"].items()}
    tags |= {
        "git_dirty": git_dirty,
        "dataset_digest": metrics["digest"],
        "validation": json.dumps({key: validation[key] for key in ("transitions", "episodes", "return", "warnings")}),
        "score": float(np.mean(metrics["scores"])),
        "scores": json.dumps(metrics["scores"]),
        "returns": json.dumps(metrics["returns"]),
        "latency_ms": metrics["latency_ms"]["median"],
        "latency_budget_ms": latency_budget_ms,
        "example_actions": json.dumps(example_actions.tolist()),
    }
    evaluation, report = Evaluation.model_validate(metrics), ValidationReport.model_validate(validation)
    card = model_card(name, evaluation, report, latency_budget_ms=latency_budget_ms, git_dirty=git_dirty)
    run.register(name, tags, card)


if __name__ == "__main__":
    main(run)
