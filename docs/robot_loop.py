"""Run a robot's control loop with the policy of `tap serve arm`: python docs/robot_loop.py [URL]

In place of the robot, `read_state` replays the first recorded states, and `send` only keeps the command.
"""

import sys
import time

import numpy as np
import requests

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:5001"
PERIOD = 1 / 30  # s: the rate at which the data was recorded
PLAN_EVERY = 1  # ticks; up to the length of a plan
BUDGET_MS = 15  # for the plan; the rest of the period is for the network and the robot
PATIENCE = 10  # ticks without a plan that can be trusted, then the robot stops

recorded = np.load("data/raw/arm/episodes/observations.npy", mmap_mode="r")
commands = []


def read_state(tick):
    return recorded[tick].tolist()


def send(command):
    commands.append(command)


server, plan, trusted, late, doubtful = requests.Session(), [], 0, 0, 0
begin = time.monotonic()
for tick in range(min(300, len(recorded))):
    if tick % PLAN_EVERY == 0 or not plan:
        params = {"details": True, "budget_ms": BUDGET_MS, "seed": tick}
        request = {"inputs": [read_state(tick)], "params": params}
        try:
            answer = server.post(f"{URL}/invocations", json=request, timeout=0.8 * PERIOD)
        except requests.RequestException:
            late += 1  # the plan before goes on
        else:
            if answer.status_code != 200:
                sys.exit(f"tick {tick}: {answer.json()['message']}")
            (planned,) = answer.json()["predictions"]
            if "state" in planned["reasons"]:
                doubtful += 1
                print(f"tick {tick}: {planned['reasons']['state']}")
            else:
                plan, trusted = planned["plan"]["actions"], tick
    if tick - trusted >= PATIENCE:
        sys.exit(f"tick {tick}: no plan to trust since tick {trusted}: stopping the robot")
    if plan:
        send(plan.pop(0))
    elif commands:
        send(commands[-1])  # the plan is used up: hold the last command
    time.sleep(max(0, begin + (tick + 1) * PERIOD - time.monotonic()))
print(f"{len(commands)} commands in {time.monotonic() - begin:.1f} s; late answers: {late}; states unlike the data: {doubtful}")
