"""A role's numbers packed small, as the page's script reads them."""

from base64 import b64encode
from typing import Any

import numpy as np

from tl_valuealign.plots.common import Array
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.streams import written_before


def role_numbers(result: ValueAlignmentResult, role: str, intervals: bool) -> dict[str, Any]:
    values = result.role(role)
    alignment = np.concatenate([values.by_source.numpy(), values.full.numpy()[:, None]], axis=1)
    stderr = np.concatenate(
        [values.by_source_stderr.numpy(), values.full_stderr.numpy()[:, None]], axis=1
    )
    known = stderr[np.isfinite(stderr)]
    scale = float(known.max()) if known.size and known.max() > 0 else 1.0
    boxes = [
        result.boxes(threshold, role=role).numpy().astype(np.uint8)
        + result.boxes(threshold, role=role, significant=True).numpy()
        for threshold in result.thresholds
    ]
    return {
        "heads": values.numerical_rank.shape[1],
        "d_head": values.singular_values.shape[-1],
        "alignment": fractions(_upstream(result, alignment)),
        "stderr": fractions(_upstream(result, stderr / scale), np.uint8) if intervals else None,
        "stderrScale": scale,
        "chance": array(values.chance.numpy().astype(np.float32)),
        "directions": array(values.n_directions.numpy().astype(np.uint16)),
        "rank": array(values.numerical_rank.numpy().astype(np.uint16)),
        "boxes": array(np.stack(boxes).astype(np.uint8)),
        "spectrum": fractions(_relative(values.singular_values.numpy())),
    }


def starts(result: ValueAlignmentResult) -> list[int]:
    """From which place on the layer axis each source is there to be read; the full stream last."""
    reads = written_before(result.sources, result.layers)
    return [*(~reads).sum(1).tolist(), 0]


def _upstream(result: ValueAlignmentResult, values: Array) -> Array:
    """[threshold, source, layer, head] without the layers a source is not upstream of, flat."""
    parts = [values[:, source, first:] for source, first in enumerate(starts(result))]
    return np.concatenate([part.reshape(len(values), -1) for part in parts], axis=1).ravel()


def _relative(spectrum: Array) -> Array:
    """Singular values with the largest of each head as 1; zero heads stay zero."""
    first = spectrum[..., :1]
    return spectrum / np.where(first > 0, first, 1.0)


def fractions(values: Array, kind: Any = np.uint16) -> dict[str, str]:
    """Numbers from 0 to 1 in even steps (16 bits: off by at most 8e-6); the top code is NaN."""
    top = np.iinfo(kind).max
    near = np.clip(np.rint(np.nan_to_num(values) * (top - 1)), 0, top - 1)
    return array(np.where(np.isfinite(values), near, top).astype(kind))


def array(values: Any) -> dict[str, str]:
    """Raw little-endian bytes, as a page reads them."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    kind = f"{values.dtype.kind}{values.dtype.itemsize}"
    return {"dtype": kind, "bdata": b64encode(little.tobytes()).decode()}
