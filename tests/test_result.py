"""The result a reader holds: accessors, boxes, merging, words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import fake_result
from scipy import stats

import tl_valuealign as va
from tl_valuealign.sums import Sums

RESULT = fake_result()


def test_accessors_read_the_named_rows():
    source = RESULT.sources[2]
    np.testing.assert_array_equal(
        RESULT.alignment("V", source, threshold=0.5), RESULT.V.by_source[1, 2]
    )
    np.testing.assert_array_equal(RESULT.alignment("K", "full"), RESULT.K.full[0])
    np.testing.assert_array_equal(RESULT.stderr("Q", "embed"), RESULT.Q.by_source_stderr[0, 0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RESULT.alignment("V", "99_attn_out"), "99_attn_out"),
        (lambda: RESULT.alignment("OV", "embed"), "roles="),
        (lambda: RESULT.alignment("V", "embed", threshold=0.8), "0.9, 0.5"),
        (lambda: RESULT.with_metric("cosine"), "pooled"),
        (lambda: RESULT.OV, "Q, K, V"),
    ],
)
def test_a_wrong_name_is_told_what_there_is(call, words):
    with pytest.raises(va.InputError, match=words):
        call()


def test_boxes_are_heads_where_full_exceeds_embedding():
    for index, threshold in enumerate(RESULT.thresholds):
        boxes = RESULT.boxes(threshold)
        for layer in range(len(RESULT.layers)):
            for head in range(boxes.shape[1]):
                full, embed = RESULT.V.full[index, layer, head], RESULT.V.by_source[index, 0, layer]
                assert bool(boxes[layer, head]) == bool(full > embed[head])


def test_significant_boxes_are_benjamini_hochberg_by_hand():
    """The step-up procedure written out, on planted errors, against the library's."""
    generator = torch.Generator().manual_seed(3)
    t = 6 * torch.rand(RESULT.V.excess.shape, generator=generator).double()
    error = RESULT.V.excess.abs() / t
    result = replace(RESULT, roles=RESULT.roles | {"V": replace(RESULT.V, excess_stderr=error)})
    t = (result.V.excess[0] / error[0]).flatten()
    p = stats.t.sf(t.numpy(), df=result.sums.n_sequences - 1)
    p = p[np.isfinite(p)]
    ordered = np.sort(p)
    passing = [i for i, value in enumerate(ordered, 1) if value <= 0.05 * i / len(p)]
    expected = int((p <= ordered[max(passing) - 1]).sum()) if passing else 0
    assert 0 < expected < len(p)
    assert int(result.boxes(significant=True).sum()) == expected


def test_dataframe_is_long_and_complete():
    frame = RESULT.to_dataframe()
    shape = RESULT.V.by_source.shape
    assert len(frame) == sum(
        shape[0] * (shape[1] + 1) * shape[2] * values.full.shape[-1]
        for values in RESULT.roles.values()
    )
    row = frame.query("role == 'K' and threshold == 0.5 and source == 'full'").iloc[-1]
    assert row.alignment == pytest.approx(float(RESULT.K.full[1, -1, -1]), nan_ok=True)
    assert row.layer == RESULT.layers[-1]


def test_summary_is_five_lines_with_chance():
    lines = RESULT.summary().splitlines()
    assert len(lines) == 5
    assert "chance" in lines[3]
    assert lines[0] in repr(RESULT)


def test_html_escapes_the_model_name():
    hostile = "</script><script>alert(1)</script>"
    named = replace(RESULT, provenance=RESULT.provenance | {"model_name": hostile})
    assert "<script>" not in named._repr_html_()
    assert "&lt;script&gt;" in named._repr_html_()


def test_labels_must_match_the_tensors():
    with pytest.raises(va.InputError, match="thresholds"):
        replace(RESULT, thresholds=(0.9,))


def test_sums_add():
    double = RESULT.sums + RESULT.sums
    assert isinstance(double, Sums)
    assert double.n_tokens == 2 * RESULT.sums.n_tokens
    np.testing.assert_allclose(
        double.alignment("V", "norm"), RESULT.sums.alignment("V", "norm"), rtol=1e-12
    )


def test_merging_refuses_another_model():
    other = replace(RESULT, provenance=RESULT.provenance | {"model_hash": "another"})
    with pytest.raises(va.InputError, match="model weights"):
        RESULT.merge(other)


def test_a_saved_result_is_as_readable_as_any_new_file(tmp_path):
    RESULT.save(tmp_path / "result.safetensors")
    (tmp_path / "other").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
