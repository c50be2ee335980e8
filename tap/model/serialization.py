"""A model as two files: NAME.safetensors with its weights, NAME.json with everything needed to rebuild it.

The files may come from anyone: a description of another form, or with other sizes than the weights, is refused before anything
of its size is allocated.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tap.files import read_json, write_atomically, write_json

MAX_DESCRIPTION_BYTES = 16 << 20  # of a thousand dimensions it has 100 KB
RESTORE = "restore it with `dvc checkout`, or train again"

Model = TypeVar("Model", bound=torch.nn.Module)
Description = TypeVar("Description", bound=BaseModel)


def save_model(folder: Path, name: str, model: torch.nn.Module, description: dict[str, Any]) -> None:
    """Write the weights and the JSON-able description of `model` into `folder`."""
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_atomically(folder / f"{name}.safetensors", save(weights))
    write_json(folder / f"{name}.json", description)


def read_description(folder: Path, name: str) -> Any:
    """The description that was saved. Raises ValueError if there is none."""
    file = folder / f"{name}.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: train first, with `dvc repro` or `tap run`")
    if (size := file.stat().st_size) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"{file} has {size} bytes, more than the description of any model: {RESTORE}")
    return read_json(file)


def load_description(folder: Path, name: str, kind: type[Description]) -> Description:
    """The description that was saved, as `kind`. Raises ValueError if there is none, or it is of another form."""
    description = read_description(folder, name)
    try:
        return kind.model_validate(description)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(
            f"{folder / name}.json is not the description of a model ({where}: {first['msg']}): {RESTORE}"
        ) from None


def load_weights(folder: Path, name: str, build: Callable[[], Model], device: torch.device) -> Model:
    """The model that `build` makes, with the saved weights, on `device` and in evaluation mode.

    Raises ValueError if the file is missing, damaged, or belongs to another model.
    """
    file = folder / f"{name}.safetensors"
    try:
        if not file.is_file():
            raise FileNotFoundError("there is no such file")
        if different := _first_difference(_described_sizes(build), _stored_sizes(file)):
            raise ValueError(different)
        model = build()
        model.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} does not contain the weights of this model ({error}): {RESTORE}") from None
    return model.to(device).eval()


def _described_sizes(build: Callable[[], torch.nn.Module]) -> dict[str, list[int]]:
    """The shape of each tensor of a model that is built without allocating it."""
    try:
        with torch.device("meta"):
            return {name: list(tensor.shape) for name, tensor in build().state_dict().items()}
    except (RuntimeError, TypeError, OverflowError):
        raise ValueError("no model has the described sizes") from None


def _stored_sizes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118, it is not iterable


def _first_difference(described: dict[str, list[int]], stored: dict[str, list[int]]) -> str | None:
    for name in sorted(described.keys() | stored.keys()):
        if described.get(name) != stored.get(name):
            sizes = [
                f"of size {shape}" if shape is not None else "missing" for shape in (stored.get(name), described.get(name))
            ]
            return f"{name:.100} is {sizes[0]} in the file, and {sizes[1]} in the description"
    return None
