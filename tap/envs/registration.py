"""Gymnasium ids for every known dataset and for AntMaze, registered by importing this module.

    import gymnasium, tap.envs.registration

    env = gymnasium.make("tap/hopper-medium-v2")
    env.get_normalized_score(1500.0)  # as in D4RL a fraction: 0 for a random policy, 1 for an expert

`gymnasium.make("tap.envs.registration:tap/hopper-medium-v2")` does both. Gymnasium has loaded no plugins by itself since
release 1.0, so one of the two is needed.

- `tap/DATASET` is what that dataset's policies are evaluated in: `tap.envs.make.make_environment`, with the step limit of
  d4rl_table.csv. The ids ending in v0, v1, v2 of one task differ in their data alone.
- Ant has 27 dimensions, not D4RL's 111, of which the other 84 are always zero.
- Adroit has D4RL's rewards, and AntMaze the goal in its observation.
- `tap/AntMaze-MAZE-v0` is AntMaze itself.

Nothing but the table is read before an environment is made.
"""

import csv
from pathlib import Path

import gymnasium

D4RL_TABLE = Path(__file__).parents[1] / "data/d4rl_table.csv"


def _register() -> None:
    with D4RL_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        # The environment comes with its limit and order of calls enforced: `get_normalized_score` must stay in reach.
        gymnasium.register(
            f"tap/{row['id']}",
            "tap.envs.make:make_known_environment",
            kwargs={"dataset": row["id"]},
            order_enforce=False,
            disable_env_checker=True,
        )
    limits = {row["environment"]: int(row["max_episode_steps"]) for row in rows if row["suite"] == "antmaze"}
    for name, limit in limits.items():
        maze = name.removeprefix("tap/AntMaze-").removesuffix("-v0")
        gymnasium.register(name, "tap.envs.antmaze:AntMaze", kwargs={"maze": maze}, max_episode_steps=limit)
    gymnasium.register("tap/D4RL-v0", "tap.envs.d4rl_gym:make")


_register()
