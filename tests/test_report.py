"""The report is one safe, complete, small file that appears whole or not at all."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from fakes import fake_result
from typeguard import TypeCheckError

from tl_valuealign import DependencyError, InputError, StorageError, report_images
from tl_valuealign.identity import IdentityResult
from tl_valuealign.report import write_report
from tl_valuealign.report_data import script_safe
from tl_valuealign.report_text import table

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> <!-- \u2028 %{z} $y$"
ORDER = [
    "sources-V", "sources-K", "norms", "directions-V", "full-stream", "projected-V",
    "sources-V-50",
]  # fmt: skip


class Page(HTMLParser):
    """What a browser would find: elements with attributes, scripts, and words."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words, self._in = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def data(self):
        return json.loads(self.scripts[1], parse_constant=pytest.fail)


def report_of(result, tmp_path, **options):
    path = tmp_path / "report.html"
    write_report(result, path, **options)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    result = fake_result(24, 16)
    write_report(result, path)
    return result, path


def test_under_eight_megabytes_with_one_plotly(full_size):
    _, path = full_size
    assert path.stat().st_size < 8e6
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.scripts) == 3
    assert sum("plotly.js v" in script[:200] for script in page.scripts) == 1


def test_nothing_is_fetched(full_size):
    page = Page(full_size[1].read_text(encoding="utf-8"))
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        for name in ("src", "href", "srcset", "action", "data"):
            value = attrs.get(name) or ""
            assert not value or value.startswith(("#", "data:")) or tag == "a", (tag, value)
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv")]
    assert "default-src 'none'" in policy and "http" not in policy


def test_it_tells_its_story_in_the_post_s_order(full_size):
    result, path = full_size
    page = Page(path.read_text(encoding="utf-8"))
    assert list(page.data["figures"]) == ORDER
    places = [page.text.rindex(words) for words in (
        "What is each attention head of", "What was found", "The evidence",
        "Which earlier output do value heads look for?", "And key heads?",
        "How much of the whole stream do the heads see?", "How it was measured",
        "Everything that shaped these numbers",
    )]  # fmt: skip
    assert places == sorted(places)
    boxes = result.boxes()
    assert f"{int(boxes.sum())} of {boxes.numel()}" in page.text
    assert "12 sequences" in page.text and "made-up passages" in page.text
    assert ("meta", "width=device-width, initial-scale=1") in [
        (tag, attrs.get("content")) for tag, attrs in page.elements
    ]
    grids = [a for t, a in page.elements if t == "div" and a.get("class") == "plot"]
    assert len(grids) == 8 and all(a["aria-label"] for a in grids)
    still = [a["id"] for a in grids if a.get("tabindex") != "0"]
    assert still == ["figure-norms"], "it has no heads to move between"


def test_the_verdict_table_comes_first_where_there_is_one(tmp_path, monkeypatch):
    result = fake_result(4, 2)
    claims = pd.DataFrame({"claim": ["V <b>prefers</b> it"], "holds": [False], "effect": [0.25]})
    monkeypatch.setattr(type(result), "claims", lambda self: claims, raising=False)
    page = report_of(result, tmp_path)
    assert page.text.index("V <b>prefers</b> it") < page.text.index("averaged over all heads")
    assert "✗ no" in page.text and "0.250" in page.text


def test_each_statement_has_its_verdict_in_words(full_size):
    result, path = full_size
    page = Page(path.read_text(encoding="utf-8"))
    for row in result.claims().to_dict("records"):
        assert " ".join(row["words"].split()) in page.text
    badges = [attrs["class"] for tag, attrs in page.elements if "badge" in attrs.get("class", "")]
    assert len(badges) == 5 and set(badges) <= {f"badge {k}" for k in ("yes", "part", "no", "none")}


def test_packed_numbers_are_the_result_s(full_size):
    result, path = full_size
    data = Page(path.read_text(encoding="utf-8")).data
    kinds = {"u1": np.uint8, "u2": np.uint16, "f4": np.float32}

    def unpack(packed, shape):
        return np.frombuffer(base64.b64decode(packed["bdata"]), kinds[packed["dtype"]]).reshape(
            shape
        )

    for role, packed in data["roles"].items():
        values = result.role(role)
        shape = (2, len(data["sources"]), 24, 16)

        def whole(packed, empty, shape=shape):
            """Put back the layers that a source is not upstream of."""
            rows = unpack(packed, (2, -1, 16))
            full = np.full(shape, empty, rows.dtype)
            there = np.arange(24) >= np.array(data["starts"])[:, None]
            full[:, there] = rows
            return full

        codes = whole(packed["alignment"], 65535)
        got = np.where(codes == 65535, np.nan, codes / 65534)
        expected = np.concatenate([values.by_source, values.full[:, None]], axis=1)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        codes = whole(packed["stderr"], 255)
        got = np.where(codes == 255, np.nan, codes / 254 * packed["stderrScale"])
        expected = np.concatenate([values.by_source_stderr, values.full_stderr[:, None]], axis=1)
        np.testing.assert_allclose(got, expected, atol=packed["stderrScale"] / 254)
        np.testing.assert_array_equal(
            unpack(packed["directions"], (2, 24, 16)), values.n_directions
        )
        np.testing.assert_array_equal(unpack(packed["rank"], (24, 16)), values.numerical_rank)
        spectrum = unpack(packed["spectrum"], (24, 16, 64)) / 65534
        first = values.singular_values[..., :1].clamp(min=1e-30)
        np.testing.assert_allclose(spectrum, values.singular_values / first, atol=1e-5)
        boxes = unpack(packed["boxes"], (2, 24, 16))
        for at, threshold in enumerate(result.thresholds):
            np.testing.assert_array_equal(boxes[at] > 0, result.boxes(threshold, role=role))
            np.testing.assert_array_equal(
                boxes[at] > 1, result.boxes(threshold, role=role, significant=True)
            )


def test_hostile_text_stays_text(tmp_path):
    result = fake_result(4, 2, model_name=HOSTILE)
    result.provenance["text"] = [HOSTILE]
    result.provenance["odd"] = {HOSTILE: HOSTILE}
    page = report_of(result, tmp_path)
    assert len(page.scripts) == 3, "no script of the model's own"
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert "<script>alert(1)</script>" in page.text, "shown as words"
    assert page.data["layers"] == [0, 1, 2, 3]


def test_script_safe_json_is_the_same_json():
    value = {"a": HOSTILE, "b": "\u2029 & <!--"}
    text = script_safe(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


@pytest.mark.parametrize(
    "options",
    [
        {"roles": ("K",)},
        {"roles": ("Q", "K", "V", "OV"), "kv_heads": 2},
        {"thresholds": (0.8,)},
        {"thresholds": tuple(np.linspace(0.05, 1, 8).round(3).tolist())},
        {"n_sequences": 3},
        {"components": ("attn_out", "mlp_out"), "positions": True},
        {"components": ("mlp_out",)},
        {"layer_numbers": (1, 3)},
        {"metric": "pooled"},
    ],
)
def test_whatever_was_measured_is_reported(tmp_path, options):
    result = fake_result(4, 4, **options)
    page = report_of(result, tmp_path)
    assert set(page.data["roles"]) == set(result.roles)
    assert "norms" in page.data["figures"] and "full-stream" in page.data["figures"]
    assert ("sources-V-50" in page.data["figures"]) == (
        "V" in result.roles and 0.5 in result.thresholds
    )
    if result.sums.n_sequences < 8:
        assert "fewer than 8 sequences" in page.text and page.data["roles"]["V"]["stderr"] is None


def test_tables_escape_align_and_word():
    frame = pd.DataFrame({"a_b": ["<i>"], "n": [np.nan], "yes": [True], "k": [3]})
    html = table(frame, "<c>")
    assert "<i>" not in html and "&lt;i&gt;" in html and "&lt;c&gt;" in html
    assert "a b" in html and "✓ yes" in html
    assert html.count("class=number") == 4  # n and k, in head and body


def test_existing_files_are_kept_unless_told(tmp_path):
    result, path = fake_result(2, 2), tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(StorageError, match="overwrite=True"):
        write_report(result, path)
    assert path.read_text() == "mine"
    write_report(result, path, overwrite=True)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("where", ["folder", "missing/report.html"])
def test_places_that_cannot_hold_a_file(tmp_path, where):
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=re.escape(str(tmp_path))):
        write_report(fake_result(2, 2), tmp_path / where, overwrite=True)
    assert not list(tmp_path.rglob("*.part"))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(StorageError, match="disk full"):
        write_report(fake_result(2, 2), path, overwrite=True)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_images_are_written_beside_the_report(tmp_path, monkeypatch):
    asked = {}

    def render(figures, kind):
        asked.update(figures)
        assert kind == "svg" and all(isinstance(f, go.Figure) for f in figures.values())
        return {name: name.encode() for name in figures}

    monkeypatch.setattr("tl_valuealign.report.render", render)
    write_report(fake_result(4, 2), tmp_path / "r.html", images="svg")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"r.html"} | {f"r-{name}.svg" for name in ORDER}
    assert (tmp_path / "r-norms.svg").read_bytes() == b"norms"
    assert all(figure.layout.title.text for figure in asked.values()), "with their own titles"


def test_an_image_in_the_way_stops_everything(tmp_path):
    (tmp_path / "r-norms.png").write_text("mine")
    with pytest.raises(StorageError, match="r-norms.png exists"):
        write_report(fake_result(4, 2), tmp_path / "r.html", images="png")
    assert not (tmp_path / "r.html").exists()


def test_unknown_images_and_missing_kaleido(tmp_path, monkeypatch):
    result, path = fake_result(2, 2), tmp_path / "r.html"
    with pytest.raises(InputError, match="png, svg, pdf"):
        write_report(result, path, images="gif")
    monkeypatch.setitem(__import__("sys").modules, "kaleido", None)
    with pytest.raises(DependencyError, match="pip install kaleido"):
        write_report(result, path, images="png")
    assert not path.exists()


def test_a_browser_that_never_answers_runs_into_the_limit(monkeypatch):
    import asyncio
    import sys
    from types import SimpleNamespace

    class Stuck:
        def __init__(self, **_):
            pass

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def calc_fig(self, *_, **__):
            await asyncio.Event().wait()

    fake = SimpleNamespace(Kaleido=Stuck, PageGenerator=lambda **_: None)
    monkeypatch.setitem(sys.modules, "kaleido", fake)
    with pytest.raises(DependencyError, match="0 of 1 images in 0 s"):
        report_images.render({"one": go.Figure()}, "png", seconds=0.05)


def test_only_results_are_reported(tmp_path):
    with pytest.raises(TypeCheckError):
        write_report({"not": "a result"}, tmp_path / "r.html")


def test_answers_about_another_model_are_refused(tmp_path):
    result = fake_result(2, 2)
    table = pd.DataFrame(
        {name: [] for name in ("role", "layer", "head", "direction", "share", "positive")}
    )
    with pytest.raises(InputError, match="'negative' is missing.*decode_directions"):
        write_report(result, tmp_path / "r.html", directions=table)
    table = table.assign(negative=[])
    table.attrs["model_hash"] = "another"
    with pytest.raises(InputError, match="directions: it is about other weights"):
        write_report(result, tmp_path / "r.html", directions=table)
    table.attrs["model_hash"] = result.provenance["model_hash"]
    write_report(result, tmp_path / "r.html", directions=table)
    row = {"role": "V", "layer": 0, "head": 1, "direction": "0", "share": 0.5}
    row |= {"positive": ["a"], "negative": []}
    for change, words in (
        ({"positive": "['a']"}, r"V L0H1: positive is .*, expected a list of strings"),
        ({"negative": float("nan")}, "negative is nan"),
        ({"positive": [float("nan")]}, "expected a list of strings"),
        ({"share": float("inf")}, "share is inf, expected a finite number"),
        ({"layer": "zero"}, "layer is 'zero'"),
        ({"role": "Z"}, "role is 'Z', expected one of Q"),
        ({}, "V L0H1 has direction 0 twice"),
    ):
        bad = pd.DataFrame([row, row | change])
        bad.attrs.update(table.attrs)
        with pytest.raises(InputError, match=f"directions: .*{words}"):
            write_report(result, tmp_path / "s.html", directions=bad)
    bad.attrs.clear()
    with pytest.raises(InputError, match="does not say which weights"):
        write_report(result, tmp_path / "s.html", directions=bad)
    other = IdentityResult({}, (0, 1), 10, 5, False, {"model_hash": "another"})
    with pytest.raises(InputError, match="further: it is about other weights"):
        write_report(result, tmp_path / "s.html", further=[other])
    assert not (tmp_path / "s.html").exists()
