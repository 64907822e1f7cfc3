"""What are the directions? Planted directions must be found, whatever signs and ties say."""

import numpy as np
import pytest
import torch
import zoo

import tl_valuealign as va
from tl_valuealign.extremes import BEFORE, RANKS
from tl_valuealign.readin import decompose_role
from tl_valuealign.spectra import HeadSVD

pytestmark = pytest.mark.bridge

LAYER, HEAD = 1, 1
TOKEN, OTHER, WRITTEN = 42, 17, 77


def planted(values, tokens, *, turn=0.0):
    """A llama whose value head L1H1 looks for the embeddings of ``tokens``, and its read-in
    directions: A = Σ s_i u_i w_iᵀ. ``turn`` rotates the last two among themselves."""
    hf = zoo.build("llama")
    block = hf.model.layers[LAYER]
    gain = block.input_layernorm.weight
    with torch.no_grad():
        embed = hf.model.embed_tokens.weight.double()
        basis = torch.linalg.qr(embed[list(tokens)].T)[0]
        width = 12
        generator = torch.Generator().manual_seed(3)
        right = torch.linalg.qr(torch.randn(width, width, generator=generator).double())[0]
        if turn:
            c, s = np.cos(turn), np.sin(turn)
            basis[:, -2:] = basis[:, -2:] @ torch.tensor([[c, -s], [s, c]])
        matrix = (basis * torch.tensor(values)) @ right[:, : len(tokens)].T
        weight = block.self_attn.v_proj.weight
        weight[HEAD * width : (HEAD + 1) * width] = (matrix / gain.double()[:, None]).T.float()
    return hf, right[:, : len(tokens)]


def decode(hf, role="V", head=HEAD, **options):
    return va.decode_directions(zoo.bridge("llama", hf=hf), LAYER, head, role, **options)


def test_planted_tokens_come_first():
    hf, _ = planted([3.0], [TOKEN])
    table = decode(hf, n_tokens=3)
    assert list(table["direction"]) == ["0"]
    row = table.iloc[0]
    assert row["singular_value"] == pytest.approx(3, rel=1e-5)
    assert row["share"] == pytest.approx(1)
    ends = {row[end][0]: row[f"{end}_cosine"][0] for end in ("positive", "negative")}
    assert abs(ends[str(TOKEN)]) == pytest.approx(1, abs=1e-5)


def test_the_sign_of_singular_vectors_does_not_matter(monkeypatch):
    hf, _ = planted([3.0, 2.0], [TOKEN, OTHER])
    model = zoo.bridge("llama", hf=hf)
    tables = [va.decode_directions(model, LAYER, HEAD)]
    for sign in (torch.tensor([-1.0]), torch.tensor([-1.0, 1.0] * 6)):

        def flipped(*args, sign=sign):
            svd = decompose_role(*args)
            return HeadSVD(svd.directions * sign, svd.singular_values)

        monkeypatch.setattr("tl_valuealign.decode.decompose_role", flipped)
        tables.append(va.decode_directions(model, LAYER, HEAD))
    for table in tables:
        assert table["positive"].tolist() == tables[0]["positive"].tolist()
        assert table["negative"].tolist() == tables[0]["negative"].tolist()
        for row in table.itertuples():  # positive is where the embeddings weigh more
            assert row.positive_cosine[0] > 0 > row.negative_cosine[0]


def test_near_equal_directions_are_one_block_whatever_turns_them():
    """Within a block any rotation is as good, so none may show."""
    apart = [decode(planted([3.0, 2.0, 1.999], [5, TOKEN, OTHER], turn=t)[0]) for t in (0.0, 0.7)]
    for table in apart:
        assert list(table["direction"]) == ["0", "1-2"]
        assert table["negative"].iloc[1] == []
        assert {str(TOKEN), str(OTHER)} <= set(table["positive"].iloc[1][:2])
    # Turning two directions of nearly one length moves what is read by as little.
    np.testing.assert_allclose(
        apart[0]["positive_cosine"].iloc[1], apart[1]["positive_cosine"].iloc[1], atol=1e-3
    )
    split = decode(planted([3.0, 2.0, 1.9], [5, TOKEN, OTHER])[0])
    assert list(split["direction"]) == ["0", "1", "2"]


def test_ov_tells_what_is_written_for_what_is_read():
    """The strongest token's own value, pushed through W_O by hand, names the written token."""
    hf, right = planted([3.0], [TOKEN])
    with torch.no_grad():
        out = hf.model.layers[LAYER].self_attn.o_proj.weight
        target = hf.lm_head.weight[WRITTEN] / hf.model.norm.weight
        head = 2 * HEAD  # two query heads share a key/value head
        out[:, head * 12 : (head + 1) * 12] = target[:, None] @ right.T.float()
    table = decode(hf, "OV", head=head, n_tokens=3)
    row = table.iloc[0]
    end = "positive" if row["positive"][0] == str(TOKEN) else "negative"
    other = {"positive": "negative", "negative": "positive"}[end]
    assert row[end][0] == str(TOKEN)
    assert row[f"{end}_writes"][0] == str(WRITTEN)
    assert str(WRITTEN) not in row[f"{other}_writes"]


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "llama"])
def test_writes_pass_the_norm_after_attention_by_hand(name):
    """From the raw weights in float64: the strongest token's share of the direction, through the
    head, the norm after attention where there is one, the last norm and the unembedding."""
    hf, one = zoo.build(name), 1.0 if name == "gemma2" else 0.0
    layer, head = 1, 3
    parts = {key: value.double() for key, value in hf.state_dict().items()}
    block = f"model.layers.{layer}"
    d_head = parts[f"{block}.self_attn.q_proj.weight"].shape[0] // hf.config.num_attention_heads
    shared = hf.config.num_attention_heads // hf.config.num_key_value_heads
    rows = slice(head // shared * d_head, (head // shared + 1) * d_head)
    read = parts[f"{block}.self_attn.v_proj.weight"][rows].T
    if name != "olmo2":
        read = (parts[f"{block}.input_layernorm.weight"] + one)[:, None] * read
    out = parts[f"{block}.self_attn.o_proj.weight"][:, head * d_head : (head + 1) * d_head].T
    direction = torch.linalg.svd(read @ out)[0][:, 0]
    embed = parts["model.embed_tokens.weight"]
    row = va.decode_directions(
        zoo.bridge(name, hf=hf), layer, head, "OV", n_directions=1, n_tokens=6
    ).iloc[0]
    for end in ("positive", "negative"):
        token = embed[int(row[end][0])]
        written = ((direction @ token) * direction) @ read @ out
        if name != "llama":
            written = written * (parts[f"{block}.post_attention_layernorm.weight"] + one)
        logits = hf.get_output_embeddings().weight.double() @ (
            written * (parts["model.norm.weight"] + one)
        )
        assert row[f"{end}_writes"] == [str(int(t)) for t in logits.topk(6).indices]


def test_all_heads_in_one_table_are_each_head_s_own():
    model = zoo.bridge("llama")
    table = va.decode_directions(model, role="K", n_directions=2, n_tokens=4)
    assert set(zip(table["layer"], table["head"], strict=True)) == {
        (layer, head) for layer in range(3) for head in range(2)
    }
    assert table.attrs == va.decode_directions(model, 0, 0).attrs != {}
    for layer, head in ((0, 1), (2, 0)):
        own = va.decode_directions(model, layer, head, "K", n_directions=2, n_tokens=4)
        part = table[(table["layer"] == layer) & (table["head"] == head)]
        assert part.to_dict("records") == own.to_dict("records")


@pytest.mark.filterwarnings("ignore:NanoChat.* does not support fold_ln")
@pytest.mark.parametrize("role", ["Q", "OV"])
@pytest.mark.parametrize("name", ["gpt2", "nanochat", "opt"])
def test_weight_processing_does_not_change_the_tokens(name, role):
    plain, processed = (
        va.decode_directions(zoo.bridge(name, compat=compat), 1, 1, role, n_directions=4)
        for compat in (False, True)
    )
    assert plain["direction"].tolist() == processed["direction"].tolist()
    for end in ("positive", "negative"):
        assert [row[:3] for row in plain[end]] == [row[:3] for row in processed[end]]


def test_only_the_tokens_asked_for():
    hf, _ = planted([3.0], [TOKEN])
    table = decode(hf, token_ids=[3, 4, 5], n_tokens=10)
    assert {*table.iloc[0]["positive"]} == {"3", "4", "5"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": 2}, "heads are 0 to 1"),
        ({"role": "X"}, "role: 'X'"),
        ({"n_directions": 0}, "n_directions"),
        ({"token_ids": [101]}, "101 is no token id here; ids are 0 to 100"),
        ({"token_ids": torch.arange(101) > 50}, "False is no token id"),
        ({"token_ids": [3.7]}, "3.7 is no token id"),
        ({"token_ids": "abc"}, "token_ids: expected a sequence"),
        ({"token_ids": [2**70]}, "is no token id"),
        ({"closeness": 2}, "closeness: expected a number of at least 0"),
        ({"closeness": float("nan")}, "closeness"),
        ({"closeness": "a"}, "closeness"),
    ],
)
def test_what_cannot_be_decoded_is_refused(options, words):
    with pytest.raises(va.InputError, match=words):
        decode(zoo.build("llama"), **options)


def test_a_zero_head_looks_for_nothing():
    hf = zoo.build("llama")
    with torch.no_grad():
        hf.model.layers[LAYER].self_attn.v_proj.weight[12:] = 0
    with pytest.raises(va.ModelError, match="L1H1"):
        decode(hf)


# The tokens of the text ---------------------------------------------------------------------------


def per_token(model, ids, stream):
    """‖U_kᵀ x̄‖/‖x̄‖ of L1H1's value directions by hand, [sequence, position]."""
    _, cache = model.run_with_cache(ids)
    matrix = model.blocks[LAYER].attn.W_V[HEAD].double()
    gain = model.blocks[LAYER].ln1.original_component.weight.double()
    left, values, _ = torch.linalg.svd(gain[:, None] * matrix, full_matrices=False)
    share = values.square().cumsum(0) / values.square().sum()
    basis = left[:, : int((share < 0.9).sum()) + 1]
    x = cache[f"blocks.{0 if stream == 'embed' else LAYER}.hook_resid_pre"].double()
    return (x @ basis).norm(dim=-1) / x.norm(dim=-1)


@pytest.mark.parametrize("batch_size", [2, 9])
def test_top_tokens_are_those_of_the_whole_text(batch_size):
    ids = zoo.ids(9, 14)
    model = zoo.bridge("llama")
    result = va.analyze_value_alignment(model, ids, batch_size=batch_size, progress=False)
    scores = per_token(model, ids, "full").detach()
    table = va.top_tokens(result, LAYER, HEAD)
    for end, order in (
        ("largest", scores.flatten().argsort(descending=True)),
        ("smallest", scores.flatten().argsort()),
    ):
        rows = table[table["end"] == end]
        assert len(rows) == RANKS
        np.testing.assert_allclose(
            rows["alignment"], scores.flatten()[order[:RANKS]], rtol=0, atol=1e-5
        )
        for row, place in zip(rows.itertuples(), order[:RANKS].tolist(), strict=True):
            sequence, position = divmod(place, ids.shape[1])
            before = ids[sequence, max(0, position - BEFORE) : position]
            assert row.id == int(ids[sequence, position])
            assert row.before == "".join(f"⟨{i}⟩" for i in before.tolist())
    assert set(table["chance"]) == {float(result.V.chance[0, LAYER, HEAD])}


def test_the_embedding_is_listed_once_a_token():
    ids = zoo.ids(9, 14)
    model = zoo.bridge("llama")
    result = va.analyze_value_alignment(model, ids, batch_size=2, progress=False)
    table = va.top_tokens(result, LAYER, HEAD, stream="embed")
    scores = per_token(model, ids, "embed").detach().flatten()
    by_token = dict(zip(ids.flatten().tolist(), scores.tolist(), strict=True))
    best = sorted(by_token, key=by_token.__getitem__, reverse=True)
    assert table[table["end"] == "largest"]["id"].tolist() == best[:RANKS]
    assert table[table["end"] == "smallest"]["id"].tolist() == best[::-1][:RANKS]


def test_a_common_first_token_takes_one_place():
    ids = zoo.ids(20, 6)
    ids[:, 0] = 1
    model = zoo.bridge("llama")
    result = va.analyze_value_alignment(model, ids, batch_size=3, progress=False)
    for layer in result.layers:
        for head in range(2):
            table = va.top_tokens(result, layer, head)
            for _, rows in table.groupby("end"):
                assert not rows[rows["before"] == ""]["id"].duplicated().any()


def test_merged_runs_have_the_extremes_of_one_run_and_survive_storage(tmp_path):
    ids = zoo.ids(12, 14)
    ids[:, 0] = 1
    model = zoo.bridge("llama")
    whole, first, second = (
        va.analyze_value_alignment(model, part, progress=False) for part in (ids, ids[:5], ids[5:])
    )
    merged = first.merge(second)
    merged.save(tmp_path / "r.safetensors")
    loaded = va.load(tmp_path / "r.safetensors")
    for stream in ("full", "embed"):
        want = va.top_tokens(whole, LAYER, HEAD, stream=stream)
        for got in (merged, loaded):
            got = va.top_tokens(got, LAYER, HEAD, stream=stream)
            np.testing.assert_allclose(got["alignment"], want["alignment"], rtol=0, atol=1e-6)
            assert got["id"].tolist() == want["id"].tolist()


def test_memory_does_not_grow_with_the_text():
    model = zoo.bridge("llama")
    short, long = (
        va.analyze_value_alignment(model, zoo.ids(n, 14), progress=False) for n in (2, 40)
    )
    for name, values in short.extremes.roles.items():
        assert values.contexts.shape == long.extremes.roles[name].contexts.shape


def test_a_text_shorter_than_the_list_leaves_it_short():
    ids = torch.tensor([[5, 6, 7]])
    result = va.analyze_value_alignment(zoo.bridge("llama"), ids, progress=False)
    table = va.top_tokens(result, LAYER, HEAD)
    assert sorted(table[table["end"] == "largest"]["id"]) == [5, 6, 7]


def test_what_is_not_in_the_result_is_refused():
    result = va.analyze_value_alignment(zoo.bridge("llama"), zoo.ids(), layers=(1,), progress=False)
    for arguments, words in (
        ((0, 0), "layer 0"),
        ((1, 2), "heads are 0 to 1"),
        ((1, 0, "OV"), "role 'OV'"),
        ((1, 0, "V", "0_attn_out"), "'embed' or 'full'"),
    ):
        with pytest.raises(va.InputError, match=words):
            va.top_tokens(result, *arguments)
