"""Seeded results that no model made, of any size, for drawing and storing.

They are assembled from sums like a real run, so every accessor works on them. Value heads lean
towards the embedding and query and key heads towards the full stream, as in the post; one head
has a zero matrix.
"""

import torch
from torch import Tensor

from tl_valuealign.chance import chance_alignment
from tl_valuealign.result import ValueAlignmentResult, assemble
from tl_valuealign.role_result import Checks, Spectra
from tl_valuealign.sums import RoleSums, Sums

TOKENS_PER_SEQUENCE = 96
REPLICATES = 60

# Alignment over chance: embedding, attention outputs, MLP outputs, full stream.
LEANING = {
    "Q": (0.80, 1.10, 1.00, 1.25),
    "K": (0.75, 1.15, 1.05, 1.35),
    "V": (1.05, 0.75, 0.85, 0.90),
    "OV": (1.10, 0.80, 0.90, 0.95),
}


def fake_result(
    layers: int = 24,
    heads: int = 16,
    kv_heads: int | None = None,
    *,
    roles: tuple[str, ...] = ("Q", "K", "V"),
    thresholds: tuple[float, ...] = (0.9, 0.5),
    components: tuple[str, ...] = ("attn_out",),
    positions: bool = False,
    layer_numbers: tuple[int, ...] | None = None,
    d_head: int = 64,
    n_sequences: int = 12,
    noise: float = 0.06,
    metric: str = "norm",
    zero_head: tuple[int, int] | None = (1, 0),
    model_name: str = "fake-0.8b",
    seed: int = 0,
) -> ValueAlignmentResult:
    """A result of ``layers`` blocks with ``heads`` query and ``kv_heads`` key/value heads.

    ``layer_numbers`` picks target blocks out of ``layers`` (None: all of them).
    """
    generator = torch.Generator().manual_seed(seed)
    targets = tuple(range(layers)) if layer_numbers is None else layer_numbers
    kv_heads = heads if kv_heads is None else kv_heads
    d_model = max(heads * d_head, 2 * d_head)
    sources = ("embed", *(("pos_embed",) if positions else ())) + tuple(
        f"{block}_{component}" for block in range(layers) for component in components
    )
    upstream = torch.tensor(
        [[_block(source) < layer for layer in targets] for source in (*sources, "full")]
    )
    spectra, sums = {}, {}
    weights = torch.poisson(torch.ones(REPLICATES, n_sequences), generator).double()
    weights[:, 0] += weights.sum(1) == 0
    for role in roles:
        count = heads if role in ("Q", "OV") else kv_heads
        spectra[role] = _spectra(
            len(targets), count, d_head, d_model, thresholds, metric, zero_head, generator
        )
        unit = chance_alignment(spectra[role].n_directions, d_model, "norm")
        centre = _centres(role, sources, targets, unit, generator)
        sums[role] = _role_sums(centre, upstream, weights, noise, generator)
    tokens = TOKENS_PER_SEQUENCE
    counts = upstream.double()[None].expand(3, -1, -1) * tokens
    denominators = torch.stack([counts, counts.square()]) * n_sequences
    replicates = weights.sum(1)[None, None, :, None] * tokens
    norms = _norms(sources, targets, generator) * tokens * n_sequences
    return assemble(
        spectra,
        Sums(
            roles=sums,
            denominators=denominators,
            replicate_denominators=replicates.expand(2, 3, -1, len(targets)).clone(),
            norms=norms,
            n_tokens=tokens * n_sequences,
            n_sequences=n_sequences,
        ),
        sources=sources,
        layers=targets,
        thresholds=thresholds,
        metric=metric,
        checks=Checks(
            torch.rand(len(targets), generator=generator, dtype=torch.float64) * 1e-6,
            1e-4,
            {
                role: torch.rand(len(targets), generator=generator, dtype=torch.float64) * 1e-6
                for role in roles
            },
            1e-4,
        ),
        provenance={
            "model_name": model_name,
            "model_hash": f"{seed:064x}",
            "n_heads": heads,
            "n_key_value_heads": kv_heads,
            "d_model": d_model,
            "readable_dim": d_model,
            "n_tokens": tokens * n_sequences,
            "n_sequences": n_sequences,
            "text": ["made-up passages"],
            "skip_first": False,
            "engine": "tokens",
            "transformer_lens": "none: this result was made up",
            "dtype": "torch.float32",
        },
    )


def _block(source: str) -> int:
    return int(source.split("_")[0]) if source[0].isdigit() else -1


def _spectra(
    layers: int,
    heads: int,
    d_head: int,
    d_model: int,
    thresholds: tuple[float, ...],
    metric: str,
    zero_head: tuple[int, int] | None,
    generator: torch.Generator,
) -> Spectra:
    decay = 0.4 + 1.2 * torch.rand(layers, heads, 1, generator=generator, dtype=torch.float64)
    values = torch.exp(-decay * torch.arange(d_head, dtype=torch.float64) / d_head)
    if zero_head is not None and zero_head[0] < layers and zero_head[1] < heads:
        values[zero_head] = 0
    share = values.square().cumsum(-1)
    share = share / share[..., -1:].clamp(min=1e-30)
    counts = torch.stack([1 + (share < t - 1e-12).sum(-1) for t in thresholds])
    counts[:, values[..., 0] == 0] = 0
    rank = (values > 0).sum(-1)
    return Spectra(
        values,
        counts,
        rank,
        torch.zeros(counts.shape, dtype=torch.bool),
        chance_alignment(counts, d_model, metric),
    )


def _centres(
    role: str,
    sources: tuple[str, ...],
    targets: tuple[int, ...],
    unit: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Typical alignment, [threshold, stream, layer, head]: chance times a leaning with texture."""
    embed, attention, mlp, full = LEANING[role]
    level = [
        {"embed": embed, "pos_embed": 0.6}.get(source, mlp if "mlp" in source else attention)
        for source in sources
    ]
    depth = torch.tensor(targets, dtype=torch.float64) / max(max(targets), 1)
    shape = (len(sources) + 1, *unit.shape[1:])
    texture = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.12
    texture += torch.randn(shape[0], 1, 1, generator=generator, dtype=torch.float64) * 0.06
    other = torch.Generator().manual_seed(generator.initial_seed() + len(role) + ord(role[0]))
    wobble = torch.randn((len(unit), *shape), generator=other, dtype=torch.float64) * 0.05
    wobble[0] = 0  # thresholds differ, and adding one leaves the first as it was
    trend = torch.tensor([*level, full], dtype=torch.float64)[:, None, None]
    trend = trend * (1 + 0.15 * (0.5 - depth))[None, :, None]
    return (unit[:, None] * trend * (texture + wobble).exp()).clamp(max=0.97)


def _role_sums(
    centre: Tensor,
    upstream: Tensor,
    weights: Tensor,
    noise: float,
    generator: torch.Generator,
) -> RoleSums:
    tokens = TOKENS_PER_SEQUENCE
    moments = torch.zeros(3, 3, *centre.shape, dtype=torch.float64)
    replicates = torch.zeros(
        2, 3, len(weights), centre.shape[0], *centre.shape[2:], dtype=torch.float64
    )
    for index in range(weights.shape[1]):
        wobble = torch.randn(centre.shape, generator=generator, dtype=torch.float64)
        share = (centre * (1 + noise * wobble)).clamp(0, 1)
        share = torch.where(upstream[None, :, :, None], share, 0.0)
        for m, value in enumerate((share, share.square(), share.square())):
            a = value * tokens
            moments[0, m] += a
            moments[1, m] += a.square()
            moments[2, m] += a * tokens
            for pair, stream in enumerate((0, -1)):
                replicates[pair, m] += weights[:, index, None, None, None] * a[:, stream]
    known = upstream[:, :, None] & ~centre[0].isnan()
    size = torch.rand(centre.shape[1:], generator=generator, dtype=torch.float64).exp()
    size[-1] *= 60
    size[0] *= 0.02
    projected = torch.where(known, size * centre[0].square().nan_to_num() * 50, torch.nan)
    return RoleSums(moments, projected * tokens * weights.shape[1], replicates)


def _norms(
    sources: tuple[str, ...], targets: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Mean norms, [stream, layer]: outputs grow with depth, the full stream grows faster."""
    growth = [1.0 if source == "embed" else 1.5 * 1.07 ** _block(source) for source in sources]
    jitter = torch.rand(len(sources), generator=generator, dtype=torch.float64) * 0.3
    written = torch.tensor(growth, dtype=torch.float64) * jitter.exp()
    full = torch.tensor([2 + 1.6 * layer for layer in targets], dtype=torch.float64)
    return torch.cat([written[:, None].expand(-1, len(targets)), full[None]])
