"""Acts with model.onnx. `python run.py` compares the action at the observation of sample.json with the expected one.

Needs Python 3.10 or later, numpy, and onnxruntime 1.17 or later: neither torch nor the project that trained the policy.

    policy = Policy()
    actions = policy.act(observations, seed)    # (N, O) -> (N, A), in the environment's units

A policy with `remembered_steps` in policy.json also acts on its episode so far: `policy.act(observations, seed, histories)`.

Shapes: N states, O observation, A action, H steps, M codes, S random numbers; t steps so far.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(__file__).resolve().parent


class Policy:
    """Decides for one state at a time, on one core."""

    def __init__(self) -> None:
        self.facts = json.loads((FOLDER / "policy.json").read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        model = str(FOLDER / "model.onnx")
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def plan(
        self, observations: np.ndarray, seed: int = 0, histories: "list[dict[str, np.ndarray]] | None" = None
    ) -> "dict[str, np.ndarray]":
        """`actions` (N, H, A), the first to execute now; of a planner also `codes` (N, M) and `predicted_return` (N,).

        A plan depends on the seed, the observation and its row. A history has the `observations` (t, O), `actions` (t, A) and
        `rewards` (t,) of the steps before each observation: rewards of all, the others at least of those that are remembered;
        without histories, episodes start here. Raises ValueError for observations that are not (N, O), or not finite.
        """
        observations = np.asarray(observations, np.float32)
        dim, size = self.facts["observation"]["dim"], self.facts["noise_size"]
        if observations.ndim != 2 or observations.shape[1] != dim or not len(observations):
            raise ValueError(f"observations have shape {observations.shape}; this policy needs (n, {dim}), n at least 1")
        if not np.isfinite(observations).all():
            raise ValueError("observations contain values that are not finite in float32: fix or drop them")
        plans = []
        for row in range(len(observations)):
            if self.facts["remembered_steps"]:
                inputs = self._past(observations[row], histories[row] if histories else None)
            else:
                inputs = {"observation": observations[row : row + 1]}
            if size:
                inputs["noise"] = noise(generator_seed(seed, row), size)[None]
            plans.append(self._session.run(None, inputs))
        return {name: np.concatenate(parts) for name, parts in zip(self._outputs, zip(*plans, strict=True), strict=True)}

    def act(
        self, observations: np.ndarray, seed: int = 0, histories: "list[dict[str, np.ndarray]] | None" = None
    ) -> np.ndarray:
        """The first action (N, A) of each plan; as `plan`."""
        return self.plan(observations, seed, histories)["actions"][:, 0]

    def _past(self, observation: np.ndarray, history: "dict[str, np.ndarray] | None") -> "dict[str, np.ndarray]":
        """The inputs of a model that remembers: the last steps, zeros before the start of an episode."""
        past, dim = self.facts["remembered_steps"], self.facts["action"]["dim"]
        inputs = {
            "observations": np.zeros((1, past + 1, len(observation)), np.float32),
            "past_actions": np.zeros((1, past, dim), np.float32),
            "returns": np.zeros((1, past + 1), np.float32),
            "step": np.zeros(1, np.int64),
        }
        inputs["observations"][0, -1] = observation
        if history and len(history["rewards"]):
            steps = len(history["rewards"])
            last = min(steps, past)
            inputs["observations"][0, -1 - last : -1] = history["observations"][-last:]
            inputs["past_actions"][0, -last:] = history["actions"][-last:]
            before = np.concatenate([[0.0], np.cumsum(history["rewards"], dtype=np.float64)])  # each step, and the present one
            inputs["returns"][0, -1 - last :], inputs["step"][0] = before[-1 - last :], steps
        return inputs


def generator_seed(seed: int, row: int) -> int:
    """The seed of a row's generator; any integer is a seed."""
    return int(np.random.SeedSequence([seed % 2**64, row]).generate_state(1, np.uint64)[0]) % 2**32


def noise(generator: int, size: int) -> np.ndarray:
    """The first S = `size` numbers (S,) float32 in [0, 1) of a Mersenne Twister with that seed, as C++ and torch draw them."""
    words = np.random.RandomState(generator).randint(0, 2**32, size, dtype=np.uint32)
    return ((words % 2**24) / 2**24).astype(np.float32)


if __name__ == "__main__":
    sample = json.loads((FOLDER / "sample.json").read_text())
    found = Policy().act(np.array([sample["observation"]]), sample["seed"])[0]
    print("action  ", *found)
    print("expected", *sample["action"])
    assert np.allclose(found, sample["action"], rtol=1e-4, atol=1e-4), "this machine's onnxruntime gives another action"
