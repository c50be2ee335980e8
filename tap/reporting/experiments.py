"""The paper's figures over all datasets: which rows enter each, and the captions."""

import statistics
from collections.abc import Mapping, Sequence

from tap.reporting.experiment_figures import (
    ablation_figure,
    dimension_latency_figure,
    horizon_latency_figure,
    latent_step_figure,
    relative_figure,
)
from tap.reporting.paper import paper_dataset, paper_score, read_paper
from tap.reporting.pictures import Picture
from tap.reporting.rows import Row
from tap.reporting.studies import STUDIES, Column, Comparison, Study, compare, complete
from tap.reporting.tables import describe
from tap.results import ValidationReport
from tap.settings import suite_of

BASELINES = "TT", "CQL", "IQL"  # in the paper's figure of scores against action dimensions
MIN_BASELINE = 5  # a ratio to a lower mean score is a ratio of two numbers near zero

Panel = tuple[Study, Sequence[Column], Sequence[Comparison]]


def experiment_pictures(rows: Sequence[Row], validations: Mapping[str, ValidationReport]) -> list[Picture]:
    """The paper's figures over all datasets, as many as there are results for."""
    compared = {study.name: (study, *compare(study, rows)) for study in STUDIES}
    panels = {
        name: (study, columns, averaged)
        for name, (study, columns, comparisons) in compared.items()
        if (averaged := complete(comparisons))
    }
    found = (
        _ablation_picture([*panels.values()]),
        _latent_step_picture(panels),
        _dimension_picture(rows, validations),
        _latency_picture(rows, validations),
        _horizon_picture(*compared["horizon"][1:]),
    )
    return [picture for picture in found if picture]


def _ablation_picture(panels: Sequence[Panel]) -> Picture | None:
    if not panels:
        return None
    bases = [each.base for _, _, comparisons in panels for each in comparisons]
    ours = "; ".join(dict.fromkeys(f"{base.first.dataset} ({describe(base)})" for base in bases))
    caption = f"Mean over the datasets that have all bars of a panel, with its standard error. Ours: {ours}."
    alt = f"Bars of the mean score by setting, ours and the paper's: {', '.join(study.title for study, *_ in panels)}."
    return Picture("experiments-ablations", "Ablations", caption, alt, ablation_figure(panels), wide=True)


def _latent_step_picture(panels: Mapping[str, Panel]) -> Picture | None:
    by_decoder = {name: panels[name] for name in ("latent_step", "unconditional") if name in panels}
    bases = _shared([comparisons for _, _, comparisons in by_decoder.values()])
    if not bases:
        return None
    steps = {
        name: [
            (int(column.paper or 0), [row for each in comparisons if each.base in bases and (row := each.rows[place])])
            for place, column in enumerate(columns)
        ]
        for name, (_, columns, comparisons) in by_decoder.items()
    }
    names = "; ".join(f"{base.first.dataset} ({describe(base)})" for base in bases)
    caption = (
        f"{'Mean over' if len(bases) > 1 else 'On'} {names}. Predicted return: of the first plan (the paper's search value). "
        "State error: mean squared error of its states against the simulator. If both rise and the score falls, plans are "
        "over-optimistic."
    )
    alt = f"Score, predicted return and state error against the latent step, by decoder, on {names}."
    figure = latent_step_figure(steps.get("latent_step", []), steps.get("unconditional", []))
    return Picture("experiments-latent-steps", "Score, predicted return and state error", caption, alt, figure, wide=True)


def _shared(studies: Sequence[Sequence[Comparison]]) -> list[Row]:
    """The bases that are in each of the studies."""
    bases = [[each.base for each in comparisons] for comparisons in studies]
    return [base for base in bases[0] if all(base in others for others in bases)] if bases else []


def _dimension_picture(rows: Sequence[Row], validations: Mapping[str, ValidationReport]) -> Picture | None:
    points = _relative_points(rows, validations)
    if len({dim for ratios in points.values() for dim, _, _ in ratios}) < 2:
        return None
    caption = (
        "Ratio of mean scores, ours over a baseline's in the paper, of the datasets of each action dimension; without Adroit's "
        f"expert data, as in the paper, and if the baseline scores {MIN_BASELINE} or more. Hollow: the paper's TAP on the "
        "same datasets. Baselines and the paper's TAP were trained on D4RL's own data, ours as the tables state."
    )
    alt = "Mean score over that of baselines by action dimensions: " + "; ".join(
        f"{method} " + ", ".join(f"{dim}: {ratio:.2f}" for dim, ratio, _ in ratios) for method, ratios in points.items()
    )
    return Picture("experiments-dimensions", "Action dimensions", caption, f"{alt}.", relative_figure(points))


def _relative_points(
    rows: Sequence[Row], validations: Mapping[str, ValidationReport]
) -> dict[str, list[tuple[int, float, float]]]:
    """By baseline: (action dimensions, our mean score / its, the paper's TAP's / its), as in the paper's figure."""
    scores = {(line["dataset"], line["method"]): paper_score(line).mean for line in read_paper("scores")}
    groups: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for row in rows:
        dataset, paper = row.first.dataset, paper_dataset(row.first.dataset)
        expert = suite_of(dataset) == "adroit" and "expert" in dataset
        if paper is None or expert or not row.normalized or dataset not in validations:
            continue
        for method in BASELINES:
            if (paper, method) in scores:
                group = groups.setdefault((method, validations[dataset].action_dim), [])
                group.append((row.score.mean, scores[paper, "TAP"], scores[paper, method]))
    points: dict[str, list[tuple[int, float, float]]] = {}
    for (method, dim), group in sorted(groups.items(), key=lambda item: (BASELINES.index(item[0][0]), item[0][1])):
        ours, papers, baseline = map(statistics.fmean, zip(*group, strict=True))
        if baseline >= MIN_BASELINE:
            points.setdefault(method, []).append((dim, ours / baseline, papers / baseline))
    return points


def _latency_picture(rows: Sequence[Row], validations: Mapping[str, ValidationReport]) -> Picture | None:
    timed = [(_step_dim(validations[row.first.dataset]), row) for row in rows if row.first.dataset in validations]
    if not timed:
        return None
    caption = (
        "Median time of one decision for one state. The paper's times are of one RTX 3090, at 15 steps and the D that it "
        "prints (S + A, 14 for hopper); ours are of the machine that evaluated, at S + A + 2 and each dataset's horizon."
    )
    times = ", ".join(f"{dim}: {row.latency.median / 1000:.3g}" for dim, row in timed)
    alt = f"Seconds per decision by dimensions: {times}."
    return Picture("experiments-latency", "Decision time and dimensions", caption, alt, dimension_latency_figure(timed))


def _step_dim(validation: ValidationReport) -> int:
    """The paper's D: numbers in one step, of state, action, reward and return-to-go."""
    return validation.observation_dim + validation.action_dim + 2


def _horizon_picture(columns: Sequence[Column], comparisons: Sequence[Comparison]) -> Picture | None:
    if not comparisons:
        return None
    horizons: dict[str, list[tuple[int, Row]]] = {
        each.base.first.dataset: [
            (column.settings["horizon"], row) for column, row in zip(columns, each.rows, strict=True) if row
        ]
        for each in comparisons
    }
    caption = "Median time of one decision for one state, on the machine that evaluated; the paper's is of one RTX 3090."
    times = "; ".join(
        f"{dataset}: " + ", ".join(f"{horizon} steps {row.latency.median / 1000:.3g}" for horizon, row in timed)
        for dataset, timed in horizons.items()
    )
    alt = f"Seconds per decision by horizon: {times}."
    return Picture("experiments-horizon", "Decision time and horizon", caption, alt, horizon_latency_figure(horizons))
