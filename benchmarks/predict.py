"""The cost model of docs/performance.md: what an analysis should take on a model of any size.

    python benchmarks/predict.py

Counts floating-point operations and bytes; the rates below are assumptions, to be replaced by those
that benchmarks/gpu.py measures.
"""

from dataclasses import dataclass

from tl_valuealign.symmetric import UpperRows


@dataclass(frozen=True)
class Model:
    name: str
    d: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    parameters: float
    vocabulary: int


@dataclass(frozen=True)
class Machine:
    """FLOP/s that products of these shapes reach, and bytes of memory."""

    name: str
    forward: float
    float32: float
    float64: float
    memory: float


MODELS = (
    Model("SmolLM2-135M", 576, 30, 9, 3, 64, 134.5e6, 49152),
    Model("Llama 3.2 1B", 2048, 16, 32, 8, 64, 1.24e9, 128256),
    Model("Llama 3.1 8B", 4096, 32, 32, 8, 128, 8.0e9, 128256),
    Model("Llama 3.1 70B", 8192, 80, 64, 8, 128, 70.6e9, 128256),
)
H200 = Machine("one H200", 400e12, 45e12, 45e12, 139 * 2**30)
KEPT = 0.75  # of all directions that the 0.9 threshold needs, as measured on SmolLM2
TOKENS = 16384
BATCH = 8 * 1024


def costs(m: Model) -> dict[str, float]:
    """Operations a token, operations once, and bytes."""
    slots = 2 * m.layers  # embedding and attention outputs, and a full stream for every block
    pairs = m.layers * (m.layers + 1) / 2 + m.layers
    heads = m.heads + 2 * m.kv_heads
    packed = UpperRows(m.d).packed
    width = heads * m.d_head
    return {
        "forward": 2 * (m.parameters - (m.layers > 0) * m.vocabulary * m.d),
        "bare": 2 * m.parameters,
        "moments": 2 * 2 * slots * packed,
        "tokens": 2 * m.d * width * KEPT * pairs + 2 * slots * packed,
        # Gram matrix and back-multiplication; projectors of two thresholds and ‖x̄A‖², then their
        # inner products with every matrix that the block reads.
        "svd": m.layers * heads * 2 * 2 * m.d * m.d_head**2,
        "forms": m.layers * heads * 2 * packed * m.d_head * 2.2 + pairs * heads * 5 * 2 * packed,
        "moment bytes": 2 * slots * packed * 8,
        "direction bytes": m.layers * width * m.d * 4,
        "stream bytes": slots * BATCH * m.d * 4,
    }


def seconds(m: Model, machine: Machine, devices: int) -> dict[str, float]:
    """Of TOKENS tokens; the text is shared out over devices, the rest is done on each."""
    c, each = costs(m), TOKENS / devices
    fixed = c["svd"] / machine.float64 + c["forms"] / machine.float64
    forward = each * c["forward"] / machine.forward
    return {
        "bare": each * c["bare"] / machine.forward,
        "energy": forward + each * c["moments"] / machine.float32 + fixed,
        "norm": forward + each * c["tokens"] / machine.float32 + fixed / 2,
    }


def main() -> None:
    print(
        "| model | operations a token: bare forward / moments / per token "
        "| GiB: moments / directions / streams of a batch "
        "| one H200, s: bare / energy / norm | eight |"
    )
    print("|---|---|---|---|---|")
    for m in MODELS:
        c = costs(m)
        operations = " / ".join(f"{c[k] / 1e9:.3g} G" for k in ("bare", "moments", "tokens"))
        sizes = ("moment bytes", "direction bytes", "stream bytes")
        room = " / ".join(f"{c[size] / 2**30:.2g}" for size in sizes)
        times = [
            " / ".join(
                f"{t:.0f}" if t > 99 else f"{t:.2g}" for t in seconds(m, H200, devices).values()
            )
            for devices in (1, 8)
        ]
        print(f"| {m.name} | {operations} | {room} | {times[0]} | {times[1]} |")


if __name__ == "__main__":
    main()
