"""The model card of a registered policy, in Markdown: method, score, data, evaluation, lineage, limits and use."""

from collections.abc import Mapping
from typing import Any, Literal

from tap.estimates import Estimate
from tap.methods.catalog import CATALOG
from tap.results import IMITATION, AnyEvaluation, Evaluation, HeldOutEvaluation, ValidationReport

DATA = {
    "d4rl": "D4RL's original file",
    "file": "a file of the user, used unchanged",
    "recollected": "recollected, not D4RL's data: no score on it is a D4RL score",
    "bundled": "recorded by this project's own script, not D4RL's data: no score on it is a D4RL score",
    "lerobot": "a dataset of the user in LeRobot's layout, used unchanged",
    "minari": "a dataset in Minari's layout, used unchanged",
    "ogbench": "a file in OGBench's layout, used unchanged",
}
METRICS = {
    "normalized_score": "normalised score, 0 for a random policy and 100 for an expert by the dataset's reference returns",
    "return": "undiscounted return",
}
CHANGES: dict[bool | str, str] = {True: ", with uncommitted changes", False: "", "unknown": ""}  # of an unknown commit
SHOWN_WARNINGS = 3  # MLflow limits a description to 5,000 characters
NO_REWARDS = f"{IMITATION}: the data's own episodes have no returns"
PROMOTION = "\n## Promotion\n"


def model_card(
    name: str,
    evaluation: AnyEvaluation,
    validation: ValidationReport,
    *,
    latency_budget_ms: float,
    git_dirty: bool | Literal["unknown"],
) -> str:
    """The card of one version of the registered model `name`, from its evaluation and its dataset's validation."""
    latency, returns = evaluation.latency_ms, validation.episode_return
    warnings = validation.warnings[:SHOWN_WARNINGS] or ["none"]
    held_out = isinstance(evaluation, HeldOutEvaluation)
    title = "TAP" if evaluation.method == "tap" else CATALOG[evaluation.method].title
    return f"""# {title[0].upper()}{title[1:]} policy for {evaluation.dataset}, training seed {evaluation.seed}

{_method(evaluation)} It was trained \
offline, on recorded trajectories alone, at {evaluation.scale} scale.

## Score

{_score(evaluation)}
- other seeds of the same recipe are the versions with the tag recipe `{evaluation.recipe}`

## Data

- dataset: `{evaluation.dataset}`, **{DATA[evaluation.source]}**
- origin: {validation.origin}, SHA-256 {evaluation.digest}
- {validation.transitions} transitions in {validation.episodes} episodes
- returns: {f"{returns.min:.1f} to {returns.max:.1f}, mean {returns.mean:.1f}" if validation.has_rewards else NO_REWARDS}
- validation warnings: {"; ".join(warnings)}

## Evaluation

- {_where(evaluation)}
- protocol: {evaluation.protocol}
- decision latency for one state: {latency.median:.1f} ms (median), {latency.p95:.1f} ms (95th percentile) on the machine \
of the evaluation; the budget, served on a CPU, is {latency_budget_ms:g} ms

## Lineage

- git commit {evaluation.git_commit}{CHANGES[git_dirty]}
- recipe {evaluation.recipe}: digest of params, data, simulator and protocol, without seed and code
- runs: {", ".join(f"{stage} {run or 'untracked'}" for stage, run in evaluation.runs.items())}

## Intended use and limits

{_limits(evaluation)} Its actions have no safety checks. It was trained on states like those of the data; far from them, its \
{"plans and their predicted returns" if evaluation.planner and validation.has_rewards else "actions"} are meaningless. A \
score is valid only for its {"episodes" if held_out else "simulator, versions"} and protocol.

## Use

`tap serve {name}` serves the champion over HTTP. In Python, with this version's number:

```python
import mlflow

policy = mlflow.pyfunc.load_model("models:/{name}/VERSION")
actions = policy.predict(observations, params={{"seed": 0}})
```

Observations are float64 (n, {validation.observation_dim}), actions float32 (n, {validation.action_dim}).
"""


def with_promotion(card: str, reason: str, scores: Mapping[str, str]) -> str:
    """The card with a last section about its promotion, which replaces an earlier one; `scores` are the recipe's, by seed."""
    table = "\n".join(f"| {seed} | {score} |" for seed, score in scores.items())
    head = card.partition(PROMOTION)[0]
    return f"{head}{PROMOTION}\n{reason}\n\n| training seed | score |\n| --- | --- |\n{table}\n"


def _score(evaluation: AnyEvaluation) -> str:
    seed, episodes = evaluation.seed, evaluation.episodes
    if isinstance(evaluation, HeldOutEvaluation):
        error = Estimate.of(evaluation.scores)
        deviation = "" if error.standard_error is None else f" ± {error.standard_error:.3f}"
        kind = "held-out episodes" if evaluation.held_out else "episodes of its training"
        return f"""| training seed | action error | hold the last action | {kind} |
| --- | --- | --- | --- |
| {seed} | {error.mean:.3f}{deviation} | {evaluation.hold_error:.3f} | {episodes} |

- action error: squared, as a share of the variance of the recorded actions; less is better. ± is the standard error over the \
episodes of this one seed
- a small error does not prove that the policy does its task: in a running episode, errors add up"""
    data = evaluation.behaviour.mean_score
    own = NO_REWARDS if data is None else f"the data's own episodes score {data:.1f} on average"
    return f"""| training seed | score | mean return | episodes |
| --- | --- | --- | --- |
| {seed} | {Estimate.of(evaluation.scores)} | {evaluation.return_mean:.1f} | {episodes} |

- score: {METRICS[evaluation.score_metric]}; ± is the standard error over the episodes of this one seed
- {own}"""


def _where(evaluation: AnyEvaluation) -> str:
    releases = f"torch {evaluation.versions['torch']}, numpy {evaluation.versions['numpy']}"
    if isinstance(evaluation, Evaluation):
        return f"simulator: {evaluation.environment}, {evaluation.simulator}; {releases}"
    return f"no simulator: actions compared with recorded ones; {releases}"


def _limits(evaluation: AnyEvaluation) -> str:
    if isinstance(evaluation, Evaluation):
        return (
            f"For research in simulation: the policy acts in {evaluation.environment} from full observations. It was not "
            "tested on a real machine."
        )
    return (
        "For research: the policy acts from full observations. It has not acted anywhere, in simulation or on a real machine."
    )


def _method(evaluation: AnyEvaluation) -> str:
    if evaluation.method != "tap":
        return CATALOG[evaluation.method].summary
    assert evaluation.planner
    return (
        f"A Trajectory Autoencoding Planner: a VQ-VAE encodes {evaluation.latent_step} steps as one code, a Transformer prior "
        f"models the sequences of codes in the data, and a decision is {_decision(evaluation.planner)}."
    )


def _decision(planner: Mapping[str, Any]) -> str:
    search, steps = planner["search"], f"{planner['horizon']} steps"
    if search == "beam":
        sizes = f"width {planner['beam_width']}, expansion {planner['expansion_factor']}, {steps}"
        return f"the best plan of a beam search over codes ({sizes})"
    mean = "the mean over the likeliest first codes, weighted by the prior"
    moved = ", moved to the action of an ensemble of networks, the actor" if planner.get("actor") else ""
    if search == "prior_mean":
        return mean + moved
    if search == "critic_weighted":
        return f"{mean} and the critic (temperature {planner['temperature']:g}){moved}"
    return f"the best of {planner['samples']} plans of {steps} ({search.replace('_', ' ')})"
