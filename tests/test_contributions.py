"""How much: shares against an oracle in float64 that sums whole vectors, and what must hold."""

import numpy as np
import oracle
import pytest
import torch
import zoo
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign.contributions import RoleShares
from tl_valuealign.plots.contributions import plot_contributions

pytestmark = pytest.mark.bridge

FAMILIES = ("gpt2", "llama", "nanochat", "gemma2", "qwen2", "neox_parallel", "bloom", "jamba")
ROTARY_WITHOUT_BIAS = ("llama", "nanochat", "gemma2", "mistral", "olmo2")


def shares_by_whole_vectors(truth, role, row):
    """{source: [head]} and the error of rebuilding the head's vectors, from full head vectors."""
    layer = truth.layers[row]
    attention = truth.attentions[layer]
    made = getattr(truth, role)
    scale = oracle.scale_of(truth.resid[layer], attention)
    whole = np.einsum(
        "bpd,hdk->bphk", oracle.visible(truth.resid[layer], attention.norm) / scale, made.A[row]
    )
    whole = (whole + made.b[row])[truth.kept]
    total = (whole**2).sum((0, 2))
    shares, rebuilt = {}, np.zeros_like(whole)
    for label in truth.upstream[layer]:
        part = oracle.visible(truth.streams[label], attention.norm) / scale
        part = np.einsum("bpd,hdk->bphk", part, made.A[row])[truth.kept]
        shares[label] = (part * whole).sum((0, 2)) / total
        rebuilt += part
    shares["bias"] = (made.b[row] * whole).sum((0, 2)) / total
    rebuilt += made.b[row]
    return shares, np.abs(rebuilt - whole).max() / np.abs(whole).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_shares_are_those_of_the_oracle_and_sum_to_one(name):
    ids = zoo.ids()
    truth = oracle.run(zoo.build(name), ids)
    result = va.contribution_shares(zoo.bridge(name), ids, progress=False)
    assert list(result.layers) == truth.layers
    for role, values in result.roles.items():
        torch.testing.assert_close(
            values.share.sum(0), torch.ones_like(values.share[0]), rtol=0, atol=1e-5
        )
        assert float(values.rebuild_error.max()) <= 1e-5
        for row in range(len(truth.layers)):
            expected, rebuilt = shares_by_whole_vectors(truth, role, row)
            assert rebuilt < 1e-12
            for number, source in enumerate(result.sources):
                want = expected.get(source, np.zeros(values.share.shape[-1]))
                np.testing.assert_allclose(
                    values.share[number, row], want, rtol=0, atol=2e-5, err_msg=f"{role} {source}"
                )


@pytest.mark.parametrize("name", ROTARY_WITHOUT_BIAS)
def test_at_block_0_of_a_rotary_model_the_embedding_is_everything(name):
    result = va.contribution_shares(zoo.bridge(name), zoo.ids(), progress=False)
    for role in ("Q", "K", "V"):
        share = getattr(result, role)
        torch.testing.assert_close(share[0, 0], torch.ones_like(share[0, 0]), rtol=0, atol=1e-5)
        assert float(share[1:, 0].abs().max()) < 1e-5
        assert float((share[0, 1] - 1).abs().max()) > 0.05  # and only there


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weight_processing_moves_only_the_bias_of_values(name):
    """Folding value biases away is the one thing that processing does to a head's own vector."""
    plain, processed = (
        va.contribution_shares(model, zoo.ids(), progress=False)
        for model in (zoo.bridge(name), zoo.bridge(name, compat=True, fold_value_biases=False))
    )
    for role in ("Q", "K", "V"):
        torch.testing.assert_close(
            getattr(plain, role), getattr(processed, role), rtol=0, atol=2e-5
        )
    torch.testing.assert_close(plain.embedding.kept, processed.embedding.kept, rtol=0, atol=1e-5)


def test_the_embedding_in_the_stream_against_the_oracle():
    ids = zoo.ids()
    truth = oracle.run(zoo.build("gpt2"), ids)
    fate = va.contribution_shares(zoo.bridge("gpt2"), ids, roles=("V",), progress=False).embedding
    embed = oracle.visible(truth.streams["embed"], "LN")[truth.kept]
    size = (embed**2).sum(-1)
    for row, layer in enumerate(truth.layers):
        stream = oracle.visible(truth.resid[layer], "LN")[truth.kept]
        rest = stream - embed
        cosine = (rest * embed).sum(-1) / np.linalg.norm(rest, axis=1) / size**0.5
        assert float(fate.rest_cosine[row]) == pytest.approx(cosine.mean(), abs=1e-5)
        kept = ((stream * embed).sum(-1) / size).mean()
        assert float(fate.kept[row]) == pytest.approx(kept, rel=1e-5)


def test_pulls_upstream_of_a_block_add_up_to_what_is_kept():
    result = va.contribution_shares(zoo.bridge("llama"), zoo.ids(), progress=False)
    fate, labels = result.embedding, result.sources[:-1]
    assert bool(fate.rest_cosine[0].isnan())  # nothing but the embedding is there yet
    for row, layer in enumerate(result.layers):
        upstream = [
            n for n, s in enumerate(labels) if not s[0].isdigit() or int(s.split("_")[0]) < layer
        ]
        assert float(fate.pull[upstream].sum()) == pytest.approx(float(fate.kept[row]), abs=1e-6)


def test_batches_do_not_matter_and_skip_first_does():
    ids = zoo.ids(9, 12)
    model = zoo.bridge("llama")
    one, nine, later = (
        va.contribution_shares(model, ids, progress=False, **options)
        for options in ({"batch_size": 1}, {"batch_size": 9}, {"skip_first": True})
    )
    torch.testing.assert_close(one.V, nine.V, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.role("V").stderr, nine.role("V").stderr, rtol=1e-3, atol=1e-7)
    assert float((later.V - nine.V).abs().max()) > 1e-3
    assert not nine.role("V").half_width.isnan().any()
    few = va.contribution_shares(model, ids[:7], progress=False)
    assert few.role("V").stderr.isnan().all() and not few.V.isnan().any()


def test_the_table_sums_to_one_and_takes_the_posts_measure_beside_it():
    model, ids = zoo.bridge("gpt2"), zoo.ids()
    result = va.contribution_shares(model, ids, progress=False)
    alignment = va.analyze_value_alignment(
        model, ids, components=("attn_out", "mlp_out"), progress=False
    )
    frame = result.to_dataframe(alignment)
    sums = frame.groupby(["role", "layer", "head"])["share"].sum()
    assert np.allclose(sums, 1, atol=1e-5)
    embed = frame[(frame["role"] == "V") & (frame["source"] == "embed")]
    wanted = alignment.V.projected_sq_norm[0].flatten()
    assert np.allclose(embed["projected_sq_norm"], wanted)
    assert set(result.by_kind("V")) == {"embed", "pos_embed", "attn_out", "mlp_out", "bias"}
    assert list(result.embedding_frame()["layer"]) == [0, 1, 2]


def test_the_figure_stacks_to_one():
    result = va.contribution_shares(zoo.bridge("llama"), zoo.ids(), progress=False)
    figure = plot_contributions(result)
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.xaxis == "x"]
    assert np.allclose(np.sum([trace.y for trace in bars], axis=0), 1, atol=1e-5)
    assert figure.layout.barmode == "relative"
    assert {trace.marker.pattern.shape for trace in bars} == {"", "/", "\\", "-"}


def test_a_wrong_shape_or_role_is_refused():
    one = torch.zeros(3, 2, 4, dtype=torch.float64)
    with pytest.raises(TypeCheckError, match="RoleShares.sq_norm"):
        RoleShares(one, one, one, torch.zeros(2, 5, dtype=torch.float64), one[0, :, 0])
    model = zoo.bridge("llama")
    with pytest.raises(va.InputError, match="OV"):
        va.contribution_shares(model, zoo.ids(), roles=("OV",), progress=False)
    result = va.contribution_shares(model, zoo.ids(), roles=("V",), layers=(1,), progress=False)
    with pytest.raises(va.InputError, match="role 'Q'"):
        result.Q  # noqa: B018
    with pytest.raises(va.InputError, match="source 'nothing'"):
        result.share("V", "nothing")
