"""Registers gymnasium ids for every known dataset and for this package's environments when this module is imported.

    import gymnasium, tap.envs.registration

    env = gymnasium.make("tap/hopper-medium-v2")
    env.get_normalized_score(1500.0)  # a fraction as in D4RL: 0 for a random policy, 1 for an expert

`gymnasium.make("tap.envs.registration:tap/hopper-medium-v2")` does both. One of the two is needed: since release 1.0, gymnasium
does not load plugins automatically.

- `tap/DATASET` is the environment in which policies of that dataset are evaluated: `tap.envs.make.make_environment`, with the
  step limit from d4rl_table.csv. The ids of one task that end in v0, v1, v2 differ only in their data.
- Ant has 27 observation dimensions, not D4RL's 111: the other 84 are always zero.
- Adroit has D4RL's rewards, and AntMaze the goal in its observation.
- `tap/AntMaze-MAZE-v0` is AntMaze without a dataset; so are `tap/StochasticHopper-v0` and `tap/StochasticWalker2d-v0`
  (tap/envs/stochastic.py) Hopper and Walker2d with stochastic dynamics.

Importing this module reads only the table; simulators are imported when an environment is made.
"""

import csv
from pathlib import Path

import gymnasium

from tap.envs.stochastic import STOCHASTIC

D4RL_TABLE = Path(__file__).parents[1] / "data/d4rl_table.csv"


def _register() -> None:
    with D4RL_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        # make_environment enforces limit and order of calls; another wrapper here would hide `get_normalized_score`.
        gymnasium.register(
            f"tap/{row['id']}",
            "tap.envs.make:make_known_environment",
            kwargs={"dataset": row["id"]},
            order_enforce=False,
            disable_env_checker=True,
        )
    limits = {row["environment"]: int(row["max_episode_steps"]) for row in rows}
    for name in sorted({row["environment"] for row in rows if row["suite"] == "antmaze"}):
        maze = name.removeprefix("tap/AntMaze-").removesuffix("-v0")
        gymnasium.register(name, "tap.envs.antmaze:AntMaze", kwargs={"maze": maze}, max_episode_steps=limits[name])
    for name, (base, max_force) in STOCHASTIC.items():
        kwargs = {"environment": base, "max_force": max_force}
        gymnasium.register(name, "tap.envs.stochastic:make", kwargs=kwargs, max_episode_steps=limits[name])
    gymnasium.register("tap/D4RL-v0", "tap.envs.d4rl_gym:make")


_register()
