"""Files: exact round trips, atomic writing, and nothing but a clear error from a hostile one."""

import json
import os
import resource
import struct
import sys

import pytest
import safetensors.torch
import tiny
import torch
from fakes import fake_result

import tl_valuealign as va
from tl_valuealign import storage


@pytest.fixture(scope="module")
def result():
    return fake_result(layers=4, heads=3, kv_heads=1, d_head=8)


@pytest.fixture
def path(result, tmp_path):
    place = tmp_path / "result.safetensors"
    result.save(place)
    return place


def parts(path):
    """(header dict, document, tensor bytes) of a file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["document"]), data[8 + size :]


def forge(path, change=None, *, metadata=None, header=None):
    """Write the file again with a changed document, metadata or header."""
    found, document, rest = parts(path)
    if change is not None:
        document = change(document) or document
        found["__metadata__"]["document"] = json.dumps(document)
    found["__metadata__"] |= metadata or {}
    for key in [key for key, value in found["__metadata__"].items() if value is None]:
        del found["__metadata__"][key]
    found |= header or {}
    text = json.dumps(found).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def rejected(path, match=None):
    with pytest.raises(va.StorageError, match=match) as caught:
        va.load(path)
    assert len(str(caught.value)) < 600 + len(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


# Round trips -------------------------------------------------------------------------------------

SHAPES = [
    {},
    {"layers": 1, "heads": 1, "zero_head": None},
    {"roles": ("OV",), "thresholds": (1.0,), "components": ("attn_out", "mlp_out")},
    {"layers": 5, "layer_numbers": (1, 4), "positions": True, "metric": "pooled"},
    {"n_sequences": 3},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trips_are_exact(shape, tmp_path):
    made = fake_result(**{"layers": 4, "heads": 3, "d_head": 8} | shape)
    made.save(tmp_path / "one.safetensors")
    found = va.load(tmp_path / "one.safetensors")
    tiny.assert_same_bits(made, found)
    assert found.provenance == made.provenance
    assert (found.metric, found.checks.read_in_tolerance) == (
        made.metric,
        made.checks.read_in_tolerance,
    )
    for role in made.roles:
        for key, value in vars(made.role(role)).items():
            assert getattr(found.role(role), key).dtype == value.dtype
    assert repr(found) == repr(made)
    found.save(tmp_path / "two.safetensors")
    assert parts(tmp_path / "one.safetensors") == parts(tmp_path / "two.safetensors")


@pytest.mark.any_bridge
@pytest.mark.parametrize("options", [{}, {"keep_moments": True}, {"metric": "energy"}], ids=str)
def test_a_real_result_with_everything_it_keeps(options, tmp_path):
    import zoo

    made = tiny.analyze(zoo.bridge("llama"), zoo.ids(), roles=("Q", "K", "V", "OV"), **options)
    made.save(tmp_path / "real.safetensors")
    found = va.load(tmp_path / "real.safetensors")
    tiny.assert_same_bits(made, found)
    assert found.provenance == made.provenance
    assert (found.moments is None) == (made.moments is None)
    if made.extremes is not None:
        assert found.extremes.words == made.extremes.words
    tiny.assert_same_bits(found.merge(found), made.merge(made))


def test_numbers_that_are_none_survive(tmp_path):
    made = fake_result(layers=3, heads=2, d_head=8)
    made.V.full[0, 0, 0] = torch.nan
    made.V.full[0, 1, 0] = torch.inf
    made.V.full[0, 2, 0] = -0.0
    made.save(tmp_path / "odd.safetensors")
    found = va.load(tmp_path / "odd.safetensors").V.full
    assert found.view(torch.int64).equal(made.V.full.contiguous().view(torch.int64))


def test_names_of_any_kind_survive(tmp_path):
    name = '</script><script>alert(1)</script> \x00 \u202e "quoted" \\ 日本'
    made = fake_result(layers=3, heads=2, d_head=8, model_name=name)
    made.save(tmp_path / "named.safetensors")
    assert va.load(tmp_path / "named.safetensors").provenance["model_name"] == name


# Writing -----------------------------------------------------------------------------------------


def only(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_nothing_is_overwritten_unasked(result, path):
    before = path.read_bytes()
    with pytest.raises(va.StorageError, match="exists; pass overwrite=True"):
        fake_result(layers=2, heads=1, d_head=4).save(path)
    assert path.read_bytes() == before and only(path.parent) == [path.name]
    result.save(path, overwrite=True)
    assert only(path.parent) == [path.name]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt, MemoryError])
def test_a_write_that_fails_leaves_the_old_file_alone(result, path, monkeypatch, error):
    before = path.read_bytes()

    def fail(tensors, name, metadata=None):
        with open(name, "wb") as stream:
            stream.write(b"half")
        raise error

    monkeypatch.setattr(storage, "save_file", fail)
    expected = va.StorageError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        result.save(path, overwrite=True)
    assert path.read_bytes() == before and only(path.parent) == [path.name]
    with pytest.raises(expected):
        result.save(path.with_name("new"))
    assert only(path.parent) == [path.name]


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one(result, path, monkeypatch):
    before = path.read_bytes()

    def busy(*names):
        raise OSError("device or resource busy")

    monkeypatch.setattr(storage.os, "replace", busy)
    with pytest.raises(va.StorageError, match="busy"):
        result.save(path, overwrite=True)
    assert path.read_bytes() == before and only(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (lambda folder: folder, "is a directory; give a file name"),
        (lambda folder: folder / "none" / "x.safetensors", "cannot write"),
        (lambda folder: folder / "result.safetensors" / "x", "cannot write"),
        (lambda folder: folder / ("x" * 300), "cannot write"),
        (lambda folder: str(folder / "x\0y"), "cannot write"),
        (lambda folder: "/proc/x.safetensors", "cannot write"),
        (lambda folder: None, "a path is needed, got None"),
        (lambda folder: 3, "a path is needed, got 3"),
    ],
)
def test_places_that_cannot_be_written(result, path, place, match):
    with pytest.raises(va.StorageError, match=match):
        result.save(place(path.parent))
    assert only(path.parent) == [path.name]


def test_a_refused_permission(result, tmp_path, monkeypatch):
    def deny(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage, "save_file", deny)
    with pytest.raises(va.StorageError, match="cannot write .*Permission denied"):
        result.save(tmp_path / "x.safetensors")


# Foreign files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"1234567", b"hello world, this is text", b"\0" * 100, b"PK\x03\x04" * 50],
    ids=["empty", "a byte", "seven bytes", "text", "zeros", "zip"],
)
def test_other_files(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    rejected(tmp_path / "x")


def test_no_file(tmp_path):
    rejected(tmp_path / "none", "is not a file")
    rejected(tmp_path, "is not a file")
    for place in (None, 3.5):
        with pytest.raises(va.StorageError, match="a path is needed"):
            va.load(place)


def test_a_pickle_is_not_opened(tmp_path):
    """Loading executes nothing, whatever the file says it is."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    (tmp_path / "x.safetensors").write_bytes(pickle.dumps(Bomb()))
    rejected(tmp_path / "x.safetensors")
    torch.save({"x": torch.ones(3)}, tmp_path / "y.safetensors")
    rejected(tmp_path / "y.safetensors")
    assert not (tmp_path / "exploded").exists()


def test_another_safetensors_file(tmp_path):
    safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / "x")
    rejected(tmp_path / "x", "but no result of tl_valuealign")


@pytest.mark.parametrize("version", ["0", "2", "999", "x", None])
def test_another_format_version(path, version):
    forge(path, metadata={"version": version})
    message = rejected(path, "format version")
    assert "reads version 1" in message


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 2000, -1, -8, -1000])
def test_truncated_files(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    rejected(path)


def test_every_flipped_bit_of_the_header_is_an_error_or_a_result(path):
    """Damage must never surface as another exception."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        where = int(torch.randint(8 + size, (1,), generator=generator))
        bit = 1 << int(torch.randint(8, (1,), generator=generator))
        path.write_bytes(data[:where] + bytes([data[where] ^ bit]) + data[where + 1 :])
        try:
            assert isinstance(va.load(path), va.ValueAlignmentResult)
        except va.StorageError:
            pass


# Hostile files -----------------------------------------------------------------------------------


@pytest.fixture
def little_memory():
    """At most 1 GB more than now: an allocation of what a file claims would fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits are read from /proc")
class TestBoundedMemory:
    @pytest.mark.parametrize("claim", [10 * 2**30, 2**40, 2**63, 2**64 - 1])
    def test_a_header_that_claims_much(self, tmp_path, little_memory, claim):
        (tmp_path / "x").write_bytes(struct.pack("<Q", claim) + b"{" * 1000)
        rejected(tmp_path / "x", f"its header claims {claim} bytes in a file of 1008")

    def test_a_header_of_ten_gigabytes_in_a_sparse_file(self, tmp_path, little_memory):
        with open(tmp_path / "x", "wb") as stream:
            stream.write(struct.pack("<Q", 10 * 2**30 - 8))
            stream.truncate(10 * 2**30)
        rejected(tmp_path / "x", "its header claims 10737418232 bytes")

    def test_a_tensor_of_ten_gigabytes(self, path, little_memory):
        claim = {"dtype": "F64", "shape": [2**30, 5], "data_offsets": [0, 5 * 2**33]}
        forge(path, header={"/norms": claim})
        rejected(path)

    def test_a_million_labels(self, path, little_memory):
        def many(document):
            document["fields"]["sources"]["value"] = [f"{i}_attn_out" for i in range(1_000_000)]

        forge(path, many)
        rejected(path, "sources is no list of at most 100,000 labels")

    @pytest.mark.parametrize(("count", "match"), [(100_000, "more tensors"), (1, "refers to")])
    def test_tensors_that_belong_to_nothing(self, path, little_memory, count, match):
        empty = {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}
        forge(path, header={f"t{i}": empty for i in range(count)})
        rejected(path, match)

    def test_nesting_without_end(self, path, little_memory):
        header, _, rest = parts(path)
        for deep in ('{"fields":' * 100_000, "[" * 1_000_000):
            header["__metadata__"]["document"] = deep
            text = json.dumps(header).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
            rejected(path, "not JSON")

    def test_nesting_that_is_json(self, path, little_memory):
        def deep(document):
            node = document
            for _ in range(300):
                node = {"items": {"x": node}}
            return node

        forge(path, deep)
        rejected(path, "does not hold one")


@pytest.mark.parametrize(
    "document", ["", "{", "null", "3", "[]", "{}", '"x"', '{"fields": {}}', None]
)
def test_descriptions_that_are_none(path, document):
    forge(path, metadata={"document": document})
    rejected(path, "not JSON|does not hold one")


def edit(*where, value):
    def change(document):
        node = document
        for key in where[:-1]:
            node = node[key]
        node[where[-1]] = value

    return change


def drop(*where):
    def change(document):
        node = document
        for key in where[:-1]:
            node = node[key]
        del node[where[-1]]

    return change


def field(name, value):
    return edit("fields", name, value={"value": value})


def fact(name, value):
    return edit("fields", "provenance", "value", name, value=value)


WRONG = {
    "a source that is no string": edit("fields", "sources", "value", 1, value={"x": 1}),
    "the same source twice": edit("fields", "sources", "value", 1, value="embed"),
    "a source too many": lambda d: d["fields"]["sources"]["value"].append("9_attn_out"),
    "sources that are a word": field("sources", "embed"),
    "no sources": field("sources", []),
    "layers out of order": field("layers", [3, 2, 1, 0]),
    "negative layers": field("layers", [-1, 0, 1, 2]),
    "layers that are fractions": field("layers", [0.0, 1.0, 2.0, 3.0]),
    "layers that are true": field("layers", [True, 2, 3, 4]),
    "a layer too few": field("layers", [0, 1, 2]),
    "a threshold of two": field("thresholds", [0.9, 2.0]),
    "a threshold that is no number": field("thresholds", [0.9, "0.5"]),
    "the same threshold twice": field("thresholds", [0.9, 0.9]),
    "an unknown metric": field("metric", "cosine"),
    "a metric that is a list": field("metric", ["norm"]),
    "no roles": edit("fields", "roles", value={"items": {}}),
    "a foreign role": lambda d: d["fields"]["roles"]["items"].__setitem__(
        "<script>", d["fields"]["roles"]["items"]["V"]
    ),
    "a role without sums": drop("fields", "sums", "fields", "roles", "items", "V"),
    "a missing field": drop("fields", "full_norms"),
    "a missing tensor": edit("fields", "norms", value={"tensor": "none"}),
    "a tensor of another shape": edit("fields", "norms", value={"tensor": "/full_norms"}),
    "a value for a tensor": field("norms", [1.0, 2.0]),
    "a tensor that serves twice": edit(
        "fields", "checks", "fields", "decomposition", value={"tensor": "/full_norms"}
    ),
    "a tensor for a value": edit("fields", "metric", value={"tensor": "/norms"}),
    "provenance that is a list": field("provenance", []),
    "provenance without a name": drop("fields", "provenance", "value", "model_name"),
    "a name that is a number": fact("model_name", 3),
    "a count that is a word": fact("n_tokens", "many"),
    "a text that is a word": fact("text", "x"),
    "texts that are numbers": fact("text", [3]),
    "a number of tokens below one": edit(
        "fields", "sums", "fields", "n_tokens", value={"value": 0}
    ),
    "sums that are swapped": edit(
        "fields", "sums", "fields", "norms", value={"tensor": "/full_norms"}
    ),
    "a stranger among the fields": edit(
        "fields", "roles", "items", "V", "fields", "x", value={"value": 1}
    ),
    "checks of another role": drop("fields", "checks", "fields", "read_in", "items", "Q"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_documents_that_do_not_fit(path, fault):
    forge(path, lambda document: WRONG[fault](document) and None)
    rejected(path, "says it is a result of tl_valuealign but does not hold one")


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "U8", "C64"])
def test_tensors_of_another_dtype(path, dtype):
    """Reading the same bytes as other numbers, with a shape that fits them."""
    header, _, _ = parts(path)
    entry = header["/full_norms"]
    width = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "C64": 8}[dtype]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    forge(path, header={"/full_norms": entry | {"dtype": dtype, "shape": [size // width]}})
    rejected(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["/roles/V/full", "/roles/V/singular_values", "/norms", "/full_norms", "/sums/norms"]
)
def test_figures_of_fewer_digits(path, name, dtype):
    header, _, _ = parts(path)
    tensors = safetensors.torch.load_file(path)
    tensors[name] = tensors[name].to(dtype)
    safetensors.torch.save_file(tensors, path, metadata=header["__metadata__"])
    rejected(path, "does not fit|is stored as")


def test_numbers_of_a_kind_that_no_result_holds(path):
    header, _, _ = parts(path)
    tensors = safetensors.torch.load_file(path)
    tensors["/checks/decomposition"] = tensors["/checks/decomposition"].half()
    safetensors.torch.save_file(tensors, path, metadata=header["__metadata__"])
    rejected(path, "tensor '/checks/decomposition' is stored as torch.float16")


def test_a_description_too_deep_to_walk(path, monkeypatch):
    """Where Python gives up depends on its version; the error does not."""

    def give_up(document, tensors):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(storage, "from_document", give_up)
    rejected(path, "RecursionError")


def test_what_was_loaded_reaches_html_escaped(tmp_path):
    name = "</script><script>alert(1)</script>"
    made = fake_result(layers=3, heads=2, d_head=8, model_name=name)
    made.save(tmp_path / "x.safetensors")
    found = va.load(tmp_path / "x.safetensors")
    found.provenance["text"][:] = ["<s>", "&amp;", "\x00", name]
    html = found._repr_html_()
    assert "<script" not in html and "&lt;s&gt;" in html and "&amp;amp;" in html
