"""The words and tables of a report. Everything that came from a model or a file is escaped."""

import math
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from tl_valuealign._version import VERSION
from tl_valuealign.describe import METRIC_WORDS, mean, model_line, text_line
from tl_valuealign.plots.boxes import has_intervals, interval_note
from tl_valuealign.plots.common import share
from tl_valuealign.result import ValueAlignmentResult

LONGEST = 600  # characters of one provenance entry

POST = "https://riddlehe.github.io/blog/importance-of-token-embeddings-to-value-vectors.html"


def asked(result: ValueAlignmentResult) -> str:
    """What was asked, of which model, and how to read the answer."""
    first = share(result.thresholds[0])
    return f"""
<p class="lead">What is each attention head of <b>{escape(str(result.provenance["model_name"]))}</b>
looking for in the residual stream, and which earlier output supplies it?</p>
<p>A head reads the stream through three matrices: query, key and value. Taken apart by singular
values, each hears most through a few <em>input directions</em>. For every head, this report
measures how much of each earlier output (the token embedding, every attention output, and the
full stream that the head really sees) lies in the directions that carry {first} of the matrix’s
squared singular values. That share is the <em>alignment</em>.</p>
<p>An alignment means nothing by itself: the more directions count, the more any stream fits. So
<em>chance</em>, the alignment of a random direction, stands beside each one. Above chance, a head
looks for that output; at chance, it treats it like any other direction; below, it looks away.</p>
<p class="quiet">{escape(model_line(result))}. Read: {escape(text_line(result))}.</p>
"""


def found(result: ValueAlignmentResult) -> str:
    """Verdict table first, then the averages behind it."""
    claims = getattr(result, "claims", None)
    return (_verdict(claims()) if claims else "") + _averages(result) + _boxes(result)


def _verdict(claims: pd.DataFrame) -> str:
    """The post's statements in words, the numbers behind them folded away."""
    numbers = table(claims, "The post’s statements, one by one")
    if not {"statement", "verdict", "words"} <= set(claims.columns):
        return numbers
    items = "".join(
        f"<li><p><b>{escape(_capital(str(row['statement'])))}</b> "
        f"<span class='badge {_tone(str(row['verdict']))}'>{escape(str(row['verdict']))}</span></p>"
        f"<p>{escape(str(row['words']))}</p></li>"
        for row in claims.to_dict("records")
    )
    numbers = table(claims.drop(columns=["words", "claim"], errors="ignore"), "The same in numbers")
    return (
        "<p>The post’s five statements, asked of this model:</p>"
        f"<ol class='verdict'>{items}</ol>"
        f"<details><summary>The same in numbers</summary>{numbers}</details>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tone(verdict: str) -> str:
    if verdict == "holds":
        return "yes"
    return {"holds": "part", "fails": "no"}.get(verdict.partition(" ")[0], "none")


def table(frame: pd.DataFrame, caption: str) -> str:
    """Any data frame as HTML: numbers short and to the right, truth in words and colour."""
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    numeric = [
        flag and not pd.api.types.is_bool_dtype(frame[name])
        for flag, name in zip(numeric, frame.columns, strict=True)
    ]
    head = "".join(
        f"<th scope='col'{' class=number' if flag else ''}>{_words(name)}</th>"
        for flag, name in zip(numeric, frame.columns, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if flag else ''}>{_cell(value)}</td>"
            for flag, value in zip(numeric, row, strict=True)
        )
        + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    return (
        f"<div class='scroll'><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _words(name: Any) -> str:
    return escape(str(name).replace("_", " "))


def _cell(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "<span class='yes'>✓ yes</span>" if value else "<span class='no'>✗ no</span>"
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return "–"
        return f"{value:.3f}" if 0.001 <= abs(value) < 100 else f"{value:.3g}"
    if value is None or value is pd.NA:
        return "–"
    return escape(str(value))


def _averages(result: ValueAlignmentResult) -> str:
    outputs = [at for at, source in enumerate(result.sources) if source.endswith("_attn_out")]
    rows = []
    for name, values in result.roles.items():
        d_head = values.singular_values.shape[-1]
        rows.append(
            {
                "role": name,
                "heads": values.numerical_rank.numel(),
                "embedding": mean(values.by_source[0, 0]),
                "attention outputs": mean(values.by_source[0, outputs]),
                "full stream": mean(values.full[0]),
                "chance": mean(values.chance[0]),
                "directions": f"{mean(values.n_directions[0]):.1f} of {d_head}",
            }
        )
    part = share(result.thresholds[0])
    return table(
        pd.DataFrame(rows),
        f"Alignment averaged over all heads and layers, {part} of squared singular values",
    )


def _boxes(result: ValueAlignmentResult) -> str:
    if "V" not in result.roles:
        return "<p>Value matrices were not measured.</p>"
    boxes = result.boxes()
    text = (
        f"<p>The full stream is more aligned than the embedding in <b>{int(boxes.sum())} of "
        f"{boxes.numel()}</b> value heads"
    )
    if has_intervals(result, "V", 0):
        firm = int(result.boxes(significant=True).sum())
        return text + f"; {firm} of these hold at a false discovery rate of 5%.</p>"
    return text + f" ({escape(interval_note(result))}).</p>"


def measured(result: ValueAlignmentResult) -> str:
    """Definitions, self-checks, provenance and sources."""
    checks = result.checks
    worst = [
        (
            "streams add up to the stream each block reads",
            checks.decomposition,
            checks.decomposition_tolerance,
        )
    ]
    worst += [
        (
            f"read-in matrices reproduce the model’s own vectors ({name})",
            error,
            checks.read_in_tolerance,
        )
        for name, error in checks.read_in.items()
    ]
    frame = pd.DataFrame(
        {
            "check": name,
            "largest relative error": f"{float(error.max()):.1e}",
            "in layer": result.layers[int(error.argmax())],
            "tolerated": f"{tolerance:.0e}",
        }
        for name, error, tolerance in worst
    )
    skipped = "Position 0 is left out. " if result.provenance.get("skip_first") else ""
    note = interval_note(result)
    intervals = (
        f"{note[0].upper()}{note[1:]}."
        if note
        else (
            "± is the standard error with sequences as the independent units; boxes are tested by "
            "a paired bootstrap over sequences, with false discoveries held at 5% over the grid "
            "(Benjamini and Hochberg 1995)."
        )
    )
    provenance = "".join(
        f"<tr><th scope='row'>{_words(key)}</th><td>{_entry(value)}</td></tr>"
        for key, value in result.provenance.items()
    )
    return f"""
<p>Alignment is the {escape(METRIC_WORDS[result.metric])}, where x̄ is the stream as the head’s
input norm lets it through (mean-free under LayerNorm) and U holds the top input directions of the
head’s read-in matrix, the norm’s gain included. {skipped}{intervals}</p>
<p>A run proves its own inputs before it reports anything:</p>
{table(frame, "Self-checks on the first batch")}
<p>What this does not show: alignment is about directions of the weights, not about what a head
does with them; W<sub>V</sub> alone can be rewritten without changing the model; and where nearly
all directions are needed, an alignment near 1 is no finding.</p>
<details><summary>Everything that shaped these numbers</summary>
<div class='scroll'><table class='provenance'><tbody>{provenance}</tbody></table></div></details>
<p class="quiet">Method: Muyu He, <a href="{POST}" rel="noreferrer">The importance of token
embeddings to value vectors</a> (2026). Made with tl_valuealign {escape(VERSION)}.</p>
"""


def _entry(value: Any) -> str:
    if isinstance(value, dict):
        text = ", ".join(f"{key} {item}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        text = ", ".join(str(item) for item in value)
    else:
        text = str(value)
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
