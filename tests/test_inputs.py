"""Every kind of text a caller may hand in, and every argument that cannot be used."""

import itertools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
import tiny
import torch
import zoo

import tl_valuealign as va

pytestmark = pytest.mark.any_bridge


@pytest.fixture(scope="module")
def model():
    """A Llama of 64 positions with a tokenizer of one token a word."""
    made = zoo.bridge("llama")
    made.tokenizer = tiny.tokenizer()
    return made


@pytest.fixture(scope="module")
def reference(model):
    return tiny.analyze(model, zoo.ids())


def facts(model, data, **options):
    return tiny.analyze(model, data, **options).provenance


# The same text in many forms ---------------------------------------------------------------------

IDS = zoo.ids()  # [3, 11]
ROWS = [row.clone() for row in IDS]


class Column(Sequence):
    """A column of a data set: indexable and iterable, and neither a list nor a tuple."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


FORMS = {
    "a list of rows": lambda: ROWS,
    "nested lists": lambda: IDS.tolist(),
    "a tuple of tuples": lambda: tuple(map(tuple, IDS.tolist())),
    "numpy": lambda: IDS.numpy(),
    "numpy, unsigned": lambda: IDS.numpy().astype(np.uint8),
    "int32": lambda: IDS.to(torch.int32),
    "a generator of rows": lambda: (row for row in ROWS),
    "a generator of batches": lambda: iter([IDS[:2], IDS[2:]]),
    "a generator of numpy rows": lambda: (row.numpy() for row in ROWS),
    "a column": lambda: Column(IDS.tolist()),
    "a strided view": lambda: IDS.repeat_interleave(2, dim=1)[:, ::2],
    "batches with a batch axis of one": lambda: [row[None] for row in ROWS],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_ids_does_not_matter(model, reference, form):
    tiny.assert_same_bits(reference, tiny.analyze(model, FORMS[form]()))


@pytest.mark.parametrize("data", [ROWS[0], ROWS[0].tolist(), ROWS[0].numpy(), [ROWS[0]]])
def test_one_row(model, data):
    tiny.assert_same_bits(tiny.analyze(model, IDS[:1]), tiny.analyze(model, data))


STRINGS = [tiny.text(row) for row in ROWS]
WITH_BOS = torch.cat([torch.full((3, 1), tiny.BOS), IDS], dim=1)


@pytest.mark.parametrize(
    "data",
    [STRINGS, tuple(STRINGS), iter(STRINGS), Column(STRINGS), [STRINGS[:2], STRINGS[2:]]],
    ids=["list", "tuple", "iterator", "column", "batches"],
)
def test_strings_are_their_ids_behind_a_bos(model, data):
    tiny.assert_same_bits(tiny.analyze(model, WITH_BOS), tiny.analyze(model, data))


def test_a_hugging_face_column(model):
    import datasets  # transformer-lens depends on it

    table = datasets.Dataset.from_dict({"text": STRINGS, "label": [1, 2, 3]})
    wanted = tiny.analyze(model, WITH_BOS)
    tiny.assert_same_bits(wanted, tiny.analyze(model, table["text"]))
    with pytest.raises(va.InputError, match="dict with keys 'text', 'label': pass one of its"):
        tiny.analyze(model, table)


def test_an_open_file_is_read_line_by_line(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(STRINGS))
    with open(path) as lines:
        tiny.assert_same_bits(tiny.analyze(model, STRINGS), tiny.analyze(model, lines))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_on_either_side(model, side):
    """Padding is no text, whatever the ids under it."""
    rows = [IDS[0, :4], IDS[1], IDS[2, :7]]
    padded, mask = torch.full((3, 11), 77), torch.zeros(3, 11, dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(11 - len(row), 11) if side == "left" else slice(0, len(row))
        padded[number, place], mask[number, place] = row, 1
    alone = tiny.analyze(model, rows)
    for keep in (mask, mask.bool(), mask.float(), mask.numpy()):
        tiny.assert_same_bits(alone, tiny.analyze(model, padded, attention_mask=keep))
    assert alone.provenance["n_tokens"] == 4 + 11 + 7


def test_the_output_of_a_tokenizer(model):
    batch = model.tokenizer(STRINGS, return_tensors="pt")
    with pytest.raises(va.InputError, match=r"mapping.*data=batch\['input_ids'\]"):
        tiny.analyze(model, batch)
    result = tiny.analyze(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    assert result.provenance["n_tokens"] == 33


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizers_padding_side_does_not_matter(model, side, monkeypatch):
    ragged = ["w5 w6", "w7 w8 w9 w10 w11", "w12"]
    rows = [[tiny.BOS, *map(int, text.replace("w", "").split())] for text in ragged]
    wanted = tiny.analyze(model, rows)
    monkeypatch.setattr(model.tokenizer, "padding_side", side)
    tiny.assert_same_bits(wanted, tiny.analyze(model, ragged))


# Another device ----------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device until ``.cpu()`` or ``.to()`` brings it here."""

    @property
    def device(self):
        return torch.device("cuda:1")

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def to(self, *args, **options):
        return self.as_subclass(torch.Tensor).to(*args, **options)


def test_ids_on_another_device(model, reference):
    far = IDS.as_subclass(Elsewhere)
    assert far.device.type == "cuda"
    tiny.assert_same_bits(reference, tiny.analyze(model, far))
    masked = tiny.analyze(model, far, attention_mask=torch.ones_like(IDS).as_subclass(Elsewhere))
    tiny.assert_same_bits(reference, masked)


def test_ids_without_numbers(model):
    with pytest.raises(va.InputError, match="ids: cannot be read"):
        tiny.analyze(model, IDS.to("meta"))


# BOS ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "prepended", "tokens"),
    [
        ("w5 w6 w7", 1, 4),
        ("<s> w5 w6 w7", 0, 4),
        (["w5", "<s> w6", "w7"], 2, 6),
        ("<s>", 0, 1),
        (torch.tensor([5, 6, 7]), 0, 3),
        (torch.tensor([1, 5, 6, 7]), 0, 4),
    ],
)
def test_bos_is_never_doubled_nor_dropped(model, data, prepended, tokens):
    found = facts(model, data)
    assert (found["n_bos_prepended"], found["n_tokens"]) == (prepended, tokens)
    assert found["bos_id"] == tiny.BOS


def test_a_text_with_a_bos_is_the_text_without(model):
    tiny.assert_same_bits(
        tiny.analyze(model, STRINGS), tiny.analyze(model, [f"<s> {text}" for text in STRINGS])
    )


def test_a_tokenizer_without_bos(monkeypatch):
    model = zoo.bridge("llama")
    model.tokenizer = tiny.tokenizer(bos_token=None)
    found = facts(model, STRINGS)
    assert (found["bos_id"], found["n_bos_prepended"], found["n_tokens"]) == (None, 0, 33)


def test_the_models_own_rule_decides(model, monkeypatch):
    monkeypatch.setattr(model.cfg, "default_prepend_bos", False, raising=False)
    found = facts(model, STRINGS)
    assert (found["bos_id"], found["n_bos_prepended"], found["n_tokens"]) == (None, 0, 33)


# Windows and limits ------------------------------------------------------------------------------


def test_a_text_beyond_the_context_is_split_and_none_of_it_is_lost(model):
    ids = torch.arange(150) % 90 + 5
    result = tiny.analyze(model, tiny.text(ids))
    windows = [torch.cat([torch.tensor([tiny.BOS]), part]) for part in ids.split(zoo.N_CTX - 1)]
    tiny.assert_same_bits(result, tiny.analyze(model, windows))
    found = result.provenance
    assert found["n_tokens"] == 150 + 3 and found["n_sequences"] == 3
    assert (found["n_items_split_into_windows"], found["n_bos_prepended"]) == (1, 3)
    # Every window begins alike, also of a text that had its own BOS.
    again = tiny.analyze(model, "<s> " + tiny.text(ids))
    tiny.assert_same_bits(result, again)
    assert again.provenance["n_bos_prepended"] == 2


@pytest.mark.filterwarnings("error")
def test_windows_of_few_texts_are_no_independent_sequences(model):
    long = torch.arange(600)[None] % 90 + 5
    with pytest.warns(UserWarning, match="1 text.* read in 10 windows.*too narrow"):
        result = tiny.analyze(model, long)
    assert result.provenance["n_texts"] == 1
    assert "windows of 1 texts" in result.summary()
    short = tiny.analyze(model, long[:, :60].repeat(8, 1))
    assert short.provenance["n_texts"] == 8 and "windows" not in short.summary()


def test_ids_beyond_the_context_are_split(model):
    ids = torch.arange(150)[None] % 90 + 5
    result = tiny.analyze(model, ids)
    tiny.assert_same_bits(result, tiny.analyze(model, list(ids[0].split(zoo.N_CTX))))
    assert result.provenance["n_items_split_into_windows"] == 1
    assert result.provenance["n_tokens"] == 150


@pytest.mark.parametrize("limit", [1, 2, 11, 12, 22, 32, 33, 34, 1000])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_max_tokens_is_exact(model, limit, batch_size):
    found = facts(model, IDS, max_tokens=limit, batch_size=batch_size, layers=[0])
    assert found["n_tokens"] == found["n_tokens_read"] == min(limit, 33)


def test_nothing_is_read_beyond_the_limit(model):
    seen = []

    def stream():
        for number in range(50):
            seen.append(number)
            yield IDS[number % 3]

    found = facts(model, stream(), max_tokens=25, batch_size=1)
    assert (found["n_tokens"], found["n_sequences"], seen) == (25, 3, [0, 1, 2])


def test_bos_counts_as_a_token_and_is_counted_once(model):
    found = facts(model, ["w5 w6 w7", "w8 w9"], max_tokens=4)
    assert (found["n_tokens"], found["n_bos_prepended"], found["n_sequences"]) == (4, 1, 1)


def test_empty_items_are_left_out_and_counted(model):
    found = facts(model, ["w5 w6", "", "w7", "  "])
    assert (found["n_items_empty"], found["n_sequences"], found["n_tokens"]) == (2, 2, 5)
    mask = torch.ones_like(IDS)
    mask[1] = 0
    result = tiny.analyze(model, IDS, attention_mask=mask)
    assert result.provenance["n_items_empty"] == 1
    tiny.assert_same_bits(tiny.analyze(model, IDS[[0, 2]]), result)


def test_skip_first_reads_position_0_and_leaves_it_out(model):
    found = facts(model, IDS, skip_first=True)
    assert (found["n_tokens"], found["n_tokens_read"]) == (30, 33)


# Without data ------------------------------------------------------------------------------------


def test_no_data_and_no_tokenizer_is_seeded_ids_that_say_so():
    model = zoo.bridge("llama")
    one, two = tiny.analyze(model), tiny.analyze(model)
    tiny.assert_same_bits(one, two)
    assert one.provenance["text"] == ["seeded random ids (the model has no tokenizer)"]


def test_no_data_reads_the_passages_that_come_with_the_package(model):
    result = tiny.analyze(model, max_tokens=50)
    assert result.provenance["text"][0].startswith("bundled passages")


def test_the_same_text_gives_the_same_figures(model, reference):
    torch.manual_seed(123)
    again = tiny.analyze(model, IDS)
    tiny.assert_same_bits(reference, again)
    assert again.provenance["text_hash"] == reference.provenance["text_hash"]
    assert facts(model, IDS.flip(0))["text_hash"] != reference.provenance["text_hash"]


def test_the_provenance_is_plain_json(reference):
    assert json.loads(json.dumps(reference.provenance)) == reference.provenance


# What cannot be read -----------------------------------------------------------------------------

BAD_DATA = {
    "a number": (3, "data of type int"),
    "bytes": (b"w5", "data of type bytes"),
    "a mapping": ({"text": "w5"}, "mapping .*keys 'text'"),
    "a set has no order": ({"w5", "w6"}, "data of type set"),
    "a path": (pathlib.Path("w5"), "data of type .*Path"),
    "floats": (torch.rand(2, 3), "whole numbers, got a tensor of torch.float32"),
    "booleans": (torch.ones(2, 3, dtype=torch.bool), "whole numbers"),
    "three axes": (torch.ones(2, 3, 4, dtype=torch.int64), r"shape \(2, 3, 4\)"),
    "no axis": (torch.tensor(5), r"shape \(\)"),
    "nothing": ([], "no tokens to read"),
    "an empty string": ("", "no tokens to read"),
    "no rows": (torch.zeros(0, 5, dtype=torch.int64), "no tokens to read"),
    "no columns": (torch.zeros(3, 0, dtype=torch.int64), "no tokens to read"),
    "beyond the vocabulary": (torch.tensor([5, 101]), "item 0 holds the id 101.* of 101"),
    "beyond the vocabulary, later": ([[5, 6], [7, 4000]], "item 1 holds the id 4000"),
    "negative": (torch.tensor([[5, -1]]), "holds the id -1"),
    "more than 64 bits": ([2**70], "64 bits"),
    "None among strings": (["w5", None], "an item of the data is a NoneType"),
    "a string among ids": ([5, "w5"], "an item of the data is a int"),
    "objects": (np.array([object()]), "ids: cannot be read"),
    "a sparse tensor": (torch.eye(3, dtype=torch.int64).to_sparse(), "plain tensor is needed"),
    "half a surrogate pair": ("w5 \ud800", "item 0 cannot be tokenised"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_read(model, name):
    data, match = BAD_DATA[name]
    with pytest.raises(va.InputError, match=match):
        tiny.analyze(model, data)


def test_a_string_needs_a_tokenizer():
    with pytest.raises(va.InputError, match="the model has no tokenizer; pass ids"):
        tiny.analyze(zoo.bridge("llama"), "w5")


@pytest.mark.parametrize(
    ("data", "mask", "match"),
    [
        (IDS, torch.ones(3, 10), r"shape \(3, 10\), ids have \(3, 11\)"),
        (IDS, torch.zeros(3, 11), "no tokens to read"),
        (IDS, torch.full((3, 11), 2), "other numbers than 1"),
        (IDS, torch.full((3, 11), torch.nan), "other numbers than 1"),
        (IDS, (torch.ones(3, 11) - 1) * 1e9 - 1, "additive mask"),
        (IDS, torch.tensor([[1, 0, 1] + [1] * 8] * 3), "gap inside row 0"),
        (IDS, "1111", "attention_mask"),
        (["w5"], torch.ones(1, 1), "goes with a tensor of ids"),
        (None, torch.ones(1, 1), "goes with a tensor of ids"),
    ],
)
def test_masks_that_do_not_fit(model, data, mask, match):
    with pytest.raises(va.InputError, match=match):
        tiny.analyze(model, data, attention_mask=mask)


def test_an_error_of_the_callers_own_generator_comes_through(model):
    def broken():
        yield IDS[0]
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tiny.analyze(model, broken())


# Arguments ---------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ({"roles": ("Q", "X")}, "roles: 'X' is unknown; use any of Q, K, V, OV"),
    ({"roles": ()}, "roles is empty"),
    ({"roles": None}, "roles: expected a sequence, got None"),
    ({"roles": torch.tensor(1)}, "roles: expected a sequence, got tensor"),
    ({"roles": [["Q"]]}, r"roles: \['Q'\] is unknown"),
    ({"roles": [torch.ones(2)]}, "roles: .* is unknown"),
    ({"components": ("attn",)}, "components: 'attn' is unknown; use any of attn_out, mlp_out"),
    ({"components": 5}, "components: expected a sequence"),
    ({"metric": "cosine"}, "metric: 'cosine' is unknown; use any of norm, energy, pooled"),
    ({"metric": None}, "metric: None is unknown"),
    ({"metric": ["norm"]}, "metric: .* is unknown"),
    ({"thresholds": (0.9, 0.0)}, r"thresholds: 0.0 is no share .* in \(0, 1\]"),
    ({"thresholds": (1.0001,)}, "thresholds: 1.0001"),
    ({"thresholds": (float("nan"),)}, "thresholds: nan"),
    ({"thresholds": (True,)}, "thresholds: True"),
    ({"thresholds": ("0.9",)}, "thresholds: '0.9'"),
    ({"thresholds": ()}, "thresholds is empty"),
    ({"thresholds": "0.9"}, "thresholds: expected a sequence"),
    ({"layers": (3,)}, "layers: 3 is no block of this model, whose blocks are 0 to 2"),
    ({"layers": (-1,)}, "layers: -1 is no block"),
    ({"layers": (0.0,)}, "layers: 0.0 is no block"),
    ({"layers": (True,)}, "layers: True is no block"),
    ({"layers": (int,)}, "layers: <class 'int'> is no block"),
    ({"layers": [np.array([0, 1])]}, "layers: .* is no block"),
    ({"layers": ()}, "layers is empty"),
    ({"layers": itertools.count()}, "layers: .* is no block|more than 100,000 items"),
    ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
    ({"batch_size": 2.0}, "batch_size: .* got 2.0"),
    ({"batch_size": True}, "batch_size: .* got True"),
    ({"batch_size": None}, "batch_size"),
    ({"max_tokens": 0}, "max_tokens: .* got 0"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"skip_first": "no"}, "skip_first: expected True or False, got 'no'"),
    ({"skip_first": 1}, "skip_first"),
    ({"progress": None}, "progress"),
    ({"device": "cuda:7"}, "device: 'cuda:7' is not available here"),
    ({"device": "meta"}, "meta device holds no numbers"),
    ({"device": "gpu"}, "device: 'gpu' is not available"),
    ({"device": 3.5}, "device"),
]


@pytest.mark.parametrize(
    ("options", "match"), BAD_ARGUMENTS, ids=[str(bad)[:40] for bad, _ in BAD_ARGUMENTS]
)
def test_arguments_that_cannot_be_used(model, options, match):
    with pytest.raises(va.InputError, match=match):
        tiny.analyze(model, IDS, **options)


def test_no_token_left_of_single_token_rows(model):
    with pytest.raises(va.InputError, match="skip_first=True leaves position 0 out"):
        tiny.analyze(model, IDS[:, :1], skip_first=True)


def test_batches_of_which_nothing_is_left(model):
    """Rows of one token between longer ones, a batch of their own."""
    rows = [IDS[0], IDS[1, :1], IDS[2, :1], IDS[2]]
    result = tiny.analyze(model, rows, skip_first=True, batch_size=2)
    wanted = tiny.analyze(model, [rows[0], rows[3]], skip_first=True)
    tiny.assert_close(wanted, result, atol=1e-6)
    assert (result.provenance["n_tokens"], result.provenance["n_sequences"]) == (20, 2)
    alone = tiny.analyze(model, [*rows, rows[1]], skip_first=True, batch_size=1)
    tiny.assert_close(wanted, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"roles": "V"}, {"roles": ("V",)}),
        ({"roles": ["V", "Q", "V"]}, {"roles": ("V", "Q")}),
        ({"thresholds": 0.9}, {"thresholds": (0.9,)}),
        ({"thresholds": np.array([0.9, 0.5])}, {"thresholds": (0.9, 0.5)}),
        ({"thresholds": [1]}, {"thresholds": (1.0,)}),
        ({"layers": 1}, {"layers": (1,)}),
        ({"layers": range(2)}, {"layers": (0, 1)}),
        ({"layers": np.array([2, 0, 2])}, {"layers": (0, 2)}),
        ({"batch_size": np.int64(2)}, {"batch_size": 2}),
        ({"skip_first": np.True_}, {"skip_first": True}),
        ({"device": torch.device("cpu")}, {"device": "cpu"}),
        ({"components": []}, {"components": ()}),
    ],
    ids=str,
)
def test_what_an_argument_may_look_like(model, given, meant):
    tiny.assert_same_bits(tiny.analyze(model, IDS, **given), tiny.analyze(model, IDS, **meant))


# Names and tokens that mean something to HTML ----------------------------------------------------


def test_text_that_reaches_html_is_escaped(monkeypatch):
    model = zoo.bridge("llama")
    monkeypatch.setattr(model.cfg, "model_name", "</script><script>alert(1)</script>&amp;\x00")
    html = tiny.analyze(model, IDS)._repr_html_()
    assert "<script" not in html and "</script" not in html
    assert "&lt;/script&gt;&lt;script&gt;" in html and "&amp;amp;" in html
