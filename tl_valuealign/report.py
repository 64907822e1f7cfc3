"""One self-contained HTML page that tells what a result says, and shows it."""

import os
import secrets
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs

from tl_valuealign.errors import StorageError
from tl_valuealign.plots.canvas import Look
from tl_valuealign.report_data import page_data
from tl_valuealign.report_images import render
from tl_valuealign.report_plates import Further, Plate, further_plates, plates
from tl_valuealign.report_text import asked, found, measured
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

# Nothing is fetched: no script, style, font or picture from anywhere but this file.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
)


@typed
def write_report(
    result: ValueAlignmentResult,
    path: str | os.PathLike[str],
    *,
    further: Sequence[Further] = (),
    directions: pd.DataFrame | None = None,
    overwrite: bool = False,
    images: str | None = None,
) -> None:
    """Write the report to ``path``: one HTML file that needs no network.

    Args:
        further: answers to further questions of the same model: what ``contribution_shares``,
            ``token_identity``, ``null_alignment`` and ``substitute_input`` (by layer or by head)
            return. Their figures follow the post's.
        directions: what ``decode_directions(model, role=...)`` returns, or several of these
            concatenated. A head's panel then shows the tokens along its top directions.
        images: "png", "svg" or "pdf" also writes every figure beside the report, named after it,
            through kaleido.

    The explorer's slider covers the whole curve under the conditions of ``plot_explorer``. Files
    appear whole or not at all. Raises ``StorageError`` if a file exists while ``overwrite`` is
    false, or cannot be written; ``InputError`` for another kind of image, and for answers or
    directions of another model; ``DependencyError`` saying what to install if images cannot be
    drawn.
    """
    target = Path(path)
    shown, more = plates(result), further_plates(result, further)
    pictures = {
        plate.name: target.with_name(f"{target.stem}-{plate.name}.{images}")
        for plate in ([*shown, *more] if images is not None else [])
    }
    for file in (target, *pictures.values()):
        _require_free(file, overwrite)
    drawn: dict[str, bytes] = {}
    if images is not None:
        drawn = render({plate.name: plate.draw(Look()) for plate in [*shown, *more]}, images)
    contents = {pictures[name]: image for name, image in drawn.items()}
    text = page(result, shown, more, directions)
    _write(contents | {target: text.encode("utf-8")})


def page(
    result: ValueAlignmentResult,
    shown: list[Plate],
    more: list[Plate],
    directions: pd.DataFrame | None,
) -> str:
    """The page's HTML."""
    name = escape(str(result.provenance["model_name"]))
    contents = "".join(
        f"<li><a href='#{anchor}'>{words}</a></li>"
        for anchor, words in (
            ("found", "What was found"),
            *((plate.name, escape(plate.title)) for plate in [*shown, *more]),
            ("explore", "Explore"),
            ("measured", "How it was measured"),
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>What {name}’s attention heads look for</title>
<style>{_asset("report.css")}</style>
</head>
<body>
<header>
<h1>What {name}’s attention heads look for</h1>
{asked(result)}
<nav aria-label="Contents"><ol>{contents}</ol></nav>
</header>
<main>
<h2 id="found">What was found</h2>
{found(result)}
<h2>The evidence</h2>
<p class="keys">Point at a cell for its numbers; click it to open that head. By keyboard: Tab to a
figure, arrow keys to a head, Enter to open it, Escape to come back.</p>
<noscript><p><b>The figures need JavaScript; the tables do not.</b></p></noscript>
{"".join(_figure(plate) for plate in shown)}
{"<h2>Further questions</h2>" if more else ""}
{"".join(_figure(plate) for plate in more)}
{_explorer()}
<h2 id="measured">How it was measured</h2>
{measured(result)}
</main>
{_dialog()}
<div id="spoken" class="hidden" aria-live="polite"></div>
<footer></footer>
<script>{get_plotlyjs()}</script>
<script id="data" type="application/json">{page_data(result, [*shown, *more], directions)}</script>
<script>{_asset("report.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (resources.files("tl_valuealign") / "assets" / name).read_text(encoding="utf-8")


def _figure(plate: Plate) -> str:
    title = escape(plate.title)
    told = f"role='img' aria-label='{title}'"
    if plate.heads:
        keys = "Arrow keys move between heads, Enter opens one."
        told = f"tabindex='0' role='application' aria-label='{title} {keys}'"
    return (
        f"<section><h3 id='{plate.name}'>{title}</h3><p>{escape(plate.reading)}</p>"
        f"<figure><div class='plot' id='figure-{plate.name}' {told}></div></figure></section>"
    )


def _explorer() -> str:
    return """
<section><h2 id="explore">Explore</h2>
<p>Every source, role and threshold in one grid. Boxes and their count follow role and threshold;
the strips are means over heads and over layers, the dotted lines chance.</p>
<div class="controls">
<label>role <select id="explore-role"></select></label>
<label>source <select id="explore-source"></select></label>
<label>view <select id="explore-view"></select></label>
<label><span>directions carrying <b id="explore-share"></b> of squared singular values</span>
<input id="explore-threshold" type="range" min="0" max="0" step="1"></label>
</div>
<figure><div class="plot" id="figure-explorer" tabindex="0" role="application"
aria-label="Explorer. Arrow keys move between heads, Enter opens one."></div></figure></section>
"""


def _dialog() -> str:
    return """
<dialog id="head" aria-labelledby="head-title"><div>
<div class="bar"><h2 id="head-title"></h2><span class="bar" id="head-roles"></span>
<button class="end" id="head-close">Close</button></div>
<dl class="facts" id="head-facts"></dl>
<h3>Sources, the best aligned first</h3>
<div class="bar"><label>directions carrying <select id="head-threshold"></select></label></div>
<div class="chart" id="head-sources"></div>
<section id="head-curve-section" hidden><h3>Alignment by threshold</h3>
<div class="chart" id="head-curve"></div></section>
<h3>How concentrated the matrix is</h3>
<div class="chart" id="head-spectrum"></div>
<section id="head-directions-section" hidden><h3>Tokens along the top directions</h3>
<p class="quiet">A direction has two ends; which is which means nothing.</p>
<div class="scroll"><table id="head-directions"></table></div></section>
<section id="head-tokens-section" hidden><h3>Tokens of the text that it sees most and least of,
with directions carrying <span id="head-tokens-share"></span></h3>
<div class="bar"><label>in <select id="head-stream">
<option value="full">the full stream</option><option value="embed">the token embedding</option>
</select></label></div>
<div class="scroll"><table id="head-tokens"></table></div></section>
</div></dialog>
"""


def _require_free(file: Path, overwrite: bool) -> None:
    if file.is_dir():
        raise StorageError(
            f"{file} is a directory; give a file name such as {file / 'report.html'}"
        )
    if file.exists() and not overwrite:
        raise StorageError(f"{file} exists; pass overwrite=True to replace it")
    if not file.parent.is_dir():
        raise StorageError(f"{file.parent} is not a folder; make it first")


def _write(contents: dict[Path, Any]) -> None:
    """Write every file beside its name, then put all in place."""
    suffix = f".{secrets.token_hex(8)}.part"
    parts = {file: file.with_name(f".{file.name}{suffix}") for file in contents}
    try:
        for file, part in parts.items():
            part.write_bytes(contents[file])
        for file, part in parts.items():
            os.replace(part, file)
    except OSError as error:
        raise StorageError(f"cannot write {next(iter(contents)).parent}: {error}") from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
