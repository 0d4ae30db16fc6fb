"""MPS is started and stopped as NVIDIA's tool wants it, against a stand-in that notes how it was called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import penstock as pk
from penstock.execute import Job
from penstock.execute._mps import Mps
from penstock.testing.executors import Drive, segment

TOOL = """#!/bin/sh
if [ "$1" = "-d" ]; then
  [ -n "$REFUSE" ] && { echo "permission denied" >&2; exit 1; }
  [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] || exit 2
  echo "start $CUDA_VISIBLE_DEVICES" >> "$NOTES"
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
else
  [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 3
  echo "told $(cat)" >> "$NOTES"
fi
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "nvidia-cuda-mps-control"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "notes"


def test_it_is_started_for_the_gpus_and_told_to_quit(notes: Path) -> None:
    mps = Mps()
    assert mps.start(("GPU-1", "GPU-2"))
    folder = Path(mps.environment()["CUDA_MPS_PIPE_DIRECTORY"])
    assert folder.is_dir()
    assert mps.start(("GPU-1",)), "a second start is no second daemon"
    mps.stop()
    mps.stop()
    assert notes.read_text().splitlines() == ["start GPU-1,GPU-2", "told quit"]
    assert not folder.exists()
    assert not mps.environment()


def test_without_permission_gpus_are_time_sliced(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSE", "1")
    mps = Mps()
    assert not mps.start(("0",))
    assert "permission denied" in mps.reason
    assert not mps.environment()


def test_a_daemon_that_runs_is_left_alone(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    mps = Mps()
    assert not mps.start(("0",))
    assert "already" in mps.reason
    mps.stop()
    assert not notes.exists()


def test_no_tool_no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    mps = Mps()
    assert not mps.start(("0",))
    assert "not installed" in mps.reason


def environment(run: pk.Run) -> None:
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    run.report(loss=float(os.path.exists(os.path.join(folder, "control"))), gpu=float(run.device == "cuda:0"))


def test_workers_on_gpus_are_its_clients(notes: Path, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "0, GPU-aa, NVIDIA A40, 46068"\necho "1, GPU-bb, NVIDIA A40, 46068"\n')
    smi.chmod(0o755)
    executor = pk.Local()
    executor.open(Job(environment, tmp_path, ("loss",), meter=False, options={"sharing": True}))
    try:
        drive = Drive(executor, [segment(0, until=1), segment(1, until=1)], fraction=0.5)
        drive.finish(2)
        assert [drive.reports(trial)[0].metrics for trial in (0, 1)] == [{"loss": 1.0, "gpu": 1.0}] * 2
    finally:
        executor.close()
    assert notes.read_text().splitlines() == ["start 0,1", "told quit"]
