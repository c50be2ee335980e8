"""Stage evaluate: a trained policy, in simulators of its dataset's environment -> scores; the policy goes to the registry.

A dataset without an environment is evaluated by its held-out actions; one without rewards is planned for by likelihood alone.

Example: python -m pipelines.stages.evaluate hopper-medium-replay 0
"""

from functools import partial
from typing import Any

import numpy as np

from pipelines.command_line import Dataset, Seed, main
from pipelines.stages.evaluation import (
    DATA,
    behaviour,
    digest,
    held_out_actions,
    log,
    provenance,
    register,
    run_ids,
    tags_of,
    training_minutes,
    with_own_environment,
)
from pipelines.stages.params import EvaluateStage
from tap.data.action_bounds import known_bounds
from tap.data.episodes import Episodes
from tap.device import choose_device
from tap.envs.make import make_environment
from tap.evaluation.rollout import rollout, summarize
from tap.files import write_json
from tap.planning.policy import Policy
from tap.results import (
    TAP_MODELS,
    AnyEvaluation,
    Evaluation,
    HeldOutEvaluation,
    Provenance,
    TrainingMetrics,
    ValidationReport,
    instance_key,
    metrics_path,
    weights_folder,
)
from tap.settings import EvaluateParams, Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import model_name


def run(dataset: Dataset, seed: Seed) -> None:
    evaluate("evaluate", dataset, seed)


def evaluate(stage: str, dataset: str, seed: int, ablation: str | None = None) -> None:
    """Evaluate the policy, write its metrics, plots and run; without an ablation, also log and register it as a model."""
    validation = ValidationReport.read(DATA / "raw" / dataset / "validation.json")
    resolved = read_params(dataset, validation, ablation)
    runtime, name = Runtime(), instance_key(dataset, seed, ablation)
    params, info = resolved.params, resolved.info
    episodes = Episodes.load(DATA / "raw" / dataset / "episodes")
    bounds = known_bounds(validation, info, resolved.fetch)
    models = name if resolved.trains else instance_key(dataset, seed)
    policy = load_policy(models, params, runtime)
    runs, facts = run_ids(trained_by(policy), models), provenance(resolved, validation, seed)
    tags = tags_of(facts, runs, validation.has_rewards) | ({"ablation": ablation} if ablation else {})
    with tracking.start_run(
        stage, name=f"{stage} {name}", params=params.model_dump(mode="json"), tags=tags, runtime=runtime
    ) as tracked:
        of_policy: dict[str, Any] = {
            **dict(facts),
            "planner": params.planner.model_dump(mode="json"),
            "training_minutes": training_minutes(trained_by(policy), models),
            "latent_step": policy.vqvae.params.latent_step,
            "window_length": policy.vqvae.params.windows.length,
            "recipe": recipe(resolved, policy, facts),
            "runs": runs | {"evaluate": tracked.id},
            "git_commit": tracking.git_state()[0],
            "ablation": ablation,
        }
        examples: list[dict[str, Any]] = []
        evaluation: AnyEvaluation
        if info.environment is None:
            held_out = policy.prior.params.fit.held_out
            found = held_out_actions(policy, episodes, held_out, seed, bounds, validation)
            evaluation = HeldOutEvaluation(**of_policy, **found)
        else:
            result = rollout(
                policy,
                partial(make_environment, info),
                episodes=params.episodes,
                environment_seed=params.seed,
                planner_seed=seed,
                plan_every=params.plan_every,
            )
            assert result.predictions is not None
            if validation.has_rewards:
                examples = [example.as_json() for example in result.predictions.examples]
            found = summarize(result, info) | ({} if validation.has_rewards else {"search_value_mean": None})
            own = behaviour(episodes, info, validation.has_rewards)
            evaluation = Evaluation(**of_policy, **found, behaviour=own)
        training = metrics_path(DATA, "train_vqvae", models)
        if training.exists() and (perplexity := TrainingMetrics.read(training).codebook_perplexity) is not None:
            tracked.log_metrics(0, {"codebook_perplexity": perplexity})
        if not ablation:
            write_json(DATA / f"plots/evaluate/{name}.json", {"examples": examples})
            states, budget = np.array(episodes.observations[:2]), params.latency_budget_ms
            evaluation = register(tracked, model_name(dataset), policy, bounds, states, evaluation, validation, budget)
        log(tracked, evaluation)
        evaluation.write(metrics_path(DATA, stage, name))


def read_params(dataset: str, validation: ValidationReport, ablation: str | None = None) -> EvaluateStage:
    """The params as they are used for this dataset. Raises ValueError as `with_objective` does."""
    return with_objective(with_own_environment(EvaluateStage.read(dataset, ablation), validation), validation)


def with_objective(resolved: EvaluateStage, validation: ValidationReport) -> EvaluateStage:
    """The params as they are used: without rewards, plans are chosen by likelihood alone.

    Raises ValueError if the search weighs returns.
    """
    if validation.has_rewards:
        return resolved
    params, planner = resolved.params, resolved.params.planner
    if planner.search == "critic_weighted":
        raise ValueError(
            f"{resolved.info.id} has no rewards, so there is nothing for evaluate.planner.search critic_weighted to weigh: use "
            "prior_mean"
        )
    by_likelihood = planner.model_copy(update={"objective": "likelihood"})
    return resolved.model_copy(update={"params": params.model_copy(update={"planner": by_likelihood})})


def load_policy(key: str, params: EvaluateParams, runtime: Runtime) -> Policy:
    """The policy of the models called `key`, with the planner of `params`."""
    vqvae, prior, critic, actor = (weights_folder(stage, key) for stage in TAP_MODELS)
    return Policy.join(vqvae, prior, critic, actor, params.planner, choose_device(runtime.device))


def trained_by(policy: Policy) -> tuple[str, ...]:
    """The stages that trained the models which the policy uses."""
    used = {"train_critic": policy.critic is not None, "train_actor": policy.actor is not None}
    return tuple(stage for stage in TAP_MODELS if used.get(stage, True))


def recipe(resolved: EvaluateStage, policy: Policy, facts: Provenance) -> str:
    """A digest of all that determines a score except training seed and code: params of models as trained, data, protocol."""
    parts = {
        "fetch": resolved.fetch.model_dump(mode="json", exclude={"source", "path"}),  # the digest identifies the data
        "train_vqvae": policy.vqvae.params.model_dump(mode="json"),
        "train_prior": policy.prior.params.model_dump(mode="json"),
        **({"train_critic": policy.critic.params.model_dump(mode="json")} if policy.critic else {}),
        **({"train_actor": policy.actor.params.model_dump(mode="json")} if policy.actor else {}),
        "evaluate": resolved.params.model_dump(mode="json", exclude={"latency_budget_ms"}),
    }
    return digest(parts, facts)


if __name__ == "__main__":
    main(run)
