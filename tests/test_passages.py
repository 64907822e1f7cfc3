"""The bundled text: many kinds, a bounded size, and a hash that follows every change."""

import ast
import hashlib
import json
import unicodedata

import pytest

from tl_valuealign import passages
from tl_valuealign.passages import PASSAGE_KINDS, PASSAGES, PASSAGES_VERSION, passages_hash


def text_of(kind: str) -> str:
    return PASSAGES[PASSAGE_KINDS.index(kind)]


def scripts(text: str) -> set[str]:
    """First words of the Unicode names of the letters, such as LATIN or CYRILLIC."""
    return {unicodedata.name(c, "?").split()[0] for c in text if c.isalpha()}


def test_about_forty_passages_each_with_a_kind():
    assert isinstance(PASSAGES, tuple)
    assert 38 <= len(PASSAGES) <= 45
    assert len(PASSAGE_KINDS) == len(PASSAGES)
    assert len(set(PASSAGE_KINDS)) == len(PASSAGE_KINDS)


def test_no_passage_repeats_another():
    stretches = [{text[i : i + 40] for i in range(len(text) - 39)} for text in PASSAGES]
    assert len(set(PASSAGES)) == len(PASSAGES)
    assert len(set().union(*stretches)) == sum(map(len, stretches))


def test_size_stays_within_the_token_budget():
    # About three bytes make a token of a GPT-2-like vocabulary over this mixture, so these bounds
    # stand for 4,000 to 6,000 tokens in all and 60 to 200 a passage, with no tokenizer at hand.
    sizes = [len(text.encode("utf-8")) for text in PASSAGES]
    assert 14_000 <= sum(sizes) <= 20_000
    assert 240 <= min(sizes) and max(sizes) <= 700


def test_first_dozen_already_cover_the_main_kinds():
    first = set(PASSAGE_KINDS[:12])
    assert {"narrative", "code, Python", "news", "dialogue", "mathematics", "table"} <= first
    assert "LATIN" in scripts(PASSAGES[0])
    assert any("CJK" in scripts(text) for text in PASSAGES[:12])


@pytest.mark.parametrize(
    "kind, script",
    [
        ("Chinese", "CJK"),
        ("Russian", "CYRILLIC"),
        ("Arabic", "ARABIC"),
        ("Hindi", "DEVANAGARI"),
        ("Japanese", "HIRAGANA"),
        ("French", "LATIN"),
    ],
)
def test_each_language_is_in_its_own_script(kind, script):
    assert script in scripts(text_of(kind))
    assert not scripts(text_of("news")) - {"LATIN"}


def test_text_is_clean():
    for text in PASSAGES:
        assert text == text.strip("\n") and text
        assert text == unicodedata.normalize("NFC", text)
        assert not [c for c in text if unicodedata.category(c) in ("Cc", "Co", "Cn") and c != "\n"]
        assert "\ufffd" not in text and "\n=== " not in text


def test_the_python_passage_does_what_it_says():
    space: dict = {}
    exec(compile(ast.parse(text_of("code, Python")), "passage", "exec"), space)
    graph = {1: [2, 3], 2: [4], 3: [4], 4: [5], 5: [], 6: [1]}
    assert space["shortest_path"](graph, 1, 5) == [1, 2, 4, 5]
    assert space["shortest_path"](graph, 1, 6) is None
    assert space["shortest_path"](graph, 6, 6) == [6]


def test_the_data_passages_are_well_formed():
    assert len(json.loads(text_of("data, JSON"))["readings"]) == 2
    rows = [line for line in text_of("table").splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert len({len(line) for line in rows}) == 1


def test_hash_is_that_of_the_texts(monkeypatch):
    oracle = hashlib.sha256(b"".join(text.encode() + b"\0" for text in PASSAGES)).hexdigest()
    assert passages_hash() == oracle

    # One letter, the order, and the place of a boundary all count.
    seen = {oracle}
    for other in (
        (PASSAGES[0] + "!", *PASSAGES[1:]),
        PASSAGES[::-1],
        (PASSAGES[0] + PASSAGES[1], *PASSAGES[2:]),
    ):
        monkeypatch.setattr(passages, "PASSAGES", other)
        seen.add(passages_hash())
    assert len(seen) == 4


def test_version_and_hash_go_together():
    # Results name the version: whoever edits a passage raises it and writes both down here.
    expected = "284947e0b94064e7575b535bd3711b37ecf0f69e85c88189b39ae59987ae5a80"
    assert (PASSAGES_VERSION, passages_hash()) == ("1", expected)
