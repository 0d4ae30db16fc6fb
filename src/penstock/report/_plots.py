"""``study.plot``: the views as Plotly figures, for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from penstock.core.errors import InvalidInput, MissingDependency
from penstock.report import views
from penstock.report.views import Figure, Folded, Options


@final
class Plots:
    """Figures of a study as it stands when each is asked for. Every method returns a ``plotly`` Figure.

    Args:
        fold: Gives the study, folded.
    """

    def __init__(self, fold: Callable[[], Folded]) -> None:
        self._fold = fold

    def history(self, x: str = "time", objective: int | None = None) -> Any:
        """Every trial where it stood last and the best so far; ``x``: time, trial, epochs or energy."""
        return _plotly(
            views.history_figure(views.history(self._fold(), _options(x=x, objective=objective))), "history"
        )

    def curves(self, metric: str = "", trial: int | None = None, limit: int = 300) -> Any:
        """Learning curves of up to ``limit`` trials, ``trial`` on top."""
        options = _options(metric=metric, trial=trial, limit=limit)
        return _plotly(views.curves_figure(views.curves(self._fold(), options)), "learning curves")

    def pareto(self, objective: int | None = None) -> Any:
        """Quality against energy and time."""
        options = _options(objective=objective)
        return _plotly(views.pareto_figure(views.pareto(self._fold(), options)), "quality, energy and time")

    def importance(self, objective: int | None = None) -> Any:
        """Which hyperparameters matter, by fANOVA.

        Raises:
            InvalidInput: There are too few trials to say.
        """
        data = views.importance(views.importance_input(self._fold(), _options(objective=objective)))
        if data["reason"]:
            raise InvalidInput(data["reason"])
        return _plotly(views.importance_figure(data), "importance")

    def parallel(self, objective: int | None = None, trial: int | None = None) -> Any:
        """Each trial a line over its hyperparameters."""
        options = _options(objective=objective, trial=trial)
        return _plotly(views.parallel_figure(views.parallel(self._fold(), options)), "parallel coordinates")

    def devices(self) -> Any:
        """Who ran where, and where nobody ran."""
        return _plotly(views.devices_figure(views.devices(self._fold())), "devices")

    def power(self) -> Any:
        """Power-limit profiles.

        Raises:
            InvalidInput: None was made.
        """
        data = views.power(self._fold())
        if not data["profiles"]:
            raise InvalidInput(
                " ".join(data["said"]) or "This study profiled no power limit: give power_limits=."
            )
        return _plotly(views.power_figure(data), "power limits")

    def sm2(self) -> Any:
        """The scores of SM2's rounds.

        Raises:
            InvalidInput: The study has another scheduler.
        """
        data = views.sm2(self._fold())
        if data is None:
            raise InvalidInput("This study has another scheduler than SM2; there are no rounds to plot.")
        return _plotly(views.sm2_figure(data), "SM2 rounds")

    def coordinate_check(self) -> Any:
        """Mean absolute activation of every layer over the widths, from the check of the narrow twin.

        Raises:
            InvalidInput: The study has no surrogate, or its twin was not checked.
        """
        data = views.coordinate_check(self._fold())
        if data is None:
            raise InvalidInput(
                "No narrow twin was checked in this study: give surrogate=pk.Shrink(8) and run it."
            )
        return _plotly(views.coordinate_check_figure(data), "coordinate check")

    def limits(self) -> Any:
        """Predicted and measured quantities against the study's limits.

        Raises:
            InvalidInput: It has none.
        """
        data = views.limits(self._fold())
        if not data["limits"]:
            raise InvalidInput("This study has no limits such as power_w <= 90.")
        return _plotly(views.limits_figure(data), "limits")

    def trial(self, number: int, metric: str = "") -> Any:
        """One trial's curve of a metric, by default the objective's.

        Raises:
            InvalidInput: There is no such trial or metric.
        """
        folded = self._fold()
        data = views.trial(folded, number)
        name = metric or folded.goal.objectives[folded.goal.quality or 0].metric
        if name not in data["curves"]:
            known = ", ".join(data["curves"]) or "nothing"
            raise InvalidInput(f"Trial {number} reports no {name!r}; it reports {known}.")
        options = Options(metric=name, trial=number, limit=1)
        if name == "energy_j":
            data["curves"] = {name: data["curves"][name]}
            return _plotly((views.trial_figures(data) or [{"data": [], "layout": {}}])[0], f"trial {number}")
        line = views.curves(folded, options)
        line["curves"] = [each for each in line["curves"] if each["trial"] == number]
        return _plotly(views.curves_figure(line), f"trial {number}")

    def __repr__(self) -> str:
        names = ", ".join(name for name in vars(Plots) if not name.startswith("_"))
        return f"<plots of a study: {names}>"


def _options(**given: Any) -> Options:
    """The options of a view.

    Raises:
        InvalidInput: One is not what it should be.
    """
    for name, least in (("objective", 0), ("trial", 0), ("limit", 1)):
        value = given.get(name, least)
        if value is None and name != "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(f"{name} takes a whole number from {least} on, got {value!r}.")
    for name in ("metric", "x"):
        if not isinstance(given.get(name, ""), str):
            raise InvalidInput(f"{name} takes a name, got {given[name]!r}.")
    return Options(**given)


def _plotly(figure: Figure, title: str) -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise MissingDependency('Figures need Plotly: pip install "penstock[dashboard]".') from error
    layout = {key: value for key, value in figure["layout"].items() if key != "rows"}
    return go.Figure({"data": figure["data"], "layout": {"title": {"text": title}, **layout}})
