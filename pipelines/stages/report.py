"""Stage report: all metrics, curves and validations -> data/report: one page, and its figures as PNG files; data/scores.

Example: python -m pipelines.stages.report
"""

from pathlib import Path

from pipelines.command_line import main
from tap.files import write_json
from tap.reporting.held_out import held_out_headline, held_out_rows
from tap.reporting.report import write_report
from tap.reporting.rows import headline, load_evaluations, table_rows

DATA = Path("data")


def run() -> None:
    """Write the report and the scores, and print the path of the report."""
    page = write_report(DATA, DATA / "report")
    evaluations = load_evaluations(DATA)
    scores = held_out_headline(held_out_rows(evaluations)) | headline(table_rows(evaluations))
    for dataset, numbers in scores.items():
        write_json(DATA / f"scores/{dataset}.json", numbers)
    print(page)


if __name__ == "__main__":
    main(run)
