"""Two processes must train what one does: real models and losses, on windows with padding."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_training
import pytest
import torch

ROOT = Path(__file__).parent.parent


def train_in_two_processes(out: Path) -> list[dict[str, Any]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(Path(distributed_training.__file__)), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(2)]


def comparable(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights but the biases of attention's keys: they change no output, and AdamW scales up their gradients' rounding."""
    weights = dict(weights)
    for name in [name for name in weights if name.endswith("query_key_value.bias")]:
        query, _, value = weights.pop(name).chunk(3)
        weights |= {f"{name} of query": query, f"{name} of value": value}
    return weights


def test_two_processes_train_the_models_of_one(tmp_path: Path) -> None:
    """The same weights, codebook, logged losses and held-out losses, although the two have different numbers of valid steps."""
    one = distributed_training.train(tmp_path / "one")
    first, second = train_in_two_processes(tmp_path / "two")
    assert any(mine != others for mine, others in zip(first["padding"], second["padding"], strict=True))
    for model in ("vqvae", "prior", "critic", "actor"):
        for (update, expected), *both in zip(
            one[model]["history"], first[model]["history"], second[model]["history"], strict=True
        ):
            for found_update, values in both:
                assert found_update == update and values.keys() == expected.keys() >= {"loss", "held_out_loss"}
                for key in values.keys() - {"updates_per_second"}:
                    assert values[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), (model, update, key)
        weights = comparable(one[model]["weights"])
        torch.testing.assert_close(comparable(first[model]["weights"]), weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(second[model]["weights"], first[model]["weights"], rtol=0, atol=0)
