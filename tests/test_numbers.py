"""Numbers that could go wrong: zero and deficient heads, ties, empty and giant tokens."""

import math

import numpy as np
import oracle
import pytest
import tiny
import torch
import zoo
from agreement import assert_agrees

import tl_valuealign as va

pytestmark = pytest.mark.any_bridge

ROLES = ("Q", "K", "V", "OV")
D_HEAD = 12  # of the zoo's Llama: 4 query heads, 2 key and value heads, d_model 32


def llama(edit=None):
    """A raw bridge and the plain model behind the same edit of the weights."""
    made = []
    for _ in range(2):
        hf = zoo.build("llama")
        if edit is not None:
            with torch.no_grad():
                edit(hf)
        made.append(hf)
    return zoo.bridge("llama", hf=made[0]), made[1]


def rows(head):
    return slice(head * D_HEAD, (head + 1) * D_HEAD)


# Heads -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_a_zero_head():
    def edit(hf):
        attn = hf.model.layers[1].self_attn
        attn.v_proj.weight[rows(1)] = 0
        attn.q_proj.weight[rows(2)] = 0

    model, plain = llama(edit)
    return tiny.analyze(model, zoo.ids(), roles=ROLES), oracle.run(plain, zoo.ids())


def test_a_zero_head_has_no_directions_and_no_alignment(with_a_zero_head):
    result, truth = with_a_zero_head
    for role, head in (("V", 1), ("Q", 2), ("OV", 2), ("OV", 3)):
        values = result.role(role)
        assert int(values.numerical_rank[1, head]) == 0
        assert values.n_directions[:, 1, head].tolist() == [0, 0]
        assert values.full[:, 1, head].isnan().all()
        assert values.by_source[:, :, 1, head].isnan().all()
        assert values.chance[:, 1, head].isnan().all()
        assert not values.tied[:, 1, head].any()
        assert values.projected_sq_norm_full[1, head] == 0
        assert not values.singular_values[1, head].any()
    assert_agrees(result, truth)


def test_its_neighbours_are_as_they_were(with_a_zero_head):
    result, _ = with_a_zero_head
    whole = tiny.analyze(zoo.bridge("llama"), zoo.ids(), roles=ROLES)
    for key in ("singular_values", "full"):
        mine, theirs = getattr(result.V, key), getattr(whole.V, key)
        before = (0, slice(None)) if key == "singular_values" else (slice(None), 0)
        assert torch.equal(mine[before], theirs[before])
    assert torch.isfinite(result.V.full[:, 1, 0]).all()


def test_a_zero_head_breaks_nothing_that_reads_the_result(with_a_zero_head, tmp_path):
    result, _ = with_a_zero_head
    assert not result.boxes()[1, 1]
    assert "nan" not in result.summary()
    frame = result.to_dataframe()
    zero = frame.query("role == 'V' and layer == 1 and head == 1")
    assert zero.alignment.isna().all() and (zero.numerical_rank == 0).all()
    result.save(tmp_path / "zero.safetensors")
    tiny.assert_same_bits(result, va.load(tmp_path / "zero.safetensors"))
    assert "<table>" in result._repr_html_()


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_a_rank_deficient_head(rank):
    generator = torch.Generator().manual_seed(rank)

    def edit(hf):
        weight = hf.model.layers[2].self_attn.v_proj.weight
        left = torch.randn(D_HEAD, rank, generator=generator.manual_seed(rank))
        weight[rows(0)] = left @ torch.randn(rank, zoo.D, generator=generator) / 6

    model, plain = llama(edit)
    result = tiny.analyze(model, zoo.ids(), roles=("V", "OV"), thresholds=(1.0, 0.9))
    assert int(result.V.numerical_rank[2, 0]) == rank
    assert result.OV.numerical_rank[2, :2].tolist() == [rank, rank]
    assert int(result.V.n_directions[0, 2, 0]) >= rank
    assert_agrees(
        tiny.analyze(model, zoo.ids(), roles=("V",)), oracle.run(plain, zoo.ids(), roles=("V",))
    )


@pytest.mark.parametrize(("role", "name"), [("Q", "q_proj"), ("K", "k_proj"), ("V", "v_proj")])
def test_one_head_that_is_not_a_number_is_named(role, name):
    def edit(hf):
        getattr(hf.model.layers[1].self_attn, name).weight[rows(1)][4, 7] = torch.nan

    with pytest.raises(va.ModelError, match=f"role {role}: .* L1H1 has NaN"):
        tiny.analyze(llama(edit)[0], zoo.ids())


def test_a_gain_that_is_not_a_number():
    def edit(hf):
        hf.model.layers[1].input_layernorm.weight[3] = torch.inf

    with pytest.raises((va.ModelError, va.SelfCheckError), match="block 1|L1H0"):
        tiny.analyze(llama(edit)[0], zoo.ids())


def with_spectrum(values, seed=0):
    """An edit that gives the first value head of block 1 these singular values, norm included."""
    values = torch.tensor(values, dtype=torch.float64)

    def edit(hf):
        generator = torch.Generator().manual_seed(seed)
        block = hf.model.layers[1]
        random = torch.randn(zoo.D, len(values), generator=generator, dtype=torch.float64)
        other = torch.randn(2 * (len(values),), generator=generator, dtype=torch.float64)
        A = torch.linalg.qr(random).Q * values @ torch.linalg.qr(other).Q.T
        stored = A.T / block.input_layernorm.weight.double()
        block.self_attn.v_proj.weight[rows(0)] = stored.to(torch.float32)

    return edit


def test_equal_singular_values_across_the_cut_are_flagged():
    """Half of twelve equal values carry half: which six is arbitrary."""
    result = tiny.analyze(llama(with_spectrum([1.0] * 12))[0], zoo.ids(), roles=("V",))
    assert int(result.V.n_directions[1, 1, 0]) in (6, 7)
    assert result.V.tied[:, 1, 0].tolist() == [True, True]
    others = result.V.tied.clone()
    others[:, 1, 0] = False
    assert not others.any()


def test_equal_singular_values_away_from_the_cut_are_not_flagged():
    spectrum = [3.0, 3.0, 3.0, 3.0, 1.0] + [0.1] * 7  # 0.9 falls after the fourth
    result = tiny.analyze(llama(with_spectrum(spectrum))[0], zoo.ids(), roles=("V",))
    assert result.V.n_directions[:, 1, 0].tolist() == [4, 3]
    assert result.V.tied[:, 1, 0].tolist() == [False, True]


def test_all_equal_values_at_threshold_one_leave_nothing_arbitrary():
    result = tiny.analyze(
        llama(with_spectrum([1.0] * 12))[0], zoo.ids(), roles=("V",), thresholds=(1.0,)
    )
    assert int(result.V.n_directions[0, 1, 0]) == 12 and not result.V.tied[0, 1, 0]


# Tokens ------------------------------------------------------------------------------------------


def test_a_token_of_zero_norm_is_left_out_and_counted():
    """A zero embedding has no direction; blocks after the first see more than it."""

    def edit(hf):
        hf.model.embed_tokens.weight[5] = 0

    ids = zoo.ids().clamp(min=6)
    ids[0, 3] = ids[1, 0] = ids[1, 1] = 5
    model, plain = llama(edit)
    for metric in ("norm", "energy", "pooled"):
        result = tiny.analyze(model, ids, metric=metric, roles=ROLES)
        truth = oracle.run(plain, ids)
        assert_agrees(result, truth)
        streams = [*result.sources, ("full", 0)]
        counts = [truth.dropped[stream] for stream in streams]
        assert result.provenance["zero_norm_tokens"] == counts
        assert counts[0] == 3 and 0 < counts[1] < 3  # attention writes nothing at the first alone
    assert result.provenance["n_tokens"] == 33


def test_a_stream_of_zeros_only():
    def edit(hf):
        hf.model.embed_tokens.weight[5] = 0

    result = tiny.analyze(llama(edit)[0], torch.full((2, 4), 5), layers=[0])
    assert result.V.by_source.isnan().all() and result.V.full.isnan().all()
    assert result.norms[0] == 0 and result.V.projected_sq_norm[0].eq(0).all()
    assert result.provenance["zero_norm_tokens"] == [8, 8]


def giant(factor):
    """The id 5, at position 0 alone, has an embedding of ``factor`` times the others', along the
    first direction of the first value head."""

    def edit(hf):
        weight, block = hf.model.embed_tokens.weight, hf.model.layers[0]
        A = (block.self_attn.v_proj.weight[rows(0)] * block.input_layernorm.weight).T
        direction = torch.linalg.svd(A, full_matrices=False).U[:, 0]
        weight[5] = direction * weight[6:].norm(dim=1).mean() * factor

    ids = zoo.ids().clamp(min=6)
    ids[:, 0] = 5
    return *llama(edit), ids


def test_one_token_of_a_thousand_times_the_norm_is_told_by_the_metrics():
    """norm and energy give each token one voice; pooled gives this one nearly all, and
    skip_first takes it out."""
    model, plain, ids = giant(1e3)
    embed = {}
    for metric in ("norm", "energy", "pooled"):
        result = tiny.analyze(model, ids, metric=metric, layers=[0])
        assert_agrees(result, oracle.run(plain, ids, layers=[0]))
        skipped = tiny.analyze(model, ids, metric=metric, layers=[0], skip_first=True)
        assert_agrees(skipped, oracle.run(plain, ids, layers=[0], skip_first=True))
        embed[metric] = (float(result.V.full[0, 0, 0]), float(skipped.V.full[0, 0, 0]))
    whole, without = map(list, zip(*embed.values(), strict=True))
    assert whole[2] > 0.9 and max(without) < whole[2] - 0.1
    assert abs(whole[1] - without[1]) < 0.2
    assert result.norms[0] > 50 * skipped.norms[0]


@pytest.mark.parametrize("factor", [1e3, 1e6, 1e12])
def test_huge_streams_lose_no_digits(factor):
    """Sums of squares in float32 would keep nothing of the small tokens beside the giant."""
    model, plain, ids = giant(factor)
    result, truth = tiny.analyze(model, ids, layers=[0]), oracle.run(plain, ids, layers=[0])
    assert_agrees(result, truth)
    pooled = tiny.analyze(model, ids, layers=[0], metric="pooled")
    np.testing.assert_allclose(pooled.V.full, truth.V.full["pooled"], rtol=0, atol=2e-5)


def test_sums_over_many_tokens_lose_no_digits():
    """A hundred thousand tokens, of which the first is a thousand times the rest."""
    model, _, ids = giant(1e3)
    row = torch.cat([ids[0, :1], ids[0, 1:].repeat(6)])[None]
    few = tiny.analyze(model, row, layers=[0], metric="pooled")
    many = tiny.analyze(model, row.repeat(1600, 1), layers=[0], metric="pooled", batch_size=64)
    assert many.provenance["n_tokens"] == 1600 * 61
    np.testing.assert_allclose(few.V.full, many.V.full, rtol=1e-9)
    np.testing.assert_allclose(few.norms, many.norms, rtol=1e-9)
    np.testing.assert_allclose(few.V.projected_sq_norm, many.V.projected_sq_norm, rtol=1e-9)


@pytest.mark.parametrize("metric", ["norm", "energy", "pooled"])
@pytest.mark.parametrize("factor", [1e-17, 1e18])
def test_the_scale_of_a_stream_changes_no_alignment(factor, metric):
    """The model itself still computes in float32, but sums of squares would leave it."""
    base = tiny.analyze(zoo.bridge("llama"), zoo.ids(), layers=[0], metric=metric)

    def edit(hf):
        hf.model.embed_tokens.weight.mul_(factor)
        hf.model.layers[0].input_layernorm.variance_epsilon = 0.0

    result = tiny.analyze(llama(edit)[0], zoo.ids(), layers=[0], metric=metric)
    np.testing.assert_allclose(result.V.full, base.V.full, atol=1e-5)
    np.testing.assert_allclose(result.norms, base.norms * factor, rtol=1e-5)
    projected = base.V.projected_sq_norm * factor**2
    np.testing.assert_allclose(result.V.projected_sq_norm, projected, rtol=1e-4)


# Activations that are no numbers -----------------------------------------------------------------


def test_one_token_that_overflows_later_in_the_text_is_found():
    """The self-checks read the beginning; the figures read everything."""

    def edit(hf):
        hf.model.embed_tokens.weight[7] = torch.inf

    ids = zoo.ids(batch=4)
    ids[ids == 7] = 8
    ids[3, 5] = 7
    with pytest.raises(va.ModelError, match="embed.* NaN or infinite"):
        tiny.analyze(llama(edit)[0], ids)
    for question in (
        va.contribution_shares,
        va.token_identity,
        va.null_alignment,
        va.substitute_input,
    ):
        with pytest.raises(va.ModelError, match="NaN or infinite entries at some token"):
            question(llama(edit)[0], ids, batch_size=2, progress=False)


def test_few_sequences_have_no_standard_error():
    few = tiny.analyze(zoo.bridge("llama"), zoo.ids(batch=7))
    many = tiny.analyze(zoo.bridge("llama"), zoo.ids(batch=8))
    assert few.V.full_stderr.isnan().all() and few.V.excess_stderr.isnan().all()
    assert many.V.full_stderr.gt(0).all()
    assert many.V.excess_stderr[:, 1:].gt(0).all()  # before block 0 there is the embedding alone


def test_the_chance_of_a_whole_space_is_one():
    """Heads as wide as the readable space see all of it."""
    options = zoo.ZOO["llama"].options | {"head_dim": zoo.D}
    zoo.ZOO["wide"] = zoo.Entry("LlamaConfig", "LlamaForCausalLM", options)
    try:
        result = tiny.analyze(zoo.bridge("wide"), zoo.ids(), thresholds=(1.0,), roles=ROLES)
    finally:
        del zoo.ZOO["wide"]
    assert result.V.n_directions.eq(zoo.D).all()
    assert result.V.chance.eq(1).all()
    assert (result.V.full - 1).abs().max() < 1e-6
    assert math.isclose(float(result.OV.full.min()), 1, abs_tol=1e-6)
