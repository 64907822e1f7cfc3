"""TransformerLens's own models as bridges, every norm it knows, against the oracle."""

import oracle
import pytest
import tiny
import zoo
from agreement import assert_agrees

pytestmark = pytest.mark.any_bridge


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("name", zoo.NATIVE)
def test_agrees_with_the_oracle(name, compat):
    ids = zoo.ids()
    result = tiny.analyze(
        zoo.native(name, compat=compat),
        ids,
        roles=("Q", "K", "V", "OV"),
        components=("attn_out", "mlp_out"),
    )
    truth = oracle.run(zoo.native_module(name), ids)
    assert set(result.sources) == set(truth.upstream[max(truth.layers)])
    assert_agrees(result, truth)
    for metric in ("energy", "pooled"):
        assert_agrees(result.with_metric(metric), truth)


@pytest.mark.parametrize(
    ("name", "norm"), [("LN", "LayerNorm"), ("RMSPre", "RMSNorm"), ("none", "none")]
)
def test_the_norm_that_was_found_is_said(name, norm):
    found = tiny.analyze(zoo.native(name), zoo.ids()).provenance["input_norm"]
    assert len(found) == 1 and found[0].startswith(norm)
