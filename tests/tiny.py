"""What several test files share: a tokenizer made on the spot, silent runs, comparisons."""

import numpy as np
import torch
import zoo

import tl_valuealign as va

BOS, EOS, PAD = 1, 2, 0


def analyze(model, data=None, **options):
    """A run without a progress bar."""
    return va.analyze_value_alignment(model, data, **{"progress": False} | options)


def tokenizer(**options):
    """One token a word: "w3" is id 3; "<pad>", "<s>" and "</s>" are 0, 1 and 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {f"w{i}": i for i in range(3, zoo.VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special | options)


def text(ids):
    """The string whose words are these ids."""
    names = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}
    return " ".join(names.get(int(i), f"w{int(i)}") for i in ids)


def figures(result):
    """{name: float64 array} of every number a result holds, sums and bootstrap included."""
    found = {"norms": result.norms, "full_norms": result.full_norms}
    for name, values in result.roles.items():
        found |= {f"{name}.{key}": value for key, value in vars(values).items()}
        found |= {f"{name}.sums.{key}": v for key, v in vars(result.sums.roles[name]).items()}
    for key in ("denominators", "replicate_denominators", "norms"):
        found[f"sums.{key}"] = getattr(result.sums, key)
    return {key: value.to(torch.float64).numpy() for key, value in found.items()}


def assert_same_bits(one, two):
    """Two results hold the same numbers to the last bit."""
    assert (one.sources, one.layers, one.thresholds) == (two.sources, two.layers, two.thresholds)
    mine, theirs = figures(one), figures(two)
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


def assert_close(one, two, *, atol=1e-5, rtol=1e-5, roles=None):
    """The figures that a reader sees agree: alignments to ``atol``, sizes to ``rtol``."""
    assert (one.sources, one.layers, one.thresholds) == (two.sources, two.layers, two.thresholds)
    np.testing.assert_allclose(one.norms, two.norms, rtol=rtol)
    np.testing.assert_allclose(one.full_norms, two.full_norms, rtol=rtol)
    for name in roles or one.roles:
        mine, theirs = one.roles[name], two.roles[name]
        for key in ("n_directions", "numerical_rank", "chance"):
            np.testing.assert_array_equal(
                getattr(mine, key), getattr(theirs, key), err_msg=f"{name}.{key}"
            )
        for key in ("full", "by_source", "excess", "full_stderr", "by_source_stderr"):
            np.testing.assert_allclose(
                getattr(mine, key), getattr(theirs, key), rtol=0, atol=atol, err_msg=f"{name}.{key}"
            )
        for key in ("singular_values", "projected_sq_norm", "projected_sq_norm_full"):
            np.testing.assert_allclose(
                getattr(mine, key),
                getattr(theirs, key),
                rtol=rtol,
                atol=1e-9,
                err_msg=f"{name}.{key}",
            )
