"""What people see: the terminal while a study runs, reports afterwards."""

from penstock.report._hyperpower import (
    Comparison,
    Gain,
    Sample,
    Search,
    compare_searches,
    comparison_text,
    search_of,
)
from penstock.report._read import Journal, read_journal, row, summarize
from penstock.report._sm2 import sm2_comparison, sm2_parameters, sm2_plot, sm2_report, sm2_text
from penstock.report._text import summary_text
from penstock.report._timeline import (
    Stay,
    Timeline,
    read_timeline,
    timeline,
    timeline_svg,
    timeline_text,
    write_timeline,
)
from penstock.report._view import JsonlView, LineView, LiveView, QuietView, View, open_view

__all__ = [
    "Comparison",
    "Gain",
    "Journal",
    "JsonlView",
    "LineView",
    "LiveView",
    "QuietView",
    "Sample",
    "Search",
    "Stay",
    "Timeline",
    "View",
    "compare_searches",
    "comparison_text",
    "open_view",
    "read_journal",
    "read_timeline",
    "row",
    "search_of",
    "sm2_comparison",
    "sm2_parameters",
    "sm2_plot",
    "sm2_report",
    "sm2_text",
    "summarize",
    "summary_text",
    "timeline",
    "timeline_svg",
    "timeline_text",
    "write_timeline",
]
