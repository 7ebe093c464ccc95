"""Tables, figures and pages of finished runs, read from their directories alone."""

from medcil.report.html import write_report
from medcil.report.plots import write_figures
from medcil.report.read import RunRecord, read_run
from medcil.report.tables import best_rows, comparison_rows, findings

__all__ = [
    "RunRecord",
    "best_rows",
    "comparison_rows",
    "findings",
    "read_run",
    "write_figures",
    "write_report",
]
