"""One reader per device and node: the process that holds the lock reads, the others read what it publishes.

How. Each device has a file in this user's runtime folder, mapped into every process that meters it. Who holds the
file's POSIX lock is the device's reader: its background thread reads the device every 50 ms and writes time, joules
and watts into the file, in two alternating records with a checksum each, so that a reading is never torn. The others
take the newest record and add watts x the time since, a few microseconds in all. When the reader's process ends,
however it ends, the kernel gives its lock up; another process finds the record stale within a quarter of a second
and takes over, bridging the gap with the last watts.

The same file has a table of participants: who uses the device now, with which weight. The reader splits each period's
joules among them (``attribution.split``: what it adds to all parts is what the device drew), so a process
that shares a GPU with others reads its own part as cheaply as the whole.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, ClassVar, TypeAlias, final

from penstock.core.errors import SensorError
from penstock.energy._attribution import split
from penstock.energy._poller import POLLER
from penstock.energy._sensor import Sensor

PERIOD_S = 0.05
STALE_S = 0.25
GIVE_UP_S = 30.0
_READER_LATE_S = 0.01
"""The reader itself reads again for a window's edge if its record is older: GPUs renew theirs every 20..100 ms."""

Reading: TypeAlias = tuple[float, float, float, float, float]
"""Joules of the whole device, of this process's part, seconds it was shared so far, watts of this process's part, and
joules of its part that the device would have drawn idle (-1: this process is no user of the device)."""

# time, joules, watts, idle watts, unattributed joules, seconds with several active, active weight, how many are
# active, sequence, pid, the reader's uncertainty
_RECORD = struct.Struct("<dddddddQQQd")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = 64
_CRC = struct.Struct("<I")
_RECORD_AT = (64, 192)
_ERROR_AT = 320
_ERROR_BYTES = 700
_TABLE_AT = 1024
_SLOTS = 64
_SLOT_BYTES = 64
_CLAIM = struct.Struct("<Qd")  # written by the participant: pid, weight (0: paused)
_CLAIMS = struct.Struct("<Qd48x")
_PART = struct.Struct("<ddd")  # written by the reader: time, joules, idle joules in them; then its checksum
_FILE_BYTES = _TABLE_AT + _SLOTS * _SLOT_BYTES


def runtime_folder() -> Path:
    """This user's folder for the shared files: ``$XDG_RUNTIME_DIR`` or the temporary folder, mode 700.

    Raises:
        SensorError: Somebody else owns it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"penstock-energy-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SensorError(
            f"{folder} is not this user's alone: remove it, or set XDG_RUNTIME_DIR to a private folder."
        )
    return folder


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "noboot"


@final
class SharedSensor(Sensor):
    """A device's sensor shared by all processes of this user on this node.

    Make one in every process that meters the device.

    Args:
        describe: The device's own sensor. Its energy and watts are not read here unless this process becomes the
            reader; its power limit is set directly. Closed with this one.
        folder: Where the shared file is; ``runtime_folder()`` if None.
        period_s: How often the reader publishes.
    """

    def __init__(self, describe: Sensor, *, folder: Path | None = None, period_s: float = PERIOD_S) -> None:
        self.inner = describe
        self.id, self.key, self.name, self.kind = describe.id, describe.key, describe.name, describe.kind
        self.method = describe.method
        self.source = describe.source
        self.uncertainty = describe.uncertainty
        self.resolution_s = max(describe.resolution_s, period_s)
        self._period_s = period_s
        self._folder = runtime_folder() if folder is None else folder
        self._lock = threading.RLock()
        self._channel: _Channel | None = None
        self._poll: int | None = None
        self._pid = -1
        self._base_j = 0.0
        self._most_j = 0.0
        self._part_j = 0.0
        self._slot: int | None = None
        self._open()
        try:
            self._base_j = self._most_j = self._total_j(self._fresh())
        except SensorError:
            self.close()
            raise

    def energy_j(self) -> float:
        """Joules since this object was made."""
        with self._lock:
            return self._total_j(self._fresh()) - self._base_j

    def power_w(self) -> float:
        """Watts now, as published by the reader."""
        with self._lock:
            return self._fresh().watts

    @property
    def is_reader(self) -> bool:
        """Whether this process is the one that reads the device."""
        channel = self._channel
        return channel is not None and channel.is_reader

    @property
    def joined(self) -> bool:
        """Whether this process counts as a user of the device."""
        return self._slot is not None

    def join(self, weight: float) -> None:
        """Use the device from now on, with a weight against others; again after ``pause``."""
        with self._lock:
            channel = self._ensure()
            if self._slot is None:
                self._slot = channel.claim()
                self._part_j = 0.0
            elif channel.weight(self._slot) == weight:
                return
            if channel.is_reader:
                channel.tick()  # what was drawn up to now belongs to those who were here
            channel.set_weight(self._slot, weight)

    def pause(self) -> None:
        """Not using the device for now."""
        with self._lock:
            if self._slot is not None and self._channel is not None:
                if self._channel.is_reader:
                    self._channel.tick()
                self._channel.set_weight(self._slot, 0.0)

    def leave(self) -> None:
        """Done using the device."""
        with self._lock:
            if self._slot is not None and self._channel is not None:
                self.pause()
                self._channel.release(self._slot)
            self._slot = None

    def reading(self) -> Reading:
        """All of a window's edge in one: the whole device's joules, this process's part, and who else is there."""
        with self._lock:
            record = self._fresh()
            whole_j = self._total_j(record) - self._base_j
            if self._slot is None:
                return whole_j, whole_j, 0.0, record.watts, -1.0
            channel = self._channel
            assert channel is not None
            part_s, part_j, idle_j = channel.part(self._slot)
            mine = channel.weight(self._slot)
            share = 1.0
            if mine > 0 and record.weight > mine:
                share = mine / record.weight
            if mine > 0 and part_s > 0:
                part_j += record.watts * share * max(0.0, time.monotonic() - max(part_s, record.time_s))
            self._part_j = max(self._part_j, part_j)
            return whole_j, self._part_j, record.shared_s, record.watts * share, idle_j

    def idle_part_j(self) -> float:
        """Of this process's part, what the device would have drawn anyway (its lowest watts seen so far)."""
        with self._lock:
            channel = self._ensure()
            self._fresh()
            return 0.0 if self._slot is None else channel.part(self._slot)[2]

    @property
    def power_limit_range_w(self) -> tuple[float, float] | None:
        """As the device says."""
        return self.inner.power_limit_range_w

    def power_limit_w(self) -> float:
        """As the device says."""
        return self.inner.power_limit_w()

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set on the device itself, whichever process reads it."""
        self.inner.set_power_limit_w(limit_w)

    @property
    def restore_key(self) -> str | None:
        """As the device says."""
        return self.inner.restore_key

    def close(self) -> None:
        """Stop reading or following; another process takes over if one is there."""
        self.leave()
        with self._lock:
            if self._poll is not None:
                POLLER.remove(self._poll)
                self._poll = None
            if self._channel is not None:
                self._channel.drop(self)
                self._channel = None
        self.inner.close()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._slot = None
        name = f"v1-{zlib.crc32(self.key.encode()):08x}-{_boot_id()}"
        self._channel = _Channel.of(self._folder / name, self)
        self._poll = POLLER.add(self._period_s, self._tick)
        self._channel.try_to_read()
        # Time may pass before the first record of a reader that is just starting.
        for _ in range(200):
            record = self._channel.record()
            if self._channel.error() or (record is not None and time.monotonic() - record.time_s < STALE_S):
                break
            self._channel.try_to_read()
            time.sleep(0.005)

    def _ensure(self) -> _Channel:
        if self._pid != os.getpid():  # forked: the parent's file and thread are not ours
            self._open()
        if self._channel is None:
            raise SensorError(f"The sensor of {self.name} ({self.id}) is closed.")
        return self._channel

    def _forget(self) -> None:
        """After a fork: the parent's place in the file is not ours, and its threads' locks are never let go here."""
        self._lock = threading.RLock()
        self._channel = self._poll = self._slot = None
        self._pid = -1

    def _tick(self) -> None:
        with self._lock:
            channel = self._channel
            if channel is None:
                return
            if channel.is_reader:
                channel.tick()
            else:
                record = channel.newest()
                if record is None or time.monotonic() - record.time_s > STALE_S:
                    channel.try_to_read()

    def _fresh(self) -> _Record:
        channel = self._ensure()
        record = channel.newest()
        late_s = time.monotonic() - record.time_s if record is not None else GIVE_UP_S
        if channel.is_reader:
            if late_s > _READER_LATE_S:
                channel.tick()
                record = channel.newest()
        elif late_s > STALE_S:
            channel.try_to_read()
            record = channel.newest()
        problem = channel.error()
        if problem:
            raise SensorError(problem)
        if record is None:
            raise SensorError(f"Nobody reads {self.name} ({self.id}): no record in {self._folder}.")
        late_s = time.monotonic() - record.time_s
        if late_s > GIVE_UP_S:
            raise SensorError(
                f"Process {record.pid} reads {self.name} ({self.id}) but has published nothing for {late_s:.0f} s."
                " If it is stopped, continue or end it."
            )
        self.uncertainty = record.uncertainty
        return record

    def _total_j(self, record: _Record) -> float:
        ahead_s = max(0.0, time.monotonic() - record.time_s)
        self._most_j = max(self._most_j, record.joules + record.watts * ahead_s)
        return self._most_j


class _Record:
    """What the reader published last."""

    __slots__ = (
        "active",
        "idle_w",
        "joules",
        "pid",
        "sequence",
        "shared_s",
        "time_s",
        "unattributed_j",
        "uncertainty",
        "watts",
        "weight",
    )

    def __init__(
        self, values: tuple[float, float, float, float, float, float, float, int, int, int, float]
    ) -> None:
        self.time_s, self.joules, self.watts, self.idle_w, self.unattributed_j = values[:5]
        self.shared_s, self.weight, self.active, self.sequence, self.pid, self.uncertainty = values[5:]


class _Channel:
    """A device's shared file, opened once per process (POSIX locks belong to processes, not to descriptors)."""

    _open: ClassVar[dict[Path, _Channel]] = {}
    _registry = threading.Lock()

    @classmethod
    def of(cls, path: Path, user: SharedSensor) -> _Channel:
        with cls._registry:
            channel = cls._open.get(path)
            if channel is None:
                channel = cls._open[path] = cls(path, user)
            channel._users.append(user)
            return channel

    @classmethod
    def forget(cls) -> None:
        """Close the parent's files, after a fork: closed later, they would take our own locks of them along."""
        cls._registry = threading.Lock()
        channels, cls._open = list(cls._open.values()), {}
        for channel in channels:
            for user in channel._users:
                user._forget()
            channel._map.close()
            channel._file.close()

    def __init__(self, path: Path, user: SharedSensor) -> None:
        self._path = path
        self._pid = os.getpid()
        self._users: list[SharedSensor] = []
        self._source = user.inner
        self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        if os.fstat(self._file.fileno()).st_size < _FILE_BYTES:
            os.ftruncate(self._file.fileno(), _FILE_BYTES)
        self._map = mmap.mmap(self._file.fileno(), _FILE_BYTES)
        self._lock = threading.RLock()
        self.is_reader = False
        self._claimed: set[int] = set()
        # The reader's books.
        self._offset_j: float | None = None  # to the source's count, from its first reading on
        self._last_s = 0.0
        self._last_j = 0.0
        self._idle_w = math.inf
        self._unattributed_j = 0.0
        self._shared_s = 0.0
        self._sequence = 0
        self._parts = [0.0] * _SLOTS
        self._idle_parts = [0.0] * _SLOTS
        self._failed = False
        self._written: _Record | None = None
        self._known: _Record | None = None
        self._alive_s: dict[int, float] = {}

    def drop(self, user: SharedSensor) -> None:
        """One user less; the last one closes the file and so gives the lock up."""
        with self._registry, self._lock:
            if user in self._users:
                self._users.remove(user)
            if self._users:
                if self._source is user.inner:
                    self.tick()
                    self._source, self._offset_j = self._users[0].inner, None
                    self.tick()
                return
            if self._open.get(self._path) is self:
                del self._open[self._path]
            if self.is_reader:
                self._quietly(self.tick)
                self.is_reader = False
            self._map.close()
            self._file.close()

    # -- reading what is published

    def newest(self) -> _Record | None:
        """The newest record; from memory in the process that wrote it."""
        return self._written if self.is_reader and self._written is not None else self.record()

    def record(self) -> _Record | None:
        """The newest intact record in the file."""
        sequences = [_SEQUENCE.unpack_from(self._map, at + _SEQUENCE_AT)[0] for at in _RECORD_AT]
        newer = 0 if sequences[0] > sequences[1] else 1
        known = self._known
        if known is not None and known.sequence == sequences[newer] and known.pid == self._known_pid(newer):
            return known  # the same as last time
        for which in (newer, 1 - newer):
            at = _RECORD_AT[which]
            raw = self._map[at : at + _RECORD.size + _CRC.size]
            if sequences[which] and _CRC.unpack_from(raw, _RECORD.size)[0] == zlib.crc32(raw[: _RECORD.size]):
                self._known = _Record(_RECORD.unpack_from(raw))
                return self._known
        return None

    def _known_pid(self, which: int) -> int:
        pid: int = _SEQUENCE.unpack_from(self._map, _RECORD_AT[which] + _SEQUENCE_AT + _SEQUENCE.size)[0]
        return pid

    def error(self) -> str:
        """Why the device can't be read, as its reader found; empty if it can."""
        size = int.from_bytes(self._map[_ERROR_AT : _ERROR_AT + 2], "little")
        if not size:
            return ""
        return self._map[_ERROR_AT + 2 : _ERROR_AT + 2 + size].decode(errors="replace")

    def part(self, slot: int) -> tuple[float, float, float]:
        """Time, joules and idle joules of a participant's account."""
        at = _TABLE_AT + slot * _SLOT_BYTES + 16
        for _ in range(20):
            raw = self._map[at : at + _PART.size + _CRC.size]
            if _CRC.unpack_from(raw, _PART.size)[0] == zlib.crc32(raw[: _PART.size]):
                time_s, joules, idle_j = _PART.unpack_from(raw)
                return time_s, joules, idle_j
        return 0.0, 0.0, 0.0

    def weight(self, slot: int) -> float:
        weight: float = _CLAIM.unpack_from(self._map, _TABLE_AT + slot * _SLOT_BYTES)[1]
        return weight

    # -- taking part

    def claim(self) -> int:
        """A free slot of the table, ours until released or until the process ends."""
        with self._lock:
            for slot in range(_SLOTS):
                if slot in self._claimed:
                    continue
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + slot)
                except OSError:
                    continue
                self._claimed.add(slot)
                self.set_weight(slot, 0.0)
                return slot
        raise SensorError(f"More than {_SLOTS} processes use {self._source.name} at the same time.")

    def release(self, slot: int) -> None:
        with self._lock:
            self._claimed.discard(slot)
            _CLAIM.pack_into(self._map, _TABLE_AT + slot * _SLOT_BYTES, 0, 0.0)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + slot)

    def set_weight(self, slot: int, weight: float) -> None:
        _CLAIM.pack_into(self._map, _TABLE_AT + slot * _SLOT_BYTES, self._pid, weight)

    def _claims(self) -> list[tuple[int, float]]:
        """Slots in use now, with their weights."""
        table = _CLAIMS.iter_unpack(self._map[_TABLE_AT:_FILE_BYTES])
        return [(slot, weight) for slot, (pid, weight) in enumerate(table) if pid and weight > 0]

    # -- being the reader

    def try_to_read(self) -> None:
        """Become the reader if there is none."""
        with self._lock:
            if self.is_reader:
                return
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                return
            now_s = time.monotonic()
            previous = self.record()
            accounts = [self.part(slot) for slot in range(_SLOTS)]
            self._parts = [account[1] for account in accounts]
            self._idle_parts = [account[2] for account in accounts]
            at_j = 0.0
            if previous is not None:
                gap_s = now_s - previous.time_s
                # Everybody who was metering has been looking every 50 ms: a longer gap was nobody's time.
                bridged_j = previous.watts * gap_s if 0 <= gap_s <= 4 * STALE_S else 0.0
                at_j = previous.joules + bridged_j
                self._unattributed_j = previous.unattributed_j + bridged_j
                self._shared_s = previous.shared_s
                self._sequence = previous.sequence
                self._idle_w = previous.idle_w
            self.is_reader = True
            self._written = None
            self._set_error("")
            self._last_s, self._last_j = now_s, at_j
            self._offset_j = None
            self._guarded(self._read)

    def tick(self) -> None:
        """Read the device, split what it drew since the last time, publish."""
        with self._lock:
            if self.is_reader:
                self._guarded(self._read)

    def _read(self) -> None:
        counted_j = self._source.energy_j()
        if self._offset_j is None:  # not before it can be read: it may come back later
            self._offset_j = self._last_j - counted_j
        joules = counted_j + self._offset_j
        watts = self._source.power_w()
        now_s = time.monotonic()
        drawn_j, time_s = max(0.0, joules - self._last_j), max(0.0, now_s - self._last_s)
        self._idle_w = min(self._idle_w, watts)
        claims = self._living_claims(now_s)
        if claims:
            weights = [weight for _, weight in claims]
            idle = split(min(drawn_j, self._idle_w * time_s), weights)
            for (slot, _), part_j, idle_j in zip(claims, split(drawn_j, weights), idle, strict=True):
                self._parts[slot] += part_j
                self._idle_parts[slot] += idle_j
                raw = _PART.pack(now_s, self._parts[slot], self._idle_parts[slot])
                at = _TABLE_AT + slot * _SLOT_BYTES + 16
                self._map[at : at + _PART.size + _CRC.size] = raw + _CRC.pack(zlib.crc32(raw))
            if len(claims) > 1:
                self._shared_s += time_s
        else:
            self._unattributed_j += drawn_j
        self._last_s, self._last_j = now_s, max(joules, self._last_j)
        self._sequence += 1
        weight = sum(weight for _, weight in claims)
        values = (
            now_s,
            self._last_j,
            watts,
            self._idle_w,
            self._unattributed_j,
            self._shared_s,
            weight,
            len(claims),
            self._sequence,
            self._pid,
            self._source.uncertainty,
        )
        self._written = _Record(values)
        raw = _RECORD.pack(*values)
        at = _RECORD_AT[self._sequence % 2]
        self._map[at : at + _RECORD.size + _CRC.size] = raw + _CRC.pack(zlib.crc32(raw))

    def _living_claims(self, now_s: float) -> list[tuple[int, float]]:
        """Claims without those of processes that died with one (looked at once a second)."""
        claims = self._claims()
        gone = False
        for slot, _ in claims:
            if slot in self._claimed or now_s - self._alive_s.get(slot, -math.inf) < 1.0:
                continue
            self._alive_s[slot] = now_s
            try:
                # Nobody else holds the slot's lock: its process is gone.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + slot)
            except OSError:
                continue
            _CLAIM.pack_into(self._map, _TABLE_AT + slot * _SLOT_BYTES, 0, 0.0)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + slot)
            gone = True
        return self._claims() if gone else claims

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SensorError as error:
            self._failed = True
            self._set_error(str(error))
        else:
            if self._failed:  # it came back
                self._failed = False
                self._set_error("")

    def _quietly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SensorError:
            return

    def _set_error(self, text: str) -> None:
        raw = text.encode()[:_ERROR_BYTES]
        self._map[_ERROR_AT : _ERROR_AT + 2 + len(raw)] = len(raw).to_bytes(2, "little") + raw


os.register_at_fork(after_in_child=_Channel.forget)
