"""Every example runs as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing.programs import Programs

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def with_torch():
    """Processes that find torch, its compiler and scikit-learn imported."""
    with Programs("torch", "torch._dynamo", "sklearn.datasets", "penstock") as programs:
        yield programs


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example, tmp_path, request):
    environment = {**os.environ, "PENSTOCK_EXAMPLE_QUICK": "1"}
    if "\nimport torch\n" in example.read_text():
        programs = request.getfixturevalue("with_torch")
        done = programs.run([str(example)], cwd=tmp_path, env=environment)
    else:  # a study whose driver has torch starts its workers another way
        done = subprocess.run(
            [sys.executable, str(example)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_says_how_to_run_it_on_its_first_line(example):
    first = example.read_text().splitlines()[0]
    assert first.startswith("# Run with: ")
    assert example.name in first or "make quickstart" in first
