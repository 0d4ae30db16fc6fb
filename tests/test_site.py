"""The documentation's site: every page is in it, and its API reference names what there is."""

import re
from importlib import import_module
from pathlib import Path

import yaml

import penstock as pk
from penstock import integrations

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def pages(entries):
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages(value)


def named():
    return re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    nav = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_reference_names_what_there_is():
    for path in named():
        home, _, name = path.rpartition(".")
        if home.startswith(
            "penstock.integrations."
        ):  # imported by their own tests: their libraries are large
            source = (ROOT / "src" / Path(*home.split("."))).with_suffix(".py").read_text()
            assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), path
            continue
        assert getattr(import_module(home), name).__doc__, path


def test_every_integration_and_all_a_study_is_made_of_is_in_the_reference():
    there = {path.rpartition(".")[2] for path in named()}
    assert set(integrations.__all__) <= there
    assert {"Study", "Run", "Task", "Space", "Float", "Int", "Choice", "Budget", "Local", "Ray"} <= there & {
        *pk.__all__
    }


def test_links_between_pages_and_to_files_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
