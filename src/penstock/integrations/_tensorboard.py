"""TensorBoard: a run per trial, with its curves and its place in the table of hyperparameters."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, final

from torch.utils.tensorboard import SummaryWriter

from penstock.core import StudyState, TrialRecord
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, metrics_of
from penstock.integrations._listen import Listener
from penstock.report import View

_MARKS = "penstock.json"


@final
class TensorBoardLogger(Listener):
    """Writes a study's trials as TensorBoard runs: ``study.run(view=TensorBoardLogger("runs"))``.

    Each trial is a run ``<folder>/<study>/trial-0007`` with its metrics by epoch, ``energy_j`` and ``train_s`` of each
    epoch, and, once it is over, its configuration and last metrics in the HPARAMS tab. ``export`` writes a study that
    is in a store. What can't be in a folder's name is replaced in the study's.

    Args:
        folder: Where ``tensorboard --logdir`` looks.
        view: What to show meanwhile, as in ``Study.run``.
    """

    tool: ClassVar[str] = "TensorBoard"

    def __init__(self, folder: str | Path = "runs", *, view: str | View | None = None) -> None:
        super().__init__(view)
        if not isinstance(folder, str | Path) or not str(folder):
            raise InvalidInput(f"folder takes the path of a folder, got {folder!r}.")
        self._base = Path(folder)
        if self._base.exists() and not self._base.is_dir():
            raise InvalidInput(f"{str(folder)!r} is not a folder. Give another.")
        self._folder = self._base
        self._began_s: float | None = None
        self._writers: dict[int, SummaryWriter] = {}
        self._marks: dict[str, tuple[int, bool]] = {}  # trial -> epochs written, whether it is over

    def _begin(self, name: str, goal: Goal, state: StudyState) -> None:
        self._folder = self._base / folder_name(name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"Can't write to {str(self._folder)!r}: {error.strerror or error}. Give another folder."
            ) from error
        self._marks = {}
        try:
            known = json.loads((self._folder / _MARKS).read_text())
            if known["began_s"] == state.first_s:  # else: another study of that name, in another store
                self._marks = {trial: (epochs, over) for trial, (epochs, over) in known["trials"].items()}
        except (OSError, ValueError, KeyError):
            pass
        self._began_s = state.first_s

    def _sync(self, record: TrialRecord) -> None:
        written, over = self._marks.get(str(record.id), (0, False))
        if over and record.status.is_end and written >= record.epoch:
            return
        if not record.reports and not record.status.is_end:
            return
        writer = self._writers.get(record.id)
        if writer is None:
            writer = SummaryWriter(str(self._folder / f"trial-{record.id:04d}"))
            self._writers[record.id] = writer
        for report in _newer(record, written):
            scalars: dict[str, float] = dict(report.metrics)
            if report.train_s is not None:
                scalars.setdefault("train_s", report.train_s)
            if report.energy is not None:
                scalars.setdefault("energy_j", report.energy.joules)
            for name, value in scalars.items():
                writer.add_scalar(name, value, report.epoch, walltime=report.time_s)
        if record.status.is_end:
            last = {f"last/{name}": value for name, value in metrics_of(record).items()}
            writer.add_hparams(
                {name: _plain(value) for name, value in record.config.items()}, last, run_name="."
            )
            writer.close()
            del self._writers[record.id]
        self._marks[str(record.id)] = (record.epoch, record.status.is_end)

    def _finish(self, goal: Goal, state: StudyState) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        marks = {"began_s": self._began_s, "trials": self._marks}
        (self._folder / _MARKS).write_text(json.dumps(marks))


def folder_name(study: str) -> str:
    """A study's folder: its name, where that is one; else as much of it as can be, and a hash that tells it apart."""
    clean = re.sub(r"[^\w .+=@,()-]", "_", study)
    clean = clean.encode()[:200].decode(errors="ignore").strip(" .")  # file systems take 255 bytes
    if clean == study:
        return study
    mark = hashlib.sha256(study.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean}-{mark}" if clean else f"study-{mark}"


def _newer(record: TrialRecord, epoch: int) -> list[Any]:
    """The reports after an epoch. From the end: a long trial is asked after every report."""
    newer = []
    for report in reversed(record.reports):
        if report.epoch <= epoch:
            break
        newer.append(report)
    return newer[::-1]


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else repr(value)
