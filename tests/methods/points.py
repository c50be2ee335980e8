"""A task whose best policy is known: a point on a line, recorded while it moves at random."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.stages.train_actor_critic import train_actor_critic
from pipelines.stages.training import Job
from tap.data.episodes import Episodes
from tap.settings import FitParams

STEPS, REACH = 20, 0.3  # of an episode; of the action 1


def step(place: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Next places and rewards (N,): the nearer to 0.5, the better, so it is best to go there at full speed, and stay."""
    place = np.clip(place + REACH * np.clip(action, -1, 1), -2, 2)
    return place, 1 - np.abs(place - 0.5)


def best_action(place: np.ndarray) -> np.ndarray:
    return np.clip((0.5 - place) / REACH, -1, 1)


def random_walks(episodes: int = 200, seed: int = 0) -> Episodes:
    """Episodes of uniformly random actions from uniformly random places, cut off after STEPS."""
    rng = np.random.default_rng(seed)
    place, rows = rng.uniform(-2, 2, episodes), []
    for _ in range(STEPS):
        action = rng.uniform(-1, 1, episodes)
        following, reward = step(place, action)
        rows.append((place, action, reward))
        place = following
    places, actions, rewards = (np.stack(column, axis=1).reshape(-1).astype(np.float32) for column in zip(*rows, strict=True))
    count = episodes * STEPS
    return Episodes(places[:, None], actions[:, None], rewards, np.zeros(count, bool), np.arange(episodes + 1) * STEPS)


EPISODES = random_walks()


class Killed(Exception):
    pass


def mean_return(act: Callable[[np.ndarray, Sequence[torch.Generator]], np.ndarray]) -> float:
    """Of episodes from places all over the line."""
    place, total = np.linspace(-2, 2, 41), np.zeros(41)
    for _ in range(STEPS):
        place, reward = step(place, act(place[:, None], [])[:, 0])
        total += reward
    return float(total.mean())


def share_of_the_best(share: float) -> float:
    """The return at this share of the way from the recorded one to the best policy's."""
    best, recorded = mean_return(lambda places, _: best_action(places)), float(EPISODES.returns.mean())
    return recorded + share * (best - recorded)


def train_on_walks(
    params: Any, policy_type: Any, learning: Any, folder: Path, checkpoint: str = "checkpoint.pt", stop_at: int | None = None
) -> Any:
    """The policy that a stage trains; raises Killed at update `stop_at`."""

    class Killing(learning):  # type: ignore[misc]
        calls = 0

        def loss(self, batch: Any, training: bool) -> Any:
            self.calls += training
            if self.calls == stop_at:
                raise Killed
            return super().loss(batch, training)

    return train_actor_critic(walks_job(params.fit, folder / checkpoint), params, policy_type, Killing)


def walks_job(fit: FitParams, checkpoint: Path) -> Job:
    training, held_out = EPISODES.split(0.1, np.random.default_rng(0))
    return Job("train_test", "walks-0", 0, fit, training, held_out, torch.device("cpu"), None, checkpoint, "")
