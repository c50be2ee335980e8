"""A task whose best policy is known: a point on a line, recorded while it moves at random."""

import numpy as np

from tap.data.episodes import Episodes

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
