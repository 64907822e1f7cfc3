"""Every decoder of the zoo against the oracle, raw and in compatibility mode; refusals by name."""

import oracle
import pytest
import torch
import zoo
from agreement import assert_agrees

import tl_valuealign as va

pytestmark = pytest.mark.bridge

ROLES = ("Q", "K", "V", "OV")
REFUSED = {name for name, entry in zoo.ZOO.items() if entry.refused}
LATENT = {"deepseek_v2", "deepseek_v3"}
SUPPORTED = [name for name in zoo.ZOO if name not in REFUSED | LATENT]


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_agrees_with_the_oracle(name, compat):
    ids = zoo.ids()
    truth = oracle.run(zoo.build(name), ids)
    result = va.analyze_value_alignment(
        zoo.bridge(name, compat=compat),
        ids,
        roles=ROLES,
        components=("attn_out", "mlp_out"),
        progress=False,
    )
    expected = {
        label
        for label in truth.upstream[max(truth.layers)]
        if label.endswith(("embed", "attn_out", "mlp_out"))
    }
    assert set(result.sources) == expected
    assert_agrees(result, truth)
    for metric in ("energy", "pooled"):
        assert_agrees(result.with_metric(metric), truth)


@pytest.mark.parametrize("name", sorted(LATENT))
def test_latent_attention_is_refused_by_name(name):
    with pytest.raises(va.ModelError, match="MLA"):
        va.analyze_value_alignment(zoo.bridge(name), zoo.ids(), progress=False)
