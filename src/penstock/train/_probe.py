"""A probe: a few iterations of a training, timed while others run beside it (Fluid 5: overheads are measured)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, final

from penstock.core.measurement import Measurement, measurement, total
from penstock.train._checkpoint import Found, Report
from penstock.train._elastic import UNDIVIDED
from penstock.train._run import Sink, Unwind
from penstock.train._worker import End, Settings, Spec, execute

_WAIT_S = 0.002
_GATHER_S = 5.0  # for the others of a crew to tell what they drew: they end with the same iteration
_SKIPPED = 2  # first iterations: libraries load, caches fill
_BLOCK_S = 0.1  # much longer than a time slice: who takes turns on a core waits for several of them in each


def probe(
    work: Callable[..., Any],
    spec: Spec,
    settings: Settings,
    sink: Sink,
    facts: Mapping[str, Any],
    *,
    devices: tuple[str, ...],
    threads: int,
) -> End:
    """Train until enough iterations are timed; report ``iteration_s``, ``setup_s`` and ``memory_bytes``.

    ``facts["probe"]``: ``path``, a folder by which the probes that run together find each other; ``size``, how many;
    ``number``, which one this is; ``iterations`` to time at least, and for ``window_s`` at least; ``limit_s`` to wait
    at most, and ``cores`` that they share (0: they stay where they are); ``meter``, whether to tell at the end what
    it drew.
    """
    told = facts["probe"]
    end, drawn = _probe(work, spec, settings, sink, facts, devices, threads)
    energy = _gathered(Path(told["path"]), told["number"], facts.get("world"), drawn)
    return end if energy is None else end._replace(energy=energy.plain)


def _probe(
    work: Callable[..., Any],
    spec: Spec,
    settings: Settings,
    sink: Sink,
    facts: Mapping[str, Any],
    devices: tuple[str, ...],
    threads: int,
) -> tuple[End, Measurement | None]:
    """The probe of this worker, and what it drew here."""
    told, world = facts["probe"], facts.get("world")
    window = _Window(devices, facts.get("fraction", 1.0), wanted=bool(told.get("meter")))
    timer = _Timer(told, leads=world is None or world[0] == 0, alone=world is None)
    with _on_cores(told["cores"]):
        end = execute(
            work,
            spec,
            replace(settings, make_meter=timer.meter),
            _Silent(timer),
            devices=devices,
            threads=threads,
            checkpoints=_Nowhere(),
            world=world,
            alone=facts.get("alone"),
        )
    times, drawn = timer.times, window.end()
    if timer.refused:
        return End("failed", 0, timer.refused), drawn
    if not times:
        why = end.reason if end.status == "failed" else f"no iteration was over within {told['limit_s']:g} s"
        return End("failed", 0, why), drawn
    metrics = {
        "iteration_s": usual_s(times),
        "setup_s": timer.setup_s,
        "memory_bytes": float(_memory_bytes()),
    }
    sink.reported((1, metrics, sum(times), None))
    return End("completed", 1), drawn


@final
class _Window:
    """What this worker draws in a probe: set-up and all that is not timed, too."""

    def __init__(self, devices: tuple[str, ...], fraction: float, *, wanted: bool) -> None:
        from penstock.energy import make_meter  # without power limits, which probes leave alone

        self._meter = make_meter(devices) if wanted else None
        if self._meter is not None:
            weigh: Callable[[float], None] | None = getattr(self._meter, "weigh", None)
            if weigh is not None:
                weigh(fraction)
            self._meter.epoch_begin()

    def end(self) -> Measurement | None:
        if self._meter is None:
            return None
        drawn = self._meter.epoch_end()
        self._meter.close()
        return drawn


def _gathered(
    folder: Path, number: int, world: tuple[int, int, str] | None, drawn: Measurement | None
) -> Measurement | None:
    """What all workers of a probe drew: those of a crew tell their lead, of whom alone the study hears."""
    if world is None:
        return drawn
    rank, size, _ = world
    if rank > 0:
        _write(folder / f"drew-{number}-{rank}", json.dumps(None if drawn is None else drawn.plain))
        return None
    if drawn is None:
        return None
    deadline_s, parts = time.perf_counter() + _GATHER_S, [drawn]
    for other in range(1, size):
        path = folder / f"drew-{number}-{other}"
        while not path.exists() and time.perf_counter() < deadline_s:
            time.sleep(_WAIT_S)
        with contextlib.suppress(OSError):
            plain = json.loads(path.read_text())
            parts += [] if plain is None else [measurement(*plain)]
    return total(parts)


def _write(path: Path, text: str) -> None:
    """Whoever sees the file reads all of it."""
    with contextlib.suppress(OSError):
        draft = path.with_name(f"draft-{path.name}")
        draft.write_text(text)
        draft.replace(path)


def usual_s(times_s: Sequence[float]) -> float:
    """Seconds per iteration, waits for a core included, but neither hiccups nor strokes of luck.

    Most iterations that are shorter than a time slice never see that a core is shared: a few wait for all the others.
    Only time over count tells, in blocks of several slices. Of the blocks the middle half counts.
    """
    total_s = sum(times_s)
    each = (
        min(len(times_s), max(1, math.ceil(_BLOCK_S * len(times_s) / total_s))) if total_s else len(times_s)
    )
    blocks = sorted(mean(times_s[at : at + each]) for at in range(0, len(times_s) - each + 1, each))
    aside = len(blocks) // 4
    return mean(blocks[aside : len(blocks) - aside])


@final
class _Timer:
    """Stands in for the meter: it hears of every iteration, or else of every epoch."""

    def __init__(self, told: Mapping[str, Any], *, leads: bool = True, alone: bool = True) -> None:
        self._folder = Path(told["path"])
        self._number, self._size = told["number"], told["size"]
        self._wanted, self._window_s, self._limit_s = told["iterations"], told["window_s"], told["limit_s"]
        self._leads, self._alone = leads, alone
        self._last = math.inf  # the iteration to stop after, once that is known
        self._timed_s = 0.0
        self._said = False
        self._began_s = time.perf_counter()
        self._count = 0
        self._by_iteration = False
        self._mark_s = 0.0
        self.setup_s = 0.0
        self.times: list[float] = []
        self.refused = ""
        self.done = False

    def meter(self, devices: tuple[str, ...]) -> _Timer:
        return self

    def on_iteration(self, samples: float) -> None:
        self._by_iteration = True
        self._tick()
        if self.done:
            raise Unwind

    def epoch(self) -> None:
        if not self._by_iteration:
            self._tick()

    def _tick(self) -> None:
        now_s = time.perf_counter()
        self._count += 1
        if self._count == 1:
            self.setup_s = now_s - self._began_s
        if self._by_iteration and self._count < _SKIPPED:
            return
        if self._count == (_SKIPPED if self._by_iteration else 1):
            self._meet("ready")
        else:
            self.times.append(now_s - self._mark_s)
            self._timed_s += self.times[-1]
            self.done = self._is_over(now_s - self._began_s)
        self._mark_s = time.perf_counter()

    def _is_over(self, since_s: float) -> bool:
        if self._leads and self._last == math.inf:
            timed = len(self.times) >= self._wanted and self._timed_s >= self._window_s
            enough = timed or since_s > self._limit_s
            if enough and not self._said:
                self._said = True
                self._say("done")
            # Until all are done each keeps the others company; what it does then counts, too.
            if enough and (self._all("done") or since_s > 2 * self._limit_s):
                # A crew must stop at one place, or some wait for who has left: it hears of the next iteration, which
                # nobody ends before the lead has begun it.
                self._last = self._count if self._alone else self._count + 1
                if not self._alone:
                    self._say("last", str(self._last))
        elif not self._leads:
            self._last = self._heard("last")
        return self._count >= self._last

    def _say(self, word: str, text: str = "") -> None:
        _write(self._folder / f"{word}-{self._number}", text)

    def _heard(self, word: str) -> float:
        try:
            return float((self._folder / f"{word}-{self._number}").read_text())
        except OSError:
            return math.inf

    def _all(self, word: str) -> bool:
        return all((self._folder / f"{word}-{number}").exists() for number in range(self._size))

    def _meet(self, word: str) -> None:
        self._say(word)
        deadline_s = time.perf_counter() + self._limit_s
        while not self._all(word) and time.perf_counter() < deadline_s:
            time.sleep(_WAIT_S)

    def epoch_begin(self) -> None:
        pass

    def epoch_end(self) -> None:
        return None

    def close(self) -> None:
        pass


@final
class _Silent:
    """Where a probe's reports go: nowhere. That it can't spread is all that counts besides its times."""

    def __init__(self, timer: _Timer) -> None:
        self._timer = timer

    def reported(self, report: Report) -> None:
        self._timer.epoch()

    def saved(self, epoch: int, path: str) -> None:
        pass

    def noted(self, topic: str, data: Mapping[str, Any]) -> None:
        if topic == UNDIVIDED:
            self._timer.refused = data["text"]

    def told(self) -> tuple[str, bool] | None:
        return ("profiled", False) if self._timer.done else None


@final
class _Nowhere:
    """Checkpoints that are not kept."""

    def find(self) -> Found | None:
        return None

    def stage(self, state: Any) -> None:
        pass

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        return None

    def settle(self) -> None:
        """Nothing is written."""

    def discard(self) -> None:
        pass


@contextlib.contextmanager
def _on_cores(count: int) -> Any:
    """Keep to the first ``count`` cores, so that probes of one device share it while the others are idle."""
    if count < 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    # Threads that run already keep theirs: each is told.
    chosen = set(sorted(before)[:count])
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, chosen)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before)


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


def _memory_bytes() -> int:
    """The most device memory this process has held; 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_reserved())
