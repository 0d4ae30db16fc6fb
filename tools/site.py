"""Build the documentation of this version into site/VERSION, beside those of other versions.

Run with: python tools/site.py [--site FOLDER] (make docs)

``site/versions.json`` lists the versions for the page's version menu, ``site/latest`` is the newest one's, and
``site/index.html`` leads there. Copy site/ of earlier releases in place before building to keep them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAD = """<!doctype html>
<meta charset="utf-8">
<title>Penstock</title>
<meta http-equiv="refresh" content="0; url=latest/">
"""


def versions(site: Path) -> list[str]:
    """The versions built there, newest first."""
    found = [path.parent.name for path in site.glob("*/index.html") if path.parent.name[:1].isdigit()]
    return sorted(
        found,
        key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")],
        reverse=True,
    )


def index(site: Path) -> None:
    """Write the list of versions, the newest one's copy and the page that leads to it."""
    names = versions(site)
    listed = [{"version": n, "title": n, "aliases": ["latest"] if n == names[0] else []} for n in names]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    shutil.rmtree(site / "latest", ignore_errors=True)
    shutil.copytree(site / names[0], site / "latest")
    (site / "index.html").write_text(LEAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    given = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(given.site / version),
    ]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    index(given.site)
    print(f"{given.site}: {', '.join(versions(given.site))}")


if __name__ == "__main__":
    main()
