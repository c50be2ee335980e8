"""Stage methods: a policy of another method than TAP, evaluated as TAP's -> scores; the policy goes to the registry.

Example: python -m pipelines.stages.methods hopper-medium-replay 0 bc
"""

from functools import partial
from typing import Any

import numpy as np

from pipelines.command_line import Dataset, Method, Seed, main
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
from pipelines.stages.params import MethodsStage
from tap.data.action_bounds import known_bounds
from tap.data.episodes import Episodes
from tap.device import choose_device
from tap.envs.make import make_environment
from tap.evaluation.rollout import rollout, summarize
from tap.results import (
    AnyEvaluation,
    Evaluation,
    HeldOutEvaluation,
    ValidationReport,
    instance_key,
    metrics_path,
    weights_folder,
)
from tap.serving.policy import load_policy
from tap.settings import Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import model_name


def run(dataset: Dataset, seed: Seed, method: Method) -> None:
    """Evaluate the policy as the stage `evaluate` does; write its metrics and run, log and register it as a model."""
    validation = ValidationReport.read(DATA / "raw" / dataset / "validation.json")
    resolved = with_own_environment(MethodsStage.read(dataset, method), validation)
    runtime, name = Runtime(), instance_key(dataset, seed, method)
    params, info, stage, models = resolved.params, resolved.info, f"train_{method}", instance_key(dataset, seed)
    episodes = Episodes.load(DATA / "raw" / dataset / "episodes")
    policy = load_policy(weights_folder(stage, models), str(choose_device(runtime.device)))
    bounds = known_bounds(validation, info, resolved.fetch)
    runs, facts = run_ids([stage], models), provenance(resolved, validation, seed)
    with tracking.start_run(
        "methods",
        name=f"methods {name}",
        params=params.model_dump(mode="json"),
        tags=tags_of(facts, runs, validation.has_rewards) | {"method": method},
        runtime=runtime,
    ) as tracked:
        trained = policy.params.model_dump(mode="json")
        parts = {
            "fetch": resolved.fetch.model_dump(mode="json", exclude={"source", "path"}),
            stage: trained,
            "methods": params.model_dump(mode="json", exclude={"latency_budget_ms"}),
        }
        of_policy: dict[str, Any] = {
            **dict(facts),
            "training_minutes": training_minutes([stage], models),
            "recipe": digest(parts, facts),
            "runs": runs | {"methods": tracked.id},
            "git_commit": tracking.git_state()[0],
            "method": method,
        }
        evaluation: AnyEvaluation
        if info.environment is None:
            found = held_out_actions(policy, episodes, trained["fit"]["held_out"], seed, bounds, validation)
            evaluation = HeldOutEvaluation(**of_policy, **found)
        else:
            result = rollout(
                policy,
                partial(make_environment, info),
                episodes=params.episodes,
                environment_seed=params.seed,
                planner_seed=seed,
            )
            own = behaviour(episodes, info, validation.has_rewards)
            evaluation = Evaluation(**of_policy, **summarize(result, info), behaviour=own)
        states, budget = np.array(episodes.observations[:2]), params.latency_budget_ms
        evaluation = register(tracked, model_name(dataset), policy, bounds, states, evaluation, validation, budget)
        log(tracked, evaluation)
        evaluation.write(metrics_path(DATA, "methods", name))


if __name__ == "__main__":
    main(run)
