"""What fused trials and lanes share in a worker: several segments at once, their runs, and which have not ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from penstock.train._run import EpochMeter, Run, Sink
from penstock.train._worker import End, Settings, Spec, conclude, files_of, make_run

if TYPE_CHECKING:
    from penstock.train._checkpoint import FileCheckpoints, Plain


@final
class Segments:
    """The segments of one placement.

    Attributes:
        specs: What to train.
        sinks: Where each tells of itself.
        runs: Of those that could be begun.
        open: Numbers of those that have not ended.

    Args:
        specs: What to train.
        settings: The study's.
        sinks: Where each tells of itself.
        tell: Takes the end of each, by its number.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        settings: Settings,
        sinks: Sequence[Sink],
        tell: Callable[[int, End], None],
    ) -> None:
        self.specs = specs
        self.sinks = sinks
        self.runs: dict[int, Run] = {}
        self.open: set[int] = set(range(len(specs)))
        self._settings = settings
        self._tell = tell
        self._files: dict[int, FileCheckpoints] = {}

    def begin(
        self, number: int, *, devices: tuple[str, ...], threads: int, meter: EpochMeter | None
    ) -> Exception | None:
        """Make the run of one segment; returns what went wrong."""
        spec = self.specs[number]
        try:
            self._files[number] = files_of(spec, self._settings)
            self.runs[number] = make_run(
                spec,
                self._settings,
                self.sinks[number],
                checkpoints=self._files[number],
                devices=devices,
                threads=threads,
                meter=meter,
            )
        except Exception as error:
            return error
        return None

    def complete(self) -> list[int]:
        """Those that were trained to their ends before, only nobody knew."""
        found = []
        for number, run in self.runs.items():
            until = self.specs[number].until
            if number in self.open and until is not None and run._epoch >= until:
                found.append(number)
        return found

    def end(
        self, number: int, error: BaseException | None, energy: Callable[[], Plain | None] | None = None
    ) -> None:
        """Tell the end of one; ``energy`` gives what it drew outside of its reports."""
        self.open.discard(number)
        if number in self._files:
            self._files[number].discard()
        end = conclude(self.runs.get(number), self.specs[number], error)
        self._tell(number, end if energy is None else end._replace(energy=energy()))

    def left(self) -> dict[int, Spec]:
        """Segments that have not ended, from where they are now."""
        found = {}
        for number in sorted(self.open):
            run, spec = self.runs.get(number), self.specs[number]
            found[number] = spec if run is None else spec._replace(known=max(spec.known, run._last_reported))
        return found

    def discard(self) -> None:
        """Checkpoints that were begun and not finished are thrown away."""
        for files in self._files.values():
            files.discard()


def note(sink: Sink, data: dict[str, Any]) -> None:
    """Tell the study what was decided about fusion."""
    noted: Callable[[str, Any], None] | None = getattr(sink, "noted", None)
    if noted is not None:
        noted("fusion", data)
