"""Checkpoints: a trial's state together with the reports made up to it, complete or not there at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import queue
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, cast, final

Plain: TypeAlias = tuple[float, str, int, float]
"""A ``Measurement.plain``: value, unit, source and uncertainty."""

Report: TypeAlias = tuple[int, dict[str, float], float | None, Plain | None]
"""Epoch (counted from 1), metrics, seconds and energy (value, unit, source, uncertainty) of one report."""

_MAGIC = b"PNSTCKP1"
_FOOTER = struct.Struct("<QQII8s")  # lengths and CRCs of state and facts, magic
_CHUNK_BYTES = 1 << 20
_MEMORY_BYTES = 1 << 20
_WRITE = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
_UNHURRIED_S = (
    0.002  # states that follow each other faster are written at once: handing them over takes its time too
)
_pace_s: float | None = (
    None  # in this process: how long the last segment took to its state; None: it saved none
)


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint to go on from.

    Attributes:
        epoch: Epochs behind the state.
        reports: The reports its writer had made since its own launch, up to ``epoch``.
        load: Reads the state; ``load(device)`` moves what lay on another accelerator to ``device``.
        unheard: Its path, where it is not the one that the study named: the study may not know of it.
    """

    epoch: int
    reports: tuple[Report, ...]
    load: Callable[[str], Any]
    unheard: str | None = None


class Checkpoints(Protocol):
    """Where one segment finds and leaves its checkpoints."""

    def find(self) -> Found | None:
        """The newest complete checkpoint the segment may go on from."""
        ...

    def stage(self, state: Any) -> None:
        """Serialise ``state`` now; it counts only after ``commit``. Replaces what was staged before."""
        ...

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        """Make the staged state the checkpoint of ``epoch``; its path, or None when nothing is staged."""
        ...

    def discard(self) -> None:
        """Drop what is staged."""
        ...

    def settle(self) -> None:
        """Wait for what is still being written; raises what went wrong."""
        ...


def lineage(seed: int, config: Mapping[str, Any], copy_from: tuple[int, int] | None) -> int:
    """What a checkpoint inside a segment must agree on with the segment that resumes from it.

    A PBT trial changes its configuration and jumps to another trial's weights under one number, so the number
    and the epoch alone don't tell whether a file on disk belongs to the present segment.
    """
    text = json.dumps([seed, dict(config), copy_from], sort_keys=True, default=repr)
    return zlib.crc32(text.encode())


def dump(state: Any, file: IO[bytes]) -> str:
    """Serialise ``state``; returns the format to give to ``load``."""
    torch = sys.modules.get("torch")
    name = "pickle" if torch is None else "torch"
    start = file.tell()
    try:
        _dump(state, file, pickle, torch)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle  # instances of classes of the user's script: by value, as the function itself came

        file.seek(start)
        file.truncate()
        _dump(state, file, cloudpickle, torch)
    return name


def _dump(state: Any, file: IO[bytes], module: Any, torch: Any) -> None:
    if torch is None:
        module.dump(state, file, protocol=5)
    else:
        torch.save(state, file, pickle_module=module)


def load(file: IO[bytes], form: str, device: str) -> Any:
    """Read back what ``dump`` wrote."""
    if form == "pickle":
        return pickle.load(file)
    import torch

    restore: Any = torch.serialization.default_restore_location

    def place(storage: Any, location: str) -> Any:
        # What lay on the CPU stays there (random states must); the rest follows the trial to its device.
        return restore(storage, location if location == "cpu" else device)

    return torch.load(file, map_location=place, weights_only=False)


@final
class _Staged(io.RawIOBase):
    """A serialised state, counted and checksummed: in memory while it is small, from then on in a file.

    Args:
        spill: Opens the file.
    """

    def __init__(self, spill: Callable[[], IO[bytes]]) -> None:
        self._spill = spill
        self.memory = bytearray()
        self.file: IO[bytes] | None = None
        self.length = 0
        self.crc = 0
        self.form = ""
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.length += len(view)
        self.crc = zlib.crc32(view, self.crc)
        if self.file is None and self.length <= _MEMORY_BYTES:
            self.memory += view
            return len(view)
        try:
            if self.file is None:
                self.file = self._spill()
                self.file.write(self.memory)
                self.memory = bytearray()
            self.file.write(view)
        except OSError as error:
            self.error = error  # torch would tell of it in other words
            raise
        return len(view)

    def tell(self) -> int:
        return self.length

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset != 0 or whence != 0:
            raise io.UnsupportedOperation("seek")
        if self.file is not None:
            self.file.seek(0)
        self.memory = bytearray()
        self.length = self.crc = 0
        return 0

    def truncate(self, size: int | None = None) -> int:
        return self.length if self.file is None else self.file.truncate()


@final
class _Job:
    """File work that another thread does while a training goes on."""

    __slots__ = ("_call", "_done", "_error")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Do it."""
        try:
            self._call()
        except BaseException as error:  # whoever waits for it gets it
            self._error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        """Until it is done; raises what went wrong."""
        with self._done:
            if self._error is not None:
                raise self._error


_jobs: queue.SimpleQueue[_Job] | None = None


def _soon(call: Callable[[], None]) -> _Job:
    """Have it done by the process's thread for file work; in the order of asking."""
    global _jobs
    if _jobs is None:
        _jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(_jobs,), name="penstock-files", daemon=True).start()
    job = _Job(call)
    _jobs.put(job)
    return job


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """In a forked child there is no such thread."""
    global _jobs
    _jobs = None


os.register_at_fork(after_in_child=_forget)


@final
class _Window(io.RawIOBase):
    """The first ``length`` bytes of a file as a file."""

    def __init__(self, path: Path, length: int) -> None:
        self._file = path.open("rb")
        self._length = length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._file.tell(), self._length)[whence]
        return self._file.seek(base + offset)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        left = max(0, self._length - self._file.tell())
        return self._file.readinto(view[:left])

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a file says besides the state."""

    state_bytes: int
    epoch: int
    form: str
    lineage: int
    study: str
    reports: tuple[Report, ...]
    state: bytes | None = None  # of a small one


def _read(path: str | Path) -> _Facts | None:
    """The facts of a complete file; None if it is missing, cut short or damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FOOTER.size:
                return None
            whole = file.read(size) if size <= _MEMORY_BYTES else None
            if whole is None:
                file.seek(size - _FOOTER.size)
            footer = file.read(_FOOTER.size) if whole is None else whole[-_FOOTER.size :]
            length, more, crc, crc_more, magic = _FOOTER.unpack(footer)
            if magic != _MAGIC or length + more + _FOOTER.size != size:
                return None
            if whole is None:
                file.seek(length)
            facts = file.read(more) if whole is None else whole[length : length + more]
            if zlib.crc32(facts) != crc_more:
                return None
            if whole is None:
                file.seek(0)
                left, seen = length, 0
                while left:
                    chunk = file.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        return None
                    seen = zlib.crc32(chunk, seen)
                    left -= len(chunk)
            else:
                seen = zlib.crc32(memoryview(whole)[:length])
            if seen != crc:
                return None
    except (OSError, struct.error):
        return None
    epoch, form, line, study, reports = pickle.loads(facts)
    return _Facts(length, epoch, form, line, study, reports, None if whole is None else whole[:length])


@final
class FileCheckpoints:
    """The checkpoints of one segment in the study's files: ``checkpoints/<trial>/<epoch>.ckpt``.

    A file is written beside its place and renamed, so a killed worker leaves the old one or the new one. A small
    state is serialised into memory and can be written by another thread while the training goes on. There is
    no fsync: a file that a power cut damages is recognised by its checksum, and the next older one serves.
    Within a segment the newest two are kept; those that segments ended or started with stay, for promotions
    and copies.
    """

    def __init__(
        self,
        files: Path,
        trial: int,
        *,
        seed: int,
        config: Mapping[str, Any],
        start: int = 0,
        until: int | None = None,
        copy_from: tuple[int, int] | None = None,
        named: str | None = None,
        study: str = "",
    ) -> None:
        self._files = str(files)
        self._folder = f"checkpoints/{trial}"
        self._seed = seed
        self._config = config
        self._start = start
        self._until = until
        self._copy_from = copy_from
        self._named = named
        self._study = study
        self._scratch = (
            ""  # the path of an unfinished file, or of an old one to write over; empty: there is none
        )
        self._staged: _Staged | None = None
        self._mine: list[str] = []
        self._ahead: int | None = (
            None  # the scratch file, open to be written: opening costs more than the bytes
        )
        self._made = False  # its folder, for it alone
        self._job: _Job | None = None  # what the other thread does for us
        self._lineage: int | None = None
        self._since_s = time.monotonic()
        self._staging_s: float | None = None  # from there to the latest state

    def _line(self) -> int:
        if self._lineage is None:
            self._lineage = lineage(self._seed, self._config, self._copy_from)
        return self._lineage

    def _list(self, folder: str, *, sweep: bool = False) -> list[tuple[int, str]]:
        """Finished files of a trial, newest first."""
        where = f"{self._files}/{folder}"
        try:
            names = os.listdir(where)
        except OSError:
            return []
        epochs = []
        for name in names:
            if name.endswith(".ckpt"):
                if name[:-5].isdigit():
                    epochs.append(int(name[:-5]))
            elif sweep and name.startswith(".") and name.endswith(".tmp"):
                with contextlib.suppress(
                    OSError
                ):  # half-written, by a killed worker: a trial runs in one at a time
                    os.unlink(f"{where}/{name}")
        return [(epoch, f"{where}/{epoch}.ckpt") for epoch in sorted(epochs, reverse=True)]

    def _candidates(self) -> list[tuple[str, bool]]:
        """Where to look, best first, and whether the file must be of the present segment's lineage."""
        own = self._list(self._folder, sweep=True)
        inside = [
            (path, True)
            for epoch, path in own
            if epoch > self._start and (self._until is None or epoch <= self._until)
        ]
        before: list[tuple[str, bool]] = []
        named = None if self._named is None else f"{self._files}/{self._named}"
        if named is not None and all(path != named for path, _ in inside):  # those are checked more strictly
            before.append((named, False))
        if self._copy_from is None:
            before += [(path, False) for epoch, path in own if epoch <= self._start]
        else:
            donor, at = self._copy_from
            before += [(path, False) for epoch, path in self._list(f"checkpoints/{donor}") if epoch <= at]
        return inside + before

    def find(self) -> Found | None:
        """The newest complete checkpoint the segment may go on from."""
        for path, strict in self._candidates():
            facts = _read(path)
            if facts is None or facts.study != self._study:
                continue
            if strict and facts.lineage != self._line():
                continue
            if self._until is not None and facts.epoch > self._until:
                continue
            reports = facts.reports if strict else ()
            unheard = None
            if strict:
                self._mine.append(path)
                name = path.removeprefix(f"{self._files}/")
                unheard = None if name == self._named else name
            return Found(facts.epoch, reports, _loader(path, facts), unheard)
        return None

    def prepare(self) -> None:
        """Have a file opened meanwhile, if the segments before this one saved at a pace that makes it worth while."""
        if _pace_s is not None and _pace_s > _UNHURRIED_S:
            self._job = _soon(self._open_ahead)

    def stage(self, state: Any) -> None:
        """Serialise ``state``, into a file beside the checkpoints if it is large."""
        self._drop()
        self._staging_s = time.monotonic() - self._since_s
        staged = _Staged(self._spill)
        try:
            staged.form = dump(state, cast(IO[bytes], staged))
        except BaseException:
            self._remove(staged)
            if staged.error is not None:
                raise staged.error from None
            raise
        self._staged = staged

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        """Complete the staged file and rename it into place."""
        staged = self._staged
        if staged is None:
            return None
        self._staged = None
        facts = self._facts(staged, epoch, reports)
        try:
            self.settle()
            return self._write(staged, epoch, facts)
        except BaseException:
            self._remove(staged)
            raise
        finally:
            self._since_s = time.monotonic()

    def commit_later(self, epoch: int, reports: Sequence[Report], tell: Callable[[str], None]) -> bool:
        """The same while the training goes on; ``tell`` is called, in another thread, when it is done.

        Returns:
            Whether it will be: a large state, and one of many in a short time, is for ``commit``.
        """
        staged = self._staged
        if staged is None or staged.file is not None or (self._staging_s or 0.0) <= _UNHURRIED_S:
            return False
        self.settle()
        self._staged = None
        facts = self._facts(staged, epoch, reports)

        def write() -> None:
            tell(self._write(staged, epoch, facts))
            self._open_ahead()

        self._job = _soon(write)
        self._since_s = time.monotonic()
        return True

    def settle(self) -> None:
        """Wait for what is being written; raises what went wrong."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()

    def _facts(self, staged: _Staged, epoch: int, reports: Sequence[Report]) -> bytes:
        facts = pickle.dumps((epoch, staged.form, self._line(), self._study, tuple(reports)), protocol=5)
        return facts + _FOOTER.pack(staged.length, len(facts), staged.crc, zlib.crc32(facts), _MAGIC)

    def _write(self, staged: _Staged, epoch: int, facts: bytes) -> str:
        if staged.file is not None:
            with staged.file as file:
                file.write(facts)
                file.truncate()  # it may lie over a longer one
        else:
            if self._ahead is None:
                self._ahead = self._open()
            fd, self._ahead = self._ahead, None
            try:
                left = memoryview(staged.memory + facts)
                size = len(left)
                while left:
                    left = left[os.write(fd, left) :]
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
        place = f"{self._folder}/{epoch}.ckpt"
        path = f"{self._files}/{place}"
        scratch, self._scratch, self._made = self._scratch, "", False
        os.replace(scratch, path)
        self._mine = [mine for mine in self._mine if mine != path]
        self._mine.append(path)
        while len(self._mine) > 2:
            old = self._mine.pop(0)
            try:
                os.replace(old, scratch)  # to write over: a new file costs far more than its bytes
                self._scratch = scratch
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old)
        return place

    def _open(self) -> int:
        """The scratch file, to be written from its start, without giving back first what it has on disk."""
        folder = f"{self._files}/{self._folder}"
        path = f"{folder}/.{os.getpid()}.tmp"
        try:
            fd = os.open(path, _WRITE, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            self._made = True
            fd = os.open(path, _WRITE, 0o666)
        self._scratch = path
        return fd

    def _open_ahead(self) -> None:
        if self._ahead is None:
            with contextlib.suppress(OSError):  # whoever writes will be told
                self._ahead = self._open()

    def _spill(self) -> IO[bytes]:
        self.settle()
        fd, self._ahead = self._ahead, None
        return os.fdopen(self._open() if fd is None else fd, "wb")

    def discard(self) -> None:
        """Drop what is staged, and what was kept to be written over."""
        global _pace_s
        _pace_s = self._staging_s
        with contextlib.suppress(OSError):
            self.settle()
        self._drop()
        if self._ahead is not None:
            os.close(self._ahead)
            self._ahead = None
        self._unlink()
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):
                os.rmdir(f"{self._files}/{self._folder}")

    def _drop(self) -> None:
        if self._staged is not None:
            staged, self._staged = self._staged, None
            self._remove(staged)

    def _remove(self, staged: _Staged) -> None:
        """Away with a file that is not complete."""
        if staged.file is not None:
            with contextlib.suppress(OSError):
                staged.file.close()
            self._unlink()

    def _unlink(self) -> None:
        if self._scratch:
            with contextlib.suppress(OSError):
                os.unlink(self._scratch)
            self._scratch = ""


def _loader(path: str | Path, facts: _Facts) -> Callable[[str], Any]:
    def read(device: str) -> Any:
        if facts.state is not None:
            return load(io.BytesIO(facts.state), facts.form, device)
        with _Window(Path(path), facts.state_bytes) as window:
            return load(io.BufferedReader(window), facts.form, device)

    return read


@final
class MemoryCheckpoints:
    """The checkpoints of one segment in a dictionary that the simulated executor owns."""

    def __init__(self, box: dict[str, tuple[int, bytes]], trial: int, named: str | None) -> None:
        self._box = box
        self._trial = trial
        self._named = named
        self._staged: bytes | None = None

    def find(self) -> Found | None:
        """The checkpoint the study named, while this process has it."""
        kept = None if self._named is None else self._box.get(self._named)
        if kept is None:
            return None
        epoch, data = kept
        return Found(epoch, (), lambda device: pickle.loads(data))

    def stage(self, state: Any) -> None:
        """Serialise ``state``."""
        file = io.BytesIO()
        try:
            pickle.dump(state, file, protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError):
            import cloudpickle

            file = io.BytesIO()
            cloudpickle.dump(state, file, protocol=5)
        self._staged = file.getvalue()

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        """Put what is staged into the box."""
        if self._staged is None:
            return None
        path = f"memory/{self._trial}/{epoch}"
        self._box[path] = (epoch, self._staged)
        self._staged = None
        return path

    def discard(self) -> None:
        """Drop what is staged."""
        self._staged = None

    def settle(self) -> None:
        """Nothing is ever left to write."""
