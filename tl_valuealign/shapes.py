"""Named array shapes, checked at run time by typeguard.

One vocabulary of axes for the whole package:

========== =====================================================================
threshold  the requested shares of squared singular value, in the caller's order
source     what was written into the stream, ``result.sources``
layer      target blocks, ``result.layers`` (original block numbers)
head       attention heads; native key/value heads for K and V
direction  input directions in order of singular value
token      positions of text that were kept
========== =====================================================================

Aliases live at module level because typeguard evaluates inline ``Float[Tensor, "layer head"]``
strings as forward references.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args

from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor
from typeguard import TypeCheckError, check_type, typechecked

Role = Literal["Q", "K", "V", "OV"]
Metric = Literal["norm", "energy", "pooled"]
Component = Literal["attn_out", "mlp_out"]

ROLES: tuple[Role, ...] = get_args(Role)
METRICS: tuple[Metric, ...] = get_args(Metric)
COMPONENTS: tuple[Component, ...] = get_args(Component)

PerSource = Float[Tensor, "source"]
PerLayer = Float[Tensor, "layer"]
PerHead = Float[Tensor, "layer head"]
PerSourceHead = Float[Tensor, "source layer head"]
PerThreshold = Float[Tensor, "threshold layer head"]
PerThresholdSource = Float[Tensor, "threshold source layer head"]
Spectrum = Float[Tensor, "layer head direction"]
HeadCounts = Int[Tensor, "layer head"]
ThresholdCounts = Int[Tensor, "threshold layer head"]
HeadFlags = Bool[Tensor, "layer head"]
ThresholdFlags = Bool[Tensor, "threshold layer head"]

Subspace = Float[Tensor, "d_model direction"]
ReadInStack = Float[Tensor, "head d_model d_head"]
DirectionStack = Float[Tensor, "head d_model direction"]
HeadSpectrum = Float[Tensor, "head direction"]
StreamBatch = Float[Tensor, "sequence position d_model"]
KeepMask = Bool[Tensor, "sequence position"]
TokenIds = Int[Tensor, "sequence position"]
TokenRow = Int[Tensor, "position"]

F = TypeVar("F", bound=Callable[..., Any])


def typed(function: F) -> F:
    """Check a function's annotated arguments and result, axis names included, at every call.

    Raises ``typeguard.TypeCheckError`` on a mismatch. The order matters: typeguard instruments the
    plain function, and jaxtyping only opens the scope in which axis sizes are remembered. (Handing
    typeguard to ``jaxtyped(typechecker=...)`` checks nothing under typeguard 4.)
    """
    return jaxtyped(typechecker=None)(typechecked(function))


def check_fields(value: Any) -> None:
    """Check a dataclass instance's fields against their annotations, axis sizes shared.

    Raises ``typeguard.TypeCheckError`` naming the field. Call it from ``__post_init__``.
    """
    with jaxtyped("context"):
        for field in fields(value):
            got = getattr(value, field.name)
            try:
                check_type(got, field.type)
            except TypeCheckError as error:
                seen = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, Tensor) else repr(got)
                raise TypeCheckError(
                    f"{type(value).__name__}.{field.name}: {error}; got {seen:.200}"
                ) from None
