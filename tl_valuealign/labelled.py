"""Results as a long table and as an xarray Dataset, every axis by its name in
``tl_valuealign.shapes``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tl_valuealign.errors import DependencyError

if TYPE_CHECKING:
    from tl_valuealign.result import ValueAlignmentResult

# field of RoleResult: dims, what the numbers are
ROLE_VARIABLES = {
    "full": ("threshold layer head", "alignment of the full stream"),
    "full_stderr": ("threshold layer head", "its standard error over sequences"),
    "by_source": ("threshold source layer head", "alignment of each source"),
    "by_source_stderr": ("threshold source layer head", "its standard error over sequences"),
    "chance": ("threshold layer head", "alignment of a random direction"),
    "singular_values": ("layer head direction", "singular values, descending"),
    "n_directions": ("threshold layer head", "directions that carry the threshold's share"),
    "numerical_rank": ("layer head", "singular values above rounding in the stored dtype"),
    "tied": ("threshold layer head", "equal singular values on both sides of the cut"),
    "projected_sq_norm": ("source layer head", "mean squared norm of each source through A"),
    "projected_sq_norm_full": ("layer head", "mean squared norm of the full stream through A"),
    "excess": ("threshold layer head", "alignment of the full stream minus the embedding's"),
    "excess_stderr": ("threshold layer head", "its paired bootstrap standard error"),
}


def long_frame(
    roles: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], keys: Sequence[str]
) -> pd.DataFrame:
    """One row per role, label of every axis in turn, and head; a column for each of ``keys``, which
    are tensors [*axes, head] of every role."""
    return pd.concat(
        [
            _rows(name, axes, {key: getattr(values, key) for key in keys})
            for name, values in roles.items()
        ],
        ignore_index=True,
    )


def _rows(
    role: str, axes: Mapping[str, Sequence[Any]], columns: Mapping[str, torch.Tensor]
) -> pd.DataFrame:
    heads = range(next(iter(columns.values())).shape[-1])
    index = pd.MultiIndex.from_product(
        [[role], *axes.values(), heads], names=["role", *axes, "head"]
    )
    flat = {key: value.reshape(-1).numpy() for key, value in columns.items()}
    return pd.DataFrame(flat, index=index).reset_index()


def to_frame(result: "ValueAlignmentResult") -> pd.DataFrame:
    """See :meth:`tl_valuealign.ValueAlignmentResult.to_dataframe`."""
    return pd.concat([_role_frame(result, name) for name in result.roles], ignore_index=True)


def _role_frame(result: "ValueAlignmentResult", name: str) -> pd.DataFrame:
    values = result.roles[name]
    alignment = torch.cat([values.by_source, values.full[:, None]], dim=1)
    shape = alignment.shape
    axes = {
        "threshold": result.thresholds,
        "source": [*result.sources, "full"],
        "layer": result.layers,
    }
    projected = torch.cat([values.projected_sq_norm, values.projected_sq_norm_full[None]])
    columns = {
        "alignment": alignment,
        "stderr": torch.cat([values.by_source_stderr, values.full_stderr[:, None]], dim=1),
        "chance": values.chance[:, None].expand(shape),
        "relative": alignment / values.chance[:, None],
        "n_directions": values.n_directions[:, None].expand(shape),
        "numerical_rank": values.numerical_rank[None, None].expand(shape),
        "projected_sq_norm": projected[None].expand(shape),
    }
    return _rows(name, axes, columns)


def to_dataset(result: "ValueAlignmentResult") -> Any:
    """See :meth:`tl_valuealign.ValueAlignmentResult.to_xarray`."""
    try:
        import xarray as xr
    except ImportError as error:
        raise DependencyError(
            "to_xarray needs xarray, which is not installed: pip install 'tl_valuealign[xarray]'"
        ) from error
    labels: dict[str, list[Any]] = {
        "threshold": list(result.thresholds),
        "source": list(result.sources),
        "layer": list(result.layers),
    }
    heads = max(values.numerical_rank.shape[1] for values in result.roles.values())
    width = max(values.singular_values.shape[2] for values in result.roles.values())
    sizes = {"head": heads, "direction": width}
    variables: dict[str, Any] = {}
    for name, (axes, words) in ROLE_VARIABLES.items():
        dims = axes.split()
        parts = [getattr(values, name).numpy() for values in result.roles.values()]
        shape = tuple(sizes.get(dim, len(labels.get(dim, ()))) for dim in dims)
        stacked = np.stack([_widened(part, shape) for part in parts])
        variables[name] = (["role", *dims], stacked, {"long_name": words})
    variables["norm"] = (["source"], result.norms.numpy(), {"long_name": "mean L2 norm"})
    variables["full_norm"] = (["layer"], result.full_norms.numpy(), {"long_name": "mean L2 norm"})
    return xr.Dataset(
        variables,
        coords={"role": list(result.roles), **labels}
        | {dim: np.arange(size) for dim, size in sizes.items()},
        attrs={
            "metric": result.metric,
            "model_name": str(result.provenance["model_name"]),
            "model_hash": str(result.provenance["model_hash"]),
            "n_tokens": int(result.provenance["n_tokens"]),
            "n_sequences": int(result.provenance["n_sequences"]),
        },
    )


def _widened(values: Any, shape: tuple[int, ...]) -> Any:
    """Pad the head and direction axes of a role that has fewer: NaN, or False for flags."""
    if values.shape == shape:
        return values
    if values.dtype != bool:
        values = values.astype(np.float64)
    room = [(0, wanted - size) for wanted, size in zip(shape, values.shape, strict=True)]
    return np.pad(values, room, constant_values=False if values.dtype == bool else np.nan)
