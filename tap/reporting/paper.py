"""The paper's numbers (Jiang et al., ICLR 2023), as printed, and the ones that apply to a dataset.

paper_scores.csv: the main tables. The paper's appendix "Baselines" gives their sources: the baselines' own papers, except for
BC (D4RL's paper), CQL in locomotion and DT in AntMaze (IQL's paper), MOPO in Adroit (Optimized MOPO's paper), TT in Adroit
(arXiv:2206.08569) and on Ant (TT's repository). The authors ran the others on Ant, and all on AntMaze-Ultra.

paper_ablations.csv: the appendix's tables, which have no standard errors.

paper_latency.csv: the section "Decision Latency" and the appendix on the planning horizon, in seconds on an i5 12900K and one
RTX 3090.
"""

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from tap.estimates import Estimate

SAME_DATA = ("d4rl", "file")  # sources that can be the paper's own data under its dataset's id


@cache
def read_paper(table: Literal["scores", "ablations", "latency"]) -> list[dict[str, str]]:
    """The lines of paper_`table`.csv."""
    with Path(__file__).with_name(f"paper_{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def paper_score(line: Mapping[str, str]) -> Estimate:
    """The score in a line of paper_scores.csv."""
    return Estimate(float(line["score"]), float(line["standard_error"]) if line["standard_error"] else None)


def paper_scores(dataset: str, source: str) -> dict[str, Estimate]:
    """The paper's normalised scores on `dataset` by method; empty unless the data can be the paper's own."""
    if source not in SAME_DATA:
        return {}
    return {line["method"]: paper_score(line) for line in read_paper("scores") if line["dataset"] == dataset}


def paper_dataset(dataset: str) -> str | None:
    """The id in the paper's tables of D4RL's dataset of the same task, whatever the version; None if there is none."""
    return next((line["dataset"] for line in read_paper("scores") if task_of(line["dataset"]) == task_of(dataset)), None)


def task_of(dataset: str) -> str:
    """The dataset's id without its version."""
    return re.sub(r"-v\d+$", "", dataset)
