"""Stage report: all metrics, curves and validations -> data/report: one page, and its figures as PNG files.

Example: python -m pipelines.stages.report
"""

from pathlib import Path

from pipelines.stages.command_line import main
from tap.reporting.report import write_report


def run() -> None:
    """Write the report and print where it is."""
    print(write_report(Path("data"), Path("data/report")))


if __name__ == "__main__":
    main(run)
