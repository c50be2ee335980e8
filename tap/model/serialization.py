"""A model as two files: NAME.safetensors with its weights, NAME.json with everything needed to rebuild it."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tap.files import read_json, write_atomically, write_json

Model = TypeVar("Model", bound=torch.nn.Module)


def save_model(folder: Path, name: str, model: torch.nn.Module, description: dict[str, Any]) -> None:
    """Write the weights and the JSON-able description of `model` into `folder`."""
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_atomically(folder / f"{name}.safetensors", save(weights))
    write_json(folder / f"{name}.json", description)


def read_description(folder: Path, name: str) -> Any:
    """The description that was saved. Raises ValueError if there is none."""
    file = folder / f"{name}.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist: train first, with `dvc repro` or `tap run`")
    return read_json(file)


def load_weights(folder: Path, name: str, model: Model, device: torch.device) -> Model:
    """Load the saved weights into `model`, move it to `device` and switch it to evaluation mode.

    Raises ValueError if the file is missing, damaged, or belongs to another model.
    """
    file = folder / f"{name}.safetensors"
    try:
        model.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{file} does not contain the weights of this model ({error}): restore it with `dvc checkout`, or train again"
        ) from None
    return model.to(device).eval()
