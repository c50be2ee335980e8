"""Control Hopper by the server of `tap serve hopper-medium-replay`, planning every three steps: python docs/client.py [URL]"""

import sys

import gymnasium
import requests

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:5001"
PLAN_EVERY = 3

environment = gymnasium.make("Hopper-v4")
observation, _ = environment.reset(seed=0)
total, step, ended = 0.0, 0, False
while not ended:
    request = {"inputs": [observation.tolist()], "params": {"details": True, "seed": step}}
    answer = requests.post(f"{URL}/invocations", json=request, timeout=10)
    if answer.status_code != 200:
        sys.exit(answer.json()["message"])
    (planned,) = answer.json()["predictions"]
    if "state" in planned["reasons"]:
        print(f"step {step}: {planned['reasons']['state']}")
    for action in planned["plan"]["actions"][:PLAN_EVERY]:
        observation, reward, terminated, truncated, _ = environment.step([min(max(force, -1), 1) for force in action])
        total, step, ended = total + reward, step + 1, terminated or truncated
        if ended:
            break
print(f"return {total:.1f} after {step} steps")
