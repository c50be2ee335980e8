"""Control Hopper by the server of a policy that remembers, such as `dt`: python docs/history_client.py [URL]"""

import sys

import gymnasium
import requests

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:5001"
REMEMBERED = 19  # earlier steps at most: one less than any `context` in params.yaml

environment = gymnasium.make("Hopper-v4")
observation, _ = environment.reset(seed=0)
observations, actions, rewards, ended = [], [], [], False
while not ended:
    history = {"observations": [observations[-REMEMBERED:]], "actions": [actions[-REMEMBERED:]], "rewards": [rewards]}
    request = {"inputs": [observation.tolist()], "params": {"history": history}}
    answer = requests.post(f"{URL}/invocations", json=request, timeout=10)
    if answer.status_code != 200:
        sys.exit(answer.json()["message"])
    (predicted,) = answer.json()["predictions"]
    observations.append(observation.tolist())
    actions.append([min(max(force, -1), 1) for force in predicted])
    observation, reward, terminated, truncated, _ = environment.step(actions[-1])
    rewards.append(reward)
    ended = terminated or truncated
print(f"return {sum(rewards):.1f} after {len(rewards)} steps")
