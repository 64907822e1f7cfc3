"""``result.to_xarray()``: the same numbers under named dimensions."""

import sys

import numpy as np
import pytest
from fakes import fake_result

import tl_valuealign as va
from tl_valuealign.labelled import ROLE_VARIABLES


def test_every_field_is_there_under_its_own_axes():
    result = fake_result(layers=4, heads=3, components=("attn_out", "mlp_out"))
    data = result.to_xarray()
    assert set(ROLE_VARIABLES) == set(va.RoleResult.__dataclass_fields__)
    for role, values in result.roles.items():
        for name in ROLE_VARIABLES:
            mine, theirs = data[name].sel(role=role), getattr(values, name).numpy()
            np.testing.assert_array_equal(mine, theirs, err_msg=f"{role}.{name}")
            assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(data.norm, result.norms)
    np.testing.assert_array_equal(data.full_norm, result.full_norms)
    sizes = {"role": 3, "threshold": 2, "source": 9, "layer": 4, "head": 3, "direction": 64}
    assert dict(data.sizes) == sizes


def test_labels_select_what_the_accessors_give():
    result = fake_result(layers=8, heads=3, layer_numbers=(2, 5, 7))
    data = result.to_xarray()
    picked = data.by_source.sel(role="V", source="3_attn_out", threshold=0.5)
    np.testing.assert_array_equal(picked, result.alignment("V", "3_attn_out", 0.5))
    assert list(data.layer.values) == [2, 5, 7]
    row = result.to_dataframe().query(
        "role == 'K' and threshold == 0.9 and source == 'embed' and layer == 5 and head == 1"
    )
    at = {"role": "K", "threshold": 0.9, "layer": 5, "head": 1}
    assert float(data.by_source.sel(source="embed", **at)) == row.alignment.item()
    assert float(data.chance.sel(**at)) == row.chance.item()


def test_fewer_key_value_heads_are_padded_and_come_off_again():
    result = fake_result(layers=3, heads=6, kv_heads=2)
    data = result.to_xarray()
    assert bool(data.full.sel(role="V", head=slice(2, None)).isnull().all())
    assert not bool(data.tied.sel(role="V", head=5).any())
    native = data.full.sel(role="V").dropna("head", how="all")
    np.testing.assert_array_equal(native, result.V.full)
    counts = data.n_directions.sel(role="K").dropna("head", how="all")
    np.testing.assert_array_equal(counts, result.K.n_directions)
    np.testing.assert_array_equal(data.full.sel(role="Q"), result.Q.full)


def test_it_says_what_was_measured():
    data = fake_result(layers=2, heads=2, metric="energy", model_name="small").to_xarray()
    assert (data.metric, data.model_name, data.n_sequences) == ("energy", "small", 12)
    assert all("long_name" in data[name].attrs for name in data.data_vars)


def test_without_xarray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(va.DependencyError, match=r"pip install 'tl_valuealign\[xarray\]'"):
        fake_result(layers=2, heads=2).to_xarray()
