"""The one style of command line: typer, where a ValueError, a user's mistake, ends the program with its message alone."""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

Dataset = Annotated[str, typer.Argument(help="A dataset id that params.yaml lists.", show_default=False)]
Seed = Annotated[int, typer.Argument(help="A training seed.", show_default=False)]
Ablation = Annotated[str, typer.Argument(help="One of params.yaml's ablations.", show_default=False)]
OptionalAblation = Annotated[str | None, typer.Argument(help="One of params.yaml's ablations, or none.", show_default=False)]


class App(typer.Typer):
    """A typer app that ends with a ValueError's message alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode="markdown",
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValueError as error:
            sys.exit(f"error: {error}")


def main(command: Callable[..., None]) -> None:
    """Run the one command of a module with the command line's arguments; --help shows the module's docstring."""
    app = App()
    app.command(help=inspect.getdoc(inspect.getmodule(command)))(command)
    app()
