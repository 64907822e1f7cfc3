"""Static images of figures through kaleido and a browser, within a time limit."""

import asyncio
import importlib
import threading
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from tl_valuealign.errors import DependencyError, InputError

FORMATS = ("png", "svg", "pdf")
SECONDS = 120.0
ADVICE = (
    "images need kaleido and a Chrome or Chromium: pip install kaleido, and install a browser "
    "(kaleido_get_chrome fetches one; BROWSER_PATH names one that is elsewhere)"
)


def render(
    figures: Mapping[str, go.Figure], kind: str, *, seconds: float = SECONDS
) -> dict[str, bytes]:
    """Every figure as ``kind`` (png, svg or pdf), all within ``seconds``.

    Raises ``InputError`` for another kind, and ``DependencyError`` saying what to install where
    kaleido or its browser is missing or does not answer in time.
    """
    if kind not in FORMATS:
        raise InputError(f"images={kind!r} is unknown; use one of {', '.join(FORMATS)}, or None")
    try:
        kaleido: Any = importlib.import_module("kaleido")
    except ImportError as error:
        raise DependencyError(f"kaleido is not installed; {ADVICE}") from error
    done: dict[str, bytes] = {}
    failed: list[BaseException] = []

    async def work() -> None:
        page = kaleido.PageGenerator(mathjax=False)
        async with kaleido.Kaleido(page_generator=page, timeout=seconds) as browser:
            for name, figure in figures.items():
                options = {"format": kind, "scale": 2 if kind == "png" else 1}
                done[name] = await browser.calc_fig(figure, opts=options)

    def run() -> None:
        # A thread of its own: a notebook's thread already runs an event loop.
        try:
            asyncio.run(asyncio.wait_for(work(), seconds))
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + 10)
    if thread.is_alive() or (
        failed and isinstance(failed[0], (TimeoutError, asyncio.TimeoutError))
    ):
        raise DependencyError(
            f"the browser behind kaleido gave {len(done)} of {len(figures)} images in "
            f"{seconds:.0f} s; {ADVICE}"
        )
    if failed:
        raise _reason(failed[0])
    return done


def _reason(error: BaseException) -> Any:
    if not isinstance(error, Exception):
        return error
    problem = DependencyError(f"kaleido could not draw: {error or type(error).__name__}; {ADVICE}")
    problem.__cause__ = error
    return problem
