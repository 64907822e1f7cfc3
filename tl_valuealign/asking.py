"""Further questions to a result that kept its second moments, without the model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tl_valuealign import arguments
from tl_valuealign.errors import InputError
from tl_valuealign.moments import KINDS, Moments, MomentSums, without_sequences
from tl_valuealign.readin import describe_spectra
from tl_valuealign.shapes import METRICS, ROLES
from tl_valuealign.spectra import HeadDirections
from tl_valuealign.streams import written_before
from tl_valuealign.sums import Sums
from tl_valuealign.symmetric import UpperRows

if TYPE_CHECKING:
    from tl_valuealign.result import ValueAlignmentResult

CURVE = tuple(part / 20 for part in range(1, 21))


def ask(
    result: "ValueAlignmentResult",
    *,
    roles: Sequence[str] | None,
    thresholds: Sequence[float] | None,
    metric: str | None,
) -> "ValueAlignmentResult":
    """See :meth:`ValueAlignmentResult.ask`."""
    from tl_valuealign.result import assemble

    moments, metric = _kept(result), _metric(result, metric)
    roles = arguments.choices("roles", tuple(result.roles) if roles is None else roles, ROLES)
    thresholds = result.thresholds if thresholds is None else thresholds
    thresholds = arguments.shares("thresholds", thresholds)
    facts = result.provenance
    spectra = {
        role: describe_spectra(
            moments.singular_values[role],
            thresholds,
            metric,
            d_model=facts["d_model"],
            readable=facts["readable_dim"],
            stored=getattr(torch, facts["dtype"]),
        )
        for role in roles
    }
    blocks = [
        [
            HeadDirections(
                moments.directions[role][place],
                moments.singular_values[role][place],
                spectra[role].n_directions[:, place],
            )
            for role in roles
        ]
        for place in range(len(result.layers))
    ]
    sums = MomentSums.of(moments, facts["d_model"], len(result.sources))
    found = sums.ask(blocks, roles, written_before(result.sources, result.layers))
    old = result.sums
    unknown = torch.full((2, len(METRICS), 2, len(result.layers)), torch.nan, dtype=torch.float64)
    return assemble(
        spectra,
        Sums(
            {role: without_sequences(*each) for role, each in found.items()},
            old.denominators,
            unknown,
            old.norms,
            old.n_tokens,
            old.n_sequences,
        ),
        sources=result.sources,
        layers=result.layers,
        thresholds=thresholds,
        metric=metric,
        checks=result.checks,
        provenance=facts | {"engine": "moments"},
        moments=moments,
    )


def along_curve(result: "ValueAlignmentResult") -> "ValueAlignmentResult":
    """The result at its own thresholds and at all of ``CURVE`` where its moments tell, without
    standard errors then; the result itself where they do not."""
    if result.moments is None or result.metric not in KINDS:
        return result
    more = [t for t in CURVE if all(abs(t - known) > 1e-9 for known in result.thresholds)]
    return result.ask(thresholds=(*result.thresholds, *more))


def captured(
    result: "ValueAlignmentResult", basis: Tensor, metric: str | None
) -> tuple[Tensor, Tensor]:
    """See :meth:`ValueAlignmentResult.subspace_alignment`."""
    moments, metric = _kept(result), _metric(result, metric)
    d_model = result.provenance["d_model"]
    if basis.ndim != 2 or basis.shape[0] != d_model or not basis.shape[1]:
        raise InputError(
            f"basis: expected the directions as columns, [{d_model}, k], got {tuple(basis.shape)}"
        )
    if not bool(basis.isfinite().all()):
        raise InputError("basis: it has NaN or infinite entries")
    work = basis.detach().cpu().to(torch.float64)
    if result.provenance["readable_dim"] < d_model:
        work = work - work.mean(0)
    left, values, _ = torch.linalg.svd(work, full_matrices=False)
    inside = values > values[0] * max(work.shape) * torch.finfo(torch.float64).eps
    if not bool(inside.any()):
        raise InputError("basis: it spans nothing that a head can see; every column is zero")
    forms = UpperRows(d_model).forms(
        [(getattr(moments, metric), 1)], left[None], inside.to(torch.float64)[None, None]
    )[0][:, 0, 0]
    sources = len(result.sources)
    total = result.sums.denominators[0, METRICS.index(metric)]
    return forms[:sources] / total[:sources, 0], forms[sources:] / total[sources]


def _kept(result: "ValueAlignmentResult") -> Moments:
    if result.moments is None:
        raise InputError(
            "this result kept no second moments; analyse with keep_moments=True to ask it about "
            "other thresholds, roles or subspaces without the model"
        )
    return result.moments


def _metric(result: "ValueAlignmentResult", metric: str | None) -> str:
    metric = result.metric if metric is None else metric
    if metric not in KINDS:
        raise InputError(
            f"metric {metric!r} does not follow from second moments; use one of {', '.join(KINDS)}"
        )
    return metric
