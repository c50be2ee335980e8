"""A project whose stages only write down that they ran: for tests of what runs them."""

import shutil
import subprocess
from pathlib import Path

from conftest import IDENTITY, ROOT

PARAMS = """
scale: cpu
seeds: [0, 1]
datasets: {a: {}, b-c: {}}
methods: [bc]
ablate: {datasets: [a, b-c], planners: [no-search], models: []}
ablations: {no-search: {evaluate: {}}}
fetch: {}
train_vqvae: {}
train_prior: {}
train_bc: {}
train_critic: {}
train_actor: {}
evaluate: {}
scales: {}
"""
# Files `fail` and `sleep` name the stages that shall do so.
STAGE = """
import json, os, sys, time
from pathlib import Path

name, out = sys.argv[1], Path(sys.argv[2])
with open("ran.txt", "a") as file:
    print(name, file=file)
print("this is", name)
for percent in (10, 50, 100):
    print(f"\\r{percent}%", end="", file=sys.stderr)
print(file=sys.stderr)
if Path("sleep").exists() and name in Path("sleep").read_text().split():
    with open("pids", "a") as file:
        print(os.getpid(), os.environ.get("OMP_NUM_THREADS"), file=file)
    time.sleep(100)
if Path("fail").exists() and name in Path("fail").read_text().split():
    sys.exit("no more memory")
out.parent.mkdir(parents=True, exist_ok=True)
dataset, _, key = name.partition("@")[2].partition("-")
if out.suffix == ".json":
    seed, _, variant = key.partition("-")
    score = {"": 50, "bc": 20, "no-search": 30}[variant]
    out.write_text(json.dumps({
        "dataset": dataset, "source": "file", "digest": "", "scale": "cpu", "environment": "Hopper-v4", "versions": {},
        "seed": int(seed), "environment_seed": 0, "episodes": 2, "protocol": "", "return_mean": 1.5, "returns": [1, 2],
        "lengths": [1, 1], "terminated": [True, True], "log_probability_mean": 0, "latent_step": 3, "window_length": 12,
        "normalized_score": score, "normalized_score_standard_error": 1.0, "search_value_mean": 0,
        "state_prediction_error": 0, "latency_ms": {"median": 12, "p95": 20, "batch_median": 12}, "planner": {},
        "runs": {}, "git_commit": "unknown",
        "behaviour": {"episodes": 1, "mean_return": 1, "mean_normalized_score": 25.0, "best_tenth_normalized_score": 1,
                      "last_tenth_normalized_score": 1},
        **({"method": "bc"} if variant == "bc" else {"ablation": variant} if variant else {}),
    }))
else:
    out.write_text(name)
"""
DVC = """
stages:
  params:
    cmd: python stage.py params data/params
    deps: [params.yaml, stage.py]
    outs: [data/params]
  fetch:
    matrix: {dataset: "${datasets}"}
    cmd: python stage.py fetch@${item.dataset} data/raw/${item.dataset}
    deps: [stage.py]
    outs: ["data/raw/${item.dataset}"]
  train_vqvae:
    matrix: &each {dataset: "${datasets}", seed: "${seeds}"}
    cmd: python stage.py train_vqvae@${item.dataset}-${item.seed} data/vqvae/${item.dataset}-${item.seed}
    deps: ["data/raw/${item.dataset}", "seeds/${item.seed}"]
    outs: ["data/vqvae/${item.dataset}-${item.seed}"]
  train_prior:
    matrix: *each
    cmd: python stage.py train_prior@${item.dataset}-${item.seed} data/prior/${item.dataset}-${item.seed}
    deps: ["data/vqvae/${item.dataset}-${item.seed}"]
    outs: ["data/prior/${item.dataset}-${item.seed}"]
  train_critic:
    matrix: *each
    cmd: python stage.py train_critic@${item.dataset}-${item.seed} data/critic/${item.dataset}-${item.seed}
    deps: ["data/vqvae/${item.dataset}-${item.seed}"]
    outs: ["data/critic/${item.dataset}-${item.seed}"]
  train_actor:
    matrix: *each
    cmd: python stage.py train_actor@${item.dataset}-${item.seed} data/actor/${item.dataset}-${item.seed}
    deps: ["data/vqvae/${item.dataset}-${item.seed}"]
    outs: ["data/actor/${item.dataset}-${item.seed}"]
  evaluate:
    matrix: *each
    cmd: python stage.py evaluate@${item.dataset}-${item.seed} data/metrics/evaluate/${item.dataset}-${item.seed}.json
    deps: &models
      - data/prior/${item.dataset}-${item.seed}
      - data/critic/${item.dataset}-${item.seed}
      - data/actor/${item.dataset}-${item.seed}
    outs: ["data/metrics/evaluate/${item.dataset}-${item.seed}.json"]
  teacher:
    matrix: *each
    cmd: python stage.py teacher@${item.dataset}-${item.seed} data/teacher/${item.dataset}-${item.seed}
    deps: *models
    outs: ["data/teacher/${item.dataset}-${item.seed}"]
  train_methods:
    matrix: &method {dataset: "${datasets}", seed: "${seeds}", method: "${methods}"}
    cmd: >-
      python stage.py train_methods@${item.dataset}-${item.seed}-${item.method} data/${item.method}/${item.dataset}-${item.seed}
    deps: ["data/raw/${item.dataset}", "data/teacher/${item.dataset}-${item.seed}"]
    outs: ["data/${item.method}/${item.dataset}-${item.seed}"]
  methods:
    matrix: *method
    cmd: >-
      python stage.py methods@${item.dataset}-${item.seed}-${item.method}
      data/metrics/methods/${item.dataset}-${item.seed}-${item.method}.json
    deps: ["data/${item.method}/${item.dataset}-${item.seed}"]
    outs: ["data/metrics/methods/${item.dataset}-${item.seed}-${item.method}.json"]
  diagnose:
    matrix: {dataset: "${datasets}", seed: ["${seeds[0]}"]}
    cmd: python stage.py diagnose@${item.dataset}-${item.seed} data/plots/diagnose/${item.dataset}-${item.seed}.json
    deps: ["data/metrics/evaluate/${item.dataset}-${item.seed}.json"]
    outs: ["data/plots/diagnose/${item.dataset}-${item.seed}.json"]
  ablations:
    matrix: {dataset: "${datasets}", seed: "${seeds}", ablation: "${ablate.planners}"}
    cmd: >-
      python stage.py ablations@${item.dataset}-${item.seed}-${item.ablation}
      data/metrics/ablations/${item.dataset}-${item.seed}-${item.ablation}.json
    deps: *models
    outs: ["data/metrics/ablations/${item.dataset}-${item.seed}-${item.ablation}.json"]
  report:
    cmd: python stage.py report data/report
    deps: [data/metrics]
    outs: [data/report]
"""


def make_stub_project(folder: Path) -> None:
    """Fill `folder` with a project in git that has datasets a and b-c, seeds 0 and 1, and one ablation."""
    subprocess.run(["git", "init", "-q", folder], check=True)
    files = {"params.yaml": PARAMS, "stage.py": STAGE, "dvc.yaml": DVC, "seeds/0": "0", "seeds/1": "1"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache"))
    shutil.copy(ROOT / "prefect.toml", folder)
    subprocess.run(["git", "-C", folder, "add", "--all"], check=True)
    subprocess.run(["git", "-C", folder, *IDENTITY, "commit", "-qm", "first"], check=True)


def ran(project: Path) -> list[str]:
    """The stages that ran since the last call, in order."""
    log = project / "ran.txt"
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names
