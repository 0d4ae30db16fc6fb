"""Ways in from other libraries and out to them, each behind an extra of its own.

- ``LightningCallback``, ``TransformersCallback``: trials, energy and power limits in a ``Trainer`` of either library
- ``PenstockSearchCV``: a study as a scikit-learn search
- ``MLflowLogger``, ``TensorBoardLogger``: a study, running or finished, in MLflow and TensorBoard
- ``export_optuna``, ``import_optuna``: to an Optuna storage (for optuna-dashboard), and an Optuna study as a warm start
- ``StudyCollector``, ``metrics_text``, ``metrics_app``, ``serve_metrics``: the studies of a store for Prometheus

A name is loaded when it is first used, with the library it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "_lightning": ("lightning", ("LightningCallback",)),
    "_transformers": ("transformers", ("TransformersCallback",)),
    "_mlflow": ("mlflow", ("MLflowLogger",)),
    "_tensorboard": ("tensorboard", ("TensorBoardLogger",)),
    "_optuna": ("optuna", ("export_optuna", "import_optuna")),
    "_prometheus": ("prometheus", ("StudyCollector", "metrics_app", "metrics_text", "serve_metrics")),
    "_sklearn": ("sklearn", ("PenstockSearchCV",)),
}
_HOME_OF = {name: (module, extra) for module, (extra, names) in _HOMES.items() for name in names}

__all__ = [
    "LightningCallback",
    "MLflowLogger",
    "PenstockSearchCV",
    "StudyCollector",
    "TensorBoardLogger",
    "TransformersCallback",
    "export_optuna",
    "import_optuna",
    "metrics_app",
    "metrics_text",
    "serve_metrics",
]

if TYPE_CHECKING:
    from penstock.integrations._lightning import LightningCallback
    from penstock.integrations._mlflow import MLflowLogger
    from penstock.integrations._optuna import export_optuna, import_optuna
    from penstock.integrations._prometheus import StudyCollector, metrics_app, metrics_text, serve_metrics
    from penstock.integrations._sklearn import PenstockSearchCV
    from penstock.integrations._tensorboard import TensorBoardLogger
    from penstock.integrations._transformers import TransformersCallback


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    module, extra = _HOME_OF[name]
    try:
        value = getattr(import_module(f"penstock.integrations.{module}"), name)
    except ImportError as error:
        from penstock.core.errors import MissingDependency

        raise MissingDependency(
            f'{name} needs the extra {extra!r}: pip install "penstock[{extra}]" ({error}).'
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
