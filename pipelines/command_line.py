"""The command lines of all programs: typer; a user's mistake and a full disk exit with one message and no traceback."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tap import settings
from tap.files import explain_disk

Dataset = Annotated[str, typer.Argument(help="A dataset id listed in params.yaml.", show_default=False)]
Seed = Annotated[int, typer.Argument(help="A training seed.", show_default=False)]
Ablation = Annotated[str, typer.Argument(help="One of params.yaml's ablations.", show_default=False)]
OptionalAblation = Annotated[str | None, typer.Argument(help="One of params.yaml's ablations, or none.", show_default=False)]

Method = Annotated[settings.Method, typer.Argument(help="A method other than TAP.", show_default=False)]


class App(typer.Typer):
    """A typer app that exits with the message of a ValueError, and of an OSError of the disk, without a traceback."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            add_completion=False,
            pretty_exceptions_enable=False,
            **{"rich_markup_mode": "markdown", "context_settings": {"help_option_names": ["-h", "--help"]}} | options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            _require_home()
            if "DVC_ROOT" in os.environ:  # a stage that DVC runs
                _require_outputs_inside()
            return super().__call__(*args, **kwargs)
        except ValueError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            if (sentence := explain_disk(error)) is None:
                raise
            sys.exit(f"error: {sentence}")


def _require_home() -> None:
    try:
        Path.home()
    except RuntimeError:
        remedy = "set HOME to a folder for settings and caches, like HOME=/tmp/home"
        raise ValueError(f"this user has no home folder: {remedy}") from None


def _require_outputs_inside() -> None:
    """Raise ValueError if DVC, which runs this stage, would refuse what it writes."""
    from pipelines.stages.params import OUTPUTS  # it imports this module

    for folder in OUTPUTS:
        if not folder.resolve().is_relative_to(Path.cwd()):
            raise ValueError(
                f"{folder} is linked to another place, where DVC accepts no results: make it a folder again, and move DVC's "
                "cache instead, by `dvc cache dir --local FOLDER` and `dvc config --local cache.type symlink`"
            )


def main(command: Callable[..., None]) -> None:
    """Run the one command of a module with the command line's arguments; --help shows the module's docstring."""
    paragraphs = (inspect.getdoc(inspect.getmodule(command)) or "").split("\n\n")
    app = App(rich_markup_mode=None)
    app.command(help="\n\n".join(f"\b\n{each}" if each.startswith("    ") else each for each in paragraphs))(command)
    app()
