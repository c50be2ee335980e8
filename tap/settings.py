"""Params, read from params.yaml alone, and Runtime, read from the environment.

Params determine results, so DVC tracks all of them; Runtime describes this machine.
One dataset's Params are the merge of five layers, of which later ones override earlier ones:

    STAGE                       values for every scale and suite
    scales.SCALE.STAGE.all      values for every suite at the chosen scale
    scales.SCALE.STAGE.SUITE    overrides of one suite
    datasets.ID                 overrides of one dataset
    ablations.NAME              overrides of one ablation

A key of STAGE may not appear under scales: otherwise a change of its value could be overridden silently.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tap.yaml_file import read_mapping

T = TypeVar("T")
Suite = Literal["locomotion", "adroit", "antmaze", "custom"]
Source = Literal["bundled", "file", "d4rl", "lerobot", "minari", "ogbench"]
Scale = Literal["cpu", "paper"]
# Other than TAP, which is always trained; tap/methods/catalog.py describes them.
Method = Literal["bc", "bc-10", "iql", "cql", "tt", "tt-q", "dt", "mopo", "reflex"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
RunKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]  # part of queries to MLflow
Unset = Annotated[T | None, Field(exclude_if=lambda value: value is None)]  # left out of files and digests while it is not set
Names = Annotated[list[str], Field(min_length=1)]
Bound = float | Annotated[list[float | None], Field(min_length=1)]
Layers = Annotated[int, Field(ge=1, le=1000)]  # modules that are built one by one, whether or not memory suffices

METHODS: tuple[Method, ...] = get_args(Method)
NO_REWARD = "none"  # fetch.reward of a dataset that is only imitated


class Section(BaseModel):
    """A frozen part of Params that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def true_is_not_one(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name
        values = value if isinstance(value, list | tuple) else [value]
        if cls.model_fields[info.field_name].annotation is not bool and any(isinstance(each, bool) for each in values):
            raise PydanticCustomError("true", "Input should not be true or false")
        return value


class FetchParams(Section):
    """Where a dataset comes from and what it is. What is not set is taken from the catalog (tap/data/catalog.py)."""

    source: Source | None = None
    # Of source "file" an HDF5 file; without it, D4RL's cache folder is searched. Of "ogbench" an .npz file, of "lerobot" and
    # "minari" a folder, or of "minari" an id in Minari's cache.
    path: Path | None = None
    # Of source "lerobot" the columns, of "minari" the keys of a Dict, that are observed, joined in this order.
    observations: Unset[Names] = None
    # "none": the dataset has no rewards, or they mean nothing. Else, of source "lerobot", the column of rewards, or of a flag
    # that is worth 1 at an episode's end.
    reward: Unset[str] = None
    suite: Suite | None = None  # without it, that of `suite_of`
    environment: str | None = None  # a gymnasium id; or d4rl: D4RL's own environment, if d4rl can be imported
    environment_kwargs: dict[str, Any] | None = None  # arguments of its constructor
    max_episode_steps: PositiveInt | None = None
    reference_min_score: float | None = None
    reference_max_score: float | None = None
    clip_actions: bool  # clip actions to their bounds (tap/data/action_bounds.py), rather than keep them as recorded
    action_low: Unset[Bound] = None  # the least action, of all dimensions or of each; null in a list: none
    action_high: Unset[Bound] = None  # the greatest
    max_jump: PositiveFloat | None  # a larger distance between neighbouring observations ends an episode


class WindowParams(Section):
    """How episodes become training windows (paper, sections 3.1 and 3.2)."""

    length: PositiveInt  # T
    discount: Probability
    termination_penalty: float | None  # replaces the reward of a true terminal
    bootstrap_truncated: bool  # returns-to-go of a truncated episode extend beyond its end, at its mean reward
    normalize: bool

    @model_validator(mode="after")
    def bootstrap_converges(self) -> Self:
        if self.bootstrap_truncated and self.discount == 1:
            raise ValueError("bootstrap_truncated needs a discount below 1: otherwise the return is infinite")
        return self


class TransformerParams(Section):
    """The causal Transformer that encoder, decoder and prior share."""

    layers: Layers
    width: PositiveInt
    heads: PositiveInt
    dropout: Fraction

    @model_validator(mode="after")
    def heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class CodebookParams(Section):
    """The codebook and its updates by exponential moving averages (paper, section 2.1)."""

    size: Annotated[int, Field(ge=2)]  # K
    dim: PositiveInt  # D
    decay: Fraction
    commitment_weight: Annotated[float, Field(ge=0)]
    dead_usage: Annotated[float, Field(ge=0)]  # a code used less often than this per batch, by its moving average, is replaced


class LossWeights(Section):
    """Weight of each column group in the reconstruction loss."""

    observation: PositiveFloat
    action: PositiveFloat
    first_action: PositiveFloat  # multiplies `action` at the window's first step, the action that a policy executes
    reward: PositiveFloat
    return_to_go: PositiveFloat


class FitParams(Section):
    """One training run, counted in updates."""

    updates: PositiveInt
    effective_share: Probability  # of windows or transitions: below 1, those of high returns are drawn more often
    batch_size: PositiveInt  # global: summed over all processes
    learning_rate: PositiveFloat  # the peak of the schedule
    schedule: Literal["constant", "cosine"]  # cosine: the learning rate falls to 0 at the last update
    warmup_updates: NonNegativeInt  # the learning rate rises linearly over these
    ema_decay: Fraction  # of the averaged weights that are evaluated and saved; 0: the last weights are
    weight_decay: Annotated[float, Field(ge=0)]
    betas: tuple[Fraction, Fraction]
    clip_norm: PositiveFloat
    held_out: Fraction  # share of episodes kept out of training; 0: none, so there is no held-out loss
    log_every: PositiveInt
    checkpoint_every: PositiveInt

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.warmup_updates >= self.updates:
            raise ValueError(f"warmup_updates {self.warmup_updates} is not below updates {self.updates}")
        return self

    def batch_size_per_process(self, world_size: int) -> int:
        """The local batch; raises ValueError if the global one cannot be divided equally."""
        if self.batch_size % world_size:
            raise ValueError(
                f"fit.batch_size {self.batch_size} is not divisible by the world size {world_size}: change one of them"
            )
        return self.batch_size // world_size


class TrainVqvaeParams(Section):
    windows: WindowParams
    latent_step: PositiveInt  # L
    bottleneck: Literal["pool", "attention"]  # between L steps and one code
    decoder: Literal["conditional", "unconditional"]  # whether it gets the window's first state
    codebook: CodebookParams
    transformer: TransformerParams
    loss_weights: LossWeights
    fit: FitParams

    @model_validator(mode="after")
    def window_holds_whole_codes(self) -> Self:
        if self.windows.length % self.latent_step:
            raise ValueError(f"windows.length {self.windows.length} is not a multiple of latent_step {self.latent_step}")
        return self


class TrainPriorParams(Section):
    transformer: TransformerParams
    fit: FitParams


class NetworkParams(Section):
    """A multilayer perceptron."""

    layers: Layers  # hidden ones
    width: PositiveInt


class TrainBcParams(Section):
    """A network that imitates actions: the data's, or a planner's."""

    network: NetworkParams
    fit: FitParams


class RewardParams(Section):
    """What is learned from instead of the recorded rewards: scale (reward + shift)."""

    shift: float
    return_range: PositiveFloat | None  # the scale is such that the returns of the data's episodes span this; null: it is 1


Expectile = Annotated[float, Field(gt=0, lt=1)]  # of Q that V estimates


class _TransitionsParams(Section):
    """A method that learns values from transitions."""

    network: NetworkParams  # of the actor and of each critic
    rewards: RewardParams
    discount: Fraction
    target_rate: Probability  # share of the way that target networks move at each update
    fit: FitParams


class TrainIqlParams(_TransitionsParams):
    """Implicit Q-learning: actor, two Q networks, V."""

    expectile: Expectile
    temperature: PositiveFloat  # the inverse one: the larger, the more the actor prefers actions of high advantage


class TrainCqlParams(_TransitionsParams):
    """Conservative Q-learning: actor, two Q networks, the weight of the actor's entropy."""

    penalty_weight: Annotated[float, Field(ge=0)]  # of values of other actions than the recorded ones
    sampled_actions: PositiveInt  # of each of three kinds, for the penalty
    imitating_updates: NonNegativeInt  # the first ones, in which the actor imitates the recorded actions


class DynamicsParams(Section):
    """MOPO's ensemble of dynamics models. Its training is as `fit` says, but for the last three, and of all episodes alike."""

    network: NetworkParams
    members: PositiveInt
    elites: PositiveInt  # those members that predict held-out transitions best; the others are not used
    beta: Annotated[float, Field(ge=0, le=1)]  # 0: of greatest likelihood; 1: all errors alike, however large the variance
    updates: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def elites_are_members(self) -> Self:
        if self.elites > self.members:
            raise ValueError(f"elites {self.elites} are more than members {self.members}: lower elites")
        return self


class TrainMopoParams(_TransitionsParams):
    """Model-based offline policy optimisation: dynamics models, then actor, two Q networks, the weight of the entropy."""

    dynamics: DynamicsParams
    horizon: PositiveInt  # h: steps of a rollout in the model, from a recorded state
    penalty_weight: Annotated[float, Field(ge=0)]  # lambda: of the model's uncertainty in the reward, both in raw units
    real_share: Fraction  # of a batch that is recorded transitions; the others are of rollouts
    kept_updates: PositiveInt  # rollouts' transitions of this many last updates are trained on

    @property
    def dynamics_fit(self) -> FitParams:
        own = self.dynamics.model_dump(include={"updates", "learning_rate", "weight_decay"})
        return self.fit.model_copy(update=own | {"effective_share": 1.0})

    @model_validator(mode="after")
    def warmup_ends_in_the_dynamics(self) -> Self:
        if self.fit.warmup_updates >= self.dynamics.updates:
            raise ValueError(
                f"fit.warmup_updates {self.fit.warmup_updates} is not below dynamics.updates {self.dynamics.updates}"
            )
        return self


class TrajectorySearchParams(Section):
    """The Trajectory Transformer's beam search."""

    horizon: PositiveInt
    beam_width: PositiveInt
    expansion_factor: PositiveInt  # actions that are sampled after each plan
    context: PositiveInt  # transitions that stay in the window when it is full
    top_k: PositiveInt | None  # of an action's dimension, only this many of the likeliest bins are sampled; null: all
    cdf: Fraction  # and none of the unlikeliest bins, whose probabilities add up to less than this


class TrainTtParams(Section):
    """The Trajectory Transformer (Janner et al. 2021)."""

    windows: WindowParams  # the length is what the model can attend to
    binning: Literal["quantile", "uniform"]
    bins: Annotated[int, Field(ge=2)]  # of each dimension
    transformer: TransformerParams
    action_weight: PositiveFloat  # of an action's dimensions in the loss; of all others 1
    search: TrajectorySearchParams
    fit: FitParams

    @model_validator(mode="after")
    def bins_have_raw_units(self) -> Self:
        if self.windows.normalize:
            raise ValueError("windows.normalize has no effect, because bins do not depend on units: set it to false")
        return self

    @model_validator(mode="after")
    def context_leaves_room(self) -> Self:
        if self.search.context >= self.windows.length:
            raise ValueError(
                f"search.context {self.search.context} leaves no room for a next step in windows.length {self.windows.length}"
            )
        return self


class CriticParams(Section):
    """The critics of implicit Q-learning without its actor: two Q networks, V."""

    network: NetworkParams  # of each
    return_range: PositiveFloat | None  # rewards are scaled such that the returns of the data's episodes span this; null: not
    expectile: Expectile
    target_rate: Probability
    fit: FitParams


class TrainTtQParams(TrainTtParams):
    """The Trajectory Transformer with a critic, which learns from the rewards of `windows` with their discount."""

    critic: CriticParams

    @model_validator(mode="after")
    def episodes_are_held_out_together(self) -> Self:
        if self.critic.fit.held_out != self.fit.held_out:
            raise ValueError(
                f"critic.fit.held_out {self.critic.fit.held_out} is not fit.held_out {self.fit.held_out}: set both to one value"
            )
        return self


class TrainDtParams(Section):
    """The Decision Transformer (Chen et al. 2021)."""

    context: Annotated[int, Field(ge=1, le=1000)]  # steps that an action depends on, the present one among them
    target_return: float | None  # what the policy is asked for, undiscounted; null: the highest return of a training episode
    return_scale: PositiveFloat | None  # returns-to-go are divided by it; null: they are normalised as observations are
    transformer: TransformerParams
    fit: FitParams


class TrainCriticParams(Section):
    """An ensemble of MLPs with two hidden layers."""

    members: PositiveInt
    width: PositiveInt  # of the hidden layers
    episode_share: Probability  # of the training episodes, for each member
    fit: FitParams


class TrainActorParams(Section):
    """An ensemble of MLPs with two hidden layers."""

    members: PositiveInt
    width: PositiveInt  # of the hidden layers
    fit: FitParams  # each member gets an equal part of the batch

    @model_validator(mode="after")
    def members_divide_batch(self) -> Self:
        if self.fit.batch_size % self.members:
            raise ValueError(f"fit.batch_size {self.fit.batch_size} is not a multiple of members {self.members}")
        return self


class PlannerParams(Section):
    """The search over codes (paper, section 3.3), or the mean over first codes (critic_weighted and prior_mean)."""

    search: Literal["beam", "prior_sampling", "uniform_sampling", "critic_weighted", "prior_mean"]
    horizon: PositiveInt
    beam_width: PositiveInt
    expansion_factor: PositiveInt
    samples: PositiveInt  # of prior_sampling and uniform_sampling
    replacement: bool  # beam search samples the codes that continue a plan with replacement
    likelihood_weight: Annotated[float, Field(ge=0)]  # alpha
    likelihood_threshold: Probability  # beta
    partial_threshold: bool  # a partial plan of m codes is penalised below beta^m, not below beta^M
    stop_at_end: bool  # leave rewards after a predicted episode end out of the sum
    likeliest_codes: PositiveInt  # of critic_weighted and prior_mean: of this many codes at a state they are the mean
    temperature: PositiveFloat  # of critic_weighted, in units of the critic's held-out error
    actor: bool  # a mean over codes is moved such that under the prior its first action is the actor's
    objective: Unset[Literal["likelihood"]] = None  # of a plan, alone; else its return, too. Without rewards, the stages set it
    precision: Unset[Literal["int8"]] = None  # of matrix products on a CPU, which are then faster; else float32
    budget_ms: Unset[PositiveFloat] = None  # the longest time to plan for a state: scores then depend on the machine's speed

    @model_validator(mode="after")
    def critic_values_returns(self) -> Self:
        if self.search == "critic_weighted" and self.objective == "likelihood":
            raise ValueError("search critic_weighted needs returns, but plans are chosen by likelihood alone: use prior_mean")
        return self

    @property
    def averages(self) -> bool:
        """Whether a plan is a mean over first codes, which only the last three params concern."""
        return self.search in ("critic_weighted", "prior_mean")


class ProtocolParams(Section):
    """How any policy is evaluated."""

    episodes: PositiveInt
    seed: Annotated[int, Field(ge=0)]  # of the environments; the planner's own randomness adds the training seed
    latency_budget_ms: PositiveFloat  # longest allowed decision of the served policy, on a CPU and for one state


class EvaluateParams(ProtocolParams):
    plan_every: PositiveInt  # actions of a plan that are executed before the next plan
    planner: PlannerParams


class Params(Section):
    """All that determines one dataset's results, merged and validated."""

    dataset: str
    scale: Scale
    fetch: FetchParams
    train_vqvae: TrainVqvaeParams
    train_prior: TrainPriorParams
    train_critic: TrainCriticParams
    train_actor: TrainActorParams
    evaluate: EvaluateParams
    # One for each method: `params_section` names it. A file may lack those of methods that it does not list.
    train_bc: TrainBcParams | None = None
    train_bc_10: TrainBcParams | None = None
    train_iql: TrainIqlParams | None = None
    train_cql: TrainCqlParams | None = None
    train_tt: TrainTtParams | None = None
    train_tt_q: TrainTtQParams | None = None
    train_dt: TrainDtParams | None = None
    train_mopo: TrainMopoParams | None = None
    train_reflex: TrainBcParams | None = None

    @model_validator(mode="after")
    def penalty_needs_rewards(self) -> Self:
        if self.fetch.reward == NO_REWARD and self.train_vqvae.windows.termination_penalty is not None:
            raise ValueError(
                "train_vqvae.windows.termination_penalty replaces a reward, but fetch.reward is none: set it to null"
            )
        return self

    @model_validator(mode="after")
    def planner_fits_model(self) -> Self:
        planner, vqvae = self.evaluate.planner, self.train_vqvae
        horizon = planner.horizon
        if horizon % vqvae.latent_step:
            raise ValueError(
                f"evaluate.planner.horizon {horizon} is not a multiple of train_vqvae.latent_step {vqvae.latent_step}"
            )
        if horizon > vqvae.windows.length:
            raise ValueError(
                f"evaluate.planner.horizon {horizon} is longer than train_vqvae.windows.length {vqvae.windows.length}: "
                "the model was not trained on plans of that length"
            )
        if self.evaluate.plan_every > horizon:
            raise ValueError(f"evaluate.plan_every {self.evaluate.plan_every} is more than evaluate.planner.horizon {horizon}")
        if planner.averages and self.evaluate.plan_every > vqvae.latent_step:
            raise ValueError(
                f"evaluate.plan_every {self.evaluate.plan_every} is more than train_vqvae.latent_step {vqvae.latent_step}: "
                f"plans of evaluate.planner.search {planner.search} are one code long"
            )
        if vqvae.bottleneck == "attention" and (planner.search == "beam" or planner.averages):
            decodes = (
                "a beam search decodes partial plans" if planner.search == "beam" else f"{planner.search} decodes single codes"
            )
            raise ValueError(
                f"evaluate.planner.search: {decodes}, which train_vqvae.bottleneck attention does not support: "
                "use prior_sampling"
            )
        return self


STAGES = tuple(name for name in Params.model_fields if name not in ("dataset", "scale"))  # the sections of params.yaml


def params_section(method: Method) -> str:
    """The section of a method in params.yaml, which is also the name of the module of its training stage."""
    return f"train_{method.replace('-', '_')}"


class Ablation(Section):
    """One ablation's overrides, by stage. An ablation that changes a model trains separate models."""

    train_vqvae: dict[str, Any] = {}
    train_prior: dict[str, Any] = {}
    train_critic: dict[str, Any] = {}
    train_actor: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}

    @property
    def trains(self) -> bool:
        return bool(self.train_vqvae or self.train_prior or self.train_critic or self.train_actor)


class Ablate(Section):
    """Which of the ablations are run, and on which datasets."""

    datasets: list[str]
    planners: list[str]
    models: list[str]


class ParamsFile(Section):
    """params.yaml as it is written: layers not merged yet."""

    scale: Scale
    seeds: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]  # strict: DVC names stages by them
    datasets: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)]
    methods: list[Method]  # baselines beside TAP
    ablate: Ablate
    ablations: dict[str, Ablation]
    fetch: dict[str, Any]
    train_vqvae: dict[str, Any]
    train_prior: dict[str, Any]
    train_critic: dict[str, Any]
    train_actor: dict[str, Any]
    evaluate: dict[str, Any]
    train_bc: dict[str, Any] = {}
    train_bc_10: dict[str, Any] = {}
    train_iql: dict[str, Any] = {}
    train_cql: dict[str, Any] = {}
    train_tt: dict[str, Any] = {}
    train_tt_q: dict[str, Any] = {}
    train_dt: dict[str, Any] = {}
    train_mopo: dict[str, Any] = {}
    train_reflex: dict[str, Any] = {}
    scales: dict[Scale, dict[str, dict[str, dict[str, Any] | None]]]

    @field_validator("datasets", "ablations")
    @classmethod
    def names_are_parts_of_file_names(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} names files and stages: use letters, digits, - and _, a letter or digit first")
        return named

    @field_validator("seeds", "methods")
    @classmethod
    def listed_once(cls, listed: list[Any]) -> list[Any]:
        if twice := [value for place, value in enumerate(listed) if value in listed[:place]]:
            raise ValueError(f"{twice[0]!r} is listed twice: keep one")
        return listed

    @cached_property
    def stages(self) -> dict[str, dict[str, Any]]:
        return {stage: getattr(self, stage) for stage in STAGES}

    @model_validator(mode="after")
    def ablate_lists_known_names(self) -> Self:
        for dataset in self.ablate.datasets:
            if dataset not in self.datasets:
                raise ValueError(
                    f"ablate.datasets: {dataset!r} is not listed under datasets: add it there, or take it out here"
                )
        for key, trains in (("planners", False), ("models", True)):
            for name in getattr(self.ablate, key):
                if name not in self.ablations:
                    raise ValueError(
                        f"ablate.{key}: {name!r} is not listed under ablations{_did_you_mean(name, self.ablations)}"
                    )
                if self.ablations[name].trains != trains:
                    other = "models" if self.ablations[name].trains else "planners"
                    raise ValueError(f"ablate.{key}: {name!r} belongs under ablate.{other}")
        return self


Key = tuple[str, ...]
LISTED = 20  # mistakes in one message
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]*")


def read_params_file(path: Path) -> ParamsFile:
    """Read and check the layout of params.yaml.

    Raises ValueError as `read_mapping` does, and if keys are unknown or missing.
    """
    try:
        return ParamsFile.model_validate(read_mapping(path))
    except ValidationError as error:
        raise ValueError(_explain(error, path, ParamsFile, {})) from None


def suite_of(dataset: str) -> Suite:
    """The suite of a dataset, from the first word of its id, as in D4RL's ids, after any `stochastic-`."""
    match dataset.removeprefix("stochastic-").split("-")[0]:
        case "hopper" | "halfcheetah" | "walker2d" | "ant":
            return "locomotion"
        case "pen" | "hammer" | "door" | "relocate":
            return "adroit"
        case "antmaze":
            return "antmaze"
        case _:
            return "custom"


def load_params(path: Path, dataset: str, *, scale: Scale | None = None, ablation: str | None = None) -> Params:
    """The merged and validated Params of one dataset.

    `scale` overrides the file's, `ablation` names one of its ablations.
    Raises ValueError with the path of the offending key in params.yaml.
    """
    file = read_params_file(path)
    if dataset not in file.datasets:
        raise ValueError(f"{path}: datasets: {dataset!r} is not listed{_did_you_mean(dataset, file.datasets)}")
    if ablation is not None and ablation not in file.ablations:
        raise ValueError(f"{path}: ablations: {ablation!r} is not listed{_did_you_mean(ablation, file.ablations)}")
    scale = scale or file.scale
    fetch = (file.datasets[dataset] or {}).get("fetch")
    suite = (fetch.get("suite") if isinstance(fetch, Mapping) else None) or suite_of(dataset)
    layers: list[tuple[Key, Mapping[str, Any]]] = [((), file.stages)]
    _check_names(file.datasets[dataset] or {}, STAGES, path, f"datasets.{dataset}", "stage")
    for listed, stages in file.scales.items():
        _check_names(stages, STAGES, path, f"scales.{listed}", "stage")
        for stage, suites in stages.items():
            _check_names(suites, ("all", *get_args(Suite)), path, f"scales.{listed}.{stage}", "suite")
    for stage, suites in file.scales.get(scale, {}).items():
        for name in ("all", suite):
            layers.append((("scales", scale, stage, name), {stage: suites.get(name) or {}}))
    layers.append((("datasets", dataset), file.datasets[dataset] or {}))
    if ablation is not None:
        layers.append((("ablations", ablation), file.ablations[ablation].model_dump(exclude_defaults=True)))

    merged: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    for where, layer in layers:
        for key, value in _leaves(layer):
            written = where + key[1:] if where[:1] == ("scales",) else where + key
            if where[:1] == ("scales",) and origins.get(key) == ".".join(key):
                raise ValueError(
                    f"{path}: {'.'.join(key)} and {'.'.join(written)} both set one value: "
                    "a change of the first would have no effect; keep one"
                )
            _assign(merged, key, value, path, ".".join(written))
            origins[key] = ".".join(written)
    try:
        params = Params.model_validate({"dataset": dataset, "scale": scale, **merged})
    except ValidationError as error:
        raise ValueError(_explain(error, path, Params, origins)) from None
    for method in file.methods:
        if getattr(params, params_section(method)) is None:
            raise ValueError(f"{path}: {params_section(method)}: is missing, but `methods` lists {method!r}: add its params")
    return params


def _check_names(layer: Mapping[str, Any], known: Sequence[str], path: Path, where: str, kind: str) -> None:
    for name in layer:
        if name not in known:
            raise ValueError(f"{path}: {where}.{name}: unknown {kind}{_did_you_mean(name, known)}")


def _leaves(tree: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in tree.items():
        here = (*prefix, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, here)
        else:
            yield here, value


def _assign(tree: dict[str, Any], key: Key, value: Any, path: Path, written: str) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: {written}: {part} is a value, not a section")
    if isinstance(tree.get(key[-1]), dict):
        raise ValueError(f"{path}: {written}: {key[-1]} is a section, not a value")
    tree[key[-1]] = value


def _explain(error: ValidationError, path: Path, model: type[BaseModel], origins: Mapping[Key, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        written = next(
            (_head(origin, len(below) - len(key)) for below, origin in origins.items() if below[: len(key)] == key), ""
        )
        if not key or problem["type"] in ("missing", "value_error"):  # concerns the merge of all layers
            written = ".".join(key)
        match problem["type"]:
            case "extra_forbidden":
                message = f"unknown key{_did_you_mean(key[-1], _fields(model, key[:-1]))}"
            case "missing":
                message = "is missing"
            case "value_error":
                message = str(problem["ctx"]["error"])
            case _:
                message = f"{problem['msg']} (is {problem['input']!r:.200})"
        lines.append(f"{path}: {written or '.'.join(key)}: {message}" if key else f"{path}: {message}")
    more = [f"{path}: and {len(lines) - LISTED} more mistakes"] if len(lines) > LISTED else []
    return "\n".join(lines[:LISTED] + more)


def _head(origin: str, drop: int) -> str:
    """A dotted path less its last `drop` parts."""
    return origin.rsplit(".", drop)[0] if drop else origin


def _fields(model: type[BaseModel], key: Key) -> list[str]:
    for part in key:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


class Runtime(BaseSettings):
    """Device, folders and store of this machine, and what started the process: environment variables, or a `.env` file.

    DVC does not track it, so it must not determine results. The exception is the device: a GPU trains in bfloat16.
    """

    # A variable that is set but empty counts as unset.
    model_config = SettingsConfigDict(env_file=".env", extra="ignore", populate_by_name=True, env_ignore_empty=True)

    device: str = Field("auto", validation_alias="TAP_DEVICE")
    checkpoints: Path = Field(Path(".checkpoints"), validation_alias="TAP_CHECKPOINTS")
    tracking_uri: str = Field("sqlite:///mlflow.db", validation_alias="MLFLOW_TRACKING_URI")
    outbox: Path = Field(Path(".tracking"), validation_alias="TAP_OUTBOX")  # runs that are not delivered to MLflow yet
    parent_run: RunKey | None = Field(None, validation_alias="TAP_PARENT_RUN")  # the id of the run that this one belongs to
    flow_run: RunKey | None = Field(None, validation_alias="TAP_FLOW_RUN")  # Prefect's id of what started it
    d4rl_dataset_dir: Path = Field(Path("~/.d4rl/datasets"), validation_alias="D4RL_DATASET_DIR")
    minari_datasets_path: Path = Field(Path("~/.minari/datasets"), validation_alias="MINARI_DATASETS_PATH")
