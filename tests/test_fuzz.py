"""Whatever is handed in: a valid result, or one of the package's documented errors.

A few hundred examples run by default and 2,000 in the slow tier (``pytest -m slow``).
"""

import io

import numpy as np
import pytest
import tiny
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tl_valuealign as va

pytestmark = pytest.mark.any_bridge

FEW, MANY = 150, 2000
DOCUMENTED = (va.InputError, va.ModelError, va.StorageError)
JUNK = [None, True, -1, 0, 3, 2**70, 0.5, 1.0, -0.0, float("nan"), float("inf"), "", "V", "norm",
        "\ud800", b"V", (), [], {}, set(), object(), int, len, torch.tensor(1), torch.ones(2),
        np.array([0.9]), np.float32(0.9), np.int64(1), range(2), io.StringIO("w5"), 1j]  # fmt: skip

junk = st.sampled_from(JUNK)
ids = st.integers(0, zoo.VOCAB - 1)
words = st.lists(ids, max_size=70).map(tiny.text) | st.text(max_size=20)
rows = st.lists(ids, max_size=70)
tensors = st.builds(
    lambda batch, pos, seed, dtype: torch.randint(
        0, zoo.VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.integers(0, 3),
    st.integers(0, 70),
    st.integers(0, 5),
    st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.float32, torch.bool]),
)
data = st.one_of(
    st.none(),
    words,
    rows,
    tensors,
    tensors.map(lambda t: t.numpy()),
    tensors.map(lambda t: t[:1].flatten()),
    st.lists(words | rows | tensors, max_size=4),
    st.lists(words | rows, max_size=4).map(iter),
    st.lists(st.integers(-3, 300), max_size=5),
    junk,
    st.lists(junk, max_size=3),
)


def mostly(good, share=9):
    """The argument left out, something sensible, or now and then anything at all."""
    return st.integers(0, share).flatmap(lambda n: junk if n == 0 else good)


ARGUMENTS = {
    "roles": mostly(st.lists(st.sampled_from(["Q", "K", "V", "OV"]), max_size=5)),
    "components": mostly(st.lists(st.sampled_from(["attn_out", "mlp_out"]), max_size=3)),
    "thresholds": mostly(
        st.lists(st.floats(0.001, 1) | st.sampled_from([1.0, 0.9, 1e-300, 2.0]), max_size=4)
    ),
    "metric": mostly(st.sampled_from(["norm", "energy", "pooled"])),
    "layers": mostly(st.lists(st.integers(-1, 2), max_size=3) | st.none() | st.integers(0, 1)),
    "attention_mask": mostly(
        st.none()
        | tensors.map(lambda t: (t > 20).int())
        | tensors.map(lambda t: torch.ones_like(t))
    ),
    "skip_first": mostly(st.booleans()),
    "batch_size": mostly(st.integers(1, 9)),
    "max_tokens": mostly(st.none() | st.integers(0, 90)),
    "device": mostly(st.sampled_from([None, "cpu", torch.device("cpu")])),
    "progress": mostly(st.just(False)),
}
calls = st.fixed_dictionaries({}, optional={"data": data, **ARGUMENTS})


class Models(list):
    def __repr__(self):  # a failing example is printed with its arguments
        return "models"


@pytest.fixture(scope="module")
def models():
    """Two blocks each: enough for every axis."""
    made = Models()
    for name, layers in (("gpt2", "n_layer"), ("llama", "num_hidden_layers")):
        entry = zoo.ZOO[name]
        zoo.ZOO["fuzzed"] = zoo.Entry(entry.config, entry.model, entry.options | {layers: 2})
        made.append(zoo.bridge("fuzzed"))
        del zoo.ZOO["fuzzed"]
    made[1].tokenizer = tiny.tokenizer()
    return made


def check_valid(result, options):
    """What must hold of every result."""
    assert isinstance(result, va.ValueAlignmentResult)
    n_tokens = result.provenance["n_tokens"]
    assert n_tokens >= 1
    if isinstance(options.get("max_tokens"), int):
        assert result.provenance["n_tokens_read"] <= options["max_tokens"]
    assert set(result.roles) <= {"Q", "K", "V", "OV"} and result.sources[0] == "embed"
    assert torch.isfinite(result.norms).all() and torch.isfinite(result.full_norms).all()
    for values in result.roles.values():
        for figure in (values.full, values.by_source):
            known = figure[~figure.isnan()]
            assert ((known >= 0) & (known <= 1 + 1e-6)).all()
        assert torch.isfinite(values.full).all()  # no head of these models is zero
        assert ((values.chance > 0) & (values.chance <= 1)).all()
        assert (values.n_directions >= 1).all()
        assert (values.n_directions <= values.singular_values.shape[-1]).all()
        assert (values.singular_values[..., :-1] >= values.singular_values[..., 1:]).all()
        upstream = ~values.by_source[0, :, :, 0].isnan()
        written = [int(s.split("_")[0]) if s[0].isdigit() else -1 for s in result.sources]
        for source, block in enumerate(written):
            assert upstream[source].tolist() == [block < layer for layer in result.layers]
    assert len(result.summary().splitlines()) == 5


def try_one(models, which, options):
    options = {"progress": False} | options
    stored = options.pop("data", None)
    if stored is None:
        options.setdefault("max_tokens", 60)  # of the bundled passages
    try:
        result = va.analyze_value_alignment(models[which], stored, **options)
    except DOCUMENTED as error:
        assert len(str(error)) > 10
        return
    check_valid(result, options)


fuzz = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


@settings(fuzz, max_examples=FEW)
@given(which=st.integers(0, 1), options=calls)
def test_any_arguments(models, which, options):
    try_one(models, which, options)


@pytest.mark.slow
@settings(fuzz, max_examples=MANY)
@given(which=st.integers(0, 1), options=calls)
def test_any_arguments_many_times(models, which, options):
    try_one(models, which, options)


@settings(fuzz, max_examples=40)
@given(model=junk)
def test_anything_as_a_model(model):
    with pytest.raises(va.ModelError):
        va.analyze_value_alignment(model, [[5, 6]], progress=False)


@settings(fuzz, max_examples=60)
@given(path=junk | st.text(max_size=10))
def test_anything_as_a_path(models, path, tmp_path_factory, saved):
    """Inside an empty folder, so that no name can hit a real file."""
    folder = tmp_path_factory.mktemp("any")
    place = folder / path if isinstance(path, str) and not path.startswith("/") else path
    try:
        assert isinstance(va.load(place), va.ValueAlignmentResult)
    except DOCUMENTED:
        pass
    if isinstance(place, (int, float)) or hasattr(place, "read"):
        return
    try:
        saved.save(place)
    except DOCUMENTED:
        pass
    else:
        tiny.assert_same_bits(saved, va.load(place))


@pytest.fixture(scope="module")
def saved(models):
    return tiny.analyze(models[0], zoo.ids(), layers=[1])


def test_the_fuzzer_reaches_both_ends(models):
    """It would prove nothing if every example were refused, or none."""
    outcomes = []

    @settings(fuzz, max_examples=60)
    @given(which=st.integers(0, 1), options=calls)
    def sample(which, options):
        options = {"progress": False} | options
        try:
            va.analyze_value_alignment(models[which], options.pop("data", None), **options)
        except DOCUMENTED:
            outcomes.append(False)
        else:
            outcomes.append(True)

    sample()
    assert 10 <= sum(outcomes) <= len(outcomes) - 10
