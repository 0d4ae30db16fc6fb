"""Fake GPUs for the energy tests: the NVML stub, loaded where the real library would be."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parent / "nvml_stub" / "nvml_stub.py"


@pytest.fixture(scope="session")
def nvml_stub() -> ModuleType:
    """The stub's Python side."""
    spec = importlib.util.spec_from_file_location("nvml_stub", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvml_stub"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory, nvml_stub: ModuleType) -> Path:
    """The stub, built, and preloaded under its soname so that nvidia-ml-py's own load finds it."""
    library: Path = nvml_stub.build(tmp_path_factory.mktemp("nvml"))
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


@pytest.fixture(autouse=True)
def private_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees another's readers."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def gpus(
    nvml_library: Path, nvml_stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., object]]:
    """``gpus(2)`` makes two fake GPUs that this process and its children see."""
    made = []

    def make(count: int = 1, *, virtual: bool = False) -> object:
        stub = nvml_stub.NvmlStub(tmp_path / f"gpus{len(made)}", count, virtual=virtual)
        made.append(stub)
        for name, value in stub.environment(nvml_library).items():
            if name in ("LD_LIBRARY_PATH", nvml_stub.ENVIRONMENT):
                monkeypatch.setenv(name, value)
        return stub

    yield make
    for stub in made:
        stub.close()


@pytest.fixture
def powercap(tmp_path: Path) -> Callable[[dict[str, tuple[str, int, int]]], Path]:
    """``powercap({"intel-rapl:0": ("package-0", energy_uj, range_uj)})`` makes a powercap tree."""

    def make(zones: dict[str, tuple[str, int, int]]) -> Path:
        root = tmp_path / "powercap"
        for path, (name, energy_uj, range_uj) in zones.items():
            zone = root / path
            zone.mkdir(parents=True)
            (zone / "name").write_text(f"{name}\n")
            (zone / "energy_uj").write_text(f"{energy_uj}\n")
            (zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
        return root

    return make
