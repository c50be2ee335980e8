"""An exported folder against the policy that it was made from, at states of its data.

A search keeps the best of many plans, some of which float32 cannot tell apart: a score of -5,800 has steps of 0.0005. Which
it keeps, and which code it samples at the border of two, depends on library and processor, and so may the whole plan. So codes
are compared where rounding does not decide: where the policy finds the same ones with scores and noise moved as rounding moves
them.

Shapes: N states, O observation, A action, H steps, M codes, S random numbers.
"""

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.exporting.decision import Decision
from tap.data.history import History
from tap.methods.trajectory_planner import TrajectoryPlanner
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.model.vqvae import Decoded
from tap.planning.plan import Remembering
from tap.planning.planner import MAX_BATCH_STATES, Planner
from tap.planning.policy import Policy
from tap.results import Record
from tap.serving.policy import row_generators

MOVES = 4  # searches with moved scores and noise
MOVED_NOISE = 1e-6  # at most; errors of cumulative probabilities are about 1e-7
MOVED_SCORE = 2.0**-22  # at most, as a share: two steps of float32
MOVED_LOGIT = 2.0**-17  # at most, as a share of the largest: what a Transformer's sums round
LEAST_SAME_CODES = 0.999
TOLERANCE = 1e-4  # of an action, as a share of its scale


@dataclass(frozen=True)
class Expected:
    """What the policy does at each of N states, with the seed n at the n-th."""

    states_NO: np.ndarray
    histories: Sequence[History]  # of each state's episode
    noise_NS: Tensor
    actions_NHA: np.ndarray  # within bounds
    codes_NM: np.ndarray | None
    decided_N: np.ndarray  # bool, whether rounding does not decide

    def sample(self) -> dict[str, Any]:
        """sample.json: the first state at which rounding does not decide. The first of all is the start of an episode."""
        n = int(self.decided_N.argmax())
        sample = {"observation": self.states_NO[n].tolist(), "seed": n, "generator": _generators(n)[0].initial_seed() % 2**32}
        sample["action"] = self.actions_NHA[n, 0].tolist()
        return sample if self.codes_NM is None else sample | {"codes": self.codes_NM[n].tolist()}


class MovedPlanner(Planner):
    """A policy's planner, whose scores are moved at random as rounding moves them."""

    def __init__(self, policy: Policy, rng: torch.Generator) -> None:
        super().__init__(policy.vqvae, policy.prior, policy.normalizer, policy.params, policy.critic, policy.actor)
        self._rng = rng

    def objective(self, steps: Decoded, log_probability_R: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
        """As the planner's, with moved scores (R,)."""
        return_R, score_R = super().objective(steps, log_probability_R, num_codes)
        return return_R, score_R * (1 + MOVED_SCORE * _sides(score_R.shape, self._rng))

    def codes(self, states_NO: Tensor, noise_NS: Tensor) -> np.ndarray:
        """The codes (N, M) of each state's best plan."""
        batches = zip(torch.split(states_NO, MAX_BATCH_STATES), torch.split(noise_NS, MAX_BATCH_STATES), strict=True)
        return torch.cat([self.solve(*batch, best=True)[4] for batch in batches]).numpy()


class MovedSearch(TrajectoryPlanner):
    """The Trajectory Transformer's planner, whose logits are moved at random as rounding moves them, and so its estimates."""

    def __init__(self, planner: TrajectoryPlanner, rng: torch.Generator) -> None:
        super().__init__(planner.model, planner.discretizer, planner.layout, planner.discount, planner.params, planner.q)
        self._rng = rng

    def logits(self, hidden: Tensor, dimension: int) -> Tensor:
        """As the planner's, moved."""
        logits = super().logits(hidden, dimension)
        return logits + MOVED_LOGIT * logits.abs().amax() * _sides(logits.shape, self._rng)

    def codes(self, states_NO: Tensor, noise_NS: Tensor) -> np.ndarray:
        """The bins (N, M) of each state's best plan."""
        params = self.params
        shape = params.horizon, self.layout.action_dim, params.beam_width, params.expansion_factor
        return self.solve(states_NO, noise_NS.view(-1, *shape)).codes


def _sides(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Random numbers from -1 to 1."""
    return 2 * torch.rand(shape, generator=rng) - 1


class Compared(Record):
    """One format of the folder beside the policy."""

    same_codes: float | None  # share, where rounding does not decide; None for a policy without codes
    same_codes_at_all_states: float | None
    action_difference: float  # the largest, where a plan's codes are the same, as a share of the action's scale

    def __str__(self) -> str:
        codes = "" if self.same_codes is None else f"{self.same_codes:.2%} of codes are the same, "
        return f"{codes}actions differ by {self.action_difference:.1g} at most"


class Check(Record):
    """The result of a check."""

    states: int
    drawn_from: str
    decided_by_rounding: int  # of these states
    onnx: Compared
    package: Compared

    def __str__(self) -> str:
        rounding = f" ({self.decided_by_rounding} are decided by rounding)" if self.decided_by_rounding else ""
        return f"checked at {self.states} states from {self.drawn_from}{rounding}; ONNX: {self.onnx}; C++: {self.package}"


@torch.no_grad()
def expect(decision: Decision, states_NO: np.ndarray, histories: Sequence[History]) -> Expected:
    """What the policy of `decision` does at raw float32 states (N, O), after their histories if it remembers."""
    policy, seeds = decision.policy, range(len(states_NO))
    past = [histories] if isinstance(policy, Remembering) else []
    plan = policy.plan(states_NO, [_generators(seed)[0] for seed in seeds], *past)
    noise_NS = torch.stack([torch.rand(decision.noise_size, generator=_generators(seed)[0]) for seed in seeds])
    codes_NM, decided_N = getattr(plan, "codes", None), np.ones(len(states_NO), bool)
    rng = torch.Generator().manual_seed(0)
    planner: MovedPlanner | MovedSearch | None = None
    if isinstance(policy, Policy) and decision.noise_size:
        planner = MovedPlanner(policy, rng)
    elif isinstance(policy, TrajectoryTransformer):
        planner = MovedSearch(policy.planner, rng)
    if planner:
        for _ in range(MOVES):
            moved_NS = (noise_NS + MOVED_NOISE * _sides(noise_NS.shape, rng)).clamp(0, 1 - 2**-24)
            found_NM = planner.codes(torch.from_numpy(states_NO), moved_NS)
            decided_N &= (found_NM == codes_NM).all(axis=1)
    return Expected(states_NO, histories, noise_NS, decision.clip(torch.from_numpy(plan.actions)).numpy(), codes_NM, decided_N)


def check(folder: Path, expected: Expected, decision: Decision, scale_A: np.ndarray, drawn_from: str) -> Check:
    """Compare both formats in `folder` with what is expected, actions as shares of `scale_A`.

    Raises ValueError if one of them acts otherwise.
    """
    return Check(
        states=len(expected.states_NO),
        drawn_from=drawn_from,
        decided_by_rounding=int((~expected.decided_N).sum()),
        onnx=_compare("model.onnx", _run_onnx(folder, expected, decision), expected, scale_A),
        package=_compare("model.pt2", _run_package(folder, decision, expected), expected, scale_A),
    )


def _compare(name: str, found: dict[str, np.ndarray], expected: Expected, scale_A: np.ndarray) -> Compared:
    difference_N = (np.abs(found["actions"] - expected.actions_NHA) / scale_A).max(axis=(1, 2))
    if expected.codes_NM is None:
        codes, of_all, difference = None, None, float(difference_N.max())
    else:
        same_NM = found["codes"] == expected.codes_NM
        codes, of_all = float(same_NM[expected.decided_N].mean()), float(same_NM.mean())
        difference = float(difference_N[same_NM.all(axis=1)].max(initial=0))
    if (codes is not None and not codes >= LEAST_SAME_CODES) or not difference <= TOLERANCE:  # so that NaN fails
        of_codes = "" if codes is None else f"{codes:.2%} of its codes are the same, and "
        raise ValueError(
            f"{name} does not act as the policy ({of_codes}actions differ by up to {difference:.2g} of their scale), so "
            "nothing was exported: install the versions of constraints.txt, and export again"
        )
    return Compared(same_codes=codes, same_codes_at_all_states=of_all, action_difference=difference)


def _run_onnx(folder: Path, expected: Expected, decision: Decision) -> dict[str, np.ndarray]:
    """What the folder's own runner returns at each state, with its seed."""
    runner, states_NO = runpy.run_path(str(folder / "run.py"))["Policy"](), expected.states_NO
    pasts = [[vars(history)] if decision.remembered_steps else None for history in expected.histories]
    plans = [runner.plan(states_NO[n : n + 1], n, past) for n, past in enumerate(pasts)]
    return {name: np.concatenate([plan[name] for plan in plans]) for name in plans[0]}


def _run_package(folder: Path, decision: Decision, expected: Expected) -> dict[str, np.ndarray]:
    package = torch._inductor.aoti_load_package(str(folder / "model.pt2"))
    inputs = decision.inputs(expected.states_NO, expected.noise_NS, expected.histories).values()
    rows = [package(*row) for row in zip(*(torch.split(each, 1) for each in inputs), strict=True)]
    return dict(zip(decision.outputs, _joined(rows), strict=True))


def _joined(parts: list[Any]) -> list[np.ndarray]:
    return [torch.cat(output).numpy() for output in zip(*parts, strict=True)]


def _generators(seed: int) -> list[torch.Generator]:
    """That of the only row of a request with this seed."""
    return row_generators(seed, 1)
