"""The pages: every public name is in the API, every piece of Python in them runs."""

import re
from pathlib import Path

import pytest

import tl_valuealign as va

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_api_page_names_everything_public():
    named = set(
        re.findall(r"^::: tl_valuealign\.(?:\w+\.)?(\w+)$", (DOCS / "api.md").read_text(), re.M)
    )
    assert named == set(va.__all__)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^  - .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert {page.name for page in DOCS.glob("*.md")} == listed


def test_every_image_is_there_and_used():
    used = set(re.findall(r"\]\(images/(.+?)\)", (DOCS / "figures.md").read_text()))
    assert used == {image.name for image in (DOCS / "images").iterdir()}


@pytest.mark.bridge
@pytest.mark.slow
@pytest.mark.parametrize("page", ["quickstart.md", "figures.md"])
def test_what_a_page_shows_runs_as_written(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert len(blocks) >= 5
    scope = {}
    for number, block in enumerate(blocks):
        code = compile(block, f"{page}, block {number}", "exec")
        exec(code, scope)  # the page is ours; that its code runs is the point
