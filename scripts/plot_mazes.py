"""Plot the AntMaze mazes, as in the paper's figure, with trajectories of collected data.

    python -m scripts.plot_mazes docs/mazes.png antmaze-umaze-diverse.hdf5 antmaze-medium-play.hdf5 ...

For each file, plots the maze that scripts.collect_antmaze recorded in it, and the ant's paths in its first episodes.
"""

from pathlib import Path
from typing import Annotated

import h5py
import numpy as np
import typer

from pipelines.command_line import main
from tap.files import write_atomically
from tap.reporting.figures import mazes_figure
from tap.reporting.style import figure_png

TRAJECTORIES = 6


def read_paths(file: Path) -> tuple[str, list[np.ndarray]]:
    """The maze of a collected file, and the positions (T, 2) of each of its first episodes.

    Raises ValueError where the file was not written by scripts.collect_antmaze.
    """
    with h5py.File(file) as data:
        if "maze" not in data.attrs:
            raise ValueError(f"{file} has no attribute `maze`: collect it with scripts.collect_antmaze")
        ends = np.flatnonzero(data["timeouts"][:])[:TRAJECTORIES] + 1
        return str(data.attrs["maze"]), np.split(data["observations"][: ends[-1], :2], ends[:-1])


def run(
    out: Annotated[Path, typer.Argument(help="The PNG file to write.")],
    files: Annotated[list[Path], typer.Argument(help="One file for each maze, from scripts.collect_antmaze.")],
) -> None:
    write_atomically(out, figure_png(mazes_figure(dict(map(read_paths, files)))))


if __name__ == "__main__":
    main(run)
