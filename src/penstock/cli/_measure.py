"""``penstock measure -- command``: energy, time and CO2e of any command and all the processes it starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli._json import json_text

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCONT)
_PR_SET_CHILD_SUBREAPER = 36


def measure(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on standard output instead of the line.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the JSON to this file too.")
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(help="Country of the electricity, e.g. DE, for CO2e; else the world average."),
    ] = None,
    g_per_kwh: Annotated[
        float | None,
        typer.Option("--g-per-kwh", help="Grams of CO2e per kilowatt-hour, instead of a region."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a kilowatt-hour.")] = None,
    currency: Annotated[str, typer.Option(help="Currency of the price.")] = "EUR",
) -> None:
    """Run a command and say what it took. The exit code is the command's (128 + n if signal n ended it)."""
    from penstock.core.errors import PenstockError
    from penstock.energy import Meter, co2, grid, money
    from penstock.energy._carbon import check_amount

    try:
        source = grid(region, g_per_kwh=g_per_kwh)
        if price is not None:
            check_amount("--price", price)
        _check_output(output)
        with Meter() as meter:
            code, problem = run_command(command)
        energy = meter.energy if not meter.failures else None
    except PenstockError as error:
        print(f"penstock measure: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if problem:
        print(f"penstock measure: {problem}", file=sys.stderr)
        raise typer.Exit(code)
    carbon = None if energy is None else co2(energy, source)
    cost = None if energy is None or price is None else money(energy, price, currency)
    result: dict[str, Any] = {
        "command": command,
        "exit_code": code,
        "time_s": meter.time_s,
        "energy_j": None if energy is None else energy.joules,
        "energy_wh": None if energy is None else energy.wh,
        "source": None if energy is None else str(energy.source),
        "uncertainty": None if energy is None else energy.uncertainty,
        "co2_g": None if carbon is None else carbon.value,
        "grid": {"g_per_kwh": source.g_per_kwh, "region": source.region, "assumed": source.assumed},
        "cost": None if cost is None else {"value": cost.value, "currency": currency},
        "devices": {
            sensor.id: {
                "name": sensor.name,
                "method": sensor.method,
                # A GPU's or package's counter counts whoever uses it; the estimate counts the command's processes.
                "scope": "processes" if sensor.key.startswith("process:") else "device",
                "energy_j": meter.devices[sensor.id].joules if sensor.id in meter.devices else None,
                "source": str(sensor.source),
                "error": str(meter.failures[sensor.id]) if sensor.id in meter.failures else None,
            }
            for sensor in meter.sensors
        },
    }
    if output is not None:
        try:
            output.write_text(json_text(result, indent=2) + "\n")
        except OSError as error:  # what was measured is still told, and the command's code still ours
            print(f"penstock measure: can't write {str(output)!r}: {error.strerror}.", file=sys.stderr)
    if as_json:
        print(json_text(result), flush=True)
    else:
        parts = [f"{meter.time_s:.2f} s"]
        if energy is None:
            parts.append(
                "energy not measurable: " + "; ".join(str(error) for error in meter.failures.values())
            )
        else:
            parts.append(str(energy))
            where = "world average grid, no --region given" if source.assumed else source.region
            where = where if g_per_kwh is None else f"{g_per_kwh:g} g/kWh as given"
            parts.append(f"{carbon} CO2e, {where}")
        if cost is not None:
            parts.append(str(cost))
        print(f"{shlex.join(command)}: {', '.join(parts)}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


def _check_output(output: Path | None) -> None:
    """Before the command runs: can its figures be kept afterwards?"""
    from penstock.core.errors import InvalidInput

    if output is None:
        return
    if output.is_dir():
        raise InvalidInput(f"--output takes a file, but {str(output)!r} is a folder.")
    if not output.parent.is_dir():
        raise InvalidInput(f"Can't write {str(output)!r}: there is no folder {str(output.parent)!r}.")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InvalidInput(f"Can't write {str(output)!r}: permission denied.")


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end, passing signals on; returns its exit code, and why it could not be run.

    Processes that outlive their parent are adopted, so that their CPU time counts while the command runs.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before there was a command to pass them to

    def forward(number: int, frame: object) -> None:
        if child is None:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    # A Ctrl-C in a terminal reaches the command by itself; one sent to us alone does not.
    in_terminal = sys.stdin is not None and sys.stdin.isatty()
    handlers: dict[int, Any] = dict.fromkeys(_FORWARDED, forward)
    handlers[signal.SIGINT] = (lambda number, frame: None) if in_terminal else forward
    # The command ignores what is ignored here (SIGHUP under nohup): it would not if we handled it before it is there.
    ignored = {number for number in handlers if signal.getsignal(number) is signal.SIG_IGN}
    old = {number: signal.signal(number, handlers[number]) for number in handlers.keys() - ignored}
    # A signal that comes just before a blocking wait() would not end it: its handler runs when that returns. So signals
    # are also written to a pipe, which is waited for.
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        try:
            child = subprocess.Popen(list(command))
        except FileNotFoundError:
            return 127, f"{command[0]}: not found."
        except OSError as error:
            return 126, f"{command[0]}: {error.strerror}."
        old |= {number: signal.signal(number, handlers[number]) for number in ignored}
        for number in early:
            forward(number, None)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child.pid:
                break
            if pid == 0:
                select.select([reader], [], [])
                os.read(reader, 4096)
    finally:
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)
        for number, handler in old.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    child.returncode = code
    return (code if code >= 0 else 128 - code), ""
