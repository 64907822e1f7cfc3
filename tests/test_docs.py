"""The pages: every public name is in the API, every piece of Python in them runs."""

import re
from pathlib import Path

import pytest

import tl_valuealign as va

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def found(pattern, path):
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_api_page_names_everything_public():
    named = found(r"^::: tl_valuealign\.(?:\w+\.)*(\w+)$", DOCS / "api.md")
    assert sorted(named) == sorted(va.__all__)


def test_every_page_is_in_the_navigation():
    listed = found(r"^  - .*: (\w+\.md)$", ROOT / "mkdocs.yml")
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_every_image_is_there_and_used():
    used = found(r"\]\(images/(.+?)\)", DOCS / "figures.md")
    assert sorted(used) == sorted(image.name for image in (DOCS / "images").iterdir())


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
