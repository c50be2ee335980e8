"""Published policies, read from .npz files of arrays.

A policy is a network of arrays weight_0, bias_0, weight_1, ... and of either

    log_std, in_shift, in_scale                 a tanh network of standardised observations, with a Gaussian of constant std
    out_shift, out_scale (optional)             around its output, which they scale (TRPO; DAPG's Adroit experts)
    log_std_weight, log_std_bias                a ReLU network with a Gaussian whose log std is linear in its last hidden
                                                layer; tanh maps its samples to actions (SAC, TQC)

A file of several policies has `iterations` (N,), and the arrays of the policy after iterations[i] under the prefix `i/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Arrays = Mapping[str, np.ndarray]
Layers = tuple[tuple[np.ndarray, np.ndarray], ...]  # weight (outputs, inputs) and bias (outputs,) of each layer


@dataclass(frozen=True)
class GaussianPolicy:
    """A tanh network of standardised observations that gives the mean of a Gaussian with constant std."""

    layers: Layers
    in_shift: np.ndarray  # (O,)
    in_scale: np.ndarray  # (O,)
    out_shift: np.ndarray  # (A,)
    out_scale: np.ndarray  # (A,)
    std: np.ndarray  # (A,)

    def act(self, observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sampled action (A,) for an observation (O,)."""
        x = (observation - self.in_shift) / (self.in_scale + 1e-6)
        for weight, bias in self.layers[:-1]:
            x = np.tanh(weight @ x + bias)
        weight, bias = self.layers[-1]
        mean = (weight @ x + bias) * self.out_scale + self.out_shift
        return np.asarray(mean + self.std * rng.standard_normal(len(self.std)))


@dataclass(frozen=True)
class SquashedGaussianPolicy:
    """A ReLU network that gives mean and log std of a Gaussian, whose samples tanh maps to actions."""

    layers: Layers
    log_std: tuple[np.ndarray, np.ndarray]  # weight (A, hidden) and bias (A,)

    def act(self, observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sampled action (A,) for an observation (O,)."""
        x = observation
        for weight, bias in self.layers[:-1]:
            x = np.maximum(0.0, weight @ x + bias)
        (weight, bias), (std_weight, std_bias) = self.layers[-1], self.log_std
        std = np.exp(np.clip(std_weight @ x + std_bias, -20, 2))
        return np.asarray(np.tanh(weight @ x + bias + std * rng.standard_normal(len(std))))


Policy = GaussianPolicy | SquashedGaussianPolicy


def read_policies(file: Path, observation_dim: int, action_dim: int) -> dict[int | None, Policy]:
    """The policies of a file by training iteration, in order of training; None is the key of a file's only policy.

    Raises ValueError where the file is not an .npz file of these arrays, or its policies have other dimensions.
    """
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        policies: dict[int | None, Policy] = {}
        if "iterations" in arrays:
            for index, iteration in enumerate(arrays["iterations"].tolist()):
                prefix = f"{index}/"
                policies[iteration] = _policy(
                    {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
                )
        else:
            policies[None] = _policy(arrays)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{file} does not contain a policy's weights ({error}): it must be an .npz file of the arrays listed in "
            "scripts/policy_files.py"
        ) from error
    for policy in policies.values():
        inputs, outputs = policy.layers[0][0].shape[1], len(policy.layers[-1][1])
        if (inputs, outputs) != (observation_dim, action_dim):
            raise ValueError(
                f"{file} has a policy from {inputs} observation dimensions to {outputs} action dimensions, but the environment "
                f"has {observation_dim} and {action_dim}: use a policy of this environment"
            )
    return policies


def _policy(arrays: Arrays) -> Policy:
    arrays = {name: values.astype(float) for name, values in arrays.items()}
    depth = max(1, sum(name.startswith("weight_") for name in arrays))  # at least 1, so that a file of other arrays is an error
    layers = tuple((arrays[f"weight_{i}"], arrays[f"bias_{i}"]) for i in range(depth))
    if "log_std" not in arrays:
        return SquashedGaussianPolicy(layers, (arrays["log_std_weight"], arrays["log_std_bias"]))
    return GaussianPolicy(
        layers,
        arrays["in_shift"],
        arrays["in_scale"],
        arrays.get("out_shift", np.zeros(1)),
        arrays.get("out_scale", np.ones(1)),
        np.exp(arrays["log_std"]),
    )
