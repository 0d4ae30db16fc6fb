"""Command: a script as the work of a study; it reports by JSON lines on its standard output."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

from penstock.core.check import is_real
from penstock.core.errors import InvalidInput
from penstock.train._run import Refused, Run

_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 14
_TAIL_LINES = 20


@final
class Command:
    """A command line as the work of a study, with the configuration's values in ``{braces}``.

    The line is split into arguments first (as a shell would, but no shell runs) and the values are filled in
    after that, so no value can become a second argument or a second command. ``{{`` and ``}}`` stand for braces.

    The script reports by printing one JSON object per line: ``{"epoch": 3, "loss": 0.1}`` after its third epoch, or
    just ``{"loss": 0.1}``, which counts one epoch per line. All else it prints goes to the log. In its environment are:

    - ``PENSTOCK_TRIAL``, ``PENSTOCK_SEED``, ``PENSTOCK_CONFIG`` (JSON);
    - ``PENSTOCK_EPOCHS``: epochs after which it should end; empty: as it likes;
    - ``PENSTOCK_CHECKPOINT_DIR``: a directory of the trial's own that outlives restarts;
    - ``PENSTOCK_RESUME_EPOCH``: epochs the study has reports of. A script that goes on from its own checkpoint must
      name the epoch in its reports; one that doesn't starts again and is counted from 1.

    A script that exits with an error fails the trial with the last lines of its standard error. When its budget
    is used up it has ``grace_s`` to end by itself; to stop it, its process group gets SIGTERM and, ``grace_s``
    later, SIGKILL.

    Args:
        line: The command line, or its arguments as a list.
        cwd: Where to run it; default: where the study runs.
        env: Further environment variables.
        grace_s: Patience before SIGTERM and before SIGKILL.
    """

    __slots__ = ("_arguments", "cwd", "env", "grace_s", "line")

    def __init__(
        self,
        line: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        if not isinstance(line, str):
            line = _joined(line)
        try:
            arguments = shlex.split(line)
        except ValueError as error:
            raise InvalidInput(f"The command {line!r} can't be split into arguments: {error}.") from error
        if not arguments:
            raise InvalidInput("The command is empty.")
        self.line = line
        if not (cwd is None or isinstance(cwd, str | os.PathLike)):
            raise InvalidInput(f"cwd takes the path of a folder, got {cwd!r}.")
        self.cwd = None if cwd is None else os.fspath(cwd)
        self.env = _checked_env(env)
        if not (is_real(grace_s) and 0 <= grace_s < math.inf):
            raise InvalidInput(
                f"grace_s must be a number of seconds, finite and at least 0, got {grace_s!r}."
            )
        self.grace_s = float(grace_s)
        self._arguments = tuple(tuple(_parse(argument, line)) for argument in arguments)

    def __repr__(self) -> str:
        return f"Command({self.line!r})"

    @property
    def fields(self) -> frozenset[str]:
        """The names in braces: each must be a domain of the space."""
        return frozenset(
            name for argument in self._arguments for _, name, _, _ in argument if name is not None
        )

    def arguments(self, config: Mapping[str, Any]) -> list[str]:
        """The argument list for a configuration.

        An argument whose value the configuration lacks (an inactive conditional domain) is left out, together
        with a ``--name`` right before it.
        """
        result: list[str] = []
        for argument in self._arguments:
            names = [name for _, name, _, _ in argument if name is not None]
            if any(name not in config for name in names):
                if result and result[-1].startswith("-") and "=" not in result[-1] and argument[0][0] == "":
                    result.pop()
                continue
            result.append("".join(_fill(piece, config) for piece in argument))
        return result

    def __call__(self, run: Run) -> None:
        """Run the script for one segment. Called by workers."""
        arguments = self.arguments(run.config)
        folder = _own_folder(run)
        environment = os.environ | self.env
        environment |= {
            "PENSTOCK_TRIAL": str(run.trial),
            "PENSTOCK_SEED": str(run.seed),
            "PENSTOCK_CONFIG": json.dumps(run.config),
            "PENSTOCK_EPOCHS": "" if run.until is None else str(run.until),
            "PENSTOCK_CHECKPOINT_DIR": str(folder),
            "PENSTOCK_RESUME_EPOCH": str(run._start if run._copy_from else max(run._start, run._known)),
            "PYTHONUNBUFFERED": "1",  # reports must come as they are made
        }
        try:
            process = subprocess.Popen(
                arguments,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,  # of the worker's session, so that it dies with the worker
            )
        except OSError as error:
            raise Refused(f"{arguments[0]!r} can't be run: {error}") from None
        try:
            self._follow(process, run)
        finally:
            _end_group(process, 0.0)

    def _follow(self, process: subprocess.Popen[bytes], run: Run) -> None:
        if process.stdout is None or process.stderr is None:
            raise Refused("the script has no output")
        out, err = _Lines(process.stdout), _Tail(process.stderr)
        counted, going = 0, True
        over_s: float | None = None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        poll.register(process.stderr, select.POLLIN | select.POLLHUP)
        streams = {process.stdout.fileno(): process.stdout, process.stderr.fileno(): process.stderr}
        while streams:
            ready = poll.poll(100)
            for fd, _ in ready:
                source = out if fd == process.stdout.fileno() else err
                if not source.read():
                    poll.unregister(fd)
                    del streams[fd]
            for line in out.take():
                report = _report(line)
                if report is None:
                    _log(line)
                    continue
                if not going:  # it goes on although its budget is used up
                    over_s = time.monotonic()
                    continue
                named = report.pop("epoch", None)
                counted = counted + 1 if named is None else _epoch(named)
                going = run._advance(counted, report)
                if not going:
                    over_s = time.monotonic() + (0.0 if run._stop is not None else self.grace_s)
            if over_s is not None and time.monotonic() >= over_s:
                _end_group(process, self.grace_s)
                return
            if not ready and process.poll() is not None:
                break  # a grandchild may hold the pipes open
        wait_s = None if over_s is None else max(0.0, over_s - time.monotonic())
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            _end_group(process, self.grace_s)
            return
        if code != 0 and going:
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            said = err.text()
            last = said.rpartition("\n")[2].strip()
            raise Refused(f"the script failed with {how}" + (f": {last}" if last else ""), said)
        if not run._new:
            example = ", ".join(f'"{name}": 0.1' for name in run._objectives)
            raise Refused(
                f"the script reported nothing; let it print lines such as {{{example}}}", err.text()
            )


def _joined(arguments: Any) -> str:
    """A list of arguments as one line that splits into them again."""
    if isinstance(arguments, Sequence) and not isinstance(arguments, bytes):
        words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in arguments]
        if all(isinstance(word, str) for word in words):
            return shlex.join(words)
    raise InvalidInput(
        f"Command takes a command line or a list of its arguments, got {arguments!r}. "
        'Write Command("python train.py --lr {lr}").'
    )


def _checked_env(env: Any) -> dict[str, str]:
    """Environment variables: else every trial would fail, with an error that names none of them."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidInput(f'env takes variables by name, such as {{"OMP_NUM_THREADS": "1"}}, got {env!r}.')
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(
                f"env takes names and values that are texts, got {name!r}: {value!r}. Write {{{str(name)!r}: "
                f"{str(value)!r}}}."
            )
    return dict(env)


def _parse(argument: str, line: str) -> list[tuple[str, str | None, str, str | None]]:
    try:
        pieces = [
            (text, name, form or "", conversion)
            for text, name, form, conversion in string.Formatter().parse(argument)
        ]
    except ValueError as error:
        raise InvalidInput(f"{line!r}: {error}. Write {{{{ and }}}} for braces that are no field.") from error
    for _, name, form, _ in pieces:
        if name is not None and (not name.isidentifier() or "{" in form):
            raise InvalidInput(f"{line!r}: {{{name}}} must be the plain name of a domain.")
    return pieces or [("", None, "", None)]


def _fill(piece: tuple[str, str | None, str, str | None], config: Mapping[str, Any]) -> str:
    text, name, form, conversion = piece
    if name is None:
        return text
    value = config[name]
    if conversion is not None:
        value = string.Formatter().convert_field(value, conversion)
    return text + format(value, form)


def _own_folder(run: Run) -> Path:
    """The trial's directory; for PBT's exploit a copy of the other trial's, once."""
    folder = run.folder / "checkpoints"
    if run._copy_from is not None:
        donor, epoch = run._copy_from
        mark = run.folder / f"copied-{donor}-{epoch}-{run._start}"
        if not mark.exists():
            theirs = run.folder.parent / str(donor) / "checkpoints"
            fresh = run.folder / f".{os.getpid()}.copy"
            shutil.rmtree(fresh, ignore_errors=True)
            if theirs.is_dir():
                shutil.copytree(theirs, fresh)
            else:
                fresh.mkdir()
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
            mark.touch()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _report(line: bytes) -> dict[str, Any] | None:
    """The report in a line, if it is one."""
    line = line.strip()
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return None
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data else None


def _epoch(named: Any) -> int:
    if isinstance(named, bool) or not isinstance(named, int | float) or named != int(named) or named < 1:
        raise Refused(f'"epoch" must be a whole number from 1 on, got {named!r}')
    return int(named)


def _log(line: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(line + b"\n")


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, patience, SIGKILL, to the script and what it has started."""
    if process.poll() is None and grace_s > 0:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        streams = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        while process.poll() is None and time.monotonic() < deadline_s:
            ready, _, _ = select.select(streams, [], [], 0.05)
            for pipe in ready:  # it must not block on a full pipe while it cleans up
                if not os.read(pipe.fileno(), 65536):
                    streams.remove(pipe)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@final
class _Lines:
    """Splits a stream into lines; a line that is too long loses its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._fd = stream.fileno()
        self._part = bytearray()
        self._lines: list[bytes] = []

    def read(self) -> bool:
        data = os.read(self._fd, 1 << 16)
        if not data:
            if self._part:
                self._lines.append(bytes(self._part))
                self._part.clear()
            return False
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._part += line
            self._lines.append(bytes(self._part))
            self._part.clear()
        if len(self._part) < _LINE_BYTES:
            self._part += rest
        return True

    def take(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines


@final
class _Tail:
    """Passes a stream on to the log and remembers its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._fd = stream.fileno()
        self._end = b""

    def read(self) -> bool:
        data = os.read(self._fd, 1 << 16)
        if data:
            with contextlib.suppress(OSError):
                os.write(2, data)
            self._end = (self._end + data)[-_TAIL_BYTES:]
        return bool(data)

    def text(self) -> str:
        return "\n".join(self._end.decode(errors="replace").splitlines()[-_TAIL_LINES:])
