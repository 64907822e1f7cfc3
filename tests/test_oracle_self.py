"""The oracle proves itself before it judges anything: on every model of the zoo.

What it says about layouts (which features are which head's query, key or value) is tested from
outside: flip the sign of one head's features at one token and watch what attention does.
"""

import math
from dataclasses import replace

import numpy as np
import oracle
import oracle_families
import pytest
import torch
import zoo

TOKEN = 2  # where features are flipped: inside every sliding window
QUIET = 1e-12  # float64 rounding, after a softmax and a few matrix products
LOUD = 1e-8  # far above rounding, and below what a saturated softmax still lets through


def watched(out, layer, pack=None, role=None, head=None):
    """(pattern [query head, query, key], z [pos, query head, d_head], summed [pos, d]) of the first
    text in one attention block, with the sign of one head's features at TOKEN flipped if named."""
    attention, seen, handles = out.attentions[layer], {}, []

    def flip(_, args, output):
        flat = output.clone().reshape(*out.ids.shape, -1)
        pack.split(flat)[role][0, TOKEN, head] *= -1
        return flat.reshape(output.shape)

    def pattern(_, args, output):
        seen["pattern"] = oracle.array(output[1] if isinstance(output, tuple) else output)[0]

    def z(_, args, output):
        value = args[0] if attention.z[1] == "input" else output
        seen["z"] = oracle.array(value).reshape(*out.ids.shape, len(attention.W_O), -1)[0]

    def summed(_, args, output):
        seen["summed"] = oracle.array(output)[0]

    if pack is not None:
        handles.append(pack.module.register_forward_hook(flip))
    for module, hook in (
        (attention.pattern, pattern),
        (attention.z[0], z),
        (attention.summed, summed),
    ):
        handles.append(module.register_forward_hook(hook))
    try:
        with oracle.exact():
            oracle_families.find(out.model).run(out.model, out.ids, {})
    finally:
        for handle in handles:
            handle.remove()
    return seen["pattern"], seen["z"], seen["summed"]


def check_layout(out, layer, gated=False):
    attention = out.attentions[layer]
    pattern, z, summed = watched(out, layer)
    n = len(attention.W_O)
    by_head = sum(z[:, h] @ attention.W_O[h] for h in range(n)) + attention.b_O
    np.testing.assert_allclose(summed, by_head, atol=QUIET * np.abs(summed).max())

    for index, pack in enumerate(attention.packs):
        features = pack.split(out.captured.projected[layer, index])
        for role in pack.W:
            values = features[role][0]  # [pos, head, d_head]
            kv = values.shape[1]
            for head in range(kv):
                flipped, moved, _ = watched(out, layer, pack, role, head)
                change = np.abs(flipped - pattern).max(-1)  # [query head, query]
                group = [h for h in range(n) if h * kv // n == head]
                others = [h for h in range(n) if h not in group]
                if role == "V":
                    assert change.max() < QUIET
                    weight = pattern[group][:, :, TOKEN].T  # [query, query head]
                    expected = np.zeros_like(z)
                    expected[:, group] = -2 * weight[..., None] * values[TOKEN, head]
                    mixed = np.stack([pattern[h] @ values[:, h * kv // n] for h in range(n)], 1)
                    if not gated:
                        np.testing.assert_allclose(z, mixed, atol=1e-11)
                    np.testing.assert_allclose((moved - z) * mixed, expected * z, atol=1e-11)
                    assert np.abs(moved - z)[TOKEN:, group].max() > LOUD
                    continue
                assert change[others].max(initial=0) < QUIET
                assert change[:, :TOKEN].max() < QUIET
                assert change[group, TOKEN].min() > LOUD
                if role == "Q":  # a query matters to its own row,
                    assert change[:, TOKEN + 1 :].max() < QUIET
                else:  # a key to all later rows as well
                    assert change[group, TOKEN + 1 :].max(-1).min() > LOUD


def check_logits(made, wanted):
    """The same next-token distributions, up to float32 rounding."""
    ids = zoo.ids(2, 7)
    with torch.no_grad():
        wanted = wanted(ids)
        wanted = getattr(wanted, "logits", wanted).log_softmax(-1)
        assert (made(ids).log_softmax(-1) - wanted).abs().max() < 1e-4


def check_figures(out):
    """Sums, read-in and the theorems that hold for any model."""
    assert out.checks.decomposition.max() < 1e-12
    for role, errors in out.checks.read_in.items():
        assert errors.max() < 1e-10, role
    for role in (role for role in oracle.ROLES if hasattr(out, role)):
        made = getattr(out, role)
        assert np.isfinite(made.s).all() and (made.s > 0).all()
        r = made.U.shape[-1]
        gram = np.einsum("lhdi,lhdj->lhij", made.U, made.U)
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(r), gram.shape), atol=1e-12)
        for row, layer in enumerate(out.layers):
            later = [i for i, name in enumerate(out.labels) if name not in out.upstream[layer]]
            by_source = made.by_source["norm"][:, :, row]
            assert np.isnan(by_source[:, later]).all()
            assert np.isfinite(np.delete(by_source, later, 1)).all()
            if out.attentions[layer].norm == "LN" and role != "OV":
                assert np.abs(made.A[row].sum(1)).max() < 1e-12
        assert (made.full["energy"] >= made.full["norm"] ** 2 - 1e-12).all()  # Jensen
        assert ((made.chance["norm"] > 0) & (made.chance["norm"] <= 1)).all()


@pytest.mark.bridge  # the oracle reads transformers 5; 2.x comes with transformers 4
@pytest.mark.parametrize("name", zoo.DECODERS)
def test_a_transformers_model(name):
    model = zoo.build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = zoo.ids(2, 7)
    ids[1, 5] = ids[0, 1]  # one token at two places
    out = oracle.run(model, ids, thresholds=(0.9,))
    check_figures(out)
    check_layout(out, out.layers[-1], gated=name == "qwen3_next")
    embed = out.streams["embed"]
    np.testing.assert_allclose(embed[1, 5], embed[0, 1], atol=1e-12)
    # Staying in float64 changes rounding and nothing else.
    with torch.no_grad():
        logits = model(ids).logits
    np.testing.assert_allclose(
        oracle.array(out.captured.output.logits),
        oracle.array(logits),
        atol=1e-5 * float(logits.abs().max()),
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.bridge
@pytest.mark.parametrize("name", zoo.NATIVE)
def test_a_native_model(name):
    out = oracle.run(zoo.native_module(name), zoo.ids(2, 7))
    check_figures(out)
    check_layout(out, 0)


@pytest.mark.hooked
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("name", zoo.HOOKED)
def test_a_hooked_transformer(name, processed):
    out = oracle.run(zoo.hooked(name, processed), zoo.ids(2, 7))
    check_figures(out)
    check_layout(out, 0)


@pytest.mark.bridge
@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("name", zoo.DECODERS)
def test_the_zoo_bridges_compute_their_models(name, compat):
    if zoo.wrong(name):
        with pytest.raises((AssertionError, AttributeError)):
            check_logits(zoo.bridge(name, compat), zoo.build(name))
    else:
        check_logits(zoo.bridge(name, compat), zoo.build(name))


@pytest.mark.bridge
def test_value_biases_cannot_be_folded_under_attention_sinks():
    """The default processing changes what gpt-oss computes; if this fails, zoo can drop its option
    and the package its care."""
    with pytest.raises(AssertionError):
        check_logits(
            zoo.bridge("gpt_oss", compat=True, fold_value_biases=True), zoo.build("gpt_oss")
        )


@pytest.mark.bridge
@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("name", zoo.NATIVE)
def test_the_native_bridges_compute_their_modules(name, compat):
    check_logits(zoo.native(name, compat), zoo.native_module(name))


def same_figures(one, two, atol):
    """Every invariant figure of two oracle results, OV included."""
    assert one.labels == two.labels and one.layers == two.layers
    np.testing.assert_allclose(one.norms, two.norms, rtol=1e-6)
    np.testing.assert_allclose(one.full_norms, two.full_norms, rtol=1e-6)
    for role in oracle.ROLES:
        a, b = getattr(one, role), getattr(two, role)
        assert (a.k == b.k).all() and (a.rank == b.rank).all()
        np.testing.assert_allclose(a.s, b.s, atol=atol)
        np.testing.assert_allclose(a.projected, b.projected, rtol=1e-5)
        for metric in oracle.METRICS:
            np.testing.assert_allclose(a.full[metric], b.full[metric], atol=atol)
            np.testing.assert_allclose(a.by_source[metric], b.by_source[metric], atol=atol)


@pytest.mark.hooked
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_figure_depends_on_weight_processing(name):
    ids = zoo.ids(2, 9)
    reference = oracle.run(zoo.build(name), ids)
    for processed in (False, True):
        made = zoo.hooked_from_hf(name, processed)
        check_logits(made, zoo.build(name))
        # the processing must have changed the weights for this to prove anything
        raw = zoo.hooked_from_hf(name).blocks[1].attn.W_V
        assert torch.equal(made.blocks[1].attn.W_V, raw) is not processed
        same_figures(reference, oracle.run(made, ids), atol=5e-7)


@pytest.mark.parametrize("name", ["bert", "t5", "mamba"])
def test_unknown_families_are_refused(name):
    with pytest.raises(KeyError):
        oracle.run(zoo.build(name), zoo.ids(1, 4))


def test_new_falcon_is_refused():
    with pytest.raises(ValueError, match="new decoder layout"):
        oracle.run(zoo.build("falcon_new"), zoo.ids(1, 4))


# The checks can fail -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def neox():
    return oracle.run(zoo.build("neox"), zoo.ids(2, 7), roles=("Q", "K", "V"))


@pytest.mark.parametrize("fault", ["gain twice", "no gain", "no offset", "no centring", "eps"])
def test_read_in_error_sees_a_wrong_norm(neox, fault):
    good = neox.attentions[1]
    changed = {
        "gain twice": dict(gain=good.gain**2),
        "no gain": dict(gain=np.ones(zoo.D)),
        "no offset": dict(offset=np.zeros(zoo.D)),
        "no centring": dict(norm="RMS"),
        "eps": dict(eps=0.1),
    }[fault]
    assert oracle.read_in_error(neox, "V", 1) < 1e-12
    neox.attentions[1] = replace(good, **changed)
    try:
        assert oracle.read_in_error(neox, "V", 1) > 1e-3
    finally:
        neox.attentions[1] = good


def roll(x, config):
    made = oracle_families.head_major(x, config)
    return {role: made[other] for role, other in zip("QKV", "KVQ", strict=True)}


def swap(x, config):
    made = oracle_families.head_major(x, config)
    return {"Q": made["K"], "K": made["Q"], "V": made["V"]}


@pytest.mark.parametrize("split", [oracle_families.role_major, roll, swap])
def test_the_layout_check_sees_a_wrong_layout(monkeypatch, split):
    family = oracle_families.FAMILIES["gpt_neox"]
    packs = oracle_families.packed("attention.query_key_value", split)
    monkeypatch.setattr(family, "packs", packs)
    out = oracle.run(zoo.build("neox"), zoo.ids(2, 7), roles=("Q", "K", "V"))
    assert max(errors.max() for errors in out.checks.read_in.values()) < 1e-10
    with pytest.raises(AssertionError):
        check_layout(out, 2)


def test_the_decomposition_sees_a_missing_factor(monkeypatch):
    monkeypatch.setattr(oracle_families.FAMILIES["granite"], "factor", None)
    out = oracle.run(zoo.build("granite"), zoo.ids(2, 7), roles=("V",))
    assert out.checks.decomposition[0] == 0
    assert (out.checks.decomposition[1:] > 1e-2).all()


# The mathematics, on matrices whose answer is known ---------------------------------------------


def test_direction_counts_and_rank_of_a_known_spectrum():
    rng = np.random.default_rng(0)
    U, _ = np.linalg.qr(rng.normal(size=(16, 4)))
    V, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    A = U * [2.0, 1.0, 1.0, 1e-4] @ V.T
    found, s, ks, rank = oracle.directions(A, (0.5, 0.9, 1.0), torch.float32, 4)
    np.testing.assert_allclose(s, [2, 1, 1, 1e-4], atol=1e-12)
    assert (ks, rank) == ([1, 3, 4], 4)
    np.testing.assert_allclose(np.abs(found[:, 0] @ U[:, 0]), 1)
    assert oracle.directions(A, (0.9,), torch.bfloat16, 4)[3] == 3
    A[:, 1] = A[:, 0]
    assert oracle.directions(A, (0.9,), torch.float32, 4)[3] == 3
    assert oracle.directions(np.zeros((16, 4)), (0.9,), torch.float32, 4)[2:] == ([0], 0)


def test_alignment_inside_outside_and_between():
    rng = np.random.default_rng(1)
    basis, _ = np.linalg.qr(rng.normal(size=(10, 10)))
    x = rng.normal(size=(50, 10))
    for value in oracle.align(x, basis).values():
        assert value == pytest.approx(1)
    for value in oracle.align(x @ basis[:, :3] @ basis[:, :3].T, basis[:, 3:]).values():
        assert value == pytest.approx(0, abs=1e-12)
    # one long token inside, three short ones outside, one that is nothing
    tokens = np.stack([3 * basis[:, 0], basis[:, 5], basis[:, 6], basis[:, 7], 0 * basis[:, 0]])
    assert oracle.align(tokens, basis[:, :2]) == pytest.approx(
        {"norm": 0.25, "energy": 0.25, "pooled": 9 / 12}
    )
    assert math.isnan(oracle.align(tokens[-1:], basis)["norm"])


@pytest.mark.parametrize(("k", "d"), [(1, 2), (3, 8), (9, 32), (31, 32), (32, 32)])
def test_chance_is_what_random_directions_give(k, d):
    x = np.random.default_rng(k).normal(size=(200_000, d))
    sampled = oracle.align(x, np.eye(d)[:, :k])
    for metric, value in oracle.chance(k, d).items():
        assert sampled[metric] == pytest.approx(value, abs=3e-3)


def test_kept_tokens_are_the_ones_that_count():
    model, ids = zoo.build("gpt2"), zoo.ids(2, 6)
    keep = np.ones((2, 6), bool)
    keep[0, 3:] = False
    out = oracle.run(model, ids, keep=keep, skip_first=True, roles=("V",), thresholds=(0.9,))
    assert out.kept.tolist() == [
        [False, True, True, False, False, False],
        [False, True, True, True, True, True],
    ]
    x = out.resid[1] - out.resid[1].mean(-1, keepdims=True)
    x = np.concatenate([x[0, 1:3], x[1, 1:]])
    U = np.linalg.svd(out.V.A[1, 2])[0][:, : out.V.k[0, 1, 2]]
    expected = np.mean([np.linalg.norm(U.T @ t) / np.linalg.norm(t) for t in x])
    assert out.V.full["norm"][0, 1, 2] == pytest.approx(expected, abs=1e-14)
    expected = np.mean([np.linalg.norm(t @ out.V.A[1, 2]) ** 2 for t in x])
    assert out.V.projected_full[1, 2] == pytest.approx(expected, abs=1e-12)
    assert out.full_norms[1] == pytest.approx(np.linalg.norm(x, axis=1).mean())
