"""A policy as an MLflow model. MLflow copies this file into each logged model and runs it there ("models from code").

A request has observations (n, O), and its response actions (n, A) or, with the param `details`, whole plans; docs/serving.md
shows both. Of a policy that remembers, the param `history` has what happened before. Equal requests get equal responses, unless
the param `budget_ms` limits the time of a decision.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from tap.data.action_bounds import load_bounds
from tap.data.history import History
from tap.device import choose_device
from tap.methods.catalog import CATALOG
from tap.planning.plan import Plan, Planned, Remembering, Searched, Timed
from tap.planning.planner import MAX_BATCH_STATES
from tap.planning.policy import Policy
from tap.settings import Runtime, Section

logger = logging.getLogger(__name__)


class ActingPolicy(Protocol):
    """Acts on raw observations (N, O), with one random generator for each. A planner's `Planned` has more than actions.

    A `Remembering` policy also takes histories.
    """

    @property
    def params(self) -> Section: ...

    @property
    def observation_dim(self) -> int: ...

    @property
    def action_dim(self) -> int: ...

    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Any:
        """A `Planned`, whose fields are arrays with a row for each state. Raises ValueError as `check` does."""
        ...

    def act(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> np.ndarray:
        """The first action (N, A) of each plan."""
        ...

    def check(self, observations: np.ndarray) -> None:
        """Raise ValueError for observations that it cannot act on."""
        ...

    def ood_reasons(self, observations: np.ndarray, plan: Any) -> list[dict[str, str]]:
        """Why each of N states, or what `plan` returned for it, is out of distribution: one dict each, empty if it is not."""
        ...

    def save(self, folder: Path) -> None:
        """Write JSON and safetensors, with which `load` acts the same anywhere."""
        ...


@dataclass(frozen=True)
class PlanRequest:
    """The observations (n, O) of one request, a generator and maybe a history for each, and the plan to come."""

    observations: np.ndarray
    generators: Sequence[torch.Generator]
    histories: Sequence[History] | None
    end: float | None  # when its budget ends, by the clock
    plan: Future[Planned] = field(default_factory=Future)


class SharedPolicy:
    """A policy for many threads at once: one thread plans, for all waiting requests in one batch.

    A batch takes less time than its states one by one. Each state has its own generator, so its plan does not depend on the
    other requests of the batch. Requests with a budget of time are planned first and one by one, in the order in which their
    budgets end; each gets a part of the time left, so that the others have theirs.
    """

    def __init__(self, policy: ActingPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy, self.clock = policy, clock
        self._waiting: SimpleQueue[PlanRequest] = SimpleQueue()
        self._planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")

    def plan(
        self,
        observations: np.ndarray,
        generators: Sequence[torch.Generator],
        histories: Sequence[History] | None = None,
        seconds: float | None = None,
    ) -> Planned:
        """As the policy's `plan`, or `plan_within` of a `Timed` policy; only a `Remembering` policy takes histories."""
        end = None if seconds is None else self.clock() + seconds
        # Before it joins a batch, because an error would fail the whole batch.
        if histories is None:
            self.policy.check(observations)
        else:
            assert isinstance(self.policy, Remembering)
            self.policy.check(observations, histories)
        assert end is None or isinstance(self.policy, Timed)
        request = PlanRequest(observations, generators, histories, end)
        self._waiting.put(request)
        self._planner.submit(self._plan_waiting)
        return request.plan.result()

    def _plan_waiting(self) -> None:
        """Plan for the first waiting requests. Called once for each request, so that each is served."""
        batch: list[PlanRequest] = []
        while not self._waiting.empty() and sum(len(request.observations) for request in batch) < MAX_BATCH_STATES:
            batch.append(self._waiting.get())
        self._plan_timed([request for request in batch if request.end is not None])
        self._plan_together([request for request in batch if request.end is None])

    def _plan_timed(self, batch: list[PlanRequest]) -> None:
        """Plan for requests with a budget, one after another."""
        rows_left = sum(len(request.observations) for request in batch)
        for request in sorted(batch, key=lambda request: request.end or 0.0):
            assert isinstance(self.policy, Timed) and request.end is not None
            rows, left = len(request.observations), request.end - self.clock()
            try:
                request.plan.set_result(
                    self.policy.plan_within(request.observations, request.generators, left * rows / rows_left)
                )
            except Exception as error:
                request.plan.set_exception(error)
            rows_left -= rows

    def _plan_together(self, batch: list[PlanRequest]) -> None:
        """Plan for requests without a budget at once."""
        if not batch:
            return
        try:
            observations = np.concatenate([request.observations for request in batch])
            generators = [generator for request in batch for generator in request.generators]
            if isinstance(self.policy, Remembering):
                start = History.empty(self.policy.observation_dim, self.policy.action_dim)
                pasts = [request.histories or [start] * len(request.observations) for request in batch]
                plan = self.policy.plan(observations, generators, list(chain.from_iterable(pasts)))
            else:
                plan = self.policy.plan(observations, generators)
        except Exception as error:
            for request in batch:
                request.plan.set_exception(error)
            return
        first = 0
        for request in batch:
            rows = slice(first, first := first + len(request.observations))
            request.plan.set_result(type(plan)(**{name: array[rows] for name, array in vars(plan).items()}))


def row_generators(seed: int, rows: int) -> list[torch.Generator]:
    """One generator for each row of a request, from (seed, row); any integer is a seed."""
    seeds = [np.random.SeedSequence([seed % 2**64, row]).generate_state(1, np.uint64)[0] for row in range(rows)]
    return [torch.Generator().manual_seed(int(each)) for each in seeds]


def read_histories(history: Mapping[str, Any], observation_dim: int, action_dim: int) -> list[History]:
    """The histories of n rows from the param `history`: lists of observations, actions and rewards for each row.

    Raises ValueError if one of the three is missing or has another number of rows, or if values are not numbers.
    """
    names = [field.name for field in fields(History)]
    if missing := [name for name in names if name not in history]:
        raise ValueError(f"the history has no {' and no '.join(missing)}: send a list of them for each row")
    columns = [history[name] for name in names]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{len(column)} rows of {name}" for name, column in zip(names, columns, strict=True))
        raise ValueError(f"the history has {counts}: send as many of each as there are observations to act on")
    return [
        History(_steps(observations, observation_dim), _steps(actions, action_dim), np.asarray(rewards, np.float64))
        for observations, actions, rewards in zip(*columns, strict=True)
    ]


def _steps(rows: Any, dim: int) -> np.ndarray:
    return np.asarray(rows, np.float64) if len(rows) else np.zeros((0, dim))


def load_policy(folder: Path, device: str) -> ActingPolicy:
    """The policy that `save` wrote into `folder`, of whichever method. Raises ValueError as its `load` does."""
    for info in CATALOG.values():
        kind = getattr(import_module(f"tap.methods.{info.module}"), info.policy)
        if (folder / f"{kind.name}.json").exists():
            policy: ActingPolicy = kind.load(folder, device)
            return policy
    return Policy.load(folder, device)


class ServedPolicy(PythonModel):
    """A policy behind MLflow's interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the policy that was logged with this file onto the configured device, or else that of TAP_DEVICE."""
        device = (context.model_config or {}).get("device") or Runtime().device
        folder = Path(context.artifacts["policy"])
        self.policy = load_policy(folder, str(choose_device(device)))
        self.action_bounds = load_bounds(folder, self.policy.action_dim)
        self.shared = SharedPolicy(self.policy)

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> np.ndarray | list[dict[str, Any]]:
        """Actions (n, A) float32 for observations (n, O); with the param `details` a record for each observation instead.

        Actions are clipped to the bounds that were logged with the policy. The plan of row i depends on the seed, i, its
        observation and its history, not on the other rows. Raises MlflowException: of HTTP status 400 for wrong observations or
        histories or a plan that is not finite, else 500.
        """
        defaults: dict[str, Any] = {"seed": 0, "details": False, "budget_ms": 0.0, "history": {}}
        params = defaults | (params or {})
        try:
            observations = np.asarray(model_input, dtype=np.float64)
            generators, histories = row_generators(params["seed"], len(observations)), None
            if params["history"]:
                histories = read_histories(params["history"], self.policy.observation_dim, self.policy.action_dim)
            if not params["budget_ms"] >= 0:
                raise ValueError(f"budget_ms is {params['budget_ms']:g}: send a time in milliseconds, or 0 for none")
            seconds = params["budget_ms"] / 1000 or None
            plan = self.shared.plan(observations, generators, histories, seconds)
            if not np.isfinite(plan.actions).all():
                raise ValueError("the model has no finite plan for these observations")
            plan = type(plan)(**vars(plan) | {"actions": plan.actions.clip(*self.action_bounds)})
        except (TypeError, ValueError) as error:  # 400: without this, the server responds with 500
            raise MlflowException.invalid_parameter_value(str(error)) from error
        except Exception as error:  # 500: without this, the server responds with 400 and a traceback
            logger.exception("Planning failed")
            raise MlflowException("planning failed; see the server's log", INTERNAL_ERROR) from error
        return self._records(observations, plan) if params["details"] else plan.actions[:, 0].astype(np.float32)

    def _records(self, observations: np.ndarray, plan: Planned) -> list[dict[str, Any]]:
        return [
            {"action": plan.actions[row, 0].tolist()}
            | ({"searched": str(plan.searched[row])} if isinstance(plan, Searched) else {})
            | (self._prediction(plan, row) if isinstance(plan, Plan) else {})
            | {"out_of_distribution": bool(reasons), "reasons": reasons}
            for row, reasons in enumerate(self.policy.ood_reasons(observations, plan))
        ]

    def _prediction(self, plan: Plan, row: int) -> dict[str, Any]:
        """What a plan predicts; rewards and returns only if the data has them."""
        assert isinstance(self.policy, Policy)
        steps = {"observations": plan.observations[row].tolist(), "actions": plan.actions[row].tolist()}
        probability = {"probability": math.exp(plan.log_probability[row])}
        if self.policy.params.objective == "likelihood":
            return {"plan": steps} | probability
        rewards = {"rewards": plan.rewards[row].tolist()}
        return {"plan": steps | rewards, "predicted_return": float(plan.predicted_return[row])} | probability


set_model(ServedPolicy())
