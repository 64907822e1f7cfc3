"""Is a value a lookup? Shares that are known in advance, and an analysis of variance by hand."""

import numpy as np
import pytest
import torch
import zoo
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign.identity import GroupSums, RoleIdentity

pytestmark = pytest.mark.bridge


def by_hand(ids, vectors):
    """Adjusted share between groups, float64 [head], from vectors [token, head, d_head]."""
    vectors, n = vectors.numpy().astype(np.float64), len(ids)
    kinds = np.unique(ids)
    within = sum(
        ((vectors[ids == kind] - vectors[ids == kind].mean(0)) ** 2).sum((0, 2)) for kind in kinds
    )
    total = ((vectors - vectors.mean(0)) ** 2).sum((0, 2))
    return 1 - (within / (n - len(kinds))) / (total / (n - 1))


@pytest.mark.parametrize("name", ["llama", "nanochat", "gemma2"])
def test_block_0_of_a_rotary_model_is_a_lookup(name):
    result = va.token_identity(zoo.bridge(name), zoo.ids(8, 40), progress=False)
    for role in ("Q", "K", "V"):
        share = getattr(result, role)
        torch.testing.assert_close(share[0], torch.ones_like(share[0]), rtol=0, atol=1e-5)
        assert float(share[1:].max()) < 0.99
        assert float(share.min()) > 0.2


def test_learned_positions_make_block_0_more_than_a_lookup():
    result = va.token_identity(zoo.bridge("gpt2"), zoo.ids(8, 40), progress=False)
    assert float(result.V[0].max()) < 0.9


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shuffled_ids_explain_nothing(name):
    result = va.token_identity(zoo.bridge(name), zoo.ids(32, 40), shuffle=True, progress=False)
    assert result.shuffled
    for role in ("Q", "K", "V"):
        assert float(getattr(result, role).abs().max()) < 0.05
        assert abs(float(getattr(result, role).mean())) < 0.01


def test_against_an_analysis_of_variance_by_hand():
    ids = zoo.ids(6, 30)
    model = zoo.bridge("llama")
    result = va.token_identity(model, ids, skip_first=False, batch_size=4, progress=False)
    _, cache = model.run_with_cache(ids)
    for row in range(3):
        vectors = cache[f"blocks.{row}.attn.hook_v"].flatten(0, 1)
        np.testing.assert_allclose(
            result.V[row], by_hand(ids.flatten().numpy(), vectors), rtol=0, atol=1e-5
        )
    assert (result.n_tokens, result.n_distinct) == (180, len(ids.unique()))


def test_the_correction_is_unbiased_where_tokens_are_rare():
    """Two vectors a token and no signal: an uncorrected share would say one half."""
    generator = torch.Generator().manual_seed(0)
    groups = GroupSums(400)
    ids = torch.arange(400).repeat(2)
    vectors = torch.randn(800, 60, 4, generator=generator)
    groups.add(ids, [vectors])
    share, total = groups.finish()
    uncorrected = 1 - (1 - share) * 400 / 799
    assert abs(float(share.mean())) < 0.02 < 0.45 < float(uncorrected.mean())
    assert float(total.mean()) == pytest.approx(4, rel=0.05)


def test_a_large_constant_does_not_drown_the_variance():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (500,), generator=generator)
    table = torch.randn(20, 3, 4, generator=generator)
    vectors = table[ids] + 0.5 * torch.randn(500, 3, 4, generator=generator)
    plain, shifted = GroupSums(20), GroupSums(20)
    plain.add(ids, [vectors])
    for chunk in range(0, 500, 100):
        shifted.add(ids[chunk : chunk + 100], [(vectors + 1000)[chunk : chunk + 100]])
    torch.testing.assert_close(plain.finish()[0], shifted.finish()[0], rtol=0, atol=1e-3)


def test_position_0_is_a_lookup_and_left_out():
    """The same first token in every row has one vector, which would look like identity."""
    ids = zoo.ids(12, 30)
    ids[:, 0] = 1
    model = zoo.bridge("llama")
    without = va.token_identity(model, ids, progress=False)
    alone = va.token_identity(model, ids[:, 1:], skip_first=False, progress=False)
    assert without.n_tokens == 12 * 29
    assert float((without.V - alone.V).abs().max()) > 1e-4  # the context still has it


def test_batches_do_not_matter():
    model, ids = zoo.bridge("llama"), zoo.ids(9, 20)
    one, nine = (va.token_identity(model, ids, batch_size=n, progress=False) for n in (1, 9))
    torch.testing.assert_close(one.V, nine.V, rtol=0, atol=1e-5)
    frame = one.to_dataframe()
    assert list(frame.columns) == ["role", "layer", "head", "share", "total"]
    picked = frame[(frame["role"] == "V") & (frame["layer"] == 2) & (frame["head"] == 1)]
    assert float(picked["share"].iloc[0]) == float(one.V[2, 1])


def test_vectors_that_never_vary_have_nothing_to_explain():
    """One token over and over: every vector is the same but for rounding."""
    found = va.token_identity(zoo.bridge("llama"), torch.full((9, 12), 7), progress=False)
    assert found.V.isnan().all() and found.role("V").total.max() < 1e-10


def test_what_cannot_be_asked_is_refused():
    model = zoo.bridge("llama")
    with pytest.raises(va.InputError, match="no token occurs twice"):
        va.token_identity(model, torch.arange(3, 30)[None], progress=False)
    with pytest.raises(va.InputError, match="skip_first"):
        va.token_identity(model, torch.tensor([[5], [5]]), progress=False)
    with pytest.raises(va.InputError, match="shuffle: expected True or False, got 'no'"):
        va.token_identity(model, zoo.ids(4, 40), shuffle="no", progress=False)
    result = va.token_identity(model, zoo.ids(4, 40), roles=("V",), progress=False)
    with pytest.raises(va.InputError, match="role 'K'"):
        result.K  # noqa: B018
    with pytest.raises(TypeCheckError, match="RoleIdentity.share"):
        RoleIdentity(torch.zeros(3), torch.zeros(3, 2))
