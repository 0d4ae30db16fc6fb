"""What people see: the terminal while a study runs, reports afterwards."""

from penstock.report._read import Journal, read_journal, row, summarize
from penstock.report._sm2 import sm2_comparison, sm2_parameters, sm2_plot, sm2_report, sm2_text
from penstock.report._text import summary_text
from penstock.report._view import JsonlView, LineView, LiveView, QuietView, View, open_view

__all__ = [
    "Journal",
    "JsonlView",
    "LineView",
    "LiveView",
    "QuietView",
    "View",
    "open_view",
    "read_journal",
    "row",
    "sm2_comparison",
    "sm2_parameters",
    "sm2_plot",
    "sm2_report",
    "sm2_text",
    "summarize",
    "summary_text",
]
