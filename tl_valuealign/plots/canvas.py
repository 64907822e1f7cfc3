"""Figures laid out in pixels: panels, notes and a legend go down, a plotly Figure comes up.

Plotly places axes by fractions of the page. Cells that are a whole number of pixels wide, outlines
that sit on their edges and ticks that never collide need pixels, so a figure is planned on a
canvas and turned into fractions once its size is known.
"""

from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from tl_valuealign.plots.common import FAINT, FONT, GREY

WIDEST = 1440
TITLE_LINE, SUBTITLE_LINE, LEGEND_LINE = 23, 16, 20
TITLE_SIZE, SUBTITLE_SIZE = 17, 12
BAR_GAP, BAR_BESIDE, BAR_ABOVE = 20, 90, 58
NARROWEST = 340
GLYPH, BOLD_GLYPH = 0.56, 0.64  # a character's mean width in ems, rather wide than narrow


@dataclass(frozen=True)
class Panel:
    """One pair of axes and where it lies, in pixels from the content's top left corner."""

    number: int
    left: float
    top: float
    width: float
    height: float

    @property
    def x(self) -> str:
        return f"x{self.number if self.number > 1 else ''}"

    @property
    def y(self) -> str:
        return f"y{self.number if self.number > 1 else ''}"


@dataclass(frozen=True)
class Look:
    """How a figure is set. ``narrow``: one grid across, for a phone. ``bare``: without title and
    subtitle, for a page that writes them itself. ``page``: pixels that grids may spread over."""

    narrow: bool = False
    bare: bool = False
    page: int = WIDEST


@dataclass
class Canvas:
    """Collects what a figure shows; :meth:`figure` builds it."""

    title: str
    subtitle: list[str]
    look: Look = Look()
    traces: list[Any] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    _panels: list[tuple[Panel, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _notes: list[tuple[float, float, dict[str, Any]]] = field(default_factory=list)
    _bar: tuple[float, float, float] | None = None
    _lead: float = 0.0
    _page: tuple[float, float, float] = (1.0, 1.0, 0.0)

    @property
    def side(self) -> int:
        """Margin left and right, in pixels."""
        return 8 if self.look.narrow else 20

    def panel(
        self, left: float, top: float, width: float, height: float, *, x: Any, y: Any
    ) -> Panel:
        """Axes whose inside is this rectangle. ``x`` and ``y`` are plotly axis options."""
        panel = Panel(len(self._panels) + 1, left, top, width, height)
        self._panels.append((panel, x, y))
        return panel

    def note(self, text: str, left: float, top: float, **options: Any) -> None:
        """Text whose top left corner (or the anchor in ``options``) lies at this point."""
        self._notes.append((left, top, {"text": text} | options))

    def colour_bar(self, left: float, top: float, length: float) -> float:
        """Where the one colour bar stands; returns the width that the figure needs up to there.

        Leave ``BAR_GAP`` pixels before it. A narrow figure has it lying on top instead, as long as
        the figure is wide.
        """
        self._bar = (left, top, length)
        if self.look.narrow:
            self._lead = BAR_ABOVE
            return left - BAR_GAP
        return left + BAR_BESIDE

    def figure(self, width: float, height: float, *, min_width: float = 680) -> go.Figure:
        """The figure, its content ``width`` × ``height`` pixels, header and legend around it."""
        page_width = max(width + 2 * self.side, NARROWEST if self.look.narrow else min_width)
        inner = page_width - 2 * self.side
        title = _wrapped(self.title, inner, TITLE_SIZE * BOLD_GLYPH)
        subtitle = [
            part for line in self.subtitle for part in _wrapped(line, inner, SUBTITLE_SIZE * GLYPH)
        ]
        top = 16.0 + TITLE_LINE * len(title) + SUBTITLE_LINE * len(subtitle) + 20
        if self.look.bare:
            title, subtitle, top = [], [], 12.0
        top += self._lead
        legend = self._legend_height(inner)
        page_height = top + height + legend
        self._page = (page_width, page_height, top)
        figure = go.Figure(self.traces)
        figure.update_layout(
            width=page_width,
            height=page_height,
            margin={"l": 0, "r": 0, "t": 0, "b": 0, "autoexpand": False},
            font={"family": FONT, "size": 12},
            title={
                "text": f"<b>{'<br>'.join(title)}</b>" if title else "",
                "font": {"size": TITLE_SIZE},
                "subtitle": {
                    "text": "<br>".join(subtitle),
                    "font": {"size": SUBTITLE_SIZE, "color": GREY},
                },
                "x": self.side / page_width,
                "xanchor": "left",
                # Plotly sets a title of several lines half a line higher for each of them.
                "y": 1 - (16 + TITLE_LINE / 2 * max(len(title) - 1, 0)) / page_height,
                "yanchor": "top",
                "automargin": False,
            },
            hovermode="closest",
            hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
            plot_bgcolor="rgba(0,0,0,0)",
            legend={
                "orientation": "h",
                "x": self.side / page_width,
                "xanchor": "left",
                "y": legend / page_height,
                "yanchor": "top",
                "bgcolor": "rgba(0,0,0,0)",
                "font": {"size": 11 if self.look.narrow else 12},
                "itemsizing": "trace",
                "traceorder": "normal",
            },
            shapes=self.shapes,
            annotations=[
                self._annotation(left, place, options, top, page_width, page_height)
                for left, place, options in self._notes
            ],
        )
        axes: dict[str, Any] = {}
        for panel, x, y in self._panels:
            left = (self.side + panel.left) / page_width
            bottom = 1 - (top + panel.top + panel.height) / page_height
            axes[f"xaxis{panel.x[1:]}"] = _axis([left, left + panel.width / page_width], panel.y, x)
            axes[f"yaxis{panel.y[1:]}"] = _axis(
                [bottom, bottom + panel.height / page_height], panel.x, y
            )
        figure.update_layout(axes)
        figure.update_layout(self.layout)
        if self._bar is not None:
            figure.update_coloraxes(colorbar=self._colour_bar())
            if self.look.narrow:
                bar = figure.layout.coloraxis.colorbar
                bar.ticktext = [text.replace(" <b>", "<br><b>") for text in bar.ticktext or ()]
        return figure

    def _colour_bar(self) -> dict[str, Any]:
        left, place, length = self._bar or (0.0, 0.0, 0.0)
        width, height, top = self._page
        bar: dict[str, Any] = {
            "thickness": 14,
            "outlinewidth": 0,
            "ticks": "outside",
            "ticklen": 4,
            "tickcolor": GREY,
            "tickfont": {"size": 11},
            "lenmode": "pixels",
            "xpad": 0,
            "ypad": 0,
            "xanchor": "left",
            "yanchor": "top",
        }
        if self.look.narrow:
            return bar | {
                "orientation": "h",
                "x": self.side / width,
                "y": 1 - (top - self._lead) / height,
                "len": width - 2 * self.side,
            }
        return bar | {
            "x": (self.side + left) / width,
            "y": 1 - (top + place) / height,
            "len": length,
        }

    def fraction(self, left: float, top: float) -> tuple[float, float]:
        """A point of the content as fractions of the page, once the figure is built."""
        width, height, offset = self._page
        return (self.side + left) / width, 1 - (offset + top) / height

    def _legend_height(self, inner: float) -> float:
        """Plotly sets a legend that overflows one line in columns as wide as its longest entry.

        Legends that take turns in one place need the room of the tallest.
        """
        legends: dict[str, dict[str, None]] = {}
        for trace in self.traces:
            if trace.showlegend and trace.name:
                legends.setdefault(trace.legend or "legend", {})[trace.name] = None
        rows = 0
        for names in legends.values():
            widths = [48 + 12 * GLYPH * len(name) for name in names]
            # Estimates may fall short of what a font needs: a line is full a little early.
            columns = len(names) if sum(widths) <= 0.9 * inner else max(1, int(inner / max(widths)))
            rows = max(rows, -(-len(names) // columns))
        return rows * LEGEND_LINE + 8 if rows else 0.0

    def _annotation(
        self,
        left: float,
        place: float,
        options: dict[str, Any],
        top: float,
        width: float,
        height: float,
    ) -> dict[str, Any]:
        return {
            "x": (self.side + left) / width,
            "y": 1 - (top + place) / height,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "left",
            "yanchor": "top",
            "showarrow": False,
            "align": "left",
            "borderpad": 0,
        } | options


def _axis(domain: list[float], anchor: str, options: dict[str, Any]) -> dict[str, Any]:
    return (
        {
            "domain": [min(max(edge, 0.0), 1.0) for edge in domain],
            "anchor": anchor,
            "automargin": False,
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
            "ticklabelstandoff": 3,
            "tickfont": {"size": 11},
            "gridcolor": FAINT,
        }
        | options
        | {"title": {"font": {"size": 12}, "standoff": 4} | options.get("title", {})}
    )


def _wrapped(text: str, width: float, glyph: float) -> list[str]:
    """Lines that fit; an entity such as ``&lt;`` never breaks because it holds no space."""
    return wrap(text, int(width / glyph), break_long_words=False) or [""]
