"""Every error that Penstock raises on purpose: ``from penstock.errors import PenstockError``."""

from penstock.core.errors import (
    ExecutorError,
    InvalidInput,
    MissingDependency,
    NotPermitted,
    PenstockError,
    SensorError,
    SpaceError,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreUnwritable,
    TrialError,
    Unsupported,
)

__all__ = [
    "ExecutorError",
    "InvalidInput",
    "MissingDependency",
    "NotPermitted",
    "PenstockError",
    "SensorError",
    "SpaceError",
    "StoreCorrupt",
    "StoreError",
    "StoreLocked",
    "StoreUnwritable",
    "TrialError",
    "Unsupported",
]
