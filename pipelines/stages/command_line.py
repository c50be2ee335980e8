"""The command line that all stages share: python -m pipelines.STAGE [DATASET [SEED [ABLATION]]]."""

import argparse
import inspect
import sys
from collections.abc import Callable


def main(run: Callable[..., None], *arguments: str) -> None:
    """Call `run` with the command line's arguments, named and typed (str or int) as its parameters are; defaults are optional.

    `arguments` stand for the command line where given. --help shows the docstring of run's module. A ValueError, which means a
    mistake in params or data, ends the process with its message alone and exit code 1.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(inspect.getmodule(run)), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, parameter in inspect.signature(run, eval_str=True).parameters.items():
        optional = parameter.default is not parameter.empty
        kind = int if parameter.annotation is int else str
        parser.add_argument(name, metavar=name.upper(), type=kind, nargs="?" if optional else None)
    options = parser.parse_args(arguments or None)
    try:
        run(**vars(options))
    except ValueError as error:
        sys.exit(f"error: {error}")
