"""The worker's side of lanes: several segments of one training function, which meet where they call ``run.prepare``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from penstock.core.measurement import Measurement
from penstock.train._run import EpochMeter, Run, Sink
from penstock.train._seeding import seed_all, seed_no_more
from penstock.train._segments import Segments, note
from penstock.train._worker import End, Settings, Spec, execute, meter_of

if TYPE_CHECKING:
    from penstock.train._checkpoint import Plain
    from penstock.train._lanes import Lane

_SHORT_S = 1e-3  # of a lane's own time, too little to read a meter for


def run_lanes(
    work: Callable[[Run], Any],
    specs: Sequence[Spec],
    settings: Settings,
    sinks: Sequence[Sink],
    tell: Callable[[int, End], None],
    *,
    devices: tuple[str, ...],
    threads: int,
    facts: Mapping[str, Any],
) -> None:
    """Run several segments of a training function in lanes; those that can't go on in theirs, alone."""
    from penstock.train._fused_loop import _is_memory

    fusion: Mapping[str, Any] = facts.get("fusion", {})
    fraction: float = facts.get("fraction", 1.0)
    group = _Placement(work, specs, settings, sinks, tell, devices, threads, fusion, fraction)
    try:
        group.run()
    except Exception as error:  # of a fused call, not of a lane: what is left trains alone
        os.write(2, f"the lanes were given up: {type(error).__name__}: {error}\n".encode())
        if _is_memory(error):
            half = max(1, len(specs) // 2)
            reason = f"{len(specs)} lanes do not fit the memory"
            group.note({"count": half, "reason": reason, "halved": True})
    finally:
        group.close()
    for number, spec in group.segments.left().items():
        sink = sinks[number]
        tell(
            number,
            execute(work, spec, settings, sink, devices=devices, threads=threads, fraction=fraction),
        )


@final
class _Window:
    """What all lanes draw, split by the time that each ran or was computed for."""

    def __init__(self, meter: EpochMeter) -> None:
        self.meter = meter
        self.shares: dict[int, _Share] = {}
        self.lanes: Sequence[Lane] = ()
        self._busy: dict[int, float] = {}

    def begin(self) -> None:
        self._busy = {number: self.lanes[at].busy() for at, number in enumerate(self.shares)}
        self.meter.epoch_begin()

    def settle(self, number: int) -> None:
        """Hand out what was drawn so far, unless that lane has done nothing since the last time."""
        from penstock.energy import attribute_fused

        spent = {
            other: max(0.0, self.lanes[at].busy() - self._busy[other]) for at, other in enumerate(self.shares)
        }
        if spent[number] < _SHORT_S:
            return
        drawn = self.meter.epoch_end()
        self.begin()
        if drawn is None:
            return
        for other, part in attribute_fused(drawn, spent).parts.items():
            share = self.shares[other]
            own = replace(part.energy, uncertainty=drawn.uncertainty)
            share.drawn = own if share.drawn is None else share.drawn + own


@final
class _Share:
    """A lane's meter: its part of the window's."""

    def __init__(self, window: _Window, number: int) -> None:
        self.drawn: Measurement | None = None
        self._other: Measurement | None = None  # between epochs
        self._window = window
        self._number = number

    def epoch_begin(self) -> None:
        self._window.settle(self._number)
        self._put_aside()

    def other(self) -> Plain | None:
        self._window.settle(self._number)
        self._put_aside()
        other, self._other = self._other, None
        return None if other is None else other.plain

    def _put_aside(self) -> None:
        drawn, self.drawn = self.drawn, None
        if drawn is not None:
            self._other = drawn if self._other is None else self._other + drawn

    def epoch_end(self) -> Measurement | None:
        self._window.settle(self._number)
        drawn, self.drawn = self.drawn, None
        return drawn

    def close(self) -> None:
        pass


@final
class _Placement:
    """The segments, their runs and their lanes."""

    def __init__(
        self,
        work: Callable[[Run], Any],
        specs: Sequence[Spec],
        settings: Settings,
        sinks: Sequence[Sink],
        tell: Callable[[int, End], None],
        devices: tuple[str, ...],
        threads: int,
        fusion: Mapping[str, Any],
        fraction: float = 1.0,
    ) -> None:
        self._work = work
        self.segments = Segments(specs, settings, sinks, tell)
        self._device = devices[0]
        self._fusion = fusion
        meter = meter_of(settings, specs[0], devices, fraction)
        self._window = None if meter is None else _Window(meter)
        for number in range(len(specs)):
            share = None if self._window is None else _Share(self._window, number)
            error = self.segments.begin(number, devices=devices, threads=threads, meter=share)
            if error is not None:
                self._end(number, error)
            elif self._window is not None and share is not None:
                self._window.shares[number] = share

    def run(self) -> None:
        """Run all lanes to the ends of their segments."""
        from penstock.train._lanes import Hub

        for number in self.segments.complete():
            self._end(number, None)
        numbers = [number for number in self.segments.runs if number in self.segments.open]
        if self._window is not None:
            self._window.shares = {number: self._window.shares[number] for number in numbers}
        hub = Hub(
            [self._body(number) for number in numbers],
            device=self._device,
            ended=lambda lane: self._over(numbers[lane.number], lane),
            note=lambda data: self._noted(data, numbers),
            resumed=lambda lane, seconds: self._resumed(numbers[lane.number], seconds),
        )
        if self._window is not None:
            self._window.lanes = hub.lanes
            self._window.begin()
        try:
            hub.run()
        finally:
            seed_no_more()

    def close(self) -> None:
        """Nothing more is measured; a checkpoint that was begun and not finished is thrown away."""
        if self._window is not None:
            self._window.meter.close()
        self.segments.discard()

    def note(self, data: Mapping[str, Any]) -> None:
        """Tell the study what was decided for trials of this kind."""
        self._post(0, {"kind": self._fusion.get("key", ""), "profiles": [], "lanes": True, **data})

    # ------------------------------------------------------------ inside

    def _body(self, number: int) -> Callable[[Lane], None]:
        run, spec = self.segments.runs[number], self.segments.specs[number]

        def body(lane: Lane) -> None:
            run._lane = lane
            seed_all(spec.seed)
            run._finish(self._work(run))

        return body

    def _over(self, number: int, lane: Lane) -> None:
        if not lane.prepared and lane.error is None:
            self.note(
                {"count": 1, "reason": "the training function does not call run.prepare(model, optimizer)"}
            )
        if lane.again is not None:  # it is run by itself once the others are through
            self._post(number, {"trial": self.segments.specs[number].trial, "reason": lane.again})
            return
        self._end(number, lane.error)

    def _end(self, number: int, error: BaseException | None) -> None:
        run = self.segments.runs.get(number)
        begun = run is not None and self._window is not None and bool(self._window.lanes)
        self.segments.end(number, error, run._drawn_otherwise if run is not None and begun else None)

    def _noted(self, data: Mapping[str, Any], numbers: Sequence[int]) -> None:
        if "lane" in data:
            number = numbers[data["lane"]]
            self._post(number, {"trial": self.segments.specs[number].trial, "reason": data["reason"]})
            return
        count = data["count"]
        self.note({**data, "count": int(self._fusion.get("count", count)) if count > 1 else 1})

    def _post(self, number: int, data: dict[str, Any]) -> None:
        note(self.segments.sinks[number], data)

    def _resumed(self, number: int, seconds: float) -> None:
        """The lane goes on: while others ran it took no time of its epoch."""
        run = self.segments.runs[number]
        run._mark_s = time.perf_counter() if seconds < 0 else run._mark_s + seconds


__all__ = ["run_lanes"]
