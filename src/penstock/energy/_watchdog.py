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

from penstock.core.errors import PenstockError
from penstock.energy._guard import claim_path
from penstock.energy._sensor import Sensor


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


def restore(limits_w: dict[str, float], *, tries: int = 5, wait_s: float = 1.0) -> bool:
    """Give devices their limits back; returns whether all took them. A device somebody holds by now is theirs."""
    left = dict(limits_w)
    for _ in range(tries):
        for key, limit_w in list(left.items()):
            with open(claim_path(key), "a+") as claim:
                try:
                    fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    del left[key]  # the next job has it, and the limit to restore with it
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
        sys.exit(0 if restore(limits_w) else 1)
