"""Two processes that add up their sums must return what one process returns."""

import numpy as np
import pytest
import torch
import zoo
from torch import distributed as dist
from torch import multiprocessing

import tl_valuealign as va

pytestmark = pytest.mark.bridge

RUNS = {
    "norm": {"metric": "norm"},
    "energy": {"metric": "energy", "keep_moments": True},
    # Cut in the middle of row 8, which is process 0's.
    "cut": {"metric": "pooled", "max_tokens": 8 * 11 + 3, "skip_first": True},
    # Fewer sequences than processes: one has nothing to read.
    "single": {"metric": "norm", "max_tokens": 7},
}


def analyse(name):
    return va.analyze_value_alignment(
        zoo.bridge("llama"), zoo.ids(batch=13), batch_size=3, progress=False, **RUNS[name]
    )


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name in RUNS:
            analyse(name).save(f"{folder}/{name}{rank}.safetensors")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed")
    multiprocessing.spawn(worker, args=(str(path),), nprocs=2)
    return path


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_returns_the_single_process_result(folder, name, rank):
    result, alone = va.load(folder / f"{name}{rank}.safetensors"), analyse(name)
    assert result.provenance["processes"] == 2 and alone.provenance["processes"] == 1
    for key in ("n_tokens", "n_sequences", "n_tokens_read", "text_hash", "model_hash"):
        assert result.provenance[key] == alone.provenance[key], key
    for role, mine in alone.roles.items():
        for field in mine.__dataclass_fields__:
            np.testing.assert_allclose(
                getattr(result.roles[role], field),
                getattr(mine, field),
                rtol=1e-5 if "stderr" in field else 1e-6,
                atol=1e-6,
                err_msg=f"{role} {field}",
            )
    np.testing.assert_allclose(result.full_norms, alone.full_norms, rtol=1e-6)
    torch.testing.assert_close(result.checks.decomposition, alone.checks.decomposition)
    if alone.moments is not None:
        size = float(alone.moments.pooled.abs().max())
        np.testing.assert_allclose(result.moments.pooled, alone.moments.pooled, atol=1e-6 * size)


@pytest.mark.parametrize("stream", ["embed", "full"])
def test_extreme_tokens_are_those_of_the_whole_text(folder, stream):
    one, other = va.load(folder / "norm0.safetensors"), analyse("norm")
    for head in range(2):
        mine, theirs = (r.extremes.table("V", 2, head, stream) for r in (one, other))
        np.testing.assert_allclose(mine.alignment, theirs.alignment, atol=1e-6)
        assert list(mine.id) == list(theirs.id)
