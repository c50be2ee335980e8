"""Stage diagnose: the plans that a policy's searches choose from, next to the simulator executing them (paper, appendix).

Without an environment or without rewards, only offline checks.

Example: python -m pipelines.stages.diagnose hopper-medium-replay 0
"""

import base64
import io
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.image import imsave

from pipelines.command_line import Dataset, Seed, main
from pipelines.stages.evaluate import load_policy, read_params, trained_by
from pipelines.stages.evaluation import DATA, provenance, run_ids, tags_of
from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes
from tap.data.sampling import by_return
from tap.data.windows import Windows
from tap.envs.antmaze import AntMaze
from tap.envs.make import State, make_environment
from tap.evaluation.diagnostics import EPISODES, distribution, render, visualise, with_planner
from tap.evaluation.offline import check
from tap.files import read_json, write_json
from tap.planning.policy import Policy
from tap.results import Diagnosis, OfflineChecks, ValidationReport, instance_key, metrics_path
from tap.settings import EvaluateParams, Runtime
from tap.tracking import run as tracking

CHECKED_WINDOWS = 2000
VIEWS = {"antmaze": (0, 1)}  # by suite: the observation dimensions to plot plans in, if known


def run(dataset: Dataset, seed: Seed) -> None:
    validation = ValidationReport.read(DATA / "raw" / dataset / "validation.json")
    resolved, key, runtime = read_params(dataset, validation), instance_key(dataset, seed), Runtime()
    facts = provenance(resolved, validation, seed)
    policy, checked = (load_policy(key, params, runtime) for params in (resolved.params, with_all_models(resolved.params)))
    with tracking.start_run(
        "diagnose",
        name=f"diagnose {key}",
        params=resolved.params.model_dump(mode="json"),
        tags=tags_of(facts, run_ids(trained_by(checked), key), validation.has_rewards),
        runtime=runtime,
    ) as tracked:
        if resolved.info.environment and validation.has_rewards:
            found = diagnose(policy, resolved.info, resolved.params, seed, key)
        else:
            found = {"protocol": "offline checks alone"}
            write_json(Path(f"data/plots/diagnose/{key}.json"), {"distributions": {}, "plans": []})
        offline = offline_checks(checked, Episodes.load(DATA / "raw" / dataset / "episodes"), seed)
        diagnosis = Diagnosis(**dict(facts), **found, offline=offline, git_commit=tracking.git_state()[0])
        if offline:
            tracked.log_metrics(0, {f"offline_{name}": float(value) for name, value in offline if value is not None})
        for name, plans in (("uniform", diagnosis.uniform), ("prior", diagnosis.prior)):
            tracked.log_metrics(0, {f"{name}_{metric}": value for metric, value in plans or ()})
        tracked.log_json(diagnosis.as_json(), "metrics.json")
        diagnosis.write(metrics_path(DATA, "diagnose", key))


def diagnose(policy: Policy, info: DatasetInfo, params: EvaluateParams, seed: int, key: str) -> dict[str, Any]:
    """Sample plans, execute them in the simulator, and write them for the report; returns what is measured."""
    examples = read_json(Path(f"data/plots/evaluate/{key}.json"))["examples"]
    episodes = min(EPISODES, params.episodes)
    starts = [State(params.seed + episode) for episode in range(episodes)]
    samples = -(-params.planner.samples // episodes)
    states = [state_of(example["state"]) for example in examples]
    with closing(make_environment(info)) as env:
        distributions = {
            name: distribution(with_planner(policy, search=f"{name}_sampling", samples=samples), env, starts, seed)
            for name in ("uniform", "prior")
        }
        plans = [visualise(policy, env, state, VIEWS.get(info.suite), seed) for state in states]
        maze = env.unwrapped.maze if isinstance(env.unwrapped, AntMaze) else None
    for example, state, shown in zip(examples, states, plans, strict=True):
        shown["title"] = example["title"]
        shown["walls"] = [maze.centre(cell).tolist() for cell in maze.walls] if maze else []
        shown["frames"] = frames(info, state, shown["searches"])
    write_json(
        Path(f"data/plots/diagnose/{key}.json"),
        {"distributions": {name: each.as_json() for name, each in distributions.items()}, "plans": plans},
    )
    protocol = (
        f"{samples * episodes} plans of {params.planner.horizon} steps, {samples} from the first state of each of "
        f"{episodes} episodes, seeds {starts[0].seed}-{starts[-1].seed}, last checkpoint"
    )
    return {"protocol": protocol} | {name: each.summarize() for name, each in distributions.items()}


def with_all_models(params: EvaluateParams) -> EvaluateParams:
    """A planner that uses critic and actor, so that both are checked whether or not the policy's does; without rewards, the
    actor alone."""
    search = "critic_weighted" if params.planner.objective is None else "prior_mean"
    planner = params.planner.model_copy(update={"search": search, "actor": True})
    return params.model_copy(update={"planner": planner})


def offline_checks(policy: Policy, episodes: Episodes, seed: int) -> OfflineChecks | None:
    """Check the policy on windows drawn as in training, of the episodes held out from it; None if it cannot decode one code."""
    if policy.vqvae.params.bottleneck == "attention":
        return None
    fit = policy.prior.params.fit
    training, held_out = episodes.split(fit.held_out, np.random.default_rng(seed))
    checked = held_out if len(held_out.lengths) else training
    params = policy.vqvae.params.windows.model_copy(update={"length": policy.vqvae.params.latent_step})
    windows = Windows(checked, params, policy.normalizer, policy.device, DATA)
    starts = by_return(checked, fit.effective_share)(CHECKED_WINDOWS, torch.Generator().manual_seed(seed))
    return check(policy, windows, starts.to(policy.device), held_out=checked is held_out)


def state_of(example: dict[str, Any]) -> State:
    """The state of an example that the stage evaluate wrote."""
    return State(example["seed"], tuple(np.array(action, np.float32) for action in example["actions"]))


def frames(info: DatasetInfo, state: State, searches: dict[str, Any]) -> dict[str, str]:
    """For each search, the simulator executing its chosen plan: a PNG in base64. Empty if no renderer works."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # needs no display
    found = {}
    try:
        with closing(make_environment(info, render_mode="rgb_array")) as env:
            for search, shown in searches.items():
                with io.BytesIO() as file:
                    imsave(file, render(env, state, np.array(shown["chosen_actions"], np.float32)), format="png")
                    found[search] = base64.b64encode(file.getvalue()).decode()
    except Exception as error:  # a graphics driver may raise anything, and pictures are optional
        print(f"no pictures of the simulator: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    return found


if __name__ == "__main__":
    main(run)
