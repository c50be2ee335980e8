"""Export: a version of a registered model as a folder that runs without this project."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pipelines.exporting.check import Check
from pipelines.exporting.data import data_facts
from pipelines.exporting.folder import write_folder
from tap.data.windows import Layout
from tap.methods.policy import MethodPolicy
from tap.planning.policy import Policy
from tap.serving.policy import load_policy
from tap.tracking.mlflow_store import redact_credentials
from tap.tracking.registry import MODEL_DIGEST, open_registry


def export(name: str, alias: str, folder: Path, tracking_uri: str) -> Check:
    """Export the version of the model `name` with that number or alias into the new `folder`, if it acts alike there.

    Raises ValueError if there is no such version, its files were changed, or as `write_folder` does.
    """
    with open_registry(tracking_uri) as registry, TemporaryDirectory() as temporary:
        version = registry.version(name, alias) if alias.isdecimal() else registry.alias(name, alias)
        if version is None:
            store = redact_credentials(tracking_uri)
            raise ValueError(f"{name} has no {alias} at {store}: `tap models` lists the versions and their aliases")
        policy = load_policy(registry.download(version, Path(temporary)) / "artifacts/policy", "cpu")
    assert isinstance(policy, Policy | MethodPolicy)
    tags = version.tags
    replanned = re.search(r"re-planned every (\d+) steps", tags.get("protocol", ""))  # else every step
    facts = {
        "model": name,
        "version": version.version,
        "method": tags.get("method", "tap"),
        "plan_every": int(replanned[1]) if replanned else 1,
        **{key: tags.get(key) for key in ("dataset", "dataset_digest", "scale", "seed", "recipe", MODEL_DIGEST, "git_commit")},
    }
    layout = Layout(policy.observation_dim, policy.action_dim)
    dataset, digest = tags.get("dataset", ""), tags.get("dataset_digest", "")
    data = data_facts(dataset, digest, policy.normalizer, layout, np.random.default_rng(0))
    return write_folder(policy, facts, data, folder)
