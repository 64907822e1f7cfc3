"""The further questions on HookedTransformer: the same theorems, the same oracle."""

import numpy as np
import oracle
import pytest
import torch
import zoo

import tl_valuealign as va

pytestmark = pytest.mark.hooked

IDS = zoo.ids(9, 12)


FAMILIES = ("LN", "RMSPre", "grouped_rotary", "parallel", "alibi", "attn_only")


@pytest.mark.parametrize("name", FAMILIES)
def test_shares_sum_to_one_and_agree_with_whole_vectors(name):
    model = zoo.hooked(name)
    truth = oracle.run(zoo.hooked(name), IDS)
    result = va.contribution_shares(model, IDS, progress=False)
    for values in result.roles.values():
        assert float((values.share.sum(0) - 1).abs().max()) < 1e-5
        assert float(values.rebuild_error.max()) <= 1e-5
    for row, layer in enumerate(truth.layers):
        attention = truth.attentions[layer]
        scale = oracle.scale_of(truth.resid[layer], attention)
        whole = oracle.visible(truth.resid[layer], attention.norm) / scale
        whole = np.einsum("bpd,hdk->bphk", whole, truth.V.A[row]) + truth.V.b[row]
        part = oracle.visible(truth.streams["embed"], attention.norm) / scale
        part = np.einsum("bpd,hdk->bphk", part, truth.V.A[row])
        want = (part * whole).sum((0, 1, 3)) / (whole**2).sum((0, 1, 3))
        np.testing.assert_allclose(result.V[0, row], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["LN", "grouped_rotary", "parallel"])
@pytest.mark.parametrize("processed", [False, True])
def test_substituting_a_stream_by_itself_changes_nothing(name, processed):
    model = zoo.hooked(name, processed=processed)
    hooks = sum(len(point.fwd_hooks) for point in model.hook_dict.values())
    for roles in (("V",), ("Q", "K", "V")):
        same = va.substitute_input(model, IDS, roles=roles, source="full", by="set", progress=False)
        assert abs(float(same.delta)) < 1e-6
    effect = va.substitute_input(model, IDS, progress=False)
    if name == "grouped_rotary":
        assert abs(float(effect.delta[0])) < 1e-6
    assert float(effect.delta[1:].abs().min()) > 1e-5
    assert sum(len(point.fwd_hooks) for point in model.hook_dict.values()) == hooks


def test_identity_and_directions():
    model = zoo.hooked("grouped_rotary")
    identity = va.token_identity(model, zoo.ids(8, 40), progress=False)
    torch.testing.assert_close(identity.V[0], torch.ones(2).double(), rtol=0, atol=1e-5)
    assert float(identity.V[1:].max()) < 0.99
    tables = [
        va.decode_directions(zoo.hooked_from_hf("llama", processed=p), 1, 1, "OV", n_tokens=4)
        for p in (False, True)
    ]
    assert tables[0]["positive"].tolist() == tables[1]["positive"].tolist()
    assert tables[0]["positive_writes"].tolist() == tables[1]["positive_writes"].tolist()


def test_nulls_and_top_tokens():
    model = zoo.hooked("LN")
    result = va.analyze_value_alignment(model, IDS, progress=False)
    null = va.null_alignment(model, IDS, draws=8, progress=False)
    torch.testing.assert_close(null.V.observed[:, 1], result.V.full, rtol=0, atol=1e-5)
    assert len(va.top_tokens(result, 1, 1)) == 16
    assert len(result.claims()) == 5


def test_positions_added_to_queries_and_keys_alone_are_refused():
    model = zoo.hooked("shortformer")
    with pytest.raises(va.ModelError, match=r"roles=\('V',\)"):
        va.contribution_shares(model, IDS, progress=False)
    values = va.contribution_shares(model, IDS, roles=("V",), progress=False)
    assert float((values.V.sum(0) - 1).abs().max()) < 1e-5
