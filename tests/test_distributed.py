"""Two processes must compute what one does."""

import os
import subprocess
import sys
from pathlib import Path

import torch

WORKER = """
import sys, torch
from torch import nn
from tap.model.codebook import Codebook
from tap.distributed import process_group, rank
from tap.settings import CodebookParams, FitParams
from tap.training import fit
from pathlib import Path

torch.set_num_threads(1)
params = FitParams(updates=12, batch_size=8, learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), clip_norm=1.0,
                   held_out=0.1, log_every=4, checkpoint_every=12)
with process_group():
    torch.manual_seed(0)
    linear = nn.Linear(5, 4)
    codebook = Codebook(CodebookParams(size=6, dim=4, decay=0.9, commitment_weight=1.0, dead_usage=0.0))
    codebook.vectors_KD.normal_(); codebook.sums_KD.copy_(codebook.vectors_KD); codebook.counts_K.fill_(1.0)
    model = nn.ModuleDict({"linear": linear, "codebook": codebook})
    data = torch.randn(101, 5, generator=torch.Generator().manual_seed(1))
    def loss(starts, held_out):
        quantized, codes, commitment = codebook(linear(data[starts]))
        total = commitment.sum() + (quantized - data[starts][:, :4]).square().sum()
        return {"loss": total / (8 if not held_out else 1)}
    history = fit(model, loss, params, num_windows=101, num_held_out=0, seed=0, device=torch.device("cpu"),
                  checkpoint=Path(sys.argv[1] + ".checkpoint"), log=lambda *_: None, description="test")
    if rank() == 0:
        torch.save({"weights": model.state_dict(), "losses": [values["loss"] for _, values in history]}, sys.argv[1])
"""


def train(processes: int, out: Path) -> dict:
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = out.with_suffix(".py")
    script.write_text(WORKER)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, *launcher, str(script), str(out)], check=True, env=environment, timeout=120)
    return torch.load(out, weights_only=True)


def test_two_processes_train_the_weights_and_codebook_of_one(tmp_path: Path) -> None:
    one, two = train(1, tmp_path / "one.pt"), train(2, tmp_path / "two.pt")
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-4, atol=1e-5)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-4, atol=1e-5)
