"""Every decoder of the zoo against the oracle, raw and in compatibility mode.

The README's support table is made from what this file reports (``support_table.py``).
"""

import oracle
import pytest
import tiny
import zoo
from agreement import assert_agrees

import tl_valuealign as va

pytestmark = pytest.mark.any_bridge

ROLES = ("Q", "K", "V", "OV")
LATENT = {"deepseek_v2", "deepseek_v3"}
SUPPORTED = [name for name in zoo.DECODERS if name not in LATENT]
COMPAT = pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])


@COMPAT
@pytest.mark.parametrize("name", SUPPORTED)
def test_agrees_with_the_oracle(name, compat, record_property):
    ids = zoo.ids()
    if zoo.wrong(name):  # this release computes another model: a refusal is the right answer
        record_property("refused", zoo.wrong(name))
        with pytest.raises(va.ModelError, match="upgrade|offers no W_Q"):
            tiny.analyze(zoo.bridge(name, compat=compat), ids)
        return
    truth = oracle.run(zoo.build(name), ids)
    result = tiny.analyze(
        zoo.bridge(name, compat=compat), ids, roles=ROLES, components=("attn_out", "mlp_out")
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


@COMPAT
@pytest.mark.parametrize("name", sorted(LATENT))
def test_latent_attention_is_refused_by_name(name, compat):
    with pytest.raises(va.ModelError, match="MLA"):
        tiny.analyze(zoo.bridge(name, compat=compat), zoo.ids())


@pytest.mark.parametrize("name", ["gpt2", "llama", "jamba"])
def test_chosen_layers_are_rows_of_the_whole(name):
    """Original block numbers on the axis, and the same figures as in the run over all blocks."""
    model, ids = zoo.bridge(name), zoo.ids()
    whole = tiny.analyze(model, ids)
    first, last = whole.layers[0], whole.layers[-1]
    for layers in ([first], [last], [last, first]):
        part = tiny.analyze(model, ids, layers=layers)
        assert part.layers == tuple(sorted(layers))
        rows = [whole.layers.index(layer) for layer in part.layers]
        upstream = [s for s in whole.sources if not s[0].isdigit() or int(s[0]) < max(layers)]
        assert part.sources == tuple(upstream)
        columns = [whole.sources.index(source) for source in upstream]
        for role in part.roles:
            mine, theirs = part.role(role), whole.role(role)
            pairs = (
                (mine.full, theirs.full[:, rows]),
                (mine.by_source, theirs.by_source[:, columns][:, :, rows]),
                (mine.singular_values, theirs.singular_values[rows]),
                (mine.projected_sq_norm, theirs.projected_sq_norm[columns][:, rows]),
            )
            for got, want in pairs:
                assert got.shape == want.shape
                assert (got - want).abs().nan_to_num().max() < 1e-6
                assert (got.isnan() == want.isnan()).all()


def test_blocks_without_attention_cannot_be_chosen():
    model = zoo.bridge("jamba")
    assert tiny.analyze(model, zoo.ids()).layers == (1, 3)
    with pytest.raises(va.InputError, match="block 2 has no attention.* 1, 3"):
        tiny.analyze(model, zoo.ids(), layers=[2])


def test_a_model_of_one_block(monkeypatch):
    options = zoo.ZOO["llama"].options | {"num_hidden_layers": 1}
    entry = zoo.Entry("LlamaConfig", "LlamaForCausalLM", options)
    monkeypatch.setitem(zoo.ZOO, "one_block", entry)
    ids = zoo.ids()
    result = tiny.analyze(zoo.bridge("one_block"), ids, roles=ROLES)
    assert result.sources == ("embed",)
    assert_agrees(result, oracle.run(zoo.build("one_block"), ids))
