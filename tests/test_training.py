import itertools
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tap import training
from tap.averaging import AveragedWeights
from tap.data.sampling import WindowSampler
from tap.data.windows import Layout
from tap.device import choose_device
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.settings import FitParams, Params
from tap.training import checkpoint_folder, fit, learning_rate, make_optimizer, step

PARAMS = FitParams(
    updates=30,
    effective_share=1.0,
    batch_size=8,
    learning_rate=1e-2,
    schedule="constant",
    warmup_updates=0,
    ema_decay=0,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    clip_norm=1.0,
    held_out=0.1,
    log_every=4,
    checkpoint_every=10,
)
# With everything that depends on the number of the update.
SCHEDULED = PARAMS.model_copy(update={"schedule": "cosine", "warmup_updates": 6, "ema_decay": 0.9})


class Killed(Exception):
    pass


class Regression:
    """A small model with dropout, and a loss over rows of fixed data; raises Killed at update `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        generator = torch.Generator().manual_seed(1)
        self.inputs, self.held_out = torch.randn(100, 5, generator=generator), torch.randn(20, 5, generator=generator)
        self.calls, self.stop_at = 0, stop_at

    def loss(self, starts: torch.Tensor, is_held_out: bool) -> dict[str, torch.Tensor]:
        if not is_held_out:
            self.calls += 1
            if self.calls == self.stop_at:
                raise Killed
        x = (self.held_out if is_held_out else self.inputs)[starts]
        error = (self.model(x)[:, 0] - x.sum(dim=1)).square().mean()
        return {"loss": error, "absolute": error.detach().sqrt()}

    def fit(self, checkpoint: Path, params: FitParams = PARAMS) -> tuple[list[tuple[int, dict[str, float]]], list[int]]:
        logged: list[int] = []
        history = fit(
            self.model,
            self.loss,
            params,
            sample=WindowSampler(np.array([100])),
            num_held_out=20,
            seed=0,
            device=torch.device("cpu"),
            checkpoint=checkpoint,
            log=lambda step, values: logged.append(step),
            description="test",
        )
        return history, logged


def test_gradients_are_clipped_to_the_norm() -> None:
    """The clipped gradient against the unclipped one: same direction, norm clip_norm."""
    norms, directions = {}, {}
    for clip_norm in (1e9, 0.5):
        regression = Regression()
        regression.model.eval()  # dropout would differ between the two runs
        params = PARAMS.model_copy(update={"clip_norm": clip_norm})
        step(regression.model, regression.loss, make_optimizer(regression.model, params), params, torch.arange(8))
        gradient = torch.cat([parameter.grad.flatten() for parameter in regression.model.parameters()])
        norms[clip_norm], directions[clip_norm] = gradient.norm().item(), gradient / gradient.norm()
    assert norms[1e9] > 1 and norms[0.5] == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(directions[0.5], directions[1e9])


def test_logged_values_are_means_over_updates_and_code_usage_is_over_all_of_them(tmp_path: Path) -> None:
    """By hand: codes 0 and 1 in odd updates, 0 alone in even ones, of four codes: shares 3/4 and 1/4."""
    parameter, losses = nn.Parameter(torch.zeros(1, 1)), []

    def loss(starts: torch.Tensor, is_held_out: bool) -> dict[str, torch.Tensor]:
        number = len(losses) + 1.0
        losses.append(number)
        counts = torch.tensor([1.0, 1, 0, 0] if number % 2 else [2.0, 0, 0, 0])
        return {"loss": parameter.sum() + number, "number": torch.tensor(number), "code_counts": counts}

    model = nn.ParameterList([parameter])
    params = PARAMS.model_copy(update={"updates": 4, "log_every": 2})
    history = fit(
        model, loss, params, sample=WindowSampler(np.array([10])), num_held_out=0, seed=0, device=torch.device("cpu"),
        checkpoint=tmp_path / "checkpoint.pt", log=lambda *_: None, description="test",
    )  # fmt: skip
    assert [update for update, _ in history] == [2, 4]
    for (_, values), mean in zip(history, (1.5, 3.5), strict=True):
        assert values["number"] == mean
        assert values["codebook_usage"] == 0.5
        assert values["codebook_perplexity"] == pytest.approx((4 / 3) ** 0.75 * 4**0.25)


def without_speed(history: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    return [(step, {k: v for k, v in values.items() if k != "updates_per_second"}) for step, values in history]


@pytest.mark.parametrize("params", [PARAMS, SCHEDULED])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, params: FitParams) -> None:
    whole = Regression()
    expected, logged = whole.fit(tmp_path / "whole.pt", params)
    assert logged == [4, 8, 12, 16, 20, 24, 28, 30]

    with pytest.raises(Killed):
        Regression(stop_at=25).fit(tmp_path / "killed.pt", params)
    resumed = Regression()
    history, logged = resumed.fit(tmp_path / "killed.pt", params)
    assert resumed.calls == 10  # from the checkpoint at update 20
    assert logged == [24, 28, 30]
    assert without_speed(history) == without_speed(expected)
    for name, weight in resumed.model.state_dict().items():
        torch.testing.assert_close(weight, whole.model.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("params", [PARAMS, SCHEDULED])
def test_a_finished_run_is_not_trained_again(tmp_path: Path, params: FitParams) -> None:
    first, again = Regression(), Regression()
    expected, _ = first.fit(tmp_path / "checkpoint.pt", params)
    history, logged = again.fit(tmp_path / "checkpoint.pt", params)
    assert again.calls == 0 and logged == [] and history == expected
    torch.testing.assert_close(again.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_between_two_log_points_keeps_the_means(tmp_path: Path) -> None:
    """Update 10 is not a multiple of log_every 4: the sums since update 8 must survive the kill."""
    expected, _ = Regression().fit(tmp_path / "whole.pt")
    with pytest.raises(Killed):
        Regression(stop_at=12).fit(tmp_path / "killed.pt")
    history, _ = Regression().fit(tmp_path / "killed.pt")
    assert without_speed(history) == without_speed(expected)


class Ramp:
    """One weight with a gradient of 1: AdamW without momentum and weight decay lowers it by the learning rate."""

    def __init__(self) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))])
        self.weights: list[float] = []  # before each update, and in the end
        self.refits: list[float] = []

    def loss(self, starts: torch.Tensor, is_held_out: bool) -> dict[str, torch.Tensor]:
        if not is_held_out:
            self.weights.append(self.model[0].item())
        return {"loss": self.model[0].sum()}

    def fit(self, checkpoint: Path, **changes: object) -> list[tuple[int, dict[str, float]]]:
        fixed = {"updates": 12, "learning_rate": 0.8, "weight_decay": 0.0, "betas": (0.0, 0.0)}
        params = PARAMS.model_copy(update=fixed | changes)
        history = fit(
            self.model, self.loss, params, sample=WindowSampler(np.array([10])), num_held_out=5, seed=0,
            device=torch.device("cpu"), checkpoint=checkpoint, log=lambda *_: None, description="test",
            refit=lambda: self.refits.append(self.model[0].item()),
        )  # fmt: skip
        return history


HALF_COSINE = [0.8 * (1 + cosine) / 2 for cosine in (1, 0.92388, 0.70711, 0.38268, 0, -0.38268, -0.70711, -0.92388)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.8] * 12),
        ({"warmup_updates": 4}, [0.2, 0.4, 0.6, 0.8] + [0.8] * 8),
        ({"warmup_updates": 4, "schedule": "cosine"}, [0.2, 0.4, 0.6, 0.8, *HALF_COSINE]),
    ],
)
def test_updates_are_made_with_the_scheduled_learning_rates(
    tmp_path: Path, changes: dict[str, object], expected: list[float]
) -> None:
    """By hand; the rates are seen in how far the weight moves."""
    ramp = Ramp()
    ramp.fit(tmp_path / "checkpoint.pt", **changes)
    weights = [*ramp.weights, ramp.model[0].item()]
    assert [before - after for before, after in itertools.pairwise(weights)] == pytest.approx(expected, abs=1e-5)
    params = PARAMS.model_copy(update={"updates": 12, "learning_rate": 0.8} | changes)
    assert [learning_rate(update, params) for update in range(12)] == pytest.approx(expected, abs=1e-5)


def test_a_learning_rate_in_a_tensor_is_set_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a resume. A CUDA graph reads the rate from one address; here the tensor is on the CPU, without a graph."""
    rates, optimizers = [], []

    def make_with_tensor(model: nn.Module, params: FitParams) -> torch.optim.AdamW:
        rates.append(torch.tensor(params.learning_rate))
        optimizers.append(make_optimizer(model, params))
        for group in optimizers[-1].param_groups:
            group["lr"] = rates[-1]
        return optimizers[-1]

    monkeypatch.setattr(training, "make_optimizer", make_with_tensor)
    for stop_at in (25, None):
        with pytest.raises(Killed) if stop_at else nullcontext():
            Regression(stop_at).fit(tmp_path / "checkpoint.pt", SCHEDULED)
        assert all(group["lr"] is rates[-1] for group in optimizers[-1].param_groups)
        last = 24 if stop_at else 29
        assert rates[-1].item() == pytest.approx(0.01 * (1 + math.cos(math.pi * (last - 6) / 24)) / 2, rel=1e-6)


def test_averaged_weights_are_evaluated_refitted_and_kept(tmp_path: Path) -> None:
    """The weight is -0.8 t after t updates; its averages by hand, with the smaller decays of the first updates."""
    average, averages = 0.0, [0.0]
    for t, decay in enumerate([2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, *[0.5] * 5], start=1):
        average = decay * average + (1 - decay) * -0.8 * t
        averages.append(average)
    ramp = Ramp()
    history = ramp.fit(tmp_path / "checkpoint.pt", ema_decay=0.5)
    assert ramp.weights == pytest.approx([-0.8 * t for t in range(12)])  # updates are made from the last weights
    assert {update: values["held_out_loss"] for update, values in history} == pytest.approx(
        {update: averages[update] for update in (4, 8, 12)}
    )
    assert ramp.refits == pytest.approx([averages[12]])
    assert ramp.model[0].item() == pytest.approx(averages[12])

    plain = Ramp()
    history = plain.fit(tmp_path / "plain.pt")
    assert history[-1][1]["held_out_loss"] == pytest.approx(plain.model[0].item()) == pytest.approx(-0.8 * 12)
    assert plain.refits == []


def test_what_refit_changes_is_kept(tmp_path: Path) -> None:
    first, again = Regression(), Regression()
    for regression in (first, again):  # the second time from the checkpoint of the finished run
        bias = regression.model[2].bias
        fit(
            regression.model, regression.loss, SCHEDULED, sample=WindowSampler(np.array([100])), num_held_out=20, seed=0,
            device=torch.device("cpu"), checkpoint=tmp_path / "checkpoint.pt", log=lambda *_: None, description="test",
            refit=lambda bias=bias: bias.data.fill_(7.0),
        )  # fmt: skip
        assert regression.model[2].bias.item() == 7.0


def test_buffers_are_averaged_and_counters_are_not() -> None:
    model = nn.BatchNorm1d(1, momentum=0.5)
    average = AveragedWeights(model, decay=0.0)
    model(torch.tensor([[2.0], [4.0]]))  # its mean 3 becomes a running mean of 1.5
    average.update(1)
    assert [tensor.item() for tensor in average.tensors] == [1.0, 0.0, 1.5, 1.5]
    model(torch.tensor([[2.0], [4.0]]))
    with average.in_model():
        assert model.running_mean.item() == 1.5 and model.num_batches_tracked.item() == 2
    assert model.running_mean.item() == 2.25


def test_training_lowers_the_held_out_loss(tmp_path: Path) -> None:
    history, _ = Regression().fit(tmp_path / "checkpoint.pt", PARAMS.model_copy(update={"updates": 300}))
    assert history[-1][1]["held_out_loss"] < 0.5 * history[0][1]["held_out_loss"]


def test_a_loss_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    task = Regression()
    task.inputs[:] = float("inf")
    with pytest.raises(ValueError, match="the loss is nan at update 4"):
        task.fit(tmp_path / "checkpoint.pt")


def test_a_truncated_checkpoint_is_explained(tmp_path: Path) -> None:
    Regression().fit(tmp_path / "checkpoint.pt")
    content = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read .* delete it"):
        Regression().fit(tmp_path / "checkpoint.pt")


def test_only_matrices_decay() -> None:
    groups = make_optimizer(nn.Linear(3, 2), PARAMS).param_groups
    assert [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in groups] == [(0.1, [2]), (0, [1])]


def test_other_inputs_get_another_folder_and_one_folder_one_process(tmp_path: Path) -> None:
    with checkpoint_folder(tmp_path, "train", {"seed": 0}) as one, checkpoint_folder(tmp_path, "train", {"seed": 1}) as two:
        assert one != two
        with (
            pytest.raises(ValueError, match="another run is training the same model"),
            checkpoint_folder(tmp_path, "train", {"seed": 0}),
        ):
            pass
    with checkpoint_folder(tmp_path, "train", {"seed": 0}) as again:
        assert again == one


def test_an_unknown_device_is_explained() -> None:
    with pytest.raises(ValueError, match="TAP_DEVICE=gpu is not a device"):
        choose_device("gpu")
    with pytest.raises(ValueError, match="TAP_DEVICE=cuda:99 is not on this machine"):
        choose_device("cuda:99")


@pytest.mark.parametrize("name", ["vqvae", "prior"])
def test_an_update_never_waits_for_a_value(tiny_params: Params, name: str) -> None:
    """Waiting would leave a GPU idle. Tested with fake tensors, which have a shape but no values."""
    with FakeTensorMode():
        vqvae = VQVAE(tiny_params.train_vqvae, Layout(11, 3)).train()
        vqvae.codebook._started = True  # only the first batch of a run reads a value
        prior = Prior(tiny_params.train_prior, tiny_params.train_vqvae, 11).train()
        tokens, valid = torch.randn(8, 6, 17), torch.ones(8, 6, dtype=torch.bool)
        codes = torch.zeros(8, 2, dtype=torch.long)
        model = vqvae if name == "vqvae" else prior
        average = AveragedWeights(model, 0.9)
        losses = step(
            model,
            lambda starts, _: vqvae.loss(tokens, valid) if name == "vqvae" else prior.loss(codes, tokens[:, 0, :11]),
            make_optimizer(model, PARAMS),
            PARAMS,
            torch.zeros(8, dtype=torch.long),
        )
        average.update(1)
    assert losses["loss"].shape == ()
