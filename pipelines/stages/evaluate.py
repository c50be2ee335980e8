"""Stage evaluate: a trained policy, in simulators of its dataset's environment -> scores; the policy goes to the registry.

Example: python -m pipelines.stages.evaluate hopper-medium-replay 0
"""

import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from pipelines.command_line import Dataset, Seed, main
from pipelines.stages.params import EvaluateStage
from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes
from tap.data.score import normalized_score
from tap.device import choose_device
from tap.envs.make import make_environment, require_environment, simulator, versions
from tap.evaluation.rollout import rollout, summarize
from tap.files import write_json
from tap.planning.policy import Policy
from tap.results import (
    Behaviour,
    Evaluation,
    Lineage,
    Provenance,
    TrainingMetrics,
    ValidationReport,
    instance_key,
    lineage_path,
    metrics_path,
    weights_folder,
)
from tap.serving.policy import row_generators
from tap.settings import EvaluateParams, Runtime
from tap.tracking import run as tracking
from tap.tracking.model_card import model_card
from tap.tracking.registry import log_policy, model_name

DATA = Path("data")


def run(dataset: Dataset, seed: Seed) -> None:
    evaluate("evaluate", dataset, seed)


def evaluate(stage: str, dataset: str, seed: int, ablation: str | None = None) -> None:
    """Roll the policy out, write its metrics, plots and run; without an ablation, also log and register it as a model."""
    resolved, runtime, name = EvaluateStage.read(dataset, ablation), Runtime(), instance_key(dataset, seed, ablation)
    params, info = resolved.params, resolved.info
    episodes = Episodes.load(DATA / "raw" / dataset / "episodes")
    validation = ValidationReport.read(DATA / "raw" / dataset / "validation.json")
    models = name if resolved.trains else instance_key(dataset, seed)
    policy = load_policy(models, params, runtime)
    runs, facts = run_ids(models, policy), provenance(resolved, validation, seed)
    tags = tags_of(facts, runs) | ({"ablation": ablation} if ablation else {})
    with tracking.start_run(
        stage, name=f"{stage} {name}", params=params.model_dump(mode="json"), tags=tags, runtime=runtime
    ) as tracked:
        result = rollout(
            policy,
            partial(make_environment, info),
            episodes=params.episodes,
            environment_seed=params.seed,
            planner_seed=seed,
            plan_every=params.plan_every,
        )
        evaluation = Evaluation(
            **dict(facts),
            **summarize(result, info),
            behaviour=behaviour(episodes, info),
            planner=params.planner.model_dump(mode="json"),
            latent_step=policy.vqvae.params.latent_step,
            window_length=policy.vqvae.params.windows.length,
            recipe=recipe(resolved, policy, facts),
            runs=runs | {"evaluate": tracked.id},
            git_commit=tracking.git_state()[0],
            ablation=ablation,
        )
        log(tracked, evaluation, models)
        if not ablation:
            examples = [example.as_json() for example in result.examples]
            write_json(DATA / f"plots/evaluate/{name}.json", {"examples": examples})
            register(tracked, policy, np.array(episodes.observations[:2]), evaluation, validation, params.latency_budget_ms)
        evaluation.write(metrics_path(DATA, stage, name))


def load_policy(key: str, params: EvaluateParams, runtime: Runtime) -> Policy:
    """The policy of the models called `key`, with the planner of `params`."""
    vqvae, prior, critic = (weights_folder(stage, key) for stage in ("train_vqvae", "train_prior", "train_critic"))
    return Policy.join(vqvae, prior, critic, params.planner, choose_device(runtime.device))


def run_ids(key: str, policy: Policy) -> dict[str, str | None]:
    """The runs that trained the policy's models, called `key`, by stage. Scores and DVC do not depend on them."""
    stages = ("train_vqvae", "train_prior", *(["train_critic"] if policy.critic else []))
    paths = {stage: lineage_path(stage, key) for stage in stages}
    return {stage: Lineage.read(path).run_id if path.exists() else None for stage, path in paths.items()}


def provenance(resolved: EvaluateStage, validation: ValidationReport, seed: int) -> Provenance:
    """What every number about a trained policy states: data, scale, simulator, seed."""
    environment = require_environment(resolved.info)
    return Provenance(
        dataset=resolved.info.id,
        source=validation.source,
        digest=validation.digest,
        scale=resolved.scale,
        environment=environment,
        simulator=simulator(environment),
        versions=versions(),
        seed=seed,
    )


def tags_of(facts: Provenance, runs: dict[str, str | None]) -> dict[str, object]:
    """The tags of a run about a trained policy: its provenance, and the runs that trained it by their stages."""
    tags = facts.model_dump(include={"dataset", "source", "scale", "environment", "seed"})
    return tags | {"dataset_digest": facts.digest} | {f"run_{stage}": key for stage, key in runs.items()}


def log(tracked: tracking.Run, evaluation: Evaluation, models: str) -> None:
    """Log what runs are compared by: scores, latency, and the codebook's perplexity of the trained `models`."""
    tracked.log_metrics(0, {key: value for key, value in evaluation if isinstance(value, float)})
    tracked.log_metrics(0, {f"latency_ms_{key}": value for key, value in evaluation.latency_ms})
    training = metrics_path(DATA, "train_vqvae", models)
    if training.exists() and (perplexity := TrainingMetrics.read(training).codebook_perplexity) is not None:
        tracked.log_metrics(0, {"codebook_perplexity": perplexity})
    tracked.log_json(evaluation.as_json(), "metrics.json")


def behaviour(episodes: Episodes, info: DatasetInfo) -> Behaviour:
    """How the dataset's own episodes score: all, the best tenth of them, the last tenth; None without reference scores."""
    returns, tenth = episodes.returns, max(1, episodes.num_episodes // 10)

    def score(some: np.ndarray) -> float | None:
        known = info.reference_min_score is not None and info.reference_max_score is not None
        return float(normalized_score(info, some).mean()) if known else None

    return Behaviour(
        episodes=episodes.num_episodes,
        mean_return=float(returns.mean()),
        mean_normalized_score=score(returns),
        best_tenth_normalized_score=score(np.sort(returns)[-tenth:]),
        last_tenth_normalized_score=score(returns[-tenth:]),
    )


def recipe(resolved: EvaluateStage, policy: Policy, facts: Provenance) -> str:
    """A digest of all that determines a score except training seed and code: params of models as trained, data, protocol."""
    parts = {
        "fetch": resolved.fetch.model_dump(mode="json", exclude={"source", "path"}),  # the digest identifies the data
        "train_vqvae": policy.vqvae.params.model_dump(mode="json"),
        "train_prior": policy.prior.params.model_dump(mode="json"),
        **({"train_critic": policy.critic.params.model_dump(mode="json")} if policy.critic else {}),
        "evaluate": resolved.params.model_dump(mode="json", exclude={"latency_budget_ms"}),
    } | facts.model_dump(include={"digest", "environment", "simulator"})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def register(
    run: tracking.Run,
    policy: Policy,
    example_observations: np.ndarray,
    evaluation: Evaluation,
    validation: ValidationReport,
    latency_budget_ms: float,
) -> None:
    """Log the policy as a model and make it a version of its family, with its card and the evidence for promotion."""
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy")
        # On a CPU, as in the load test: a GPU rounds differently, and may choose another plan.
        on_cpu = Policy.load(Path(folder) / "policy", "cpu")
        example_actions = on_cpu.act(example_observations, row_generators(0, len(example_observations))).astype(np.float32)
        log_policy(run, Path(folder) / "policy", example_observations)
    name, git_dirty = model_name(evaluation.dataset), tracking.git_state()[1]
    same = ("dataset", "source", "scale", "seed", "environment", "simulator", "episodes", "environment_seed", "protocol")
    tags = {key: getattr(evaluation, key) for key in (*same, "score_metric", "recipe", "git_commit")}
    tags |= {f"run_{stage}": run_id for stage, run_id in evaluation.runs.items()}
    facts = {key: validation.as_json()[key] for key in ("transitions", "episodes", "return", "warnings")}
    tags |= {
        "git_dirty": git_dirty,
        "dataset_digest": evaluation.digest,
        "validation": json.dumps(facts),
        "score": float(np.mean(evaluation.scores)),
        "scores": json.dumps(evaluation.scores),
        "returns": json.dumps(evaluation.returns),
        "latency_ms": evaluation.latency_ms.median,
        "latency_budget_ms": latency_budget_ms,
        "example_actions": json.dumps(example_actions.tolist()),
    }
    card = model_card(name, evaluation, validation, latency_budget_ms=latency_budget_ms, git_dirty=git_dirty)
    run.register(name, tags, card)


if __name__ == "__main__":
    main(run)
