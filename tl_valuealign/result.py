"""The frozen result of ``analyze_value_alignment`` and everything a reader asks of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from tl_valuealign import arguments, describe
from tl_valuealign.chance import chance_alignment
from tl_valuealign.errors import InputError
from tl_valuealign.extremes import Extremes
from tl_valuealign.intervals import half_width
from tl_valuealign.moments import Moments
from tl_valuealign.role_result import Checks, RoleResult, Spectra
from tl_valuealign.shapes import (
    METRICS,
    HeadFlags,
    PerHead,
    PerLayer,
    PerSource,
    Subspace,
    check_fields,
    typed,
)
from tl_valuealign.sums import Sums

FULL = "full"


@dataclass(frozen=True, repr=False)
class ValueAlignmentResult:
    """Alignment of every stream with every head's input directions.

    ``result.V``, ``.K``, ``.Q``, ``.OV`` are :class:`RoleResult` for the roles that were asked for.
    ``sums`` holds what :meth:`merge` adds; ``provenance`` everything that shaped a number;
    ``extremes`` what :func:`tl_valuealign.top_tokens` reads; ``moments``, where they were kept,
    what :meth:`ask` and :meth:`subspace_alignment` read.
    """

    roles: dict[str, RoleResult]
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    thresholds: tuple[float, ...]
    metric: str
    norms: PerSource
    full_norms: PerLayer
    checks: Checks
    sums: Sums
    provenance: dict[str, Any]
    extremes: Extremes | None = None
    moments: Moments | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        labels = (len(self.thresholds), len(self.sources), len(self.layers))
        shapes = {tuple(values.by_source.shape[:3]) for values in self.roles.values()}
        shapes.add((len(self.thresholds), len(self.norms), len(self.full_norms)))
        if shapes != {labels}:
            raise InputError(
                f"{labels[0]} thresholds, {labels[1]} sources and {labels[2]} layers are named, "
                f"but the tensors have {sorted(shapes)}"
            )

    def __repr__(self) -> str:
        return describe.text(self)

    def _repr_html_(self) -> str:
        return describe.html(self)

    def summary(self) -> str:
        """Five lines: what was measured and what it shows, chance beside it."""
        return describe.summary(self)

    def role(self, name: str) -> RoleResult:
        """One role's result. Raises ``InputError`` naming the roles that were measured."""
        if name not in self.roles:
            raise InputError(
                f"role {name!r} is not in this result, which has {', '.join(self.roles)}; "
                f"ask for it with analyze_value_alignment(..., roles=({name!r},))"
            )
        return self.roles[name]

    @property
    def Q(self) -> RoleResult:
        return self.role("Q")

    @property
    def K(self) -> RoleResult:
        return self.role("K")

    @property
    def V(self) -> RoleResult:
        return self.role("V")

    @property
    def OV(self) -> RoleResult:
        return self.role("OV")

    def threshold_index(self, threshold: float | None = None) -> int:
        """Row of the threshold axis; None is the first. Raises ``InputError`` if not computed."""
        return arguments.threshold_index(threshold, self.thresholds, "analyze_value_alignment")

    def source_index(self, source: str) -> int:
        """Row of the source axis. Raises ``InputError`` naming the nearest labels."""
        if source not in self.sources:
            raise InputError(
                f"source {source!r} is not in this result; its sources are "
                f"{', '.join(self.sources[:3])}, …, {self.sources[-1]}, and {FULL!r}"
            )
        return self.sources.index(source)

    @typed
    def alignment(self, role: str, source: str, threshold: float | None = None) -> PerHead:
        """Alignment of one source (or ``"full"``) with every head, [layer, head]."""
        values, index = self.role(role), self.threshold_index(threshold)
        if source == FULL:
            return values.full[index]
        return values.by_source[index, self.source_index(source)]

    @typed
    def stderr(self, role: str, source: str, threshold: float | None = None) -> PerHead:
        """Standard error of :meth:`alignment` over sequences, [layer, head]; NaN under 8."""
        values, index = self.role(role), self.threshold_index(threshold)
        if source == FULL:
            return values.full_stderr[index]
        return values.by_source_stderr[index, self.source_index(source)]

    def interval(
        self, role: str, source: str, threshold: float | None = None, *, level: float = 0.95
    ) -> tuple[Tensor, Tensor]:
        """Lower and upper limit of :meth:`alignment`, each [layer, head]; NaN under 8 sequences.

        ``level`` is the share of texts like this one whose interval covers the truth.
        """
        middle = self.alignment(role, source, threshold)
        effective = self._effective_sequences(source)[:, None]
        width = half_width(self.stderr(role, source, threshold), effective, level)
        return middle - width, middle + width

    def _effective_sequences(self, source: str) -> Tensor:
        """[layer]; see :func:`tl_valuealign.intervals.effective_sequences`."""
        stream = -1 if source == FULL else self.source_index(source)
        return self.sums.effective_sequences(self.metric)[stream]

    def claims(self) -> pd.DataFrame:
        """The post's five statements, each with where it holds, how much, and chance beside it.

        See :func:`tl_valuealign.claims_table`.
        """
        from tl_valuealign.claims import claims_table

        return claims_table(self)

    @typed
    def boxes(
        self, threshold: float | None = None, *, role: str = "V", significant: bool = False
    ) -> HeadFlags:
        """Heads where the full stream's alignment exceeds the embedding's, [layer, head].

        ``significant=True`` keeps those that survive false-discovery control at 5% over the grid
        (Benjamini and Hochberg 1995) of a one-sided test of the paired bootstrap; none do where
        there is no error to test with (fewer than 8 sequences, or a run from second moments).
        """
        values, index = self.role(role), self.threshold_index(threshold)
        boxed = values.excess[index] > 0
        if not significant:
            return boxed
        t = (values.excess[index] / values.excess_stderr[index]).numpy()
        known = np.isfinite(t)
        survives = np.zeros(t.shape, dtype=bool)
        if known.any():
            freedom = self._effective_sequences(FULL)[:, None].expand(t.shape).numpy() - 1
            p = stats.t.sf(t[known], df=freedom[known])
            survives[known] = stats.false_discovery_control(p) <= 0.05
        return boxed & torch.from_numpy(survives)

    def to_dataframe(self) -> pd.DataFrame:
        """Long form, one row per role, threshold, source (``"full"`` last), layer and head.

        Columns: role, threshold, source, layer, head, alignment, stderr, chance, relative
        (alignment over chance), n_directions, numerical_rank, projected_sq_norm. Rows of a source
        that is not upstream of a layer carry NaN.
        """
        from tl_valuealign.labelled import to_frame

        return to_frame(self)

    def to_xarray(self) -> Any:
        """The result as an ``xarray.Dataset`` with dimensions role, threshold, source, layer,
        head and direction (extra ``xarray``).

        Variables have the names of :class:`RoleResult`'s fields, beside ``norm`` and ``full_norm``.
        Where key/value heads are fewer than query heads, the heads that a role lacks are NaN
        (False in ``tied``) and its counts are floats: ``.sel(role="V").dropna("head", how="all")``
        takes them out. Raises ``DependencyError`` if xarray is not installed.
        """
        from tl_valuealign.labelled import to_dataset

        return to_dataset(self)

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write to a ``.safetensors`` file, atomically. See :func:`tl_valuealign.load`.

        Raises ``StorageError`` if the path exists and ``overwrite`` is false, is a directory, or
        cannot be written.
        """
        from tl_valuealign import storage

        storage.save(self, path, overwrite=overwrite)

    def with_metric(self, metric: str) -> "ValueAlignmentResult":
        """The same run read with another metric, without the model.

        NaN for ``"norm"`` where the run kept second moments only.
        """
        if metric not in METRICS:
            raise InputError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
        spectra = {}
        for name, values in self.roles.items():
            chance = chance_alignment(values.n_directions, self.provenance["readable_dim"], metric)
            spectra[name] = replace(Spectra.of(values), chance=chance)
        return assemble(
            spectra,
            self.sums,
            sources=self.sources,
            layers=self.layers,
            thresholds=self.thresholds,
            metric=metric,
            checks=self.checks,
            provenance=self.provenance,
            extremes=self.extremes,
            moments=self.moments,
        )

    def ask(
        self,
        *,
        roles: Sequence[str] | None = None,
        thresholds: Sequence[float] | None = None,
        metric: str | None = None,
    ) -> "ValueAlignmentResult":
        """The same text asked about other roles, thresholds or metric, without the model.

        Needs a run with ``keep_moments=True``, which keeps the directions of every role. None
        leaves an option as it is. Raises ``InputError`` if no moments were kept, or for
        ``metric="norm"``, which does not follow from second moments. There are no standard errors.
        """
        from tl_valuealign import asking

        return asking.ask(self, roles=roles, thresholds=thresholds, metric=metric)

    @typed
    def subspace_alignment(
        self, basis: Subspace, metric: str | None = None
    ) -> tuple[PerSource, PerLayer]:
        """Alignment of every source [source], and of each layer's full stream [layer], with any
        subspace of the residual stream, without the model.

        ``basis`` [d_model, direction]: columns that span it; they need not be orthonormal. Needs
        ``keep_moments=True``; metric and errors as in :meth:`ask`.
        """
        from tl_valuealign import asking

        return asking.captured(self, basis, metric)

    def merge(self, other: "ValueAlignmentResult") -> "ValueAlignmentResult":
        """The result over both texts, exactly as if they had been analysed in one run.

        Raises ``InputError`` naming the first difference in model weights or options.
        """
        from tl_valuealign.merging import merge

        return merge(self, other)


def assemble(
    spectra: Mapping[str, Spectra],
    sums: Sums,
    *,
    sources: tuple[str, ...],
    layers: tuple[int, ...],
    thresholds: tuple[float, ...],
    metric: str,
    checks: Checks,
    provenance: dict[str, Any],
    extremes: Extremes | None = None,
    moments: Moments | None = None,
) -> ValueAlignmentResult:
    """Turn sums and spectra into the result. Pure: the same input gives the same bits."""
    roles = {}
    for name, known in spectra.items():
        alignment = sums.alignment(name, metric)
        stderr = sums.stderr(name, metric)
        projected = sums.projected(name)
        excess, excess_stderr = sums.excess(name, metric)
        roles[name] = RoleResult(
            full=alignment[:, -1],
            full_stderr=stderr[:, -1],
            by_source=alignment[:, :-1],
            by_source_stderr=stderr[:, :-1],
            chance=known.chance,
            singular_values=known.singular_values,
            n_directions=known.n_directions,
            numerical_rank=known.numerical_rank,
            tied=known.tied,
            projected_sq_norm=projected[:-1],
            projected_sq_norm_full=projected[-1],
            excess=excess,
            excess_stderr=excess_stderr,
        )
    norms = sums.mean_norms()
    return ValueAlignmentResult(
        roles=roles,
        sources=sources,
        layers=layers,
        thresholds=thresholds,
        metric=metric,
        norms=norms[:-1, 0],
        full_norms=norms[-1],
        checks=checks,
        sums=sums,
        provenance=provenance,
        extremes=extremes,
        moments=moments,
    )
