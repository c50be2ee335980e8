"""The folder of an exported policy: it appears whole, and only if it acts as the policy."""

import platform
from importlib.metadata import version
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from pipelines.exporting.check import Check, check, expect
from pipelines.exporting.data import DataFacts
from pipelines.exporting.decision import Decision, decision_of
from pipelines.exporting.formats import require_tools, trace, write_onnx, write_package
from tap.data.windows import Layout
from tap.files import sha256, write_atomically, write_json
from tap.methods.policy import MethodPolicy
from tap.planning.policy import Policy

TEMPLATE = Path(__file__).parent / "template"
FORMATS = ("model.onnx", "model.pt2")
HISTORIES = """
The policy acts on the episode so far: `policy.act(observations, seed, histories)`, with a history for each observation, of the
`observations` (t, O), `actions` (t, A) and `rewards` (t,) before it. Without histories, each is the first of an episode."""


def write_folder(policy: Policy | MethodPolicy, facts: dict[str, Any], data: DataFacts, folder: Path) -> Check:
    """Export a policy, on the CPU, into the new `folder`, with `facts` about where it comes from.

    Raises ValueError if the folder exists, a tool is missing, the method cannot be exported, or the check fails; the folder
    then is as it was.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: name a folder that does not, or delete it")
    require_tools()
    decision = decision_of(policy, data.bounds).eval()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        built = Path(temporary) / folder.name
        built.mkdir()
        program = trace(decision)
        write_onnx(program, decision, built / "model.onnx")
        write_package(program, built / "model.pt2")
        expected = expect(decision, data.states_NO, data.histories)
        described = facts | _description(policy, decision, data, built)
        write_json(built / "policy.json", described)  # which the runner reads
        write_json(built / "sample.json", expected.sample())
        _write_programs(built, described)
        std_A = policy.normalizer.std[Layout(policy.observation_dim, policy.action_dim).action]
        checked = check(built, expected, decision, np.maximum(1, std_A), data.drawn_from)
        write_json(built / "policy.json", described | {"check": checked.as_json()})
        built.rename(folder)
    return checked


def _description(policy: Policy | MethodPolicy, decision: Decision, data: DataFacts, built: Path) -> dict[str, Any]:
    """What policy.json says beside where the policy comes from."""
    low, high = ([float(each) if np.isfinite(each) else None for each in bound] for bound in data.bounds)
    return {
        "observation": {"dim": policy.observation_dim, "names": data.observation_names},
        "action": {"dim": policy.action_dim, "names": data.action_names, "low": low, "high": high},
        "steps_per_second": data.fps,
        "noise_size": decision.noise_size,
        "remembered_steps": decision.remembered_steps,
        "planner": policy.params.model_dump(mode="json") if isinstance(policy, Policy) else None,
        "files": {name: sha256(built / name) for name in FORMATS},
        "versions": {name: version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")},
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _write_programs(built: Path, described: dict[str, Any]) -> None:
    """The runner, the example in C++ and README.md, with the facts in place of $names."""
    remembers = described["remembered_steps"] > 0
    kind = TEMPLATE / ("remembering" if remembers else "present")
    keys = ("model", "version", "method", "dataset", "plan_every", "noise_size", "remembered_steps")
    facts = {key: described[key] for key in keys}
    facts |= {f"{key}_dim": described[key]["dim"] for key in ("observation", "action")}
    facts |= {"window": described["remembered_steps"] + 1, "histories": HISTORIES if remembers else ""}
    facts["arguments"] = "OBSERVATION..." if remembers else "GENERATOR OBSERVATION..."
    facts["inputs"] = Template((kind / "inputs.md").read_text()).substitute(facts)
    write_atomically(built / "run.py", (TEMPLATE / "run.py").read_text())
    for source, target in ((TEMPLATE / "README.md", "README.md"), (kind / "cpp/act.cpp", "cpp/act.cpp")):
        write_atomically(built / target, Template(source.read_text()).substitute(facts))
