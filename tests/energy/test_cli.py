"""``penstock doctor`` and ``penstock measure`` as a shell sees them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

APP = (
    "import typer; from penstock.cli._doctor import doctor; from penstock.cli._measure import measure;"
    "app = typer.Typer(); app.command()(doctor); app.command()(measure); app()"
)


def penstock(*arguments, env=None, **options):
    return subprocess.run(
        [sys.executable, "-c", APP, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


@pytest.fixture
def plain(nvml_stub):
    """No GPUs."""
    return {name: value for name, value in os.environ.items() if name != nvml_stub.ENVIRONMENT}


# -- doctor


def findings(stub, library):
    done = penstock("doctor", "--json", env=stub.environment(library))
    result = json.loads(done.stdout)
    assert result["exit_code"] == done.returncode
    return done.returncode, {finding["subject"].split()[0]: finding for finding in result["findings"]}


def test_doctor_on_this_machine(plain):
    done = penstock("doctor", env=plain)
    assert "NVIDIA GPUs: energy none" in done.stdout
    assert done.returncode in (0, 1)
    if not Path("/sys/class/powercap").exists():
        assert done.returncode == 1
        assert "CPU: energy estimated" in done.stdout
        assert "fix: sudo modprobe intel_rapl_msr" in done.stdout


def test_doctor_of_four_gpus(gpus, nvml_library, nvml_stub):
    stub = gpus(4)
    stub.add_flags(nvml_stub.LOCKED, 1)
    stub.add_flags(nvml_stub.MIG, 2)
    code, found = findings(stub, nvml_library)
    assert code == 1
    assert (found["gpu:0"]["measure"], found["gpu:0"]["control"]) == ("ok", "ok")
    assert "NVML total energy counter" in found["gpu:0"]["detail"]
    assert (found["gpu:1"]["measure"], found["gpu:1"]["control"]) == ("ok", "limited")
    assert "sudo" in found["gpu:1"]["fix"]
    assert found["gpu:2"]["fix"] == "sudo nvidia-smi -i 2 -mig 0"
    assert [stub.limit_w(index) for index in range(4)] == [250.0] * 4  # looked, not touched
    stub.add_flags(nvml_stub.LOST, 3)
    code, found = findings(stub, nvml_library)
    assert code == 2
    assert found["gpu:3"]["measure"] == "broken"
    assert found["gpu:3"]["fix"] == "sudo nvidia-smi --gpu-reset -i 3"


def test_doctor_and_rapl(powercap, monkeypatch):
    from penstock.energy import State, examine

    root = powercap(
        {"intel-rapl:0": ("package-0", 5, 1000), "intel-rapl:0/intel-rapl:0:0": ("dram", 5, 1000)}
    )
    found = [finding for finding in examine(root) if finding.subject.startswith(("cpu", "memory"))]
    assert [(f.subject, f.measure) for f in found] == [("cpu:0 package-0", "ok"), ("memory:0 dram", "ok")]
    read = Path.read_bytes

    def refuse(path):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    found = [finding for finding in examine(root) if finding.subject.startswith("cpu")]
    assert found[0].measure is State.ESTIMATED
    assert found[0].fix == "sudo chmod -R a+r /sys/class/powercap/intel-rapl*"


def test_doctor_tells_a_broken_driver_from_none(tmp_path, monkeypatch, nvml_library, nvml_stub):
    from penstock.energy import State, examine

    monkeypatch.delenv(nvml_stub.ENVIRONMENT, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # left by an uninstalled driver: no GPU
    assert examine(tmp_path / "no", tmp_path)[0].measure is State.ABSENT
    (tmp_path / "dev/nvidia0").touch()
    found = examine(tmp_path / "no", tmp_path)[0]
    assert (found.subject, found.measure, found.control) == ("NVIDIA GPUs", State.BROKEN, State.BROKEN)
    assert f"{tmp_path}/dev/nvidia0" in found.detail
    assert "Driver Not Loaded" in found.detail
    assert found.fix.startswith("sudo modprobe nvidia")
    assert "reboot" in found.fix


def test_doctor_tells_of_gpus_that_cant_be_counted(tmp_path, monkeypatch):
    from penstock.core.errors import SensorError
    from penstock.energy import State, _nvml, examine

    def fail():
        raise SensorError("NVML can't count GPUs: Driver/library version mismatch.")

    monkeypatch.setattr(_nvml, "gpu_count", fail)
    found = examine(tmp_path / "no", tmp_path)[0]
    assert found.measure is State.BROKEN
    assert "mismatch" in found.detail


# -- measure

BURN = "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass\n"


def test_measure_says_what_a_command_took(plain, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}]); print('mine'); sys.exit(7)"
    file = tmp_path / "out.json"
    arguments = ["--json", "--output", str(file), "--region", "FR", "--price", "0.25", "--"]
    done = penstock("measure", *arguments, sys.executable, "-c", code, env=plain)
    assert done.returncode == 7
    mine, line = done.stdout.splitlines()
    assert mine == "mine"
    result = json.loads(line)
    assert json.loads(file.read_text()) == result
    assert result["exit_code"] == 7
    if "cpu-estimate" in next(iter(result["devices"])):
        assert result["energy_j"] >= 0.5 * 6.5  # the grandchild's CPU time at the stated watts
        assert result["source"] == "estimated"
    assert result["time_s"] >= 0.5
    assert result["co2_g"] == pytest.approx(result["energy_wh"] / 1000 * 56)
    assert result["cost"]["value"] == pytest.approx(result["energy_wh"] / 1000 * 0.25)
    assert result["grid"] == {"g_per_kwh": 56, "region": "FR", "assumed": False}


def test_measure_s_line(plain):
    done = penstock("measure", "--", "true", env=plain)
    assert done.returncode == 0
    assert done.stdout == ""
    assert re.match(r"true: \d+\.\d\d s, ", done.stderr)
    assert "J +-" in done.stderr
    assert "CO2e, world average grid, no --region given" in done.stderr


def test_measure_of_gpus(gpus, nvml_library):
    stub = gpus(2)
    stub.set_load(150.0)
    done = penstock("measure", "--json", "--", "sleep", "0.6", env=stub.environment(nvml_library))
    devices = json.loads(done.stdout)["devices"]
    for name in ("gpu:0", "gpu:1"):
        assert devices[name]["energy_j"] == pytest.approx(150 * json.loads(done.stdout)["time_s"], rel=0.1)
        assert devices[name]["scope"] == "device"


@pytest.mark.parametrize(
    ("command", "code"), [(["no-such-command-here"], 127), (["/"], 126), (["sh", "-c", "kill -9 $$"], 137)]
)
def test_measure_exits_as_a_shell_would(plain, command, code):
    assert penstock("measure", "--", *command, env=plain).returncode == code


def test_measure_refuses_an_unknown_region(plain):
    done = penstock("measure", "--region", "XX", "--", "true", env=plain)
    assert done.returncode == 2
    assert "No grid intensity for region 'XX'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_measure_passes_signals_on_and_still_reports(plain, number):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(5));"
        "signal.signal(signal.SIGINT, lambda *a: sys.exit(5)); print('up', flush=True); time.sleep(300)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", APP, "measure", "--", sys.executable, "-c", code],
        env=plain,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "up"
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 5
    assert "CO2e" in errors


START = """
import os, signal, subprocess, sys
popen = subprocess.Popen
signal.signal({number}, signal.SIG_DFL)  # a parent may have left it ignored

def start(command):
    os.kill(os.getpid(), {number})  # while it is not there yet
    return popen(command)

subprocess.Popen = start
from penstock.cli._measure import run_command
sys.exit(run_command({command!r})[0])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_the_command_is_there_is_passed_on_to_it(plain, number, code):
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    source = START.format(number=int(number), command=command)
    done = subprocess.run([sys.executable, "-c", source], env=plain, timeout=120)
    assert done.returncode == code


def test_a_command_ignores_what_was_ignored_before(plain):
    """As SIGHUP under nohup."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = penstock("measure", "--", sys.executable, "-c", code, env=plain)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout == "True\n"


def test_measure_counts_a_process_that_left_its_parent(plain, tmp_path):
    """A daemon that outlives the shell that started it, while the command runs."""
    burnt = tmp_path / "burnt"
    daemon = f"{BURN}open('{burnt}', 'w')"
    script = f'(setsid "{sys.executable}" -c "{daemon}" &) ; until [ -e "{burnt}" ]; do sleep 0.05; done; sleep 0.5'
    done = penstock("measure", "--json", "--", "sh", "-c", script, env=plain)
    result = json.loads(done.stdout.splitlines()[-1])
    if result["source"] == "estimated":
        idle_j = 1.5 * len(os.sched_getaffinity(0)) * result["time_s"]
        assert result["energy_j"] - idle_j >= 0.4 * 6.5
