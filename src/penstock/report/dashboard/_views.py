"""From a request's view and parameters to its JSON: which view takes what, and what is cached."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, final

from penstock.core.errors import InvalidInput
from penstock.report import views
from penstock.report._feed import Feed
from penstock.report._journal import told_of
from penstock.report.dashboard._assess import Assessor
from penstock.report.views import Folded, Options

_CACHED = 128
_NUMBERS = ("objective", "trial", "limit", "offset")
_LARGEST = 2**53
_FIRST_S = 0.4


def _history(folded: Folded, options: Options) -> Any:
    data = views.history(folded, options)
    return {
        "figure": views.history_figure(data),
        **{key: data[key] for key in ("metric", "maximize", "total", "shown", "x")},
    }


def _curves(folded: Folded, options: Options) -> Any:
    data = views.curves(folded, options)
    return {
        "figure": views.curves_figure(data),
        "shown": len(data["curves"]),
        **{key: data[key] for key in ("metric", "metrics", "total")},
    }


def _pareto(folded: Folded, options: Options) -> Any:
    data = views.pareto(folded, options)
    return {
        "figure": views.pareto_figure(data),
        "front": [point for point in data["points"] if point["front"]],
        **{key: data[key] for key in ("axes", "maximize", "metered", "quality", "total", "shown")},
    }


def _parallel(folded: Folded, options: Options) -> Any:
    data = views.parallel(folded, options)
    return {
        "figure": views.parallel_figure(data),
        "shown": len(data["lines"]),
        "axes": [axis["name"] for axis in data["axes"]],
        **{key: data[key] for key in ("metric", "total")},
    }


def _devices(folded: Folded, options: Options) -> Any:
    data = views.devices(folded, options)
    return {
        "figure": views.devices_figure(data),
        **{key: data[key] for key in ("devices", "hidden", "total", "joined", "span_s")},
    }


def _power(folded: Folded, options: Options) -> Any:
    data = views.power(folded)
    return {"figure": views.power_figure(data), **data}


def _sm2(folded: Folded, options: Options) -> Any:
    data = views.sm2(folded)
    if data is None:
        return {"rounds": [], "reason": "This study has another scheduler than SM2."}
    return {"figure": views.sm2_figure(data), **data}


def _coordinate_check(folded: Folded, options: Options) -> Any:
    data = views.coordinate_check(folded)
    if data is None:
        return {"rows": [], "reason": "No narrow twin was checked: give surrogate=pk.Shrink(8) to the study."}
    return {"figure": views.coordinate_check_figure(data), **data}


def _limits(folded: Folded, options: Options) -> Any:
    data = views.limits(folded, options)
    short = [
        {**{key: value for key, value in each.items() if key != "rows"}, "trials": len(each["rows"])}
        for each in data["limits"]
    ]
    figure = views.limits_figure(data)
    shown = sum(len(trace["x"]) for trace in figure["data"])
    return {"figure": figure, "limits": short, "shown": shown}


def _trial(folded: Folded, options: Options) -> Any:
    if options.trial is None:
        raise InvalidInput("Which trial? Give trial=NUMBER.")
    data = views.trial(folded, options.trial)
    data["figures"] = views.trial_figures(data)
    del data["curves"]
    return data


VIEWS: Mapping[str, Callable[[Folded, Options], Any]] = {
    "overview": lambda folded, options: views.overview(folded),
    "history": _history,
    "curves": _curves,
    "table": views.table,
    "pareto": _pareto,
    "parallel": _parallel,
    "devices": _devices,
    "power": _power,
    "sm2": _sm2,
    "coordinate_check": _coordinate_check,
    "limits": _limits,
    "log": views.log,
    "trial": _trial,
}
"""Views that are quick enough to be made while the fold is held; importance is not."""


def options_of(query: Mapping[str, str]) -> Options:
    """The options of a request's query.

    Raises:
        InvalidInput: One is not known, or not what it should be.
    """
    found: dict[str, Any] = {}
    for name, text in query.items():
        if name in _NUMBERS:
            try:
                found[name] = int(text)
            except ValueError:
                raise InvalidInput(f"{name} takes a whole number, got {text[:50]!r}.") from None
            if not 0 <= found[name] <= _LARGEST:
                raise InvalidInput(f"{name} must be between 0 and {_LARGEST}, got {text[:50]}.")
        elif name in ("metric", "x", "sort", "filter", "job"):
            if len(text) > 1000:
                raise InvalidInput(f"{name} is too long: {len(text)} characters, at most 1000.")
            found[name] = text
        elif name == "descending":
            found[name] = text in ("1", "true")
        else:
            raise InvalidInput(f"There is no parameter {name[:50]!r}.")
    return Options(**found)


@final
class Kitchen:
    """Makes views and keeps what it made while the study is unchanged. For several threads at once."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()
        self._assessing = threading.Lock()
        self._assessor = Assessor()

    def close(self) -> None:
        """End what it has running."""
        self._assessor.close()

    def view(self, study: int, name: str, options: Options) -> bytes:
        """A view as JSON.

        Raises:
            InvalidInput: There is no such study or view, or an option makes no sense.
        """
        if not self._feed.progress(study)[0]:
            self._feed.wait_read(study, _FIRST_S)  # a small journal is read before anybody sees an empty page
        if name == "importance":
            return self._importance(study, options)
        make = VIEWS.get(name)
        if make is None:
            known = ", ".join([*VIEWS, "importance"])
            raise InvalidInput(f"There is no view {name[:50]!r}; there are {known}.")
        with self._feed.view(study) as folded:
            key = (study, name, _key(options), folded.events)
            made = self._known(key)
            if made is None:
                data = make(folded, options)
        return made if made is not None else self._keep(key, data)

    def job(self, options: Options) -> bytes:
        """A recurring job as JSON.

        Raises:
            InvalidInput: There is no such job.
            StoreCorrupt: What the store keeps of it is not a recurring job's.
        """
        jobs = self._feed.jobs()
        if options.job not in jobs:
            known = ", ".join(map(repr, jobs)) or "none"
            raise InvalidInput(f"There is no recurring job {options.job!r} in this store; there are {known}.")
        data, figures = told_of(options.job, jobs[options.job])
        return encoded({"figures": figures, **data})

    def _importance(self, study: int, options: Options) -> bytes:
        """A forest is slow: grown in a process of its own, one at a time, and anew only with a tenth more trials."""
        with self._feed.view(study) as folded:
            given = views.importance_input(folded, options)
        size = given["scored"]
        step = size if size < 40 else size - size % (size // 10)
        key = (study, "importance", options.objective, step)
        with self._assessing:
            made = self._known(key)
            if made is None:
                data = self._assessor.assess(given)
                made = self._keep(key, {"figure": views.importance_figure(data), **data})
        return made

    def _known(self, key: tuple[Any, ...]) -> bytes | None:
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
            return made

    def _keep(self, key: tuple[Any, ...], data: Any) -> bytes:
        made = encoded(data)
        with self._lock:
            self._made[key] = made
            while len(self._made) > _CACHED:
                self._made.popitem(last=False)
        return made


def encoded(data: Any) -> bytes:
    """JSON with nothing in it that isn't JSON, and readable by every parser (a lone surrogate stays an escape)."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), default=str).encode("ascii")


def _key(options: Options) -> tuple[Any, ...]:
    return tuple(getattr(options, name) for name in Options.__slots__)
