"""Which hyperparameters matter: fANOVA (Hutter et al. 2014) by Optuna, over the trials that have a score."""

from __future__ import annotations

import math
import warnings
from typing import Any

from penstock.core import TrialStatus
from penstock.goal import metrics_of
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._history import objective_at
from penstock.report.views._style import BLUE, Figure, axis, escaped, figure
from penstock.report.views._thin import spaced

TRIALS = 250
"""Over so many trials at most, an even choice over their ranking: a forest of thousands takes minutes."""
FEWEST = 4


def importance_input(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """What the assessment needs: configurations and values, the space, the objective. Quick, unlike the assessment."""
    options = options or Options()
    objective = objective_at(folded, options.objective)
    scored = []
    for record in folded.state.trials.values():
        value = metrics_of(record).get(objective.metric)
        if record.status is TrialStatus.FAILED or not record.known:  # the value is of what it was before
            continue
        if value is not None and math.isfinite(value):
            scored.append((value, record.id, dict(record.config)))
    scored.sort(key=lambda item: item[:2])
    chosen = [scored[i] for i in spaced(len(scored), TRIALS)]
    return {
        "metric": objective.metric,
        "maximize": objective.maximize,
        "space": folded.spec.get("space"),
        "trials": [(config, value) for value, _, config in chosen],
        "scored": len(scored),
    }


def importance(given: dict[str, Any]) -> dict[str, Any]:
    """The importance of each hyperparameter, summing to 1; those that only some trials have are not assessed.

    By fANOVA where scikit-learn is installed, else by PED-ANOVA, which needs nothing.
    """
    result: dict[str, Any] = {
        "metric": given["metric"],
        "method": "",
        "trials": len(given["trials"]),
        "scored": given["scored"],
        "importance": {},
        "left_out": [],
        "reason": "",
    }
    found, left_out = _distributions(given["space"], [config for config, _ in given["trials"]])
    result["left_out"] = left_out
    if len(given["trials"]) < FEWEST or len({value for _, value in given["trials"]}) < 2:
        result["reason"] = f"Needs at least {FEWEST} trials with different values of {given['metric']}."
    elif not found:
        result["reason"] = "No hyperparameter takes several values in all trials."
    else:
        result["method"], result["importance"] = _assess(given, found)
    cleaned: dict[str, Any] = clean(result)
    return cleaned


def importance_figure(data: dict[str, Any]) -> Figure:
    """Bars, the most important on top."""
    items = sorted(data["importance"].items(), key=lambda item: item[1])
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": data["method"],
            "y": [escaped(name) for name, _ in items],
            "x": [value for _, value in items],
            "text": [f"{value:.1%}" for _, value in items],
            "textposition": "auto",
            "hovertemplate": "%{y}: %{x:.1%}<extra></extra>",
            "marker": {"color": BLUE},
        }
    ]
    title = f"importance for {data['metric']} ({data['method']})"
    return figure(
        traces if items else [], axis(title, tickformat=".0%", rangemode="tozero"), axis("", type="category")
    )


def _within(values: list[float]) -> list[float]:
    """Values over a power of 2, so that the largest is about 1: shares stay as they are, and squares are finite.

    A trial that diverged may have a loss of 1e200, and must not take the report with it.
    """
    _, exponent = math.frexp(max(map(abs, values)))
    return [math.ldexp(value, -exponent) for value in values]


def _assess(given: dict[str, Any], distributions: dict[str, Any]) -> tuple[str, dict[str, float]]:
    import optuna

    values = _within([value for _, value in given["trials"]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna marks evaluators as experimental
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            study = optuna.create_study(direction="maximize" if given["maximize"] else "minimize")
            study.add_trials(
                [
                    optuna.trial.create_trial(
                        params={name: _param(entry, config[name]) for name, entry in distributions.items()},
                        distributions={name: entry[0] for name, entry in distributions.items()},
                        value=value,
                    )
                    for (config, _), value in zip(given["trials"], values, strict=True)
                ]
            )
            method, evaluator = _evaluator(optuna)
            told = optuna.importance.get_param_importances(study, evaluator=evaluator)
        finally:
            optuna.logging.set_verbosity(before)
    return method, {name: float(value) for name, value in told.items()}


def _evaluator(optuna: Any) -> tuple[str, Any]:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return "PED-ANOVA", optuna.importance.PedAnovaImportanceEvaluator()
    return "fANOVA", optuna.importance.FanovaImportanceEvaluator(n_trees=16, max_depth=16, seed=0)


def _distributions(space: Any, configs: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Of each hyperparameter that all trials have: Optuna's distribution, and the values of a choice."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    entries = dict(space["domains"]) if isinstance(space, dict) and "domains" in space else {}
    names = dict.fromkeys(name for config in configs for name in config)
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for name in names:
        if not all(name in config for config in configs):
            left_out.append(name)
            continue
        values = [config[name] for config in configs]
        if len({repr(value) for value in values}) < 2:
            left_out.append(name)
            continue
        entry = entries.get(name) or {}
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if entry.get("kind") == "choice" or not numbers:
            options = list({repr(value): value for value in values})
            found[name] = (CategoricalDistribution(tuple(range(len(options)))), options)
            continue
        low, high = min(values), max(values)
        log = bool(entry.get("log")) and low > 0
        whole = entry.get("kind") == "int" and all(isinstance(v, int) for v in values)
        found[name] = (
            (IntDistribution(low, high, log=log), None)
            if whole
            else (FloatDistribution(float(low), float(high), log=log), None)
        )
    return found, left_out


def _param(entry: tuple[Any, list[str] | None], value: Any) -> Any:
    return value if entry[1] is None else entry[1].index(repr(value))
