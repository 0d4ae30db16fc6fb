"""The views of a study as pure functions: from ``Folded``, a fold over its events, to JSON-able data and figures.

Start with ``_fold.py``. Every view is one file with ``view(folded, options)`` and ``view_figure(data)``; a figure is
``{"data", "layout"}`` in Plotly's terms, which the dashboard draws as it is, ``study.plot`` hands out and ``report``
draws with matplotlib.
"""

from penstock.report.views._coordinates import coordinate_check, coordinate_check_figure
from penstock.report.views._curves import curves, curves_figure, metric_names
from penstock.report.views._devices import devices, devices_figure
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._history import history, history_figure
from penstock.report.views._importance import importance, importance_figure, importance_input
from penstock.report.views._limits import limits, limits_figure
from penstock.report.views._log import log
from penstock.report.views._overview import overview
from penstock.report.views._parallel import parallel, parallel_figure
from penstock.report.views._pareto import pareto, pareto_figure
from penstock.report.views._power import power, power_figure
from penstock.report.views._recurring import recurring, recurring_figures
from penstock.report.views._sm2 import sm2, sm2_figure
from penstock.report.views._style import Figure
from penstock.report.views._table import table
from penstock.report.views._trial import trial, trial_figures

__all__ = [
    "Figure",
    "Folded",
    "Options",
    "clean",
    "coordinate_check",
    "coordinate_check_figure",
    "curves",
    "curves_figure",
    "devices",
    "devices_figure",
    "history",
    "history_figure",
    "importance",
    "importance_figure",
    "importance_input",
    "limits",
    "limits_figure",
    "log",
    "metric_names",
    "overview",
    "parallel",
    "parallel_figure",
    "pareto",
    "pareto_figure",
    "power",
    "power_figure",
    "recurring",
    "recurring_figures",
    "sm2",
    "sm2_figure",
    "table",
    "trial",
    "trial_figures",
]
