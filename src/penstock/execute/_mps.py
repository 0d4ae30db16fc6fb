"""NVIDIA's Multi-Process Service, started for a study whose trials share GPUs, and stopped with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from typing import final

_TOOL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0


@final
class Mps:
    """An MPS daemon of our own, or the reason why there is none: then processes take turns on a GPU (time slicing).

    One that runs already (its pipe directory is set) is used and left alone. Not shared between threads.
    """

    def __init__(self) -> None:
        self.reason = ""  # why it is not used
        self._folder: str | None = None

    @property
    def active(self) -> bool:
        """Whether a daemon of ours runs."""
        return self._folder is not None

    def environment(self) -> dict[str, str]:
        """What a worker needs in its environment to be a client."""
        if self._folder is None:
            return {}
        return {
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(self._folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(self._folder, "log"),
        }

    def start(self, gpus: tuple[str, ...]) -> bool:
        """Start the daemon for these GPUs (as CUDA_VISIBLE_DEVICES names them), if the machine lets us."""
        if self.active:
            return True
        if os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
            self.reason = "an MPS daemon runs already"
            return False
        tool = shutil.which(_TOOL)
        if tool is None or not gpus:
            self.reason = f"{_TOOL} is not installed" if gpus else "there are no GPUs"
            return False
        folder = tempfile.mkdtemp(prefix="penstock-mps-")
        for name in ("pipe", "log"):
            os.mkdir(os.path.join(folder, name))
        self._folder = folder
        try:
            subprocess.run(
                [tool, "-d"],
                env={**os.environ, **self.environment(), "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or str(error)
            self.reason = f"{_TOOL} could not be started: {detail.strip()}"
            self._forget()
            return False
        return True

    def stop(self) -> None:
        """End our daemon, once its clients are gone. Idempotent."""
        tool = shutil.which(_TOOL)
        if self._folder is None:
            return
        if tool is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [tool],
                    input="quit\n",
                    env={**os.environ, **self.environment()},
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT_S,
                )
        self._forget()

    def _forget(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
