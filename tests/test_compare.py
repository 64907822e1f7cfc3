"""Models and checkpoints side by side: the table's numbers, what is refused, what is drawn."""

import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import zoo
from fakes import fake_result

import tl_valuealign as va

TEXT = "ab" * 32


def measured(seed=0, layers=6, heads=4, **options):
    """A fake result with the provenance that a comparison reads."""
    changes = {key: options.pop(key) for key in ("text_hash", "skip_first") if key in options}
    result = fake_result(layers, heads, seed=seed, **options)
    facts = {"n_layers": layers, "text_hash": TEXT} | changes
    return replace(result, provenance=result.provenance | facts)


def test_every_row_is_the_mean_of_its_heads():
    results = {"early": measured(0), "late": measured(1, components=("attn_out", "mlp_out"))}
    frame = va.compare(results).dataframe
    for label, result in results.items():
        long = result.to_dataframe()
        long["kind"] = long["source"].str.replace(r"^\d+_", "", regex=True)
        keys = ["role", "threshold", "kind", "layer"]
        expected = long.groupby(keys)["alignment"].agg(["mean", "min", "max"])
        chance = long.groupby(["role", "threshold", "layer"])["chance"].mean()
        mine = frame[frame["model"] == label].set_index(["role", "threshold", "source", "layer"])
        assert len(mine) == len(expected)
        expected = expected.loc[mine.index]
        np.testing.assert_allclose(mine["alignment"], expected["mean"], rtol=1e-12)
        np.testing.assert_array_equal(mine["lowest"], expected["min"])
        np.testing.assert_array_equal(mine["highest"], expected["max"])
        beside = chance.loc[mine.index.droplevel("source")]
        np.testing.assert_allclose(mine["chance"], beside, rtol=1e-12)
        np.testing.assert_allclose(mine["relative"], mine["alignment"] / mine["chance"])


def test_boxed_counts_the_boxes():
    results = {"early": measured(0), "late": measured(1)}
    frame = va.compare(results).dataframe
    for label, result in results.items():
        rows = frame.query("role == 'V' and threshold == 0.5 and source == 'full'")
        assert list(rows[rows["model"] == label]["boxed"]) == result.boxes(0.5).sum(1).tolist()


def test_depth_puts_models_of_any_size_on_one_axis():
    results = {"small": measured(0, 3, 2), "part": measured(1, 12, 5, layer_numbers=(0, 6, 11))}
    frame = va.compare(results).dataframe.query("role == 'V' and source == 'full'")
    depths = frame[frame["threshold"] == 0.9].groupby("model")["depth"].apply(list)
    assert depths["small"] == [0, 0.5, 1]
    assert depths["part"] == pytest.approx([0, 6 / 11, 1])
    assert list(frame["model"].unique()) == ["small", "part"]


def test_what_is_not_upstream_is_missing():
    frame = va.compare({"a": measured(0), "b": measured(1)}).dataframe
    first = frame.query("source == 'attn_out' and layer == 0")
    assert len(first) and first[["alignment", "lowest", "highest"]].isna().all(axis=None)
    assert frame.query("source == 'embed'")["alignment"].notna().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("thresholds", {"thresholds": (0.9, 0.7)}),
        ("metric", {"metric": "energy"}),
        ("text", {"text_hash": "cd" * 32}),
        ("skip_first", {"skip_first": True}),
        ("roles", {"roles": ("V", "OV")}),
    ],
)
def test_results_measured_differently_are_refused_unless_told(name, options):
    results = {"one": measured(0), "same": measured(1), "other": measured(2, **options)}
    with pytest.raises(va.InputError, match=f"'one' and 'other' differ in {name}") as caught:
        va.compare(results)
    assert f"allow=('{name}',)" in str(caught.value)
    frame = va.compare(results, allow=(name,)).dataframe
    assert list(frame["model"].unique()) == ["one", "same", "other"]
    assert set(frame["role"]) == ({"V"} if name == "roles" else {"Q", "K", "V"})
    assert set(frame["threshold"]) == ({0.9} if name == "thresholds" else {0.9, 0.5})
    assert len(frame["metric"].unique()) == 1 + (name == "metric")


def test_every_difference_needs_its_own_word():
    results = {"a": measured(0), "b": measured(1, metric="energy", skip_first=True)}
    with pytest.raises(va.InputError, match=r"allow=\('metric', 'skip_first',\)"):
        va.compare(results, allow=("metric",))
    va.compare(results, allow=("metric", "skip_first"))


def test_the_order_of_thresholds_and_roles_is_no_difference():
    one, other = measured(0), measured(1, thresholds=(0.5, 0.9), roles=("V", "K", "Q"))
    frame = va.compare({"one": one, "other": other}).dataframe
    rows = frame.query("model == 'other' and role == 'V' and threshold == 0.9 and source == 'full'")
    np.testing.assert_allclose(rows["alignment"], other.V.full[1].nanmean(-1))


def test_identical_weights_are_warned_of():
    result = measured(0)
    with pytest.warns(UserWarning, match="'step 1' and 'step 2' have identical weights"):
        va.compare({"step 1": result, "step 2": result})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        va.compare({"step 1": result, "step 2": measured(1)})


@pytest.mark.parametrize(
    ("results", "options", "message"),
    [
        ([1, 2], {}, "takes labelled results"),
        ({"a": 1, "b": 2}, {}, "'a' is a int"),
        ({"a": measured(0)}, {}, "got 1 result, expected two"),
        ({}, {}, "got 0 result"),
        ({"a": measured(0), "b": measured(1)}, {"threshold": 0.7}, r"0\.7 is not in this result"),
        ({"a": measured(0), "b": measured(1)}, {"allow": "colour"}, "'colour' is unknown"),
        (
            {"a": measured(0, roles=("Q",)), "b": measured(1, roles=("V",))},
            {"allow": "roles"},
            "no roles in common",
        ),
        (
            {"a": measured(0), "b": measured(1, thresholds=(0.9,))},
            {"allow": "thresholds", "threshold": 0.5},
            "0.5 is not in every result",
        ),
    ],
)
def test_what_cannot_be_compared(results, options, message):
    with pytest.raises(va.InputError, match=message):
        va.compare(results, **options)


def test_it_unpacks_and_says_what_it_is():
    comparison = va.compare({"a": measured(0), "b": measured(1)})
    frame, figure = comparison
    assert frame is comparison.dataframe is comparison.to_dataframe()
    assert figure is comparison.figure and isinstance(figure, go.Figure)
    assert repr(comparison) == "Comparison of 'a', 'b': .dataframe (216 rows) and .figure"


# The figure -------------------------------------------------------------------------------------


def lines(figure, axis=None, dotted=False):
    """Curves of a figure or of one of its panels; those of chance are dotted."""
    return [
        trace
        for trace in figure.data
        if (axis is None or trace.xaxis == axis)
        and trace.x != (None,)
        and (trace.line.dash == "dot") == dotted
    ]


@pytest.mark.parametrize("relative", [False, True])
def test_curves_show_the_table_with_chance_beside_each(relative):
    results = {"a": measured(0), "b": measured(1), "c": measured(2, 12, 3)}
    frame, figure = va.compare(results, threshold=0.5, relative=relative)
    value = "relative" if relative else "alignment"
    shown = frame.query("threshold == 0.5")
    axes = iter(["x", *(f"x{number}" for number in range(2, 10))])
    for _, of_role in shown.groupby("role", sort=False):
        for _, of_source in of_role[of_role["source"].isin(["embed", "full"])].groupby("source"):
            axis = next(axes)
            drawn, chances = lines(figure, axis), lines(figure, axis, dotted=True)
            assert [trace.name for trace in drawn] == ["a", "b", "c"]
            if relative:
                assert [(trace.x, trace.y) for trace in chances] == [((0, 1), (1, 1))]
            for number, trace in enumerate(drawn):
                rows = of_source[of_source["model"] == trace.name]
                np.testing.assert_allclose(trace.y, rows[value])
                np.testing.assert_allclose(trace.x, rows["depth"])
                if not relative:
                    np.testing.assert_allclose(chances[number].y, rows["chance"])
                    assert chances[number].line.color == trace.line.color
        axis = next(axes)
        by_kind = {trace.name.split(",")[0]: trace for trace in lines(figure, axis)}
        assert set(by_kind) == {"embedding", "full stream", "attention outputs"}
        means = of_role[of_role["source"] == "embed"].groupby("model")[[value, "chance"]].mean()
        np.testing.assert_allclose(by_kind["embedding"].y, means[value])
        (chance,) = lines(figure, axis, dotted=True)
        np.testing.assert_allclose(chance.y, np.ones(3) if relative else means["chance"])


def test_all_panels_share_one_scale_that_holds_every_value():
    figure = va.compare({"a": measured(0), "b": measured(1, 20, 2)}).figure
    ranges = {tuple(figure.layout[name].range) for name in figure.layout if name[:5] == "yaxis"}
    ((low, high),) = ranges
    values = np.concatenate([np.asarray(t.y, dtype=float) for t in figure.data if t.x != (None,)])
    assert low < np.nanmin(values) and np.nanmax(values) < high


def test_models_differ_by_more_than_colour():
    figure = va.compare({str(seed): measured(seed) for seed in range(6)}).figure
    symbols = [trace.marker.symbol for trace in lines(figure, "x")]
    assert len(set(symbols)) == 6
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert len(legend) == len(set(legend))


def test_labels_are_shown_as_they_are():
    name = "<b>x</b> %{y} $a$"
    figure = va.compare({name: measured(0), "b": measured(1)}).figure
    seen = str(figure.to_dict())
    assert "<b>x</b>" not in seen and "&lt;b&gt;x&lt;/b&gt; %&#123;y} &#36;a&#36;" in seen


@pytest.mark.bridge
def test_merged_text_is_another_text_however_it_was_merged():
    model, one, other = zoo.bridge("llama"), zoo.ids(seed=1), zoo.ids(seed=2)
    first, second = (va.analyze_value_alignment(model, ids, progress=False) for ids in (one, other))
    hashes = {r.provenance["text_hash"] for r in (first.merge(second), second.merge(first))}
    assert len(hashes) == 1 and not hashes & {first.provenance["text_hash"]}
    merged = first.merge(second).provenance
    assert merged["n_tokens_read"] == merged["n_tokens"] == one.numel() + other.numel()
    with pytest.raises(va.InputError, match="differ in text"):
        va.compare({"merged": first.merge(second), "first": first})


@pytest.mark.bridge
@pytest.mark.slow
def test_the_checkpoints_of_a_training_run(tmp_path):
    """The example, on the bundled weights and on fresh ones as step 0."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    from tl_valuealign.pocket import POCKET_FOLDER

    for step in ("step_000000", "step_002000"):
        shutil.copytree(POCKET_FOLDER, tmp_path / "checkpoints" / step)
    config = NanoChatConfig.from_pretrained(POCKET_FOLDER)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        NanoChatForCausalLM(config).save_pretrained(tmp_path / "checkpoints" / "step_000000")
    example = Path(__file__).parent.parent / "examples" / "compare_checkpoints.py"
    done = subprocess.run(
        [sys.executable, example, "checkpoints"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines() if "step" in line]
    start = next(row for row in table if row[:3] == ["V", "step", "0"])
    assert start[3:6] == ["1.00", "1.00", "1.00"]
    assert (tmp_path / "comparison.html").stat().st_size > 1e6
