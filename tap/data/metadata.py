"""JSON with which a dataset describes itself: what is needed of it, validated; the rest is ignored."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def read_metadata(path: Path, model: type[Model]) -> Model:
    """A JSON file as `model`. Raises ValueError if it is missing, or not of that form."""
    with _readable(path):
        return model.model_validate_json(path.read_bytes())


def read_metadata_lines(path: Path, model: type[Model]) -> list[Model]:
    """A file with JSON in each line, as a `model` each. Raises ValueError as `read_metadata` does."""
    with _readable(path):
        return [model.model_validate_json(line) for line in path.read_bytes().splitlines()]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: get the whole dataset, or correct its path in params.yaml") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): allow it, or copy the dataset") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = ": ".join([".".join(map(str, problem["loc"]))] * bool(problem["loc"]) + [problem["msg"]])
        raise ValueError(f"{path} is not as expected ({what}): replace it with a complete copy") from None
