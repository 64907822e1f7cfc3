"""``tl-valuealign``: a thin face over the public functions."""

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_valuealign.errors import InputError, ValueAlignError
from tl_valuealign.result import ValueAlignmentResult

app = typer.Typer(
    help=(
        "What does each attention head look for in the residual stream, and which earlier output "
        "supplies it? Breaks every head's W_Q, W_K and W_V by SVD and measures how much of each "
        "stream lies along the directions that carry most of its squared singular values, with "
        "chance beside every figure. Start with: tl-valuealign demo"
    ),
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# A result, and what else its report shows.
Found = tuple[ValueAlignmentResult, dict[str, Any]]
DEMO_TEXTS, DEMO_LENGTH = 12, 250  # passages and characters of each, for the further questions


class Metric(str, enum.Enum):
    norm = "norm"
    energy = "energy"
    pooled = "pooled"


class Dtype(str, enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Out = Annotated[
    Path, typer.Option("--out", help="Folder for the result, the report and the figures.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar, no summary.")]


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Hugging Face name or local folder, such as gpt2.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text file; repeat for several. Default: bundled passages."),
    ] = None,
    out: Out = Path("value-alignment"),
    role: Annotated[
        list[str] | None, typer.Option(help="Q, K, V or OV; repeat. Default: Q, K and V.")
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(help="attn_out or mlp_out; repeat. Default: attn_out."),
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(help="Share of squared singular values; repeat. Default: 0.9 and 0.5."),
    ] = None,
    metric: Annotated[
        Metric,
        typer.Option(
            help="norm: mean share of a token's norm (the post's); energy: of its squared norm; "
            "pooled: of all squared norm, so that large tokens weigh most."
        ),
    ] = Metric.norm,
    skip_first: Annotated[
        bool,
        typer.Option("--skip-first", help="Leave position 0 out: a control for attention sinks."),
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Read exactly so many tokens.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 8,
    dtype: Annotated[Dtype, typer.Option(help="Load the weights as.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, …")] = None,
    further: Annotated[
        bool,
        typer.Option(
            "--further",
            help="Also what the vectors are made of, whether they are lookups by token, what "
            "substituting the embedding costs, and which tokens the directions point to. Takes "
            "a few times as long.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Analyse MODEL and write the result, its figures and a report that opens in a browser."""
    import torch

    from tl_valuealign import analyze_value_alignment
    from tl_valuealign.adapter import load_model

    def run() -> Found:
        data = [_read(path) for path in text] if text else None
        loaded = load_model(model, dtype=getattr(torch, dtype.value), device=device)
        result = analyze_value_alignment(
            loaded,
            data,
            roles=role or ("Q", "K", "V"),
            components=component or ("attn_out",),
            thresholds=threshold or (0.9, 0.5),
            metric=metric.value,
            skip_first=skip_first,
            max_tokens=max_tokens,
            batch_size=batch_size,
            progress=not quiet,
        )
        if not further:
            return result, {}
        options = {
            "skip_first": skip_first,
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "progress": not quiet,
        }
        return result, _further(loaded, data, result, **options)

    _deliver(run, out, overwrite=overwrite, quiet=quiet)


@app.command()
def demo(
    out: Out = Path("value-alignment/demo"),
    overwrite: Overwrite = True,
    quiet: Quiet = False,
) -> None:
    """Analyse the bundled pocket model: real weights, no arguments, no network."""
    from tl_valuealign import analyze_value_alignment, pocket_model
    from tl_valuealign.asking import CURVE
    from tl_valuealign.passages import PASSAGES

    def run() -> Found:
        model, progress = pocket_model(), not quiet
        curve = (0.9, 0.5, *(share for share in CURVE[1::2] if share not in (0.9, 0.5)))
        result = analyze_value_alignment(model, thresholds=curve, progress=progress)
        openings = [text[:DEMO_LENGTH] for text in PASSAGES[:DEMO_TEXTS]]
        return result, _further(model, openings, result, progress=progress)

    _deliver(run, out, overwrite=overwrite, quiet=quiet)


def _further(model: Any, data: Any, result: ValueAlignmentResult, **options: Any) -> dict[str, Any]:
    """What the further questions add to a report."""
    import pandas as pd

    from tl_valuealign import (
        contribution_shares,
        decode_directions,
        substitute_input,
        token_identity,
    )

    asked = options | {"layers": result.layers}
    roles = [role for role in result.roles if role != "OV"]
    answers: list[Any] = []
    if roles:
        answers.append(contribution_shares(model, data, roles=roles, **asked))
        answers.append(token_identity(model, data, roles=roles, **asked))
    if "V" in roles:
        answers.append(substitute_input(model, data, **asked))
    tables = [decode_directions(model, role=role, n_directions=4) for role in result.roles]
    return {"further": answers, "directions": pd.concat(tables, ignore_index=True)}


def _deliver(run: Callable[[], Found], out: Path, *, overwrite: bool, quiet: bool) -> None:
    """Check that the folder can be written before the work, then write all of it."""
    from tl_valuealign.report import write_report

    with _plain_errors():
        result_path, report_path = out / "result.safetensors", out / "report.html"
        _prepare(out, (result_path, report_path), overwrite=overwrite)
        result, more = run()
        result.save(result_path, overwrite=overwrite)
        write_report(result, report_path, overwrite=overwrite, **more)
        _write_figures(result, out / "figures")
        if not quiet:
            typer.echo(result.summary())
        typer.echo(f"Open {report_path.resolve()} in a browser.")


def _prepare(out: Path, files: tuple[Path, ...], *, overwrite: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made a folder: {error}") from error
    for path in files:
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists; choose another --out or pass --overwrite")


def _write_figures(result: ValueAlignmentResult, folder: Path) -> None:
    """Every figure of the post as a page of its own; they share one plotly.min.js."""
    from tl_valuealign import post_figures

    folder.mkdir(exist_ok=True)
    for name, figure in post_figures(result).items():
        figure.write_html(folder / f"{name}.html", include_plotlyjs="directory")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {path} cannot be read: {error}") from error


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The package's errors as one line on stderr and exit status 1."""
    try:
        yield
    except ValueAlignError as error:
        typer.echo(f"tl-valuealign: {error}", err=True)
        sys.exit(1)
