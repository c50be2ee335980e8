"""The maps of D4RL's AntMaze tasks and of AntMaze-Ultra (paper, appendix "AntMaze Details"), and their coordinates in metres.

Maps use D4RL's letters: `1` is a wall, `R` the cell where the ant starts, `G` the cell of the goal. A cell is (row, column), a
position (x, y). The centre of the start cell is the origin; x grows with the column and y with the row:

      x ->      -4    0    4    8   12
    y           1    1    1    1    1     -4
    |           1    R    0    0    1      0
    v           1    1    1    0    1      4
                1    G    0    0    1      8
                1    1    1    1    1     12
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

CELL_SIZE = 4.0  # metres

Cell = tuple[int, int]


@dataclass(frozen=True)
class Maze:
    """A map, and the offset of its goals from the centre of their cell."""

    rows: tuple[str, ...]
    goal_shift: float = 0.0  # metres, on each axis

    @cached_property
    def free(self) -> list[Cell]:
        """Every cell that is not a wall, row by row."""
        return [(i, j) for i, row in enumerate(self.rows) for j, letter in enumerate(row) if letter != "1"]

    @cached_property
    def walls(self) -> list[Cell]:
        """Every wall cell, row by row."""
        return [(i, j) for i, row in enumerate(self.rows) for j, letter in enumerate(row) if letter == "1"]

    @cached_property
    def start(self) -> Cell:
        """The cell where the ant starts an episode."""
        return self._find("R")

    @cached_property
    def goal(self) -> Cell:
        """The cell of the goal in an evaluation."""
        return self._find("G")

    @cached_property
    def centres(self) -> np.ndarray:
        """Positions (F, 2) of the centres of the F free cells."""
        return np.array([self.centre(cell) for cell in self.free])

    def _find(self, letter: str) -> Cell:
        (cell,) = [(i, row.index(letter)) for i, row in enumerate(self.rows) if letter in row]
        return cell

    def centre(self, cell: Cell) -> np.ndarray:
        """Position (2,) of a cell's centre."""
        return CELL_SIZE * np.array([cell[1] - self.start[1], cell[0] - self.start[0]], np.float64)

    def cell(self, position: np.ndarray) -> Cell:
        """The free cell whose centre is nearest to a position (2,): the one that contains it, unless that is a wall."""
        return self.free[int(np.argmin(np.sum((self.centres - position) ** 2, axis=1)))]

    def sample_goal(self, cell: Cell, rng: np.random.Generator) -> np.ndarray:
        """A goal (2,) in `cell`: centre + `goal_shift` + U(0, 1) + U(0, 0.5) on each axis, at least 0 as in D4RL."""
        goal = self.centre(cell) + self.goal_shift + rng.uniform(0, 1.0, 2) + rng.uniform(0, 0.5, 2)
        return np.maximum(goal, 0.0)

    def opened(self, *cells: Cell) -> "Maze":
        """The same maze with the walls of `cells` removed."""
        letters = [list(row) for row in self.rows]
        for i, j in cells:
            letters[i][j] = "0"
        return replace(self, rows=tuple("".join(row) for row in letters))


MAZES = {
    "umaze": Maze(
        (
            "11111",
            "1R001",
            "11101",
            "1G001",
            "11111",
        )
    ),
    "medium": Maze(
        (
            "11111111",
            "1R011001",
            "10010001",
            "11000111",
            "10010001",
            "10100101",
            "100010G1",
            "11111111",
        )
    ),
    "large": Maze(
        (
            "111111111111",
            "1R0001000001",
            "101101010101",
            "100000010001",
            "101111011101",
            "100101000001",
            "110101010111",
            "100100010G01",
            "111111111111",
        )
    ),
    "ultra": Maze(
        (
            "1111111111111111",
            "1R00000010000001",
            "1011101010110101",
            "1011101000010101",
            "1000101101110101",
            "1010001000000001",
            "1000100010111011",
            "1010111010001011",
            "1000000010100001",
            "1101101000111101",
            "11010010100000G1",
            "1111111111111111",
        ),
        goal_shift=-1.0,  # as published: goals lie within centre + [-1, 0.5]
    ),
}
