"""One short check of a GPU: are the figures right on it, and what do they cost?

    python benchmarks/gpu.py                     a few minutes on a large GPU
    python benchmarks/gpu.py --device cpu --small    the same script, small, to see that it runs

Correctness is against float64 on the CPU; the first wrong figure ends the run with an error. Where
transformer_lens is missing, the model itself is left out and said so.
"""

import argparse
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from measure import Row, in_turns, machine, ratios, row, table

from tl_valuealign.engines import TokenEngine
from tl_valuealign.moments import MomentEngine, MomentSums
from tl_valuealign.spectra import HeadDirections, count_directions, decompose
from tl_valuealign.tokens import Batch

CPU = torch.device("cpu")
ROLES, SHARES = ("Q", "K", "V"), (0.9, 0.5)
LARGE = SimpleNamespace(d=4096, width=128, heads=(32, 8, 8), layers=8, rows=4, positions=1024)
SMALL = SimpleNamespace(d=192, width=32, heads=(6, 2, 2), layers=3, rows=4, positions=64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(size: SimpleNamespace, device: torch.device) -> list[list[HeadDirections]]:
    """Directions of random heads in every block."""
    blocks = []
    for layer in range(size.layers):
        block = []
        for role, count in enumerate(size.heads):
            matrices = draw(count, size.d, size.width, seed=100 * layer + role)
            svd = decompose(matrices.to(device), torch.float32)
            k = torch.stack([count_directions(svd.singular_values, share) for share in SHARES])
            block.append(HeadDirections(svd.directions, svd.singular_values, k))
        blocks.append(block)
    return blocks


def engine_of(
    kind: str,
    size: SimpleNamespace,
    blocks: list[list[HeadDirections]],
    dtype: torch.dtype,
    device: torch.device,
) -> TokenEngine | MomentEngine:
    kinds = ("energy", "pooled") if kind == "moments" else ("pooled",)
    sums = MomentSums(size.d, size.layers, size.layers, kinds=kinds, device=device)
    options = {"centred": True, "dtype": dtype, "device": device}
    if kind == "moments":
        return MomentEngine(blocks, ROLES, sums, **options)
    return TokenEngine(blocks, ROLES, size.layers, moments=sums, **options)


def eat(engine: TokenEngine | MomentEngine, size: SimpleNamespace, x: torch.Tensor) -> None:
    """One batch: every source, then every full stream."""
    shape = x.shape[:2]
    batch = Batch(
        torch.zeros(shape, dtype=torch.int64),
        torch.ones(shape, dtype=torch.bool),
        tuple(range(len(x))),
    )
    engine.start_batch(batch)
    for source in range(size.layers):
        engine.add(source, x, list(range(source, size.layers)))
    for layer in range(size.layers):
        engine.add(size.layers, x, [layer])


def close(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> Row:
    """A row with the largest difference; raises where it is over the tolerance."""
    error = float((got.cpu().double() - want.cpu().double()).abs().nan_to_num(0).max())
    if error > tolerance or bool((got.cpu().isnan() != want.cpu().isnan()).any()):
        raise SystemExit(f"WRONG on this device: {what} is off by {error:.2g}")
    return Row("right", what, error, error, error, target=tolerance)


def right(device: torch.device) -> Iterator[Row]:
    """Directions and both engines against float64 on the CPU, one token 1,000 times as long."""
    size = SMALL
    x = draw(size.rows, size.positions, size.d, seed=7)
    x[1, 5] *= 1000
    exact = blocks_of(size, CPU)
    wide = [
        [HeadDirections(h.directions.double(), h.singular_values, h.n_directions) for h in block]
        for block in exact
    ]
    found = blocks_of(size, device)
    for one, other in zip(found[0], exact[0], strict=True):
        yield close("directions, projectors", _projector(one), _projector(other), 1e-5)
        yield close("singular values", one.singular_values, other.singular_values, 1e-9)
    upstream = torch.ones(size.layers, size.layers, dtype=torch.bool).triu()
    truth = engine_of("tokens", size, wide, torch.float64, CPU)
    eat(truth, size, x.double())
    want = truth.finish(upstream)
    for kind in ("moments", "tokens"):
        engine = engine_of(kind, size, found, torch.float32, device)
        eat(engine, size, x.to(device))
        sums = engine.finish(upstream)
        for role in ROLES:
            for metric in ("energy", "pooled") if kind == "moments" else ("norm", "energy"):
                got = sums.alignment(role, metric)
                yield close(f"{kind}: {metric} of {role}", got, want.alignment(role, metric), 1e-6)
            share = sums.projected(role) / want.projected(role)
            expected = torch.ones_like(share).where(~share.isnan(), torch.nan)
            yield close(f"{kind}: projected squared norm of {role}", share, expected, 5e-6)


def _projector(head: HeadDirections) -> torch.Tensor:
    inside = head.directions[0][:, : int(head.n_directions[0, 0])].double()
    return inside @ inside.T


def decompositions(device: torch.device, rounds: int, small: bool) -> Iterator[Row]:
    """The Gram path against torch's drivers, float32, batched."""
    shapes = [(6, 192, 32)] if small else [(36, 768, 64), (32, 2048, 64), (16, 4096, 128)]
    drivers = ("gesvd", "gesvdj", "gesvda") if device.type == "cuda" else (None,)
    for shape in shapes:
        matrices = draw(*shape).to(device)
        runs = {"ours": lambda m=matrices: decompose(m, torch.float32)}
        for driver in drivers:
            runs[str(driver)] = lambda m=matrices, d=driver: torch.linalg.svd(
                m, full_matrices=False, driver=d
            )
        times = in_turns(runs, rounds)
        for driver in drivers:
            name = f"{list(shape)} against {driver or 'LAPACK'}"
            yield row("SVD / torch.linalg.svd", name, ratios(times, "ours", str(driver)))


def engines(device: torch.device, rounds: int, size: SimpleNamespace) -> Iterator[Row]:
    """Each engine's products against bare matrix products of the same shapes."""
    blocks = blocks_of(size, device)
    x = draw(size.rows, size.positions, size.d, seed=7).to(device)
    pairs = size.layers * (size.layers + 1) // 2 + size.layers
    tokens = engine_of("tokens", size, blocks, torch.float32, device)
    moments = engine_of("moments", size, blocks, torch.float32, device)
    columns = len(tokens.packs[0].rows)
    weights, flat = torch.randn(columns, size.d, device=device), x.flatten(0, 1)

    def project() -> None:
        for part in flat.split(tokens.chunk):
            for _ in range(pairs):
                torch.mm(weights, part.T)

    def outer() -> None:
        for _ in range(4 * size.layers):
            torch.mm(flat.T, flat)

    times = in_turns(
        {
            "tokens": lambda: eat(tokens, size, x),
            "project": project,
            "moments": lambda: eat(moments, size, x),
            "outer": outer,
        },
        rounds,
    )
    flops = 2 * flat.numel() * columns * pairs
    rate = f"{flops / times[-1]['project'] / 1e12:.1f} TFLOP/s in float32"
    yield row(
        "FLOP/s / matrix rate",
        "per-token engine",
        ratios(times, "project", "tokens"),
        target=0.7,
        at_least=True,
        note=rate,
    )
    yield row(
        "time / full d × d products",
        "second-moment engine",
        ratios(times, "moments", "outer"),
        note="under 1 where symmetry pays",
    )


def model(device: torch.device, rounds: int, small: bool) -> Iterator[Row]:
    """A random Llama: the analysis against the bare forward pass, float32 and bfloat16."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import LlamaConfig, LlamaForCausalLM

    import tl_valuealign as va
    from tl_valuealign import readin

    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    if not small:
        shape = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = LlamaConfig(
        vocab_size=1000 if small else 32000,
        intermediate_size=3 * shape["hidden_size"],
        num_key_value_heads=shape["num_attention_heads"] // 4,
        max_position_embeddings=1024,
        **shape,
    )
    ids = torch.randint(0, 1000, (8, 64) if small else (32, 512))
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        hf = LlamaForCausalLM(config).to(device, dtype).eval()
        bridge = build_bridge_from_module(hf, type(hf).__name__, hf_config=config, tokenizer=None)

        def bare(bridge: object = bridge) -> None:
            with torch.inference_mode():
                for batch in ids.split(8):
                    bridge(batch.to(device), return_type="logits")

        def analyse(metric: str, bridge: object = bridge) -> object:
            readin.forget()
            return va.analyze_value_alignment(bridge, ids, metric=metric, progress=False)

        times = in_turns(
            {
                "bare": bare,
                "energy": lambda: analyse("energy"),
                "norm": lambda: analyse("norm"),
            },
            rounds,
        )
        name = str(dtype).removeprefix("torch.")
        for metric in ("energy", "norm"):
            what = f"{name}, {metric}, {ids.numel():,} tokens"
            yield row("total / bare forward", what, ratios(times, metric, "bare"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = list(right(device))
    rows += decompositions(device, options.rounds, options.small)
    rows += engines(device, options.rounds, SMALL if options.small else LARGE)
    if importlib.util.find_spec("transformer_lens"):
        rows += model(device, options.rounds, options.small)
    else:
        print("transformer_lens is not installed: the model is left out")
    print(machine())
    print(table(rows))


if __name__ == "__main__":
    main()
