"""Figures of a result: each function takes a result and returns a plotly Figure.

Nothing here measures, shows or writes anything, and plotly's own settings stay as they are: a
template chosen by the caller (``plotly.io.templates.default``) applies.
"""

from tl_valuealign.plots.directions import plot_directions
from tl_valuealign.plots.explorer import plot_explorer
from tl_valuealign.plots.full_stream import plot_full_stream
from tl_valuealign.plots.gallery import post_figures
from tl_valuealign.plots.norms import plot_norms
from tl_valuealign.plots.projected import plot_projected_norms
from tl_valuealign.plots.sources import plot_sources

__all__ = [
    "plot_directions",
    "plot_explorer",
    "plot_full_stream",
    "plot_norms",
    "plot_projected_norms",
    "plot_sources",
    "post_figures",
]
