"""Stage report: all metrics, curves and validations -> data/report: one page, and its figures as PNG files; data/scores.json.

Example: python -m pipelines.stages.report
"""

from pathlib import Path

from pipelines.command_line import main
from tap.files import write_json
from tap.reporting.report import write_report
from tap.reporting.results import load_results, table_rows


def run() -> None:
    """Write the report and print where it is."""
    data = Path("data")
    page = write_report(data, data / "report")
    scores = {}
    for row in table_rows(load_results(data / "metrics")):
        score = row.score
        scores[row.first.dataset] = {"score": round(score.mean, 2)}
    write_json(data / "scores.json", scores)
    print(page)


if __name__ == "__main__":
    main(run)
