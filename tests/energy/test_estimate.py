"""The estimate: CPU time of a process tree times a power model."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from penstock.core import Source
from penstock.core.errors import InvalidInput
from penstock.energy import EstimateSensor
from penstock.energy._estimate import descendants

BURN = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass\n"


def test_busy_and_idle_watts_are_those_stated():
    """In a process without children: those that other tests have left here would count, too."""
    code = (
        "import json, time\n"
        "from penstock.energy import EstimateSensor\n"
        "sensor = EstimateSensor(cores=3, busy_core_w=100.0, idle_core_w=2.0)\n"
        "begin_s, cpu_s = time.monotonic(), time.process_time()\n"
        "while time.process_time() < cpu_s + 0.1: pass\n"
        "time.sleep(0.1)\n"
        "joules = sensor.energy_j()\n"
        "wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - cpu_s\n"
        "print(json.dumps([joules, wall_s, cpu_s, str(sensor.source), sensor.uncertainty]))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    joules, wall_s, cpu_s, source, uncertainty = json.loads(told)
    assert joules == pytest.approx(3 * 2.0 * wall_s + 100.0 * cpu_s, rel=0.05)
    assert source == str(Source.ESTIMATED)
    assert uncertainty == 0.5


def test_ended_children_count():
    sensor = EstimateSensor(busy_core_w=1.0, idle_core_w=0.0)
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert sensor.cpu_s >= 0.3


def test_living_descendants_count_while_they_live():
    """A child of a child, neither waited for yet."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN + 'time.sleep(300)'!r}])"
    sensor = EstimateSensor(busy_core_w=1.0, idle_core_w=0.0)
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 120
        while sensor.cpu_s < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sensor.cpu_s >= 0.3
    finally:
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
        child.kill()
        child.wait()
    assert sensor.cpu_s >= 0.3  # and are not forgotten


def test_another_process_tree():
    child = subprocess.Popen([sys.executable, "-c", BURN + "time.sleep(300)"])
    sensor = EstimateSensor(child.pid, busy_core_w=10.0, idle_core_w=0.0)
    try:
        deadline = time.monotonic() + 120
        while sensor.energy_j() < 2.0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sensor.energy_j() >= 2.0
    finally:
        child.kill()
        child.wait()


def test_descendants_are_those_psutil_finds():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    me = psutil.Process()
    try:
        deadline = time.monotonic() + 120
        while (
            not all(psutil.Process(child.pid).children() for child in children)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        found: set[int] = set()
        while time.monotonic() < deadline:  # What else this process started may come or go between two looks.
            before = {child.pid for child in me.children(recursive=True)}
            found = set(descendants(me.pid))
            if before == {child.pid for child in me.children(recursive=True)}:
                break
        assert len(before) >= 4
        assert found == before
    finally:
        for child in children:  # and no others that this process may have
            for process in (*psutil.Process(child.pid).children(), child):
                process.kill()
            child.wait()
    assert descendants(2**22 + 1) == []


def test_psutil_s_way_gives_the_same(monkeypatch):
    """Where there is no /proc."""
    from penstock.energy import _estimate

    child = subprocess.Popen([sys.executable, "-c", BURN + "time.sleep(300)"])
    try:
        deadline = time.monotonic() + 120
        while _estimate._cpu_of(child.pid) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.02)
        by_proc, tree = _estimate._cpu_of(child.pid), descendants(psutil.Process().pid)
        monkeypatch.setattr(_estimate, "_HAS_PROC", False)
        assert _estimate._cpu_of(child.pid) == pytest.approx(by_proc, abs=0.1)
        assert child.pid in descendants(psutil.Process().pid)
        assert set(descendants(psutil.Process().pid)) == set(tree)
    finally:
        child.kill()
        child.wait()
    assert _estimate._cpu_of(child.pid) == 0


def test_a_window_from_before_a_fork_tells_what_the_child_uses():
    """A child's CPU time begins at 0, far below its parent's."""
    code = (
        "import json, os, time\n"
        "from penstock.energy import EstimateSensor, Meter\n"
        "def burn(seconds):\n"
        "    until = time.process_time() + seconds\n"
        "    while time.process_time() < until: pass\n"
        "burn(0.3)\n"
        "meter = Meter([EstimateSensor(cores=1, busy_core_w=100.0, idle_core_w=0.0)])\n"
        "burn(0.3)\n"
        "window = meter.window()\n"
        "if os.fork() == 0:\n"
        "    burn(0.2)\n"
        "    mine_j = 100.0 * time.process_time()\n"
        "    print(json.dumps([window.energy.joules, mine_j]), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    joules, mine_j = json.loads(told)
    assert joules == pytest.approx(mine_j, rel=0.1)


def test_bad_figures_are_refused():
    with pytest.raises(InvalidInput, match="busy_core_w=0"):
        EstimateSensor(busy_core_w=0)
    with pytest.raises(InvalidInput, match="cores must be positive"):
        EstimateSensor(cores=0)
