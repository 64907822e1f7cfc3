"""The figures of the post, in its order, from one result."""

import plotly.graph_objects as go

from tl_valuealign.plots.directions import plot_directions
from tl_valuealign.plots.full_stream import plot_full_stream
from tl_valuealign.plots.norms import plot_norms
from tl_valuealign.plots.projected import plot_projected_norms
from tl_valuealign.plots.sources import plot_sources
from tl_valuealign.result import ValueAlignmentResult


def post_figures(result: ValueAlignmentResult) -> dict[str, go.Figure]:
    """Every figure of the post that the result has the roles and thresholds for, by name.

    Grids of the full stream; sources at six blocks for V, K and Q; norms; directions and rank;
    projected squared norms; and V's sources again at the 50% threshold.
    """
    figures = {"full_stream": plot_full_stream(result)}
    for role in ("V", "K", "Q"):
        if role in result.roles:
            figures[f"{role.lower()}_sources"] = plot_sources(result, role=role)
    figures["norms"] = plot_norms(result)
    if "V" in result.roles:
        figures["v_directions"] = plot_directions(result, role="V")
        figures["v_projected_norms"] = plot_projected_norms(result, role="V")
        if 0.5 in result.thresholds:
            figures["v_sources_50"] = plot_sources(result, role="V", threshold=0.5)
    return figures
