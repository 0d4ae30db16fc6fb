"""Build the sdist and the wheel, look inside, install the wheel into a clean environment, run the quickstart from it.

Run with: python tools/release.py [--keep] (make release-check)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("penstock/py.typed", "penstock/__init__.py", "penstock/report/dashboard/static/app.js",
          "penstock/report/dashboard/static/index.html", "penstock/testing/kills.py")  # fmt: skip
IN_SOURCE = ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "Makefile", "constraints.txt",
             "src/penstock/py.typed", "tests/conftest.py", "examples/quickstart.py", "docs/index.md")  # fmt: skip
PROBE = """
import importlib.metadata, pathlib, sys
import penstock
home = pathlib.Path(penstock.__file__).resolve()
assert pathlib.Path(sys.prefix).resolve() in home.parents, f"{home} is not the wheel's"
assert (home.parent / "py.typed").exists()
assert penstock.__version__ == importlib.metadata.version("penstock") == sys.argv[1]
print("installed", penstock.__version__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    """A command that must succeed; nothing of this checkout is on its path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    print("+", *map(str, command), flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, env=clean | environment, check=True)


def look(wheel: Path, source: Path, version: str) -> None:
    """What must be inside is, and what must not is not."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in NEEDED if name not in names]
    strange = [
        n
        for n in names
        if not n.startswith(("penstock/", f"penstock-{version}.dist-info/")) or "__pycache__" in n
    ]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing += [name for name in IN_SOURCE if name not in inside]
    strange += [
        name
        for name in inside
        if name.startswith((".venv", "site/", ".git/")) or name.endswith((".db", ".pyc"))
    ]
    if missing or strange:
        raise SystemExit(f"missing in the distributions: {missing}; should not be there: {strange[:10]}")
    print(f"{wheel.name}: {len(names)} files; {source.name}: {len(inside)} files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the distributions in dist/")
    given = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        (wheel,), (source,) = (list((folder / "dist").glob(end)) for end in ("*.whl", "*.tar.gz"))
        look(wheel, source, version)
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        python = folder / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[examples]", cwd=folder)
        shutil.copy(ROOT / "examples" / "quickstart.py", folder)
        run(python, "-c", PROBE, version, cwd=folder)
        run(python, "-m", "pip", "check", cwd=folder)
        run(folder / "venv" / "bin" / "penstock", "--version", cwd=folder)
        run(python, "quickstart.py", cwd=folder)
        if given.keep:
            shutil.copytree(folder / "dist", ROOT / "dist", dirs_exist_ok=True)
    print("The wheel installs and runs.")


if __name__ == "__main__":
    main()
