"""What the stages write, for each other and for people: one model per kind of file.

    data/raw/DATASET/validation.json     ValidationReport
    data/metrics/train_vqvae/KEY.json    TrainingMetrics
    data/metrics/train_prior/KEY.json    TrainingMetrics
    data/metrics/train_critic/KEY.json   TrainingMetrics
    data/metrics/train_actor/KEY.json    TrainingMetrics
    data/metrics/train_METHOD/KEY.json   TrainingMetrics
    data/lineage/train_vqvae/KEY.json    Lineage
    data/lineage/train_prior/KEY.json    Lineage
    data/lineage/train_critic/KEY.json   Lineage
    data/lineage/train_actor/KEY.json    Lineage
    data/lineage/train_METHOD/KEY.json   Lineage
    data/teacher/KEY/METHOD.json         Teacher
    data/metrics/evaluate/KEY.json       Evaluation, or HeldOutEvaluation of a dataset without an environment
    data/metrics/ablations/KEY.json      likewise
    data/metrics/methods/KEY.json        likewise
    data/metrics/diagnose/KEY.json       Diagnosis

KEY is the `instance_key` DATASET-SEED, DATASET-SEED-ABLATION or DATASET-SEED-METHOD. Fields are the file's keys, in the
file's order.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tap.files import read_json, write_json
from tap.settings import Method, PlannerParams

TAP_MODELS = ("train_vqvae", "train_prior", "train_critic", "train_actor")  # the stages that train them
T = TypeVar("T")
Absent = Annotated[T | None, Field(exclude_if=lambda value: value is None)]  # a field that is None is left out of the file


def instance_key(dataset: str, seed: int, variant: str | None = None) -> str:
    """The name of one instance of a stage, as DVC's matrix forms it: DATASET-SEED or DATASET-SEED-VARIANT.

    The variant is an ablation, or a method other than TAP.
    """
    return "-".join(str(part) for part in (dataset, seed, variant) if part is not None)


def metrics_path(data: Path, stage: str, key: str) -> Path:
    """Where a stage writes the metrics of an instance, below the folder `data`."""
    return data / "metrics" / stage / f"{key}.json"


def weights_folder(stage: str, key: str) -> Path:
    """Where a training stage writes its weights: data/vqvae/KEY, data/prior/KEY, data/critic/KEY, data/METHOD/KEY."""
    return Path("data") / stage.removeprefix("train_") / key


def teacher_path(key: str, method: Method) -> Path:
    """Where the stage `teacher` writes what a method learns from."""
    return Path("data/teacher") / key / f"{method}.json"


def lineage_path(stage: str, key: str) -> Path:
    """Where a training stage writes its `Lineage`: separate from the weights, which may be equal in two runs."""
    return Path("data/lineage") / stage / f"{key}.json"


def seed_files(folder: Path, dataset: str, extension: str) -> dict[int, Path]:
    """The files DATASET-SEED.EXTENSION in `folder`, in the order of seeds; other ids may begin with this one's."""
    seeds = {path.stem.removeprefix(f"{dataset}-"): path for path in folder.glob(f"{dataset}-*.{extension}")}
    return dict(sorted((int(seed), path) for seed, path in seeds.items() if seed.isdigit()))


class Record(BaseModel):
    """A frozen part of a file. Unknown keys are an error when it is constructed, and ignored when it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of a stage. Raises ValueError, with a remedy, if it is missing or a field is missing or wrong."""
        try:
            return cls.model_validate(read_json(path), extra="ignore")
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist: run its stage with `dvc repro`") from None
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ValueError(f"{path} is not valid ({problems}): run its stage again with `dvc repro --force`") from None

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises ValueError on NaN or infinity."""
        write_json(path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """What `write` writes."""
        return self.model_dump(mode="json", by_alias=True)


# ---------------------------------------------------------------- fetch


class EpisodeLength(Record):
    """Steps in an episode, over all episodes."""

    min: int
    median: float
    max: int


class EpisodeReturn(Record):
    """Undiscounted returns of episodes."""

    mean: float
    min: float
    max: float


class Boundaries(Record):
    """How many episodes end for each reason, what was ignored or dropped, and the same in words."""

    terminals: int
    timeouts: int
    discontinuities: int
    end_of_file: int
    ignored_timeouts: int
    dropped_goal_rows: int
    how: str


class Histogram(Record):
    """Counts of n bins between n + 1 edges."""

    counts: list[int]
    edges: list[float]


class OwnEnvironment(Record):
    """The environment that a dataset names: facts about it, called as in its params."""

    environment: str  # a gymnasium id
    environment_kwargs: dict[str, Any] = {}
    max_episode_steps: Absent[int] = None


class ValidationReport(Record):
    """A dataset's file, and the episodes cut from it."""

    dataset: str
    suite: str
    source: str
    origin: str  # the URL or path that the file came from
    digest: str  # SHA-256 of the file, or of all files that are read
    bytes: int
    transitions: int
    episodes: int
    observation_dim: int
    action_dim: int
    has_rewards: Annotated[bool, Field(exclude_if=bool)] = True  # left out of the file if it has; else all rewards are 0
    fps: Absent[float] = None  # steps per second
    tasks: Absent[list[str]] = None  # in words
    observation_names: Absent[list[str]] = None  # of each dimension
    action_names: Absent[list[str]] = None
    own_environment: Absent[OwnEnvironment] = None  # if policies are evaluated in it, since params name none
    length: EpisodeLength
    episode_return: EpisodeReturn = Field(alias="return")
    normalized_score_mean: float | None  # None without reference scores
    boundaries: Boundaries
    truncated_episodes: int
    unfinished_last_episode: bool
    constant_observation_dims: list[int]
    constant_action_dims: list[int]
    rounded_observation_dims: Absent[list[int]] = None  # of which float32 distinguishes few values
    actions_out_of_range: int  # rows
    action_bounds: Absent[str] = None  # in words
    action_low: Absent[list[float | None]] = None  # the bounds of each dimension, unless all are -1 and 1
    action_high: Absent[list[float | None]] = None
    action_max_abs: float
    non_finite: dict[str, int]  # by column of the file
    return_histogram: Histogram
    warnings: list[str]


# ---------------------------------------------------------------- training


class TrainingMetrics(Record):
    """The last values of a training run, means since the log's previous entry.

    Only the VQ-VAE has parts of the loss. Only the critic has errors: the RMSE of its values, and Spearman's correlation of
    values and returns, in units of return, on held-out episodes, or on the training episodes if none are held out.
    """

    step: int
    loss: float
    observation: Absent[float] = None
    action: Absent[float] = None
    reward: Absent[float] = None
    return_to_go: Absent[float] = None
    end: Absent[float] = None
    commitment: Absent[float] = None
    actor_loss: Absent[float] = None  # of methods with critics, as the next four
    q_loss: Absent[float] = None
    value_loss: Absent[float] = None
    penalty: Absent[float] = None
    entropy_loss: Absent[float] = None
    codebook_usage: Absent[float] = None  # share of the codes
    codebook_perplexity: Absent[float] = None
    held_out_loss: Absent[float] = None  # none without held-out episodes
    held_out_error: Absent[float] = None
    dynamics_loss: Absent[float] = None  # of MOPO's dynamics models, as the next four; errors are of normalised states
    dynamics_held_out_loss: Absent[float] = None
    one_step_error: Absent[float] = None  # of the state that follows, on held-out transitions, or on all if none are held out
    no_change_error: Absent[float] = None  # of the prediction that the state does not change
    uncertainty_rank_correlation: Absent[float] = None  # Spearman's, of the models' uncertainty and their error
    first_state_error: Absent[float] = None  # at the episodes' first states
    first_state_rank_correlation: Absent[float] = None
    return_std: Absent[float] = None
    parameters: int


class Lineage(Record):
    """Where a model comes from. DVC restores it with the weights."""

    run_id: str
    git_commit: str  # "unknown" where git cannot tell
    dataset_digest: str
    versions: dict[str, str]
    stage: str
    minutes: Absent[float] = None  # of all updates, at the speed of the last ones made; unknown if a finished run was resumed


class Teacher(Record):
    """The planner whose decisions a method learns, and the digests of its models; none if it learns from data alone."""

    planner: Absent[PlannerParams] = None
    models: Absent[dict[str, str]] = None


# ---------------------------------------------------------------- evaluation


class Provenance(Record):
    """What every number about a trained policy states: data, scale, simulator, seed."""

    dataset: str
    source: str
    digest: str  # SHA-256 of the dataset's file
    scale: str
    environment: Absent[str] = None  # absent where a dataset has none
    simulator: str = ""  # the releases that the physics depends on; empty in files of early versions
    versions: dict[str, str]
    seed: int  # of training


class Latency(Record):
    """Milliseconds per decision: for one state at a time, and for all episodes' states in a batch."""

    median: float
    p95: float
    batch_median: float


class Behaviour(Record):
    """How the dataset's own episodes score; normalised scores are None without reference scores, and all without rewards."""

    episodes: int
    mean_return: float | None
    mean_normalized_score: float | None
    best_tenth_normalized_score: float | None  # the tenth with the highest returns
    last_tenth_normalized_score: float | None  # the tenth recorded last

    @property
    def mean_score(self) -> float | None:
        """The mean normalised score, or the mean return without reference scores; None without rewards."""
        return self.mean_return if self.mean_normalized_score is None else self.mean_normalized_score


class Evaluation(Provenance):
    """One seed of one dataset, or of one of its ablations, evaluated in simulation. Lists have one value per episode.

    What describes plans, models and planner is absent for a method that has none.
    """

    environment: str
    environment_seed: int  # of the first episode
    episodes: int
    protocol: str
    normalized_score: float | None  # None without reference scores
    normalized_score_standard_error: float | None  # over episodes; None for a single one
    return_mean: float
    returns: list[float]  # undiscounted
    score_metric: str = ""  # what `scores` are, "normalized_score" or "return"; both empty in files of early versions
    scores: list[float] = []
    lengths: list[int]
    terminated: list[bool]
    search_value_mean: Absent[float] = None  # the best predicted return at the first state
    log_probability_mean: Absent[float] = None
    state_prediction_error: Absent[float] = None  # mean squared error of plans' states against the simulator
    latency_ms: Latency
    behaviour: Behaviour
    method: Literal["tap"] | Method = "tap"  # absent in files of early versions
    planner: Absent[dict[str, Any]] = None
    training_minutes: Absent[float] = None  # of all models that the policy uses, on the machine that trained them
    latent_step: Absent[int] = None
    window_length: Absent[int] = None
    recipe: str = ""  # a digest of all that determines a score except seed and code; empty in files of early versions
    runs: dict[str, str | None]  # run ids by stage; None for a model without lineage
    git_commit: str  # "unknown" where git cannot tell
    ablation: Absent[str] = None
    model_digest: Absent[str] = None  # of all files of the logged model; absent where none was logged


IMITATION = "imitation, no rewards"  # where returns would stand, of a dataset without rewards
ACTION_ERROR = "action_error"  # a score metric, of which less is better


class HeldOutEvaluation(Provenance):
    """One seed of a dataset without an environment, or of one of its ablations: how far actions are from the recorded ones.

    At each decision, a policy plans from a recorded observation, and its actions are compared with those that were recorded
    from there on; so is the last action before it, held. Errors are shares of the variance of the recorded actions, of all
    episodes, in the mean over those of the A action dimensions that vary. H are the steps of a plan. All are means over the
    decisions of an episode, then over episodes.
    """

    has_rewards: bool
    held_out: bool  # whether the episodes were held out from training; if none could be, they are those of training
    episodes: int
    decisions: int
    protocol: str
    action_error: float  # of the action at a decision
    hold_error: float  # of the last action, held
    error_ahead: list[float]  # (H,), of the actions 0, 1, ... steps after a decision
    hold_error_ahead: list[float]
    std: list[float]  # (A,) of the recorded actions, in their units, as the next two
    rmse: list[list[float]]  # (H, A)
    hold_rmse: list[list[float]]
    score_metric: Literal["action_error"] = "action_error"
    scores: list[float]  # the action error of each episode
    latency_ms: Latency
    method: Literal["tap"] | Method = "tap"
    planner: Absent[dict[str, Any]] = None
    training_minutes: Absent[float] = None
    latent_step: Absent[int] = None
    window_length: Absent[int] = None
    recipe: str
    runs: dict[str, str | None]
    git_commit: str
    ablation: Absent[str] = None
    model_digest: Absent[str] = None


AnyEvaluation = Evaluation | HeldOutEvaluation


def read_evaluation(path: Path) -> AnyEvaluation:
    """What an evaluating stage wrote. Raises ValueError as `Record.read` does."""
    held_out = path.exists() and read_json(path).get("score_metric") == ACTION_ERROR
    return (HeldOutEvaluation if held_out else Evaluation).read(path)


class SampledPlans(Record):
    """Plans sampled in one way: their predicted returns, and the error of their states against the simulator."""

    predicted_return_median: float
    predicted_return_deviation: float  # standard deviation
    state_prediction_error_median: float
    distinct_plans: float  # share
    rank_correlation: float  # Spearman's, of predicted return and error


class OfflineChecks(Record):
    """How well the parts of a policy do on recorded windows, drawn as in training, of the held-out episodes if there are any.

    Errors of first actions are shares of the variance of the recorded ones; gain and spread are in units of return. What a
    policy without a critic or an actor does not have is absent.
    """

    windows: int
    held_out: bool
    own_code_error: float  # of the action decoded from the window's own code: what codes can express
    mean_error: float  # of the mean action under the prior
    actor_error: Absent[float] = None  # of the actor's action
    drawn_code_error: float  # of the action of a code drawn from the prior
    return_std: Absent[float] = None  # of the windows' returns-to-go; absent without rewards
    predicted_gain: Absent[float] = None  # of the planner's weights over the prior's, mean
    # The more return that followed for each unit of advantage that the critic gives to the recorded code: 1 for a perfect
    # critic, 0 for one that knows nothing. The slope of a regression, and its standard error as if windows were independent.
    advantage_slope: Absent[float] = None
    advantage_slope_error: Absent[float] = None


class Diagnosis(Provenance):
    """One seed of one dataset: plans sampled with codes uniform over the codebook and from the prior, and offline checks.

    Without an environment or without rewards, no plans are sampled.
    """

    protocol: str
    offline: Absent[OfflineChecks] = None  # absent for the attention bottleneck, which cannot decode single codes
    uniform: Absent[SampledPlans] = None
    prior: Absent[SampledPlans] = None
    git_commit: str
