"""The verdict: on results made so that each statement holds, or fails, and on real ones."""

import dataclasses

import numpy as np
import pytest
import torch
import zoo
from fakes import fake_result
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign.claims import STATEMENTS

ROWS = list(STATEMENTS)


def claims(result, contributions=None):
    return va.claims_table(result, contributions).set_index("claim")


def with_embedding(result, change):
    """The same result with V's embedding alignment [threshold, layer, head] changed."""
    values = result.V
    by_source = values.by_source.clone()
    by_source[:, 0] = change(values.by_source[:, 0])
    excess = values.full - by_source[:, 0]
    changed = dataclasses.replace(values, by_source=by_source, excess=excess)
    return dataclasses.replace(result, roles=result.roles | {"V": changed})


def test_one_row_a_statement_with_counts_that_fit():
    result = fake_result()
    table = result.claims()
    assert list(table["claim"]) == ROWS
    assert list(table["statement"]) == list(STATEMENTS.values())
    assert (table["heads"] <= table["of"]).all()
    assert (table["low"].fillna(0) <= table["high"].fillna(0)).all()
    for row in table.itertuples():
        assert row.words and f"{row.heads} of {row.of}" in row.words


def test_a_result_like_the_post_bears_the_post_out():
    table = claims(fake_result())
    assert set(table["verdict"]) <= {"holds", "holds in most heads"}
    assert table.loc["embedding over full stream, V", "effect"] > 0
    assert table.loc["embedding over attention, Q and K", "effect"] < 0
    assert table.loc["negligible share, V", "effect"] < 0.05


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_statements_about_v_follow_the_embedding(factor):
    result = with_embedding(fake_result(zero_head=None), lambda embed: embed * factor)
    table = claims(result)
    expected = "holds" if factor > 1 else "fails"
    for name in ("embedding over attention, V", "embedding over full stream, V"):
        assert table.loc[name, "verdict"] == expected
        assert table.loc[name, "heads"] == (table.loc[name, "of"] if factor > 1 else 0)


def test_counts_are_those_of_the_boxes_and_the_frame():
    result = fake_result()
    table = claims(result)
    row = table.loc["embedding over full stream, V"]
    assert row["of"] == 24 * 16 - 1  # one head is zero
    assert row["heads"] == row["of"] - int(result.boxes().sum())
    assert row["chance"] == row["of"] / 2
    frame = result.to_dataframe()
    frame = frame[(frame["role"] == "V") & (frame["threshold"] == 0.9)]
    attention = frame[frame["source"].str.endswith("attn_out")]
    best = attention.groupby(["layer", "head"])["alignment"].max()
    embed = frame[frame["source"] == "embed"].set_index(["layer", "head"])["alignment"]
    margin = (embed - best).dropna()
    row = table.loc["embedding over attention, V"]
    assert (row["heads"], row["of"]) == ((margin > 0).sum(), len(margin))
    assert row["effect"] == pytest.approx(margin.mean())


def test_luck_is_one_over_the_number_of_streams():
    """With every stream drawn alike, the embedding is first about as often as luck says."""
    result = fake_result(12, 40, zero_head=None)
    generator = torch.Generator().manual_seed(0)
    by_source = result.V.by_source.clone()
    alike = torch.rand(by_source.shape, generator=generator, dtype=torch.float64)
    alike = torch.where(by_source.isnan(), by_source, alike)
    values = dataclasses.replace(result.V, by_source=alike)
    row = claims(dataclasses.replace(result, roles={"V": values})).loc[ROWS[0]]
    expected = sum(40 / (n + 1) for n in range(1, 12))
    assert row["chance"] == pytest.approx(expected)
    assert abs(row["heads"] - expected) < 4 * expected**0.5
    assert row["verdict"] in ("fails in most heads", "fails")


def test_an_embedding_at_chance_is_called_avoidance_not_seeking():
    base = fake_result(zero_head=None)
    at_chance = with_embedding(base, lambda embed: base.V.chance)
    above = with_embedding(base, lambda embed: 1.5 * base.V.chance)
    for name in ("embedding over attention, V", "embedding over full stream, V"):
        assert "avoid" in claims(at_chance).loc[name, "words"]
        assert "avoid" not in claims(above).loc[name, "words"]
        assert "× chance" in claims(above).loc[name, "words"]


def test_the_interval_of_the_mean_over_heads_is_the_bootstrap_of_the_mean():
    result = fake_result(zero_head=None)
    row = claims(result).loc["embedding over full stream, V"]
    means = result.sums.excess_replicates("V", "norm")[:, 0].flatten(1).mean(1)
    assert row["effect"] == pytest.approx(-float(result.V.excess[0].mean()))
    width = (row["high"] - row["low"]) / 2
    assert width == pytest.approx(2.201 * float(means.std()) * (13 / 11) ** 0.5, rel=1e-3)
    per_head = result.V.excess_stderr[0].mean()
    assert width < 2.2 * float(per_head)  # heads err apart here, so their mean errs less


def test_few_sequences_withhold_intervals_in_a_plain_word():
    table = claims(fake_result(n_sequences=5))
    for name in ROWS[:3]:
        assert np.isnan(table.loc[name, "low"]) and np.isnan(table.loc[name, "high"])
        assert "Intervals withheld: 5 sequences, fewer than 8." in table.loc[name, "words"]
        assert table["clear"].isna()[name]
    exact = table.loc["concentrated spectra, V"]
    assert exact["low"] == exact["effect"] == exact["high"]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"roles": ("Q", "K")}, [ROWS[0], ROWS[2], ROWS[3], ROWS[4]]),
        ({"roles": ("V",)}, [ROWS[1]]),
        ({"components": ("mlp_out",)}, [ROWS[0], ROWS[1], ROWS[4]]),
        ({"layers": 1, "zero_head": None}, [ROWS[0], ROWS[1], ROWS[4]]),
    ],
)
def test_what_was_not_measured_is_said(options, missing):
    table = claims(fake_result(**{"layers": 4, "heads": 3} | options))
    assert sorted(table.index[table["verdict"] == "not measured"]) == sorted(missing)


@pytest.mark.bridge
def test_a_random_model_bears_nothing_out():
    """Spectra are those of random matrices, and the embedding beats the full stream by a toss."""
    result = va.analyze_value_alignment(zoo.bridge("llama"), zoo.ids(9, 20), progress=False)
    table = claims(result)
    assert table.loc["embedding over full stream, V", "of"] == 4  # block 0 has nothing else
    assert table.loc["embedding over attention, V", "of"] == 4
    assert table.loc["embedding over attention, V", "chance"] == pytest.approx(2 / 2 + 2 / 3)


@pytest.mark.bridge
def test_signed_shares_answer_the_last_statement_where_they_are_given():
    model, ids = zoo.bridge("llama"), zoo.ids(9, 20)
    result = va.analyze_value_alignment(model, ids, progress=False)
    shares = va.contribution_shares(model, ids, progress=False)
    row = claims(result, shares).loc["negligible share, V"]
    later = shares.V[0, 1:]
    assert row["effect"] == pytest.approx(float(later.mean()))
    assert (row["heads"], row["of"]) == (int((later.abs() < 0.05).sum()), 4)
    assert row["low"] < row["effect"] < row["high"]
    plain = claims(result).loc["negligible share, V"]
    projected = result.V.projected_sq_norm
    ratio = (projected[0] / result.V.projected_sq_norm_full)[1:]
    assert plain["effect"] == pytest.approx(float(ratio.mean()))
    assert plain["heads"] == int((ratio < 0.05).sum()) and np.isnan(plain["low"])
    smallest = projected[1:].nan_to_num(torch.inf).min(0).values
    count = int((projected[0] < smallest)[1:].sum())
    assert f"In {count} of 4 heads the embedding alone gives a smaller value" in plain["words"]
    for wrong in ((None,), (result, "x")):
        with pytest.raises(TypeCheckError):
            va.claims_table(*wrong)


@pytest.mark.bridge
def test_shares_of_some_blocks_answer_for_those_and_of_another_model_for_none():
    model, ids = zoo.bridge("llama"), zoo.ids(9, 20)
    shares = {
        layers: va.contribution_shares(model, ids, layers=layers, progress=False)
        for layers in ((1, 2), (2,), (0,))
    }
    result = va.analyze_value_alignment(model, ids, layers=(1, 2), progress=False)
    for layers, of in (((1, 2), 4), ((2,), 2), ((0,), 0)):
        row = claims(result, shares[layers]).loc["negligible share, V"]
        assert row["of"] == of
        if of:
            later = shares[layers].V[0]
            assert row["heads"] == int((later.abs() < 0.05).sum())
    assert row["verdict"] == "not measured" and "no block after" in row["words"]
    other = zoo.bridge("llama", seed=5)
    foreign = va.contribution_shares(other, ids, progress=False)
    with pytest.raises(va.InputError, match="contributions: it is about other weights"):
        claims(result, foreign)
    with pytest.raises(va.InputError, match="alignment: it is about other weights"):
        foreign.to_dataframe(result)
