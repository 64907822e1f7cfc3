"""An ActivationCache in place of forward passes: the same figures, or a refusal that says why."""

import pytest
import torch
import zoo

import tl_valuealign as va

pytestmark = pytest.mark.bridge

FAMILIES = ("gpt2", "llama", "nanochat", "gemma2")
OPTIONS = {"components": ("attn_out", "mlp_out"), "progress": False}
TENSORS = ("full", "by_source", "full_stderr", "projected_sq_norm", "excess")


def streams_of(model, ids, **options):
    """What a user holds after run_with_cache with no filter."""
    return model.run_with_cache(ids, **options)[1]


def assert_same(left, right, tolerance=1e-6):
    assert left.sources == right.sources
    for role, mine in left.roles.items():
        for field in TENSORS:
            torch.testing.assert_close(
                getattr(mine, field),
                getattr(right.role(role), field),
                rtol=10 * tolerance,
                atol=tolerance,
                equal_nan=True,
            )
    torch.testing.assert_close(left.norms, right.norms, rtol=tolerance, atol=0)


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_gives_what_a_run_gives(name, compat):
    model, ids = zoo.bridge(name, compat=compat), zoo.ids(batch=9)
    run = va.analyze_value_alignment(model, ids, **OPTIONS)
    cached = va.analyze_value_alignment(
        model, ids, cache=streams_of(model, ids), batch_size=4, **OPTIONS
    )
    assert_same(cached, run)
    assert cached.provenance["from_cache"] and not run.provenance["from_cache"]
    assert cached.provenance["text_hash"] == run.provenance["text_hash"]


def test_the_blocks_run_on_the_checks_alone(monkeypatch):
    """Reading 40 sequences costs embeddings of all, and blocks on the few that are checked."""
    from tl_valuealign.adapter import ModelView

    model, ids = zoo.bridge("llama"), zoo.ids(batch=40)
    cache = streams_of(model, ids)
    through_blocks = []
    run = ModelView.run

    def counted(view, rows, names, stop_at_layer=None):
        through_blocks.append(0 if stop_at_layer == 0 else len(rows))
        return run(view, rows, names, stop_at_layer)

    monkeypatch.setattr(ModelView, "run", counted)
    va.analyze_value_alignment(model, ids, cache=cache, progress=False)
    assert sum(through_blocks) <= 6


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_the_cache_does_not_count(side):
    model, lengths = zoo.bridge("llama"), (11, 0, 5, 8, 3)
    ids, mask = zoo.ids(batch=len(lengths), pos=11), torch.zeros(len(lengths), 11, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 11 - length :] = 1
        if side == "right":
            mask[row] = mask[row].flip(0)
    cache = streams_of(model, ids, attention_mask=mask)
    for batch_size in (2, 8):
        options = {"attention_mask": mask, "batch_size": batch_size, "progress": False}
        cached = va.analyze_value_alignment(model, ids, cache=cache, **options)
        assert_same(cached, va.analyze_value_alignment(model, ids, **options), 2e-6)


def test_one_sequence_without_a_batch_axis():
    for name in ("gpt2", "llama"):
        model, ids = zoo.bridge(name), zoo.ids(batch=1)
        cache = streams_of(model, ids, remove_batch_dim=True)
        run = va.analyze_value_alignment(model, ids, progress=False)
        for data in (ids, ids[0], ids[0].tolist()):
            assert_same(va.analyze_value_alignment(model, data, cache=cache, progress=False), run)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 25},
        {"skip_first": True},
        {"layers": (1,)},
        {"roles": ("OV",)},
        {"metric": "pooled"},
        {"keep_moments": True},
    ],
)
def test_options_mean_the_same_with_a_cache(options):
    model, ids = zoo.bridge("nanochat"), zoo.ids(batch=9)
    cached = va.analyze_value_alignment(model, ids, cache=streams_of(model, ids), **options)
    assert_same(cached, va.analyze_value_alignment(model, ids, **options))


def test_a_plain_dict_of_only_what_is_needed_will_do():
    model, ids = zoo.bridge("gpt2"), zoo.ids()
    whole = streams_of(model, ids)
    needed = ("hook_resid_pre", "hook_attn_out", "hook_pos_embed")
    some = {name: whole[name] for name in whole.keys() if name.endswith(needed)}
    run = va.analyze_value_alignment(model, ids, progress=False)
    assert_same(va.analyze_value_alignment(model, ids, cache=some, progress=False), run)
    del some["blocks.1.hook_attn_out"], some["hook_pos_embed"]
    with pytest.raises(va.InputError, match=r"2 of .* blocks\.1\.hook_attn_out, hook_pos"):
        va.analyze_value_alignment(model, ids, cache=some, progress=False)
    only_early = va.analyze_value_alignment(zoo.bridge("llama"), ids, layers=(0,), progress=False)
    early = {"blocks.0.hook_resid_pre": streams_of(zoo.bridge("llama"), ids)["embed.hook_out"]}
    assert_same(
        va.analyze_value_alignment(
            zoo.bridge("llama"), ids, cache=early, layers=(0,), progress=False
        ),
        only_early,
    )


def test_the_cache_of_other_tokens_is_refused():
    model, ids = zoo.bridge("llama"), zoo.ids(batch=6)
    other = ids.clone()
    other[4, 7] = (ids[4, 7] + 1) % zoo.VOCAB
    with pytest.raises(va.SelfCheckError, match=r"blocks\.0\.hook_resid_pre of sequence 4"):
        va.analyze_value_alignment(model, ids, cache=streams_of(model, other), progress=False)


def test_the_cache_of_other_weights_is_refused():
    ids, trained = zoo.ids(), zoo.build("llama")
    cache = streams_of(zoo.bridge("llama"), ids)
    with torch.no_grad():
        trained.model.layers[1].self_attn.o_proj.weight.mul_(1.01)
    model = zoo.bridge("llama", hf=trained)
    with pytest.raises(va.SelfCheckError, match=r"blocks\.(1\.hook_attn_out|2\.hook_resid_pre)"):
        va.analyze_value_alignment(model, ids, cache=cache, progress=False)


def test_the_cache_of_a_patched_run_is_refused():
    model, ids = zoo.bridge("llama"), zoo.ids()
    with model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", lambda value, hook: value * 0)]):
        cache = streams_of(model, ids)
    with pytest.raises(va.SelfCheckError, match=r"cache: blocks\."):
        va.analyze_value_alignment(model, ids, cache=cache, progress=False)


def test_a_padded_run_without_its_mask_is_refused():
    model, ids = zoo.bridge("llama"), zoo.ids(batch=3)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with pytest.raises(va.SelfCheckError, match="sequence 1 .* attention_mask"):
        va.analyze_value_alignment(
            model, ids, cache=streams_of(model, ids), attention_mask=mask, progress=False
        )


def test_a_cache_with_a_nan_is_refused():
    model, ids = zoo.bridge("llama"), zoo.ids()
    cache = dict(streams_of(model, ids).items())
    name = "blocks.0.hook_resid_pre"
    cache[name] = cache[name].clone()
    cache[name][2, 3, 4] = torch.nan
    with pytest.raises(va.SelfCheckError, match="sequence 2"):
        va.analyze_value_alignment(model, ids, cache=cache, progress=False)


@pytest.mark.parametrize(
    ("data", "cache", "message"),
    [
        ([[4, 5, 6]], None, "the ids .* computed from"),
        ("ids", "nonsense", "expected the ActivationCache"),
        ("fewer", None, r"has shape \(3, 11, 32\), expected .* \[2, 11, 32\]"),
        ("shorter", None, r"expected .* \[3, 10, 32\]"),
    ],
)
def test_what_does_not_fit_is_named(data, cache, message):
    model, ids = zoo.bridge("llama"), zoo.ids()
    held = streams_of(model, ids) if cache is None else cache
    named = {"ids": ids, "fewer": ids[:2], "shorter": ids[:, :10]}
    data = named[data] if isinstance(data, str) else data
    with pytest.raises(va.InputError, match=message):
        va.analyze_value_alignment(model, data, cache=held, progress=False)


def test_nothing_in_the_cache_is_changed():
    model, ids = zoo.bridge("gpt2"), zoo.ids()
    cache = streams_of(model, ids)
    before = {name: value.clone() for name, value in cache.items() if torch.is_tensor(value)}
    va.analyze_value_alignment(model, ids, cache=cache, progress=False)
    for name, value in before.items():
        assert torch.equal(cache[name], value), name


def test_each_of_several_processes_reads_its_own_rows():
    """Rows rank, rank + processes, … of the cache, as Corpus.batches hands them out."""
    from tl_valuealign import tokens
    from tl_valuealign.adapter import ModelView
    from tl_valuealign.cached import CachedStreams

    model, ids = zoo.bridge("llama"), zoo.ids(batch=7)
    view, cache, name = ModelView(model), streams_of(model, ids), "blocks.0.hook_resid_pre"
    options = {"tokenizer": None, "prepend_bos": False, "n_ctx": 64, "d_vocab": zoo.VOCAB}
    seen = []
    for rank in range(3):
        held = CachedStreams(view, cache, ids, None, [name], (rank, 3))
        with view.quiet():
            for batch in tokens.read(ids, **options).batches(2, None, (rank, 3)):
                taken = held.take(batch)[name]  # compares with the embedding of these very ids
                seen += list(taken)
    assert len(seen) == len(ids)
    torch.testing.assert_close(torch.stack(seen).sum(0), cache[name].sum(0))
