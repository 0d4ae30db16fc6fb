"""Checkpoints: a trial's state together with the reports made up to it, complete or not there at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, cast, final

Report: TypeAlias = tuple[int, dict[str, float], float | None, tuple[float, str, int, float] | None]
"""Epoch (counted from 1), metrics, seconds and energy (value, unit, source, uncertainty) of one report."""

_MAGIC = b"PNSTCKP1"
_FOOTER = struct.Struct("<QQII8s")  # lengths and CRCs of state and facts, magic
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint to go on from.

    Attributes:
        epoch: Epochs behind the state.
        reports: The reports its writer had made since its own launch, up to ``epoch``.
        load: Reads the state; ``load(device)`` moves what lay on another accelerator to ``device``.
    """

    epoch: int
    reports: tuple[Report, ...]
    load: Callable[[str], Any]


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
class _Tally(io.RawIOBase):
    """Counts and checksums what is written through it; can go back to where it began."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.length = 0
        self.crc = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error  # torch would tell of it in other words
            raise
        self.length += len(view)
        self.crc = zlib.crc32(view, self.crc)
        return len(view)

    def tell(self) -> int:
        return self.length

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset != 0 or whence != 0:
            raise io.UnsupportedOperation("seek")
        self._file.seek(0)
        self.length = self.crc = 0
        return 0

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate()


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


def _read(path: Path) -> _Facts | None:
    """The facts of a complete file; None if it is missing, cut short or damaged."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < _FOOTER.size:
                return None
            file.seek(size - _FOOTER.size)
            length, more, crc, crc_more, magic = _FOOTER.unpack(file.read(_FOOTER.size))
            if magic != _MAGIC or length + more + _FOOTER.size != size:
                return None
            file.seek(length)
            facts = file.read(more)
            if zlib.crc32(facts) != crc_more:
                return None
            file.seek(0)
            left, seen = length, 0
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    return None
                seen = zlib.crc32(chunk, seen)
                left -= len(chunk)
            if seen != crc:
                return None
    except OSError:
        return None
    return _Facts(length, *pickle.loads(facts))


@final
class FileCheckpoints:
    """The checkpoints of one segment in the study's files: ``checkpoints/<trial>/<epoch>.ckpt``.

    A file is written beside its place and renamed, so a killed worker leaves the old one or the new one. There
    is no fsync: a file that a power cut damages is recognised by its checksum, and the next older one serves.
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
        self._files = files
        self._folder = f"checkpoints/{trial}"
        self._seed = seed
        self._config = config
        self._start = start
        self._until = until
        self._copy_from = copy_from
        self._named = named
        self._study = study
        self._staged: tuple[Path, IO[bytes], _Tally, str] | None = None
        self._mine: list[Path] = []
        self._spare: Path | None = None  # an old one to write over: a new file costs far more than its bytes
        self._lineage: int | None = None

    def _line(self) -> int:
        if self._lineage is None:
            self._lineage = lineage(self._seed, self._config, self._copy_from)
        return self._lineage

    def _list(self, folder: str) -> list[tuple[int, Path]]:
        """Finished files of a trial, newest first."""
        try:
            names = os.listdir(self._files / folder)
        except OSError:
            return []
        stems = [name[:-5] for name in names if name.endswith(".ckpt")]
        epochs = sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True)
        return [(epoch, self._files / folder / f"{epoch}.ckpt") for epoch in epochs]

    def _candidates(self) -> list[tuple[Path, bool]]:
        """Where to look, best first, and whether the file must be of the present segment's lineage."""
        own = self._list(self._folder)
        inside = [
            (path, True)
            for epoch, path in own
            if epoch > self._start and (self._until is None or epoch <= self._until)
        ]
        before: list[tuple[Path, bool]] = []
        named = None if self._named is None else self._files / self._named
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
        self._sweep()
        for path, strict in self._candidates():
            facts = _read(path)
            if facts is None or facts.study != self._study:
                continue
            if strict and facts.lineage != self._line():
                continue
            if self._until is not None and facts.epoch > self._until:
                continue
            reports = facts.reports if strict else ()
            if strict:
                self._mine.append(path)
            return Found(facts.epoch, reports, _loader(path, facts))
        return None

    def _sweep(self) -> None:
        """Remove what a killed worker left half-written. A trial runs in one worker at a time."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._files / self._folder):
                if name.startswith(".") and name.endswith(".tmp"):
                    os.unlink(self._files / self._folder / name)

    def stage(self, state: Any) -> None:
        """Serialise ``state`` into a file beside the checkpoints."""
        self._drop()
        folder = self._files / self._folder
        path = folder / f".{os.getpid()}.tmp"
        self._spare = None
        try:
            file = _overwrite(path)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            file = _overwrite(path)
        tally = _Tally(file)
        try:
            form = dump(state, cast(IO[bytes], tally))
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)
            if tally.error is not None:
                raise tally.error from None
            raise
        self._staged = (path, file, tally, form)

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        """Complete the staged file and rename it into place."""
        if self._staged is None:
            return None
        path, file, tally, form = self._staged
        self._staged = None
        facts = pickle.dumps((epoch, form, self._line(), self._study, tuple(reports)), protocol=5)
        try:
            with file:
                file.write(facts)
                file.write(_FOOTER.pack(tally.length, len(facts), tally.crc, zlib.crc32(facts), _MAGIC))
                file.truncate()  # it may lie over a longer one
            place = f"{self._folder}/{epoch}.ckpt"
            os.replace(path, self._files / place)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._mine = [mine for mine in self._mine if mine != self._files / place]
        self._mine.append(self._files / place)
        while len(self._mine) > 2:
            old = self._mine.pop(0)
            try:
                os.replace(old, path)
                self._spare = path
            except OSError:
                old.unlink(missing_ok=True)
        return place

    def discard(self) -> None:
        """Drop what is staged, and what was kept to be written over."""
        self._drop()
        if self._spare is not None:
            self._spare.unlink(missing_ok=True)
            self._spare = None

    def _drop(self) -> None:
        if self._staged is not None:
            path, file, _, _ = self._staged
            self._staged = None
            with contextlib.suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)


def _overwrite(path: Path) -> IO[bytes]:
    """A file to write from its start, without giving back first what it has on disk."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666), "wb")


def _loader(path: Path, facts: _Facts) -> Callable[[str], Any]:
    def read(device: str) -> Any:
        with _Window(path, facts.state_bytes) as window:
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
