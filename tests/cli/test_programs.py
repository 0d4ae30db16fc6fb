"""Programs that are forks of one process end, print and see the world as interpreters of their own do."""

import os
import subprocess
import sys

import pytest

from penstock.testing.programs import Programs

CODE = """
import json, os, sys
assert not hasattr(json, "left_behind")
json.left_behind = True
print(__name__, sys.argv, os.getcwd(), os.environ["WORD"], sys.path[0] in ("", os.getcwd()))
sys.stderr.write("to stderr")
"""
ENDS = {
    "returns": "",
    "exits": "import sys; sys.exit(3)",
    "says why": "raise SystemExit('no')",
    "fails": "1 / 0",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at the end": "import atexit; atexit.register(print, 'after'); print('before')",
}


@pytest.fixture(scope="module")
def programs():
    with Programs("json") as made:
        yield made


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_an_interpreter_does(programs, end, tmp_path):
    environment = os.environ | {"WORD": "here"}
    arguments = ["-c", CODE + ENDS[end], "a", "b c"]
    found = programs.run(arguments, cwd=tmp_path, env=environment)
    expected = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == expected.returncode
    assert found.stdout == expected.stdout
    assert found.stderr.splitlines()[-1] == expected.stderr.splitlines()[-1]


def test_a_script_finds_what_lies_beside_it(programs, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__': print(beside.WORD, sys.argv[1])")
    done = programs.run([str(script), "1"], cwd="/")
    assert (done.stdout, done.returncode) == ("beside 1\n", 0), done.stderr


def test_one_that_takes_too_long_is_an_error():
    with Programs() as programs, pytest.raises(TimeoutError, match="longer than"):
        programs.run(["-c", "import time; time.sleep(3)"], cwd="/", timeout=0.2)
