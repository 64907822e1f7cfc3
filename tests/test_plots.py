"""Figures show the result's own numbers, in the right cells, and say what is missing."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch
from fakes import fake_result
from hypothesis import given, settings
from hypothesis import strategies as st
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign import InputError
from tl_valuealign.plots import (
    plot_directions,
    plot_explorer,
    plot_full_stream,
    plot_norms,
    plot_projected_norms,
    plot_sources,
)
from tl_valuealign.plots.common import log_ticks, plain, safe, thinned
from tl_valuealign.plots.grid import rectangles
from tl_valuealign.plots.rows import default_layers

FIGURES = {
    "full_stream": plot_full_stream,
    "full_stream_relative": lambda result: plot_full_stream(result, relative=True),
    "sources": plot_sources,
    "sources_k_relative": lambda result: plot_sources(result, role="K", relative=True),
    "sources_50": lambda result: plot_sources(result, threshold=0.5),
    "norms": plot_norms,
    "directions": plot_directions,
    "projected": plot_projected_norms,
    "explorer": plot_explorer,
}
GRIDS = [name for name in FIGURES if name not in ("norms", "explorer")]
HOSTILE = "</script><script>alert(1)</script> <b>$x$ %{z}"


@pytest.fixture(scope="module")
def results():
    return {
        "6x2": fake_result(6, 2),
        "24x16": fake_result(24, 16),
        "80x64": fake_result(80, 64),
        "gqa": fake_result(
            30, 9, 3, components=("attn_out", "mlp_out"), positions=True, n_sequences=4
        ),
        "hybrid": fake_result(12, 4, layer_numbers=(3, 7, 11)),
        "one": fake_result(1, 1, zero_head=None),
    }


def heats(figure, *, missing=False):
    return [
        trace
        for trace in figure.data
        if trace.type == "heatmap" and bool((trace.meta or {}).get("missing")) == missing
    ]


def boxed_cells(path):
    """(layer row, head) of every square in an outline's path, checked to lie on cell edges."""
    cells = set()
    for square in filter(None, (part.strip() for part in path.split("M"))):
        points = np.array(
            [[float(n) for n in p.split(",")] for p in re.findall(r"[-\d.]+,[-\d.]+", square)]
        )
        low, high = points.min(axis=0), points.max(axis=0)
        if (high == low).all():
            continue  # the empty outline
        assert (high - low == 1).all(), "a box is one cell"
        assert (low % 1 == 0.5).all(), "its edges are cell edges"
        assert points[0][0] == low[0], "it starts on the left edge"
        assert {tuple(p) for p in points[1:]} == {
            (low[0], low[1]),
            (high[0], low[1]),
            (high[0], high[1]),
            (low[0], high[1]),
        }
        cells.add((int(low[1] + 0.5), int(low[0] + 0.5)))
    return cells


def cells_of(flags):
    return {tuple(cell) for cell in np.argwhere(np.asarray(flags)).tolist()}


@pytest.mark.parametrize("size", ["6x2", "24x16", "80x64", "gqa", "hybrid", "one"])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_at_every_size(results, name, size):
    figure = FIGURES[name](results[size])
    assert isinstance(figure, go.Figure)
    assert figure.layout.title.text and figure.layout.title.subtitle.text
    axes = [figure.layout[key] for key in figure.layout if re.match(r"[xy]axis\d*$", key)]
    assert axes
    for axis in axes:
        low, high = axis.domain
        assert 0 <= low < high <= 1
        assert axis.type != "category"
    json.loads(figure.to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize("size", ["6x2", "24x16", "80x64", "gqa", "hybrid"])
@pytest.mark.parametrize("name", [*GRIDS, "norms"])
def test_tick_labels_do_not_collide(results, name, size):
    figure = FIGURES[name](results[size])
    for key in figure.layout:
        match = re.match(r"([xy])axis\d*$", key)
        if not match or figure.layout[key].tickvals is None:
            continue
        axis = figure.layout[key]
        page = figure.layout.width if match[1] == "x" else figure.layout.height
        length = (axis.domain[1] - axis.domain[0]) * page
        scale = length / abs(axis.range[1] - axis.range[0])
        places = np.sort(np.array(axis.tickvals, dtype=float)) * scale
        widest = max(len(re.sub("<[^>]*>", "", text)) for text in axis.ticktext)
        need = 7 * widest + 3 if match[1] == "x" else 12
        assert (np.diff(places) >= need).all(), key
        if name != "norms":
            assert all(text.isdigit() for text in axis.ticktext if match[1] == "x")


@pytest.mark.parametrize("size", ["6x2", "24x16", "80x64", "gqa"])
def test_cells_are_whole_pixels(results, size):
    figure = plot_full_stream(results[size])
    for heat in heats(figure):
        for letter, count in (("x", heat.z.shape[1]), ("y", heat.z.shape[0])):
            axis = figure.layout[f"{letter}axis{heat[f'{letter}axis'][1:]}"]
            page = figure.layout.width if letter == "x" else figure.layout.height
            pixels = (axis.domain[1] - axis.domain[0]) * page
            cell = pixels / abs(axis.range[1] - axis.range[0])
            assert cell == pytest.approx(round(cell)) and round(cell) >= 6
            assert pixels == pytest.approx(count * cell + 2)


@pytest.mark.parametrize("name", GRIDS)
def test_one_colour_scale_and_bar_per_figure(results, name):
    figure = FIGURES[name](results["24x16"])
    assert {heat.coloraxis for heat in heats(figure)} == {"coloraxis"}
    axis = figure.layout.coloraxis
    assert axis.cmin < axis.cmax and axis.colorbar.tickvals
    assert not any(heat.showscale for heat in heats(figure, missing=True))


def test_full_stream_shows_the_result(results):
    result = results["gqa"]
    figure = plot_full_stream(result, threshold=0.5)
    shown = {heat.meta["role"]: heat for heat in heats(figure)}
    assert set(shown) == {"Q", "K", "V"}
    for role, heat in shown.items():
        values = result.role(role)
        np.testing.assert_allclose(heat.z, values.full[1], rtol=1e-6)
        columns = (
            values.full[1],
            values.full_stderr[1],
            values.chance[1],
            values.full[1] / values.chance[1],
            values.n_directions[1],
            values.numerical_rank,
        )
        for place, column in enumerate(columns):
            np.testing.assert_allclose(heat.customdata[..., place], column, rtol=1e-6)
        np.testing.assert_array_equal(heat.customdata[:, 0, 6], result.layers)
        assert "of 64 directions" in heat.hovertemplate
        assert f"H%{{x}} · {role} · full stream" in heat.hovertemplate


def test_relative_view_is_log2_of_the_ratio_and_centred_on_chance(results):
    result = results["24x16"]
    figure = plot_full_stream(result, relative=True)
    for heat in heats(figure):
        values = result.role(heat.meta["role"])
        np.testing.assert_allclose(
            heat.z, np.log2((values.full[0] / values.chance[0]).numpy()), rtol=1e-4, atol=1e-6
        )
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax
    assert "chance" in axis.colorbar.ticktext[axis.colorbar.tickvals.index(0)]


def test_chance_is_marked_on_the_colour_bar_and_in_the_strip(results):
    result = results["24x16"]
    figure = plot_sources(result, role="K")
    marked = [text for text in figure.layout.coloraxis.colorbar.ticktext if "chance" in text]
    mean = float(result.K.chance[0].nanmean())
    assert marked == [f"{mean:.2f} <b>chance</b>"]
    strips = [t for t in plot_full_stream(result).data if t.name == "chance"]
    assert len(strips) == 3
    np.testing.assert_allclose(strips[2].y, result.V.chance[0].nanmean(-1), rtol=1e-6)


@pytest.mark.parametrize("size", ["6x2", "24x16", "80x64"])
def test_boxes_are_the_result_s_and_the_legend_counts_them(results, size):
    result = results[size]
    figure = plot_full_stream(result)
    plain_boxes, firm = result.boxes(), result.boxes(significant=True)
    assert 0 < firm.sum() < plain_boxes.sum(), "the fake must tell the two kinds apart"
    dashed, solid = figure.layout.shapes
    assert dashed.line.dash != "solid" and solid.line.dash == "solid"
    assert boxed_cells(dashed.path) == cells_of(plain_boxes & ~firm)
    assert boxed_cells(solid.path) == cells_of(firm)
    v_axis = next(heat.xaxis for heat in heats(figure) if heat.meta["role"] == "V")
    for shape in (dashed, solid):
        assert shape.line.width == 2 and shape.xref == v_axis
    names = [trace.name for trace in figure.data if trace.showlegend]
    total = (
        f"{int(plain_boxes.sum())} of {plain_boxes.numel()} V heads: full stream above embedding"
    )
    assert total in names
    assert f"{int(firm.sum())} of these hold at 5% false discovery" in names


def test_too_few_sequences_say_so_and_draw_plain_boxes(results):
    result = results["gqa"]
    assert result.sums.n_sequences < 8
    figure = plot_full_stream(result)
    (only,) = figure.layout.shapes
    assert only.line.dash == "solid" and boxed_cells(only.path) == cells_of(result.boxes())
    assert "intervals withheld: fewer than 8 sequences" in figure.layout.title.subtitle.text
    assert "±" not in heats(figure)[0].hovertemplate
    assert "±" in heats(plot_full_stream(results["24x16"]))[0].hovertemplate


def test_no_boxes_is_a_finding_too():
    result = fake_result(4, 2, zero_head=None)
    everywhere = result.boxes(0.9, role="K")
    assert everywhere.all()
    figure = plot_explorer(result)
    assert any(trace.name == "8 of 8 K heads: full stream above embedding" for trace in figure.data)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("24x16", [12, 14, 16, 18, 20, 22]),
        ("gqa", [15, 17, 20, 22, 25, 27]),
        ("6x2", [3, 4, 5]),
        ("hybrid", [7, 11]),
        ("one", [0]),
    ],
)
def test_default_blocks_are_spread_over_the_second_half(results, size, expected):
    assert default_layers(results[size]) == expected


def test_sources_show_the_result_and_what_is_not_upstream(results):
    result = results["24x16"]
    figure = plot_sources(result, role="V", layers=[5, 20], threshold=0.5)
    shown = {}
    for heat in heats(figure):
        assert (heat.customdata[..., 6] == heat.meta["layer"]).all()
        for row in range(heat.z.shape[0]):
            block = int(heat.customdata[row, 0, 7])
            source = "embed" if block < 0 else f"{block}_attn_out"
            shown[heat.meta["layer"], source] = heat.z[row]
    for layer in (5, 20):
        for source in ["embed"] + [f"{block}_attn_out" for block in range(20)]:
            expected = result.alignment("V", source, 0.5)[layer].numpy()
            got = shown.get((layer, source), np.full(16, np.nan))
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert "attention output of block %{customdata[7]}" in heats(figure)[1].hovertemplate
    (gap,) = heats(figure, missing=True)
    np.testing.assert_array_equal(np.isfinite(gap.z).all(axis=1), [j >= 5 for j in range(20)])
    np.testing.assert_array_equal(gap.customdata[:, 0, 0], range(20))
    assert gap.hovertemplate == (
        "<b>L5H%{x} · V · attention output of block %{customdata[0]}</b><br>"
        "not upstream of block 5<extra></extra>"
    )
    assert "not upstream of this block" in [t.name for t in figure.data if t.showlegend]


def test_embedding_is_set_apart_above_the_attention_outputs(results):
    figure = plot_sources(results["24x16"])
    embed, outputs = heats(figure)[:2]
    assert embed.z.shape[0] == 1 and outputs.z.shape[0] == 22
    gap = (outputs.y0 - outputs.dy / 2) - (embed.y0 + embed.dy / 2)
    assert gap > 0.3
    axis = figure.layout.yaxis
    assert axis.range[0] > axis.range[1], "layers and sources run downwards"


def test_roles_share_order_and_scale_so_that_they_compare(results):
    value, key = (plot_sources(results["24x16"], role=role) for role in ("V", "K"))
    assert value.layout.coloraxis.cmin == key.layout.coloraxis.cmin
    assert value.layout.coloraxis.cmax == key.layout.coloraxis.cmax
    assert value.layout.yaxis == key.layout.yaxis


def test_a_zero_matrix_is_told_apart(results):
    (gap, *_) = heats(plot_full_stream(results["24x16"]), missing=True)
    assert cells_of(np.isfinite(gap.z)) == {(1, 0)}
    assert gap.hovertemplate.startswith("<b>L%{customdata[0]}H%{x} · Q</b><br>its read-in matrix")
    figure = plot_sources(results["24x16"], layers=[1, 3])
    reasons = {gap.hovertemplate.split("<br>")[1] for gap in heats(figure, missing=True)}
    assert reasons == {
        "its read-in matrix is zero<extra></extra>",
        "not upstream of block 1<extra></extra>",
    }


def test_norms(results):
    result = results["24x16"]
    figure = plot_norms(result)
    lines = {trace.name: trace for trace in figure.data}
    np.testing.assert_allclose(lines["token embedding"].y, [float(result.norms[0])] * 2)
    np.testing.assert_allclose(lines["attention output of the block"].y, result.norms[1:])
    np.testing.assert_allclose(lines["full stream into the block"].y, result.full_norms)
    spread = float(result.full_norms.max() / result.norms.min())
    assert spread > 30 and figure.layout.yaxis.type == "log"
    small = fake_result(6, 2)
    assert float(small.full_norms.max() / small.norms.min()) < 30
    assert plot_norms(small).layout.yaxis.type == "linear"


def test_directions(results):
    result = results["24x16"]
    counts, rank = heats(plot_directions(result, role="K", threshold=0.5))
    known = result.K.numerical_rank.numpy() > 0
    np.testing.assert_array_equal(counts.z[known], result.K.n_directions[1].numpy()[known])
    np.testing.assert_array_equal(rank.z[known], result.K.numerical_rank.numpy()[known])
    assert counts.texttemplate and not heats(plot_directions(results["80x64"]))[0].texttemplate
    axis = plot_directions(result).layout.coloraxis
    assert (axis.cmin, axis.cmax) == (0, 64)


def test_projected_norms_have_the_head_s_own_norm_on_top(results):
    result = results["24x16"]
    figure = plot_projected_norms(result, layers=[20])
    top, outputs = heats(figure)
    assert [row[0] for row in top.text] == ["full stream", "token embedding"]
    np.testing.assert_allclose(
        top.z[0], np.log10(result.V.projected_sq_norm_full[20].numpy()), rtol=1e-5
    )
    np.testing.assert_allclose(
        outputs.z, np.log10(result.V.projected_sq_norm[1:21, 20].numpy()), rtol=1e-4, atol=1e-5
    )


def test_hostile_names_stay_text():
    result = fake_result(4, 2, model_name=HOSTILE)
    for name, draw in FIGURES.items():
        subtitle = draw(result).layout.title.subtitle.text
        assert "<script" not in subtitle and "&lt;script" in subtitle, name
        assert "$" not in subtitle and "%{" not in subtitle
    assert safe("a" * 100).endswith("…") and len(safe("a" * 100)) == 60


def test_global_state_and_templates_are_the_caller_s(results):
    before = (pio.templates.default, pio.renderers.default)
    for draw in FIGURES.values():
        draw(results["6x2"])
    assert (pio.templates.default, pio.renderers.default) == before
    try:
        pio.templates.default = "plotly_dark"
        figure = plot_full_stream(results["6x2"])
    finally:
        pio.templates.default = before[0]
    assert figure.layout.template == pio.templates["plotly_dark"]
    assert figure.layout.paper_bgcolor is None and figure.layout.font.color is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: plot_sources(r, role="OV"), "role 'OV'"),
        (lambda r: plot_sources(r, layers=[99]), "layer 99"),
        (lambda r: plot_sources(r, layers=[]), "no layer"),
        (lambda r: plot_sources(r, threshold=0.7), "threshold 0.7"),
        (lambda r: plot_full_stream(r, threshold=0.7), "threshold 0.7"),
        (lambda r: plot_directions(r, role="X"), "role 'X'"),
        (lambda r: plot_directions(r, threshold=0.1), "threshold 0.1"),
        (lambda r: plot_projected_norms(r, role="OV"), "role 'OV'"),
        (lambda r: plot_projected_norms(r, layers=[-1]), "layer -1"),
    ],
)
def test_what_was_not_measured_is_refused_by_name(results, call, words):
    with pytest.raises(InputError, match=re.escape(words)):
        call(results["6x2"])


@pytest.mark.parametrize(
    "draw",
    [
        plot_full_stream,
        plot_sources,
        plot_norms,
        plot_directions,
        plot_projected_norms,
        plot_explorer,
    ],
)
def test_only_results_are_drawn(draw):
    with pytest.raises(TypeCheckError):
        draw("a result")


def test_results_without_v_or_with_ov_are_drawn():
    keys = fake_result(6, 4, roles=("K",))
    assert not plot_full_stream(keys).layout.shapes
    assert {heat.meta["role"] for heat in heats(plot_explorer(keys))} == {"K"}
    circuits = fake_result(6, 4, 2, roles=("Q", "K", "V", "OV"))
    shapes = [heat.z.shape for heat in heats(plot_full_stream(circuits))]
    assert shapes == [(6, 4), (6, 2), (6, 2), (6, 4)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**49 - 1))
def test_rectangles_cover_a_mask_exactly_once(rows, columns, bits):
    mask = np.array([[bits >> (r * columns + c) & 1 for c in range(columns)] for r in range(rows)])
    covered = np.zeros_like(mask)
    for left, top, right, bottom in rectangles(mask.astype(bool)):
        covered[int(top + 0.5) : int(bottom + 0.5), int(left + 0.5) : int(right + 0.5)] += 1
    np.testing.assert_array_equal(covered, mask)


@given(st.integers(1, 200), st.floats(1, 40), st.floats(10, 40))
def test_thinned_ticks_start_at_zero_and_keep_their_room(count, spacing, room):
    shown = thinned(count, spacing, room)
    assert shown[0] == 0 and shown[-1] < count
    assert all((b - a) * spacing >= room for a, b in zip(shown, shown[1:], strict=False))


@given(st.floats(-6, 6), st.floats(0.3, 10))
def test_log_ticks_lie_inside_and_are_few(low, span):
    ticks = log_ticks(low, low + span)
    assert len(ticks) <= 10
    assert all(10 ** (low - 1e-6) <= tick <= 10 ** (low + span + 1e-6) for tick in ticks)


def test_round_numbers_are_written_plainly():
    assert [plain(v) for v in (0.05, 2, 500, 1000, 1e6, 3e5, 5e6, 2e-5)] == [
        "0.05",
        "2",
        "500",
        "1,000",
        "10<sup>6</sup>",
        "3·10<sup>5</sup>",
        "5·10<sup>6</sup>",
        "2·10<sup>-5</sup>",
    ]


class Browser:
    """Replays explorer buttons as plotly would, on plain dictionaries."""

    def __init__(self, figure):
        self.data = [trace.to_plotly_json() for trace in figure.data]
        self.layout = figure.layout.to_plotly_json()
        self.menus = self.layout["updatemenus"]
        self.steps = self.layout["sliders"][0]["steps"]

    def press(self, step):
        data, layout = {}, {}
        if step["method"] == "relayout":
            (layout,) = step["args"]
        elif step["method"] == "restyle":
            data, where = step["args"]
        else:
            data, layout, where = step["args"]
        for key, values in data.items():
            for at, value in zip(where, values, strict=True):
                self.data[at][key] = value
        for key, value in layout.items():
            parts = re.findall(r"[^.\[\]]+", key)
            target = self.layout
            for part in parts[:-1]:
                target = target[int(part) if part.isdigit() else part]
            target[parts[-1]] = value

    def axis(self, name):
        return self.layout[f"{name[0]}axis{name[1:]}"]

    def in_sight(self, trace):
        return trace.get("visible", True) is True and all(
            max(self.axis(trace[key])["range"]) < 1000 for key in ("xaxis", "yaxis")
        )

    def heat(self):
        (shown,) = [t for t in self.data if t["type"] == "heatmap" and self.in_sight(t)]
        return shown


def decoded(value):
    import base64

    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
        return flat.reshape([int(n) for n in value["shape"].split(",")])
    return np.asarray(value)


CLICKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(clicks=CLICKS)
def test_any_order_of_clicks_shows_what_the_menus_say(explored, clicks):
    check_clicks(*explored, clicks)


@pytest.mark.bridge
@settings(max_examples=10, deadline=None)
@given(clicks=CLICKS)
def test_with_moments_the_slider_covers_the_whole_curve(explored_curve, clicks):
    check_clicks(*explored_curve, [*clicks, (3, sum(number for _, number in clicks))])


def check_clicks(result, figure, clicks):
    browser, roles = Browser(figure), list(result.roles)
    order = sorted(range(len(result.thresholds)), key=lambda index: result.thresholds[index])
    assert figure.layout.sliders[0].active == order.index(0)
    role, source, view, threshold = "V", "full", 0, 0
    sources = ["full", *result.sources]
    for menu, number in clicks:
        steps = browser.steps if menu == 3 else browser.menus[menu]["buttons"]
        pick = number % len(steps)
        browser.press(steps[pick])
        if menu == 0:
            role = roles[pick]
        elif menu == 1:
            source = sources[pick]
        elif menu == 2:
            view = pick
        else:
            threshold = order[pick]
            assert steps[pick]["label"] == f"{100 * result.thresholds[threshold]:.4g}%"
    tau = result.thresholds[threshold]
    expected = result.alignment(role, source, tau).numpy()
    if view:
        expected = np.log2(expected / result.role(role).chance[threshold].numpy())
    heat = browser.heat()
    assert heat["meta"]["role"] == role and heat["meta"]["source"] == source
    np.testing.assert_allclose(decoded(heat["z"]), expected, rtol=1e-4, atol=1e-5)
    assert heat["coloraxis"] == ("coloraxis2" if view else "coloraxis")
    assert browser.layout[heat["coloraxis"]]["showscale"]
    assert not browser.layout["coloraxis" if view else "coloraxis2"]["showscale"]
    outlined = set()
    for shape in browser.layout["shapes"]:
        if (shape["xref"], shape["yref"]) == (heat["xaxis"], heat["yaxis"]):
            outlined |= boxed_cells(shape["path"])
    boxes = result.boxes(tau, role=role)
    assert outlined == cells_of(boxes)
    legends = [key for key in browser.layout if re.match(r"legend\d*$", key)]
    (legend,) = [key for key in legends if browser.layout[key]["visible"]]
    names = [
        t["name"]
        for t in browser.data
        if t.get("showlegend")
        and t.get("visible", True)
        and t.get("legend", "legend") == legend
        and "of" in t["name"]
    ]
    assert (
        f"{int(boxes.sum())} of {boxes.numel()} {role} heads: full stream above embedding" in names
    )


@pytest.fixture(scope="module")
def explored():
    result = fake_result(5, 4, 2, seed=4)
    assert (result.boxes(0.9) != result.boxes(0.5)).any(), "or the slider could not be tested"
    return result, plot_explorer(result)


@pytest.fixture(scope="module")
def explored_curve():
    """What the moments tell, and a run that was asked for every threshold from the start."""
    model, text = va.pocket_model(), torch.arange(240).reshape(10, 24)
    kept = va.analyze_value_alignment(
        model, text, metric="energy", thresholds=(0.9, 0.3), keep_moments=True, progress=False
    )
    curve = tuple(percent / 100 for percent in range(5, 101, 5))
    whole = va.analyze_value_alignment(
        model,
        text,
        metric="energy",
        thresholds=(0.9, *(share for share in curve if share != 0.9)),
        progress=False,
    )
    return whole, plot_explorer(kept)


def test_explorer_offers_a_selection_when_all_would_be_too_much(results):
    figure = plot_explorer(results["80x64"])
    labels = [button.label for button in figure.layout.updatemenus[1].buttons]
    assert labels[:2] == ["full stream", "token embedding"] and 3 <= len(labels) < 10
    assert "a selection of the sources" in figure.layout.title.subtitle.text
    every = plot_explorer(results["6x2"]).layout.updatemenus[1].buttons
    assert len(every) == 1 + 1 + 5
