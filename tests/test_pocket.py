"""The bundled model and the script that trained it."""

import hashlib
import importlib.util
import json
import math
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tl_valuealign import pocket
from tl_valuealign.errors import ModelError
from tl_valuealign.pocket import POCKET_FOLDER, POCKET_SHA256, load_nanochat, pocket_model

# Written for these tests, so in no Python's standard library.
CODE = '''\
class Orchard:
    """A row of trees, each with the number of apples still hanging on it."""

    def __init__(self, apples):
        self.apples = list(apples)

    def pick(self, tree, count=1):
        """Take count apples from a tree and return how many are left there.

        Raises ValueError if the tree does not have that many.
        """
        if count > self.apples[tree]:
            raise ValueError("not enough apples: %d" % self.apples[tree])
        self.apples[tree] -= count
        return self.apples[tree]

    def __len__(self):
        return len(self.apples)
'''
PROSE = """\
If the argument is a string, the function returns a list of the words that are in it. The default
value of this argument is None, which means that the name of the file is used instead. Note that
the object must not be changed while the method is being called from another thread.
"""


@pytest.fixture(scope="module")
def bridge():
    return pocket_model()


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[1] / "examples" / "train_pocket.py"
    spec = importlib.util.spec_from_file_location("train_pocket", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the bundled folder, in the place of the bundled folder."""
    copy = tmp_path / "pocket_model"
    shutil.copytree(POCKET_FOLDER, copy)
    monkeypatch.setattr(pocket, "POCKET_FOLDER", copy)
    return copy


def test_folder_is_small_and_complete():
    names = {path.name for path in POCKET_FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in POCKET_FOLDER.iterdir()) < 5_000_000


def test_card_and_record_tell_of_these_weights():
    weights = (POCKET_FOLDER / "model.safetensors").read_bytes()
    record = json.loads((POCKET_FOLDER / "training.json").read_text())
    card = (POCKET_FOLDER / "README.md").read_text()
    assert hashlib.sha256(weights).hexdigest() == POCKET_SHA256 == record["sha256"]
    assert POCKET_SHA256 in card
    for key in ("held_out_bits_per_byte", "bigram_bits_per_byte"):
        assert f"{record[key]:.3f}" in card
    assert record["held_out_bits_per_byte"] < 0.9 * record["bigram_bits_per_byte"]


def test_changed_weights_are_refused(folder):
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    found = hashlib.sha256(weights).hexdigest()
    with pytest.raises(ModelError, match=f"{found}.*expected {POCKET_SHA256}"):
        pocket_model()


def test_missing_parts_are_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer.json"):
        pocket_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="missing"):
        pocket_model()
    with pytest.raises(ModelError, match="no config.json"):
        load_nanochat(folder / "nowhere")


def test_an_old_transformer_lens_is_told_which_version_is_needed(monkeypatch):
    # None in sys.modules makes the import fail as it does where the module does not exist.
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge.sources", None)
    with pytest.raises(ModelError, match=r"transformer_lens >= 3\.6 .*found transformer-lens \d"):
        pocket_model()


@pytest.mark.any_bridge
def test_loads_with_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = pocket_model()
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_model) == (8, 4, 128)
    assert model.cfg.model_name == "pocket"
    assert not model.training


@pytest.mark.any_bridge
def test_bridge_predicts_what_the_plain_model_predicts(bridge):
    from transformers import NanoChatForCausalLM

    plain = NanoChatForCausalLM.from_pretrained(POCKET_FOLDER, dtype=torch.float32).eval()
    ids = bridge.to_tokens(CODE)
    with torch.no_grad():
        torch.testing.assert_close(bridge(ids), plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.any_bridge
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype_is_what_was_asked_for(dtype):
    model = pocket_model(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.cfg.dtype == dtype


@pytest.mark.any_bridge
def test_tokenizer_comes_with_it_and_loses_nothing(bridge):
    for text in (CODE, PROSE, "  naïve 漢字 नाव\t\r\n x"):
        ids = bridge.tokenizer(text)["input_ids"]
        assert ids[0] == bridge.tokenizer.bos_token_id and 0 not in ids[1:]
        assert bridge.tokenizer.decode(ids[1:]) == text
        assert bridge.to_tokens(text)[0].tolist() == ids


def greedy(model, prompt: str, length: int) -> str:
    ids = model.to_tokens(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return model.tokenizer.decode(ids[0, 1:])[len(prompt) :]


@pytest.mark.any_bridge
def test_greedy_continuation_is_deterministic_and_knows_python(bridge):
    prompt = "    if value is not"
    torch.manual_seed(1)
    first = greedy(bridge, prompt, 12)
    torch.manual_seed(2)
    assert greedy(pocket_model(), prompt, 12) == first
    assert first.startswith(" None")


@pytest.mark.any_bridge
@pytest.mark.parametrize("shown", [True, False])
def test_loading_is_quiet_and_changes_no_global_state(capfd, shown):
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        random, dtype = torch.get_rng_state(), torch.get_default_dtype()
        pocket_model()
        assert logging.is_progress_bar_enabled() == shown
    finally:
        (logging.enable_progress_bar if was_shown else logging.disable_progress_bar)()
    assert torch.equal(random, torch.get_rng_state()) and torch.get_default_dtype() == dtype
    assert capfd.readouterr() == ("", "")


@pytest.mark.any_bridge
@pytest.mark.parametrize("text", [CODE, PROSE], ids=["code", "prose"])
def test_predicts_unseen_text_far_better_than_chance_and_bigram(bridge, script, text):
    ids = bridge.to_tokens(text)
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(bridge(ids)[0, :-1].float(), ids[0, 1:])
    tokens, size = ids[0, 1:].tolist(), len(text.encode())
    bits = nats.item() * len(tokens) / math.log(2) / size

    root = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text(encoding="utf-8") for path in sorted(root.glob("[a-h]*.py"))]
    assert len(sources) > 30
    known = bridge.tokenizer(sources, add_special_tokens=False, verbose=False)["input_ids"]
    assert bits < 0.8 * script.bigram_bits(known, [tokens], size)
    assert bits < 0.55 * math.log2(bridge.cfg.d_vocab) * len(tokens) / size


@pytest.mark.any_bridge
def test_bigram_probabilities_sum_to_one(script, monkeypatch):
    monkeypatch.setattr(script, "VOCAB", 5)
    train = [[1, 2, 1, 3], [1, 2]]
    for before in (0, 1, 4):  # a start, a known token, a token never seen before another

        def probability(after, before=before):
            alone = script.bigram_bits(train, [[before]], 1) if before else 0.0
            ids = [before, after] if before else [after]
            return 2 ** -(script.bigram_bits(train, [ids], 1) - alone)

        assert sum(map(probability, range(5))) == pytest.approx(1.0)
    # By hand: 1 is followed by 2 twice and by 3 once; the unigram of 2 is (2 + 1) / (6 + 5).
    expected = (2 + 2 * 3 / 11) / (3 + 2)
    first = script.bigram_bits(train, [[1]], 1)
    assert 2 ** -(script.bigram_bits(train, [[1, 2]], 1) - first) == pytest.approx(expected)


@pytest.mark.any_bridge
def test_model_bits_agree_with_the_models_own_loss(script, monkeypatch):
    torch.manual_seed(0)
    model = script.new_model().eval()
    monkeypatch.setattr(script, "CONTEXT", 7)
    ids = [torch.randint(1, script.VOCAB, (length,)).tolist() for length in (3, 7, 16)]
    nats = 0.0
    for document in ids:
        for start in range(0, len(document), 7):
            row = torch.tensor([[0, *document[start : start + 7]]])
            with torch.no_grad():
                nats += model(row, labels=row).loss.item() * (row.shape[1] - 1)
    assert script.model_bits(model, ids, 10) == pytest.approx(nats / math.log(2) / 10, rel=1e-5)


@pytest.mark.any_bridge
def test_training_rows_read_every_token_once_a_pass(script, monkeypatch):
    monkeypatch.setattr(script, "CONTEXT", 4)
    monkeypatch.setattr(script, "BATCH", 1)
    ids = [list(range(1, 60)), list(range(60, 100))]
    rows = script.training_rows(ids, seed=3)
    seen = torch.cat([next(rows) for _ in range(24)])
    assert (seen[:, 0] == 0).all()
    texts = seen[:, 1:].flatten()
    assert (texts == 0).any()  # a new document begins inside a row
    texts = texts[texts > 0]
    assert len(set(texts.tolist())) == len(texts) > 90
    again = script.training_rows(ids, seed=3)
    assert torch.equal(seen, torch.cat([next(again) for _ in range(24)]))


@pytest.mark.any_bridge
@pytest.mark.slow
def test_split_keeps_the_files_of_one_family_together(script):
    documents = script.read_corpus()
    sides = {d.name: script.is_held_out(d) for d in documents}
    for name, twin in (("_io", "_pyio"), ("_pydecimal", "decimal"), ("_bisect", "bisect")):
        if name in sides:
            assert script.is_held_out(script.Document("source", twin, "")) == sides[name]
    share = sum(sides.values()) / len(sides)
    assert 0.5 * script.HELD_OUT < share < 2 * script.HELD_OUT
    for kind in ("topic", "docstring", "source"):
        assert any(d.kind == kind and script.is_held_out(d) for d in documents)


@pytest.mark.any_bridge
def test_rate_rises_stays_and_falls(script):
    rates = [script.rate(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 30) and max(rates) == 1.0
    assert rates[29] == rates[500] == 1.0
    assert rates[750] == pytest.approx(0.5) and rates[-1] == pytest.approx(0.002)
