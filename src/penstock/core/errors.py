"""Every error Penstock raises on purpose. Users catch ``penstock.errors.PenstockError``.

PenstockError
 ├─ InvalidInput (also ValueError)      what the user gave cannot work; says the value and the remedy
 │   └─ SpaceError                      a domain, a condition or a configuration is wrong
 ├─ MissingDependency (also ImportError)  an extra is not installed; says which
 ├─ Unsupported                         this machine or device cannot do it
 ├─ SensorError                         a device can't be read: lost, stalled, its files unreadable
 │   └─ NotPermitted                    this user may not read it or set its power limit; says the remedy
 ├─ StoreError                          the journal cannot be used
 │   ├─ StoreLocked                     another process writes this study
 │   ├─ StoreUnwritable                 disk full, read-only, no permission; nothing was half-written
 │   └─ StoreCorrupt                    a record does not read back; says which, the rest stays readable
 ├─ ExecutorError                       workers cannot be started or reached
 └─ TrialError                          a training failed (kept as data; raised only by ``raise_on_failure``)
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class InvalidInput(PenstockError, ValueError):
    """What the user gave cannot work. The text names the value and the remedy."""


class SpaceError(InvalidInput):
    """A domain, a condition between domains, or a configuration is wrong."""


class MissingDependency(PenstockError, ImportError):
    """An optional dependency is not installed."""


class Unsupported(PenstockError):
    """This machine, device or backend cannot do what was asked."""


class SensorError(PenstockError):
    """The energy of a device can't be read: it is lost, its counter stalled, its files are unreadable."""


class NotPermitted(SensorError):
    """This user may not read a device's energy or set its power limit. The text names the remedy."""


class StoreError(PenstockError):
    """The journal cannot be used."""


class StoreLocked(StoreError):
    """Another process has the study open for writing."""


class StoreUnwritable(StoreError):
    """The journal cannot be written: disk full, read-only, no permission. What was written is intact."""


class StoreCorrupt(StoreError):
    """A record of the journal does not read back."""


class ExecutorError(PenstockError):
    """Workers cannot be started or reached."""


class TrialError(PenstockError):
    """A training failed."""
