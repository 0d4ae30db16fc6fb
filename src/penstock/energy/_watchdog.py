"""The watchdog process: restores power limits when the process that changed them is killed.

It is told the limits on its standard input, a line of JSON, and waits there. ``clean`` means they have been restored,
and others may follow; the end of the input without it means that the process is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from typing import IO

from penstock.core.errors import PenstockError
from penstock.energy._guard import claim_path, read_claim
from penstock.energy._sensor import Sensor

_LOOK_S = 0.05


def open_device(key: str) -> Sensor:
    """The sensor of a ``restore_key``."""
    kind, _, name = key.partition(":")
    if kind == "nvml":
        from penstock.energy._nvml import NvmlSensor

        # Lazy: whether its energy can be read does not matter.
        return NvmlSensor(name, whole_mig_gpu=True, lazy=True)
    from penstock.energy._amd import amd_sensors

    for sensor in amd_sensors():
        if sensor.restore_key == key:
            return sensor
    raise PenstockError(f"No device {key}.")


def take(claim: IO[str], dead: int) -> bool:
    """Lock a device's claim; False: the next job has it, or has restored the limit already.

    A job that has just come knows the limit to restore, but may be killed, too, before it has a watchdog of its own.
    Till then this one stays.
    """
    waited = False
    while True:
        try:
            fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.seek(0)
            told = read_claim(claim)
            if (
                told.get("watched") and told.get("pid") != dead
            ):  # what a dead one wrote stands till the next one writes
                return False
            waited = True
            time.sleep(_LOOK_S)
            continue
        claim.seek(0)
        return not waited or bool(read_claim(claim))


def restore(limits_w: dict[str, float], *, tries: int = 5, wait_s: float = 1.0, dead: int = 0) -> bool:
    """Give devices their limits back; returns whether all took them. A device somebody holds by now is theirs.

    Args:
        limits_w: By ``restore_key``.
        tries: For devices that refuse.
        wait_s: Between two of them.
        dead: The process that changed the limits.
    """
    left = dict(limits_w)
    for _ in range(tries):
        for key, limit_w in list(left.items()):
            with open(claim_path(key), "a+") as claim:
                if not take(claim, dead):
                    del left[key]
                    continue
                try:
                    sensor = open_device(key)
                    try:
                        sensor.set_power_limit_w(limit_w)
                    finally:
                        sensor.close()
                except PenstockError:
                    continue
                claim.truncate(0)
                del left[key]
        if not left:
            return True
        time.sleep(wait_s)
    return False


def main() -> None:
    """Wait for the end of the input."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    limits_w: dict[str, float] = {}
    for line in sys.stdin:
        limits_w = {} if line.strip() == "clean" else json.loads(line)
    if limits_w:
        sys.exit(0 if restore(limits_w, dead=int(sys.argv[1])) else 1)
