"""One grid of layers by heads for every role, side by side, of any figure a head has."""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Panel
from tl_valuealign.plots.common import KIND, Array, count_of, safe
from tl_valuealign.plots.grid import Cells, draw_cells, fit, head_axis, layer_axis

LEFT, BETWEEN, HEADING, UNDER_GRID = 56, 26, 22, 52
NARROWEST_GRID = 116


@dataclass(frozen=True)
class RoleGrid:
    """What one role shows: colour z [layer, head], the numbers behind it [layer, head, field],
    which end with the layer, and the template of the hover text that names them."""

    role: str
    z: Array
    behind: Array
    template: str


def role_cells(role: str, shapes: dict[str, tuple[int, int]]) -> Cells:
    """Cells of one height for all roles, whose (layers, heads) are given; a key/value head may
    span the query heads it serves."""
    layers, heads = shapes[role]
    most = max(count for _, count in shapes.values())
    base = fit(layers, most, 260, 480)
    served = min(base.width * most // heads, 3 * base.width)
    return Cells(layers, heads, max(served, -(-NARROWEST_GRID // heads)), base.height)


def draw_role_grids(
    canvas: Canvas, layers: Sequence[int], grids: Sequence[RoleGrid], under: float = 0.0
) -> tuple[list[Panel], float, float]:
    """The grids, as many side by side as the page holds, with ``under`` pixels free below each,
    and the place of the colour bar. Returns the panels, and the width and height of it all."""
    shapes = {grid.role: grid.z.shape for grid in grids}
    cells = {grid.role: role_cells(grid.role, shapes) for grid in grids}
    widest = max(cell.across for cell in cells.values())
    fitting = max(1, min(len(grids), (canvas.look.page - LEFT - 110) // (widest + BETWEEN)))
    columns = 1 if canvas.look.narrow else fitting
    down = cells[grids[0].role].down
    block = HEADING + down + UNDER_GRID + under
    panels, right, left = [], 0.0, float(LEFT)
    for place, grid in enumerate(grids):
        row, column = divmod(place, columns)
        if column == 0:
            left = float(LEFT)
        cell, top = cells[grid.role], row * block + HEADING
        panel = canvas.panel(
            left,
            top,
            cell.across,
            cell.down,
            x=head_axis(cell.columns, cell.width),
            y=layer_axis(layers, cell.height, labels=column == 0),
        )
        counted = count_of(cell.columns, KIND.get(grid.role, "heads"))
        canvas.note(f"<b>{safe(grid.role)}</b>  {counted}", left, top - 5, yanchor="bottom")
        draw_cells(
            canvas,
            panel,
            grid.z,
            grid.behind,
            grid.template,
            role=grid.role,
            gap=1 if min(cell.width, cell.height) >= 12 else 0,
        )
        panels.append(panel)
        left += panel.width + BETWEEN
        right = max(right, left - BETWEEN)
    width = canvas.colour_bar(right + BAR_GAP, HEADING, max(down, 120))
    return panels, width, -(-len(grids) // columns) * block
