"""Figures and report as a reader meets them: in a real browser, with mouse and keyboard.

Screenshots are left in ``screenshots/`` for whoever changes a figure to look at.
"""

import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import fake_result
from playwright.sync_api import sync_playwright

import tl_valuealign as va
from tl_valuealign.plots import (
    plot_directions,
    plot_explorer,
    plot_full_stream,
    plot_norms,
    plot_projected_norms,
    plot_sources,
)
from tl_valuealign.report import write_report

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).parents[1] / "screenshots"
SIZES = {"6x2": (6, 2), "24x16": (24, 16), "gqa": (30, 9, 3), "80x64": (80, 64)}
FIGURES = {
    "full_stream": plot_full_stream,
    "full_stream_relative": lambda result: plot_full_stream(result, relative=True),
    "sources": plot_sources,
    "norms": plot_norms,
    "directions": plot_directions,
    "projected": plot_projected_norms,
    "explorer": plot_explorer,
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def results():
    made = {name: fake_result(*size) for name, size in SIZES.items()}
    made["gqa"] = fake_result(
        *SIZES["gqa"], components=("attn_out", "mlp_out"), positions=True, n_sequences=4
    )
    return made


@pytest.fixture(scope="module")
def reports(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, result in results.items():
        write_report(result, folder / f"{name}.html")
    return folder


@pytest.fixture
def visit(browser):
    """Open a file; at the end, nothing may have complained or asked for anything elsewhere."""
    contexts, problems = [], []

    def request(sent):
        if not sent.url.startswith(("file:", "data:", "blob:")):
            problems.append(f"request to {sent.url}")

    def visit(path, *, width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", request)
        page.goto(f"file://{path}")
        if "data-drawn" in Path(path).read_text(encoding="utf-8") or 'id="data"' in Path(
            path
        ).read_text(encoding="utf-8"):
            page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        else:
            page.wait_for_selector(".main-svg .infolayer text")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def show(visit, tmp_path):
    """Open one figure as a page of its own."""

    def show(figure, name="figure"):
        path = tmp_path / f"{name}.html"
        path.write_text(
            "<!doctype html><meta charset=utf-8><body style='margin:10px'>"
            + figure.to_html(full_html=False, include_plotlyjs=True),
            encoding="utf-8",
        )
        size = {"width": int(figure.layout.width) + 20, "height": int(figure.layout.height) + 20}
        return visit(path, **size)

    return show


WORDS = """gd => Array.from(gd.querySelectorAll(
    '.infolayer text, [class$="tick"] text, .updatemenu-container text')).map(text => {
  const box = text.getBoundingClientRect();
  let shown = box.width > 0 && getComputedStyle(text).opacity !== '0';
  for (let e = text; e && e !== gd; e = e.parentElement)
    shown = shown && getComputedStyle(e).display !== 'none';
  return {words: text.textContent, shown, left: box.left, top: box.top, right: box.right,
          bottom: box.bottom, size: parseFloat(getComputedStyle(text).fontSize)};
}).filter(text => text.shown)"""


def overlapping(words):
    """Pairs of texts whose boxes share more than a hair."""
    boxes = np.array([[w["left"], w["top"], w["right"], w["bottom"]] for w in words])
    across = np.minimum.outer(boxes[:, 2], boxes[:, 2]) - np.maximum.outer(boxes[:, 0], boxes[:, 0])
    down = np.minimum.outer(boxes[:, 3], boxes[:, 3]) - np.maximum.outer(boxes[:, 1], boxes[:, 1])
    pairs = np.argwhere(np.triu((across > 1) & (down > 3), 1))
    return [(words[a]["words"], words[b]["words"]) for a, b in pairs]


def check_legible(page, gd):
    words = page.evaluate(WORDS, gd)
    assert len(words) > 5
    frame = page.evaluate(
        "gd => gd.querySelector('.main-svg').getBoundingClientRect().toJSON()", gd
    )
    for word in words:
        assert word["size"] >= 10, word
        assert word["left"] >= frame["left"] - 1 and word["right"] <= frame["right"] + 1, word
        assert word["top"] >= frame["top"] - 1 and word["bottom"] <= frame["bottom"] + 1, word
    assert overlapping(words) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_inside_and_apart(results, show, name, size):
    page = show(FIGURES[name](results[size]))
    page.screenshot(path=SCREENSHOTS / f"{name}-{size}.png")
    check_legible(page, page.query_selector(".js-plotly-plot"))


CORNERS = """gd => {
  const corners = [];
  for (const path of gd.querySelectorAll('.shapelayer path')) {
    const to = path.getScreenCTM();
    const subs = path.getAttribute('d').split('M').filter(s => s.trim());
    for (const sub of subs) {
      const numbers = sub.match(/-?[\\d.]+(?:e-?\\d+)?/g).map(Number);
      const points = [];
      for (let i = 0; i + 1 < numbers.length; i += 2) {
        const p = new DOMPoint(numbers[i], numbers[i + 1]).matrixTransform(to);
        points.push([p.x, p.y]);
      }
      corners.push(points);
    }
  }
  return corners;
}"""


@pytest.mark.parametrize("size", ["6x2", "24x16", "80x64"])
def test_boxes_lie_on_cell_edges_to_a_pixel(results, show, size):
    result = results[size]
    page = show(plot_full_stream(result))
    gd = page.query_selector(".js-plotly-plot")
    grid = v_grid(page, gd)
    layers, heads = result.boxes().shape
    width, height = grid["width"] / heads, grid["height"] / layers
    found = set()
    for points in page.evaluate(CORNERS, gd):
        xs, ys = np.array(points).T
        if np.ptp(xs) < 1:
            continue
        head, row = (xs.min() - grid["x"]) / width, (ys.min() - grid["y"]) / height
        assert abs(head - round(head)) * width < 1 and abs(row - round(row)) * height < 1
        assert abs(np.ptp(xs) - width) < 1 and abs(np.ptp(ys) - height) < 1
        found.add((round(row), round(head)))
    assert found == {tuple(cell) for cell in np.argwhere(result.boxes().numpy()).tolist()}
    strokes = page.eval_on_selector_all(
        ".shapelayer path", "all => all.map(p => getComputedStyle(p).strokeWidth)"
    )
    assert set(strokes) == {"2px"}


def v_grid(page, gd, role="V"):
    """Where a role's cells are on the page, from the picture that plotly drew."""
    return page.evaluate(
        """([gd, role]) => {
          const at = gd._fullData.findIndex(t => t.type === 'heatmap' && t.meta &&
            t.meta.role === role && !t.meta.missing);
          const t = gd._fullData[at];
          const plot = gd._fullLayout._plots[t.xaxis + t.yaxis].plotgroup.node();
          const image = Array.from(plot.querySelectorAll('.hm image'))[0];
          return image.getBoundingClientRect().toJSON();
        }""",
        [gd, role],
    )


def test_empty_cells_look_and_read_differently(results, show):
    page = show(plot_sources(results["24x16"], role="V", layers=[12, 20]))
    gd = page.query_selector(".js-plotly-plot")
    point = """([gd, x, y]) => {
      const t = gd._fullData[1], l = gd._fullLayout;
      const xa = l['xaxis' + t.xaxis.slice(1)], ya = l['yaxis' + t.yaxis.slice(1)];
      const box = gd.getBoundingClientRect();
      return [box.left + xa._offset + xa.l2p(x), box.top + ya._offset + ya.l2p(t.y0 + y)];
    }"""
    colours = {}
    for row, expected in ((3, "alignment 0."), (16, "not upstream of block 12")):
        x, y = page.evaluate(point, [gd, 5, row])
        page.mouse.move(x, y)
        page.wait_for_selector(".hoverlayer .hovertext")
        text = page.text_content(".hoverlayer")
        assert f"L12H5 · V · attention output of block {row}" in text and expected in text
        page.mouse.move(2, 2)
        page.wait_for_selector(".hoverlayer .hovertext", state="detached")
        shot = page.screenshot(clip={"x": x - 5, "y": y - 5, "width": 10, "height": 10})
        colours[row] = pixels(shot).reshape(-1, 3).astype(int)
    saturation = {row: np.ptp(c, axis=1).max() for row, c in colours.items()}
    assert saturation[3] > 30 and saturation[16] < 8, "colour against grey"
    assert len(np.unique(colours[16], axis=0)) > 2, "and hatched"


def pixels(png):
    """RGB of an 8-bit PNG without interlacing, [row, column, 3] (PNG specification, chapter 9)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", body[:10])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    step = {2: 3, 6: 4}[colour]
    raw = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * step)
    rows = np.zeros((height + 1, (width + 1) * step), int)  # a row above, a pixel to the left
    for y, line in enumerate(raw.astype(int), 1):
        filtering, values = line[0], line[1:]
        for x in range(width * step):
            left, up, corner = rows[y, x], rows[y - 1, x + step], rows[y - 1, x]
            nearest = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
            guess = (0, left, up, (left + up) // 2, nearest)[filtering]
            rows[y, x + step] = (values[x] + guess) % 256
    return rows[1:, step:].reshape(height, width, step)[..., :3]


STATE = """gd => {
  const layout = gd._fullLayout;
  const inSight = t => t.visible === true &&
    Math.max(...layout['xaxis' + t.xaxis.slice(1)].range) < 1000 &&
    Math.max(...layout['yaxis' + t.yaxis.slice(1)].range) < 1000;
  const heats = gd._fullData.filter(t => t.type === 'heatmap' && inSight(t));
  const [heat] = heats;
  const boxes = layout.shapes.filter(s => s.xref === heat.xaxis && s.yref === heat.yaxis)
    .reduce((n, s) => n + (s.path.match(/L/g) || []).length / 4, 0);
  const legend = Array.from(gd.querySelectorAll('[class^="legend"][class$="text"]'))
    .map(t => t.textContent);
  return {count: heats.length, z: heat.z.map(r => Array.from(r)), boxes, legend,
          drawn: layout[heat.coloraxis].showscale};
}"""


def expected_state(result, role, source, view, threshold):
    values = result.alignment(role, source, threshold)
    chance = result.role(role).chance[result.threshold_index(threshold)]
    shown = np.log2((values / chance).numpy()) if view else values.numpy()
    boxes = result.boxes(threshold, role=role)
    words = f"{int(boxes.sum())} of {boxes.numel()} {role} heads: full stream above embedding"
    return shown, int(boxes.sum()), words


def check_state(page, gd, *expected):
    shown, boxes, words = expected_state(*expected)
    row, head = np.argwhere(np.isfinite(shown))[-1].tolist()
    page.wait_for_function(  # plotly answers a click a moment later
        f"([gd, row, head, z]) => Math.abs(({STATE})(gd).z[row][head] - z) < 2e-4",
        arg=[gd, row, head, float(shown[row, head])],
        timeout=10_000,
    )
    state = page.evaluate(STATE, gd)
    z = np.array([[np.nan if v is None else v for v in row] for row in state["z"]], dtype=float)
    np.testing.assert_allclose(z, shown, atol=2e-4)
    assert (state["count"], state["boxes"], state["drawn"]) == (1, boxes, True)
    assert words in state["legend"]


def test_explorer_s_menus_and_slider_move_values_and_boxes_together(results, show):
    result = results["24x16"]
    page = show(plot_explorer(result))
    gd = page.query_selector(".js-plotly-plot")

    def choose(menu, label):
        page.locator(".updatemenu-header").nth(menu).click()
        page.locator(".updatemenu-dropdown-button").filter(
            has=page.get_by_text(label, exact=True)
        ).click()
        page.wait_for_function("gd => !gd.querySelector('.updatemenu-dropdown-button')", arg=gd)

    check_state(page, gd, result, "V", "full", 0, 0.9)
    choose(0, "K")
    check_state(page, gd, result, "K", "full", 0, 0.9)
    choose(1, "token embedding")
    check_state(page, gd, result, "K", "embed", 0, 0.9)
    rail = page.locator(".slider-rail-rect").bounding_box()
    page.mouse.click(rail["x"] + 3, rail["y"] + rail["height"] / 2)
    page.wait_for_function("gd => gd._fullLayout.sliders[0].active === 0", arg=gd)
    check_state(page, gd, result, "K", "embed", 0, 0.5)
    choose(2, "relative to chance")
    check_state(page, gd, result, "K", "embed", 1, 0.5)
    choose(0, "V")
    choose(1, "attention output of block 3")
    check_state(page, gd, result, "V", "3_attn_out", 1, 0.5)
    page.screenshot(path=SCREENSHOTS / "explorer-24x16-chosen.png")
    page.mouse.click(rail["x"] + rail["width"] - 3, rail["y"] + rail["height"] / 2)
    page.wait_for_function("gd => gd._fullLayout.sliders[0].active === 1", arg=gd)
    choose(2, "alignment")
    check_state(page, gd, result, "V", "3_attn_out", 0, 0.9)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_report_opens_in_silence(reports, visit, size, scheme):
    page = visit(reports / f"{size}.html", color_scheme=scheme)
    assert page.locator(".plot .main-svg").count() >= 8 * 2
    for gd in page.query_selector_all(".plot"):
        check_legible(page, gd)
    ink = page.evaluate("getComputedStyle(document.body).color")
    ticks = page.eval_on_selector_all(
        '.plot [class$="tick"] text', "all => [...new Set(all.map(t => getComputedStyle(t).fill))]"
    )
    assert ticks == [ink], "the figures' words follow the page"
    page.screenshot(path=SCREENSHOTS / f"report-{size}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("size", ["6x2", "24x16", "gqa"])
def test_report_on_a_phone(reports, visit, size):
    page = visit(reports / f"{size}.html", width=390, height=844)
    page.screenshot(path=SCREENSHOTS / f"report-{size}-phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for gd in page.query_selector_all(".plot"):
        assert page.evaluate("gd => gd.scrollWidth - gd.clientWidth", gd) <= 0
        check_legible(page, gd)


def test_turning_a_phone_redraws_for_the_new_width(reports, visit):
    page = visit(reports / "6x2.html", width=390, height=844)
    gd = page.query_selector("#figure-full-stream")
    upright = page.evaluate("gd => gd._fullLayout.width", gd)
    for width in (844, 390, 844):  # faster than it can draw
        page.set_viewport_size({"width": width, "height": 390})
    page.wait_for_timeout(100)
    page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
    assert upright < 390 < page.evaluate("gd => gd._fullLayout.width", gd)
    for gd in page.query_selector_all(".plot"):
        check_legible(page, gd)


def cell_centre(page, name, role, layer, head):
    gd = page.query_selector(f"#figure-{name}")
    gd.scroll_into_view_if_needed()
    page.evaluate("gd => gd.scrollIntoView({behavior: 'instant', block: 'center'})", gd)
    return page.evaluate(
        """([gd, role, row, head]) => {
          const t = gd._fullData.find(t => t.type === 'heatmap' && t.meta.role === role &&
            !t.meta.missing && t.meta.layer == null);
          const l = gd._fullLayout, box = gd.getBoundingClientRect();
          const xa = l['xaxis' + t.xaxis.slice(1)], ya = l['yaxis' + t.yaxis.slice(1)];
          return [box.left + xa._offset + xa.l2p(head), box.top + ya._offset + ya.l2p(row)];
        }""",
        [gd, role, layer, head],
    )


def test_a_click_opens_the_head_that_was_clicked(results, reports, visit):
    result = results["24x16"]
    page = visit(reports / "24x16.html")
    for name, role, layer, head in (
        ("full-stream", "V", 7, 3),
        ("full-stream", "Q", 23, 15),
        ("directions-V", "V", 0, 9),
        ("explorer", "V", 20, 0),
    ):
        x, y = cell_centre(page, name, role, layer, head)
        page.mouse.move(x, y)
        page.mouse.click(x, y)
        page.wait_for_selector("#head[open]")
        assert page.inner_text("#head-title") == f"L{layer}H{head} · {role}"
        facts = page.inner_text("#head-facts")
        assert f"{float(result.alignment(role, 'full')[layer, head]):.3f} ±" in facts
        assert f"{float(result.role(role).chance[0, layer, head]):.3f}" in facts
        assert f"{int(result.role(role).n_directions[0, layer, head])} of 64 carry 90%" in facts
        ranked = page.eval_on_selector("#head-sources", "gd => Array.from(gd.data[0].x)")
        upstream = result.V.by_source[0, :, layer, head].isfinite().sum() + 1
        assert ranked == sorted(ranked, reverse=True) and len(ranked) == int(upstream)
        if name == "explorer":
            page.screenshot(path=SCREENSHOTS / "report-head.png")
        page.click("#head-close")
        page.wait_for_selector("#head:not([open])", state="attached")


def test_a_small_grid_s_block_is_the_one_in_its_heading(reports, visit):
    page = visit(reports / "24x16.html")
    gd = page.query_selector("#figure-sources-V")
    page.evaluate("gd => gd.scrollIntoView({behavior: 'instant', block: 'center'})", gd)
    x, y = page.evaluate(
        """gd => {
          const t = gd._fullData.find(t => t.type === 'heatmap' &&
            t.meta.layer === 18 && t.z.length > 5);
          const l = gd._fullLayout, box = gd.getBoundingClientRect();
          const xa = l['xaxis' + t.xaxis.slice(1)], ya = l['yaxis' + t.yaxis.slice(1)];
          return [box.left + xa._offset + xa.l2p(4), box.top + ya._offset + ya.l2p(t.y0 + 2)];
        }""",
        gd,
    )
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    page.wait_for_selector("#head[open]")
    assert page.inner_text("#head-title") == "L18H4 · V"


def test_all_of_it_by_keyboard(results, reports, visit):
    page = visit(reports / "gqa.html")
    page.focus("#figure-full-stream")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    value = float(results["gqa"].alignment("Q", "full")[3, 1])
    assert page.inner_text("#spoken").startswith(f"L3H1 · Q · full stream, alignment {value:.3f}")
    cursor = page.locator("#figure-full-stream .cursor").bounding_box()
    x, y = cell_centre(page, "full-stream", "Q", 3, 1)
    cursor = page.locator("#figure-full-stream .cursor").bounding_box()
    assert abs(cursor["x"] + cursor["width"] / 2 - x) < 2
    assert abs(cursor["y"] + cursor["height"] / 2 - y) < 2
    page.keyboard.press("Enter")
    page.wait_for_selector("#head[open]")
    assert page.inner_text("#head-title") == "L3H1 · Q"
    page.get_by_role("button", name="V", exact=True).click()
    assert page.inner_text("#head-title") == "L3H0 · V", "the value head that serves it"
    page.keyboard.press("Escape")
    page.wait_for_selector("#head:not([open])", state="attached")
    assert page.evaluate("document.activeElement.id") == "figure-full-stream"


def test_the_report_s_explorer_moves_values_and_boxes_together(results, reports, visit):
    result = results["gqa"]
    page = visit(reports / "gqa.html")
    gd = page.query_selector("#figure-explorer")

    check_state(page, gd, result, "V", "full", 0, 0.9)
    page.select_option("#explore-role", "Q")
    check_state(page, gd, result, "Q", "full", 0, 0.9)
    page.select_option("#explore-source", label="MLP output of block 2")
    check_state(page, gd, result, "Q", "2_mlp_out", 0, 0.9)
    page.focus("#explore-threshold")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#explore-share") == "50%"
    check_state(page, gd, result, "Q", "2_mlp_out", 0, 0.5)
    page.select_option("#explore-view", "1")
    check_state(page, gd, result, "Q", "2_mlp_out", 1, 0.5)
    page.select_option("#explore-role", "K")
    page.select_option("#explore-source", label="token embedding")
    check_state(page, gd, result, "K", "embed", 1, 0.5)
    page.locator("#figure-explorer").screenshot(path=SCREENSHOTS / "report-explorer-gqa.png")


@pytest.fixture(scope="module")
def pocket(tmp_path_factory):
    """A report with everything in it, of real weights, and what it was made from."""
    model, text = va.pocket_model(), torch.arange(400).reshape(10, 40)
    result = va.analyze_value_alignment(model, text, progress=False)
    further = [
        va.contribution_shares(model, text, progress=False),
        va.token_identity(model, text.flip(1).repeat(2, 1), progress=False),
        va.null_alignment(model, text, progress=False),
        va.substitute_input(model, text, layers=range(1, 4), progress=False),
    ]
    directions = va.decode_directions(model, role="V", n_directions=3, n_tokens=6)
    path = tmp_path_factory.mktemp("pocket") / "report.html"
    write_report(result, path, further=further, directions=directions)
    return result, directions, path


def told_rows(page, table):
    return page.eval_on_selector_all(
        f"{table} tbody tr",
        """rows => rows.map(row => Array.from(row.cells).map(cell => {
          const chips = Array.from(cell.querySelectorAll('code'), chip => chip.textContent);
          return chips.length ? chips : cell.textContent;
        }))""",
    )


def seen(text):
    return text.replace("\n", "⏎").replace("\t", "⇥")


@pytest.mark.bridge
def test_a_head_s_panel_tells_its_directions_and_tokens(pocket, visit):
    result, directions, path = pocket
    page = visit(path)
    x, y = cell_centre(page, "full-stream", "V", 5, 2)
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    page.wait_for_selector("#head[open]")
    expected = directions[(directions["layer"] == 5) & (directions["head"] == 2)]
    rows = told_rows(page, "#head-directions")
    assert len(rows) == len(expected) > 0
    for row, known in zip(rows, expected.to_dict("records"), strict=True):
        assert row[:2] == [known["direction"].replace("-", "–"), f"{known['share']:.1%}"]
        for shown, tokens in zip(row[2:], (known["positive"], known["negative"]), strict=True):
            assert shown == ([seen(token) for token in tokens[:5]] or "–")
    for stream in ("full", "embed"):
        page.select_option("#head-stream", stream)
        told = told_rows(page, "#head-tokens")
        table = va.top_tokens(result, 5, 2, "V", stream)
        known = table[table["rank"] < 5].to_dict("records")
        assert len(told) == len(known) == 10
        for (_, value, words), row in zip(told, known, strict=True):
            assert value == f"{row['alignment']:.3f}"
            around = (row["before"], row["after"]) if stream == "full" else ("", "")
            assert words == seen(f"{around[0]}{row['token']}{around[1]}")
    page.screenshot(path=SCREENSHOTS / "report-head-tokens.png")
    page.get_by_role("button", name="Q", exact=True).click()
    assert page.is_hidden("#head-directions-section"), "only V was decoded"
    assert page.is_visible("#head-tokens-section")


@pytest.mark.bridge
def test_further_questions_are_drawn_on_the_page(pocket, visit):
    for width in (1280, 390):
        page = visit(pocket[2], width=width)
        for name in ("contributions", "identity", "null-covariance-full", "effect-V-embed"):
            gd = page.query_selector(f"#figure-{name}")
            check_legible(page, gd)
            gd.screenshot(path=SCREENSHOTS / f"report-{name}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        bars = "#figure-contributions .barlayer path"
        hidden = page.eval_on_selector_all(
            bars,
            """paths => paths.filter(p => {
              const fill = p.style.fill.match(/#([^"]+)/);
              const filled = !fill || document.getElementById(fill[1]).querySelector('rect');
              return !filled;
            }).length""",
        )
        assert hidden == 0, "every hatched bar has its colour under the hatching"


@pytest.mark.bridge
def test_heads_that_were_not_analysed_open_nothing(visit, tmp_path):
    model, text = va.pocket_model(), torch.arange(400).reshape(10, 40)
    options = {"progress": False}
    result = va.analyze_value_alignment(model, text, roles="V", layers=[1], **options)
    identity = va.token_identity(model, text.repeat(2, 1), **options)
    write_report(result, tmp_path / "part.html", further=[identity])
    page = visit(tmp_path / "part.html")
    page.focus("#figure-identity")
    page.keyboard.press("Enter")
    assert page.inner_text("#spoken") == "L0H0 · Q is not part of the analysis"
    assert page.is_hidden("#head")
    assert page.get_attribute("#figure-norms", "role") == "img", "no heads, no keys"


@pytest.mark.bridge
def test_a_figure_s_own_threshold_opens_with_a_head(pocket, visit):
    page = visit(pocket[2])
    gd = page.query_selector("#figure-sources-V-50")
    page.evaluate("gd => gd.scrollIntoView({behavior: 'instant', block: 'center'})", gd)
    page.focus("#figure-sources-V-50")
    page.keyboard.press("Enter")
    page.wait_for_selector("#head[open]")
    assert "carry 50%" in page.inner_text("#head-facts")


@pytest.mark.bridge
def test_with_moments_both_explorers_cover_the_whole_curve(show, visit, tmp_path):
    text = torch.arange(240).reshape(10, 24)
    options = {"metric": "energy", "progress": False}
    kept = va.analyze_value_alignment(va.pocket_model(), text, keep_moments=True, **options)
    asked = va.analyze_value_alignment(va.pocket_model(), text, thresholds=(0.2, 1.0), **options)
    write_report(kept, tmp_path / "moments.html")
    page = visit(tmp_path / "moments.html")
    gd = page.query_selector("#figure-explorer")
    page.focus("#explore-threshold")
    page.keyboard.press("End")
    assert page.inner_text("#explore-share") == "100%"
    check_state(page, gd, asked, "V", "full", 0, 1.0)
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#explore-share") == "20%"
    check_state(page, gd, asked, "V", "full", 0, 0.2)
    page = show(plot_explorer(kept))
    gd = page.query_selector(".js-plotly-plot")
    rail = page.locator(".slider-rail-rect").bounding_box()
    page.mouse.click(rail["x"] + rail["width"] - 1, rail["y"] + rail["height"] / 2)
    page.wait_for_function("gd => gd._fullLayout.sliders[0].active === 19", arg=gd)
    check_state(page, gd, asked, "V", "full", 0, 1.0)


def test_printing(reports, visit):
    page = visit(reports / "24x16.html", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible("nav") and not page.is_visible(".controls")
    pdf = page.pdf(path=SCREENSHOTS / "report-24x16.pdf", landscape=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 4


def test_hostile_names_run_nothing(visit, tmp_path):
    name = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>"
    path = tmp_path / "hostile.html"
    write_report(fake_result(4, 2, model_name=name), path)
    page = visit(path)
    assert page.title().startswith("What </script>")
    assert page.inner_text("h1").startswith("What </script><script>document.title")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_static_images_through_kaleido(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("BROWSER_PATH", shutil.which("chromium"))
    write_report(fake_result(4, 2), tmp_path / "r.html", images=kind)
    images = sorted(tmp_path.glob(f"*.{kind}"))
    assert len(images) == 7
    starts = {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}
    assert all(image.read_bytes().startswith(starts[kind]) for image in images)
