"""What is known of one role, before and after reading text, and of the checks of a run."""

from dataclasses import dataclass

from tl_valuealign.shapes import (
    HeadCounts,
    PerHead,
    PerLayer,
    PerSourceHead,
    PerThreshold,
    PerThresholdSource,
    Spectrum,
    ThresholdCounts,
    ThresholdFlags,
    check_fields,
)


@dataclass(frozen=True)
class RoleResult:
    """What one role's read-in matrices see. Tensors are on the CPU, figures in float64.

    Axes follow ``tl_valuealign.shapes``; a source that is not upstream of a layer, and a head whose
    matrix is zero, are NaN.

    full, full_stderr: alignment of the full stream and its standard error over sequences.
    by_source, by_source_stderr: the same for every source.
    chance: alignment of a random direction with as many directions.
    singular_values: descending. n_directions: how many carry the threshold's share.
    numerical_rank: singular values above rounding in the stored dtype.
    tied: the singular values on both sides of the cut are equal, so the cut is arbitrary.
    projected_sq_norm, projected_sq_norm_full: mean_t ‖x̄_t A‖².
    excess, excess_stderr: full stream minus embedding, with its paired bootstrap error.
    """

    full: PerThreshold
    full_stderr: PerThreshold
    by_source: PerThresholdSource
    by_source_stderr: PerThresholdSource
    chance: PerThreshold
    singular_values: Spectrum
    n_directions: ThresholdCounts
    numerical_rank: HeadCounts
    tied: ThresholdFlags
    projected_sq_norm: PerSourceHead
    projected_sq_norm_full: PerHead
    excess: PerThreshold
    excess_stderr: PerThreshold

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Spectra:
    """What is known of a role's matrices before any text is read (axes as in RoleResult)."""

    singular_values: Spectrum
    n_directions: ThresholdCounts
    numerical_rank: HeadCounts
    tied: ThresholdFlags
    chance: PerThreshold

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, values: RoleResult) -> "Spectra":
        return cls(
            values.singular_values,
            values.n_directions,
            values.numerical_rank,
            values.tied,
            values.chance,
        )


@dataclass(frozen=True)
class Checks:
    """How well the run reproduced the model's own activations (relative errors).

    decomposition: Σ upstream sources against resid_pre, per layer.
    read_in: (x̄/s) A + b against hook_q, hook_k, hook_v (and, for OV, Σ_h z W_O against the
    attention output), per role and layer.
    """

    decomposition: PerLayer
    decomposition_tolerance: float
    read_in: dict[str, PerLayer]
    read_in_tolerance: float

    def __post_init__(self) -> None:
        check_fields(self)
