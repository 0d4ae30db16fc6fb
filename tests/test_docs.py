"""Every Python block in the README and the docs runs, in order, in one namespace per file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for number, code in enumerate(blocks(page)):
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def test_there_is_something_to_run():
    assert blocks(ROOT / "README.md")


def test_the_two_commands_stand_at_the_top_of_the_readme():
    top = (ROOT / "README.md").read_text()[:1500]
    assert "make quickstart" in top
    assert "make test" in top
