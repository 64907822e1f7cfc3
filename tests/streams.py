"""Seeded streams and heads that no model made, and engines that have eaten them."""

from types import SimpleNamespace

import torch

from tl_valuealign.engines import TokenEngine
from tl_valuealign.moments import MomentEngine, MomentSums
from tl_valuealign.spectra import HeadDirections, count_directions, decompose
from tl_valuealign.tokens import Corpus

CPU = torch.device("cpu")
THRESHOLDS = (0.9, 0.5)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads_of(matrices, thresholds=THRESHOLDS, dtype=torch.float32):
    """Directions of matrices [head, d_model, d_head] stored in float32."""
    svd = decompose(matrices.to(dtype), torch.float32)
    k = torch.stack([count_directions(svd.singular_values, t) for t in thresholds])
    return HeadDirections(svd.directions.to(dtype), svd.singular_values, k)


def world(
    seed=0,
    *,
    d=40,
    d_head=6,
    layers=3,
    roles=(("Q", 4), ("V", 2)),
    lengths=(9, 4, 7, 11, 5, 8, 6, 3),
):
    """A pretend model: ``streams`` [stream, token, d] (sources, then each layer's full stream)."""
    sources = layers
    matrices = {
        role: [draw(seed + 100 * i + n, h, d, d_head) for i in range(layers)]
        for n, (role, h) in enumerate(roles)
    }
    streams = draw(seed + 7, sources + layers, sum(lengths), d)
    upstream = torch.tensor([[s - 1 < layer for layer in range(layers)] for s in range(sources)])
    return SimpleNamespace(
        d=d,
        layers=layers,
        sources=sources,
        matrices=matrices,
        streams=streams,
        upstream=upstream,
        lengths=lengths,
        roles=[role for role, _ in roles],
    )


def engine_of(world, kind, *, centred=False, dtype=torch.float32, moments=("energy", "pooled")):
    """An engine over a world's heads that has eaten nothing."""
    blocks = [
        [heads_of(_centred(world.matrices[role][i], centred), dtype=dtype) for role in world.roles]
        for i in range(world.layers)
    ]
    options = {"centred": centred, "dtype": dtype, "device": CPU}
    sums = MomentSums(world.d, world.sources, world.layers, kinds=moments, device=CPU)
    if kind == "moments":
        return MomentEngine(blocks, world.roles, sums, **options)
    return TokenEngine(
        blocks, world.roles, world.sources, moments=sums if moments else None, **options
    )


def _centred(matrices, centred):
    return matrices - matrices.mean(1, keepdim=True) if centred else matrices


def eat(engine, world, *, batch_size=3, share=(0, 1)):
    """Feed the streams of a world to an engine, batch by batch, as the analysis does."""
    numbers = torch.arange(sum(world.lengths))
    corpus = Corpus("test", iter(numbers.split(list(world.lengths))))
    for batch in corpus.batches(batch_size, None, share):
        engine.start_batch(batch)
        for source in range(world.sources):
            readers = world.upstream[source].nonzero()[:, 0].tolist()
            engine.add(source, world.streams[source][batch.ids], readers)
        for layer in range(world.layers):
            engine.add(world.sources, world.streams[world.sources + layer][batch.ids], [layer])
    return engine


def truth(world, *, centred=False, thresholds=THRESHOLDS):
    """{role: (alignment [metric, threshold, stream, layer, head], projected)} in float64, a loop
    over heads."""
    x = world.streams.double()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    found = {}
    for role in world.roles:
        heads = len(world.matrices[role][0])
        shape = (world.sources + 1, world.layers, heads)
        alignment = torch.full((3, len(thresholds), *shape), torch.nan, dtype=torch.float64)
        projected = torch.full(shape, torch.nan, dtype=torch.float64)
        for layer in range(world.layers):
            A = _centred(world.matrices[role][layer].double(), centred)
            U, s, _ = torch.linalg.svd(A, full_matrices=False)
            share = s.square().cumsum(-1) / s.square().sum(-1, keepdim=True)
            for stream in [*world.upstream[:, layer].nonzero()[:, 0].tolist(), world.sources]:
                y = x[stream + layer if stream == world.sources else stream]
                size = y.square().sum(-1)
                kept = size > 0
                for head in range(heads):
                    projected[stream, layer, head] = (y @ A[head]).square().sum(-1).mean()
                    for t, threshold in enumerate(thresholds):
                        k = int((share[head] < threshold * (1 - 1e-12)).sum()) + 1
                        inside = (y[kept] @ U[head, :, :k]).square().sum(-1)
                        cell = alignment[:, t, stream, layer, head]
                        cell[0] = (inside / size[kept]).sqrt().mean()
                        cell[1] = (inside / size[kept]).mean()
                        cell[2] = inside.sum() / size.sum()
        found[role] = (alignment, projected)
    return found
