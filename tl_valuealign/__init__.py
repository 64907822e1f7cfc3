"""Which earlier outputs do attention heads look for? Measured on any TransformerLens model."""

from tl_valuealign._version import VERSION
from tl_valuealign.analysis import analyze_value_alignment
from tl_valuealign.causal import SubstitutionResult, substitute_input
from tl_valuealign.claims import claims_table
from tl_valuealign.compare import Comparison, compare
from tl_valuealign.contributions import ContributionResult, contribution_shares
from tl_valuealign.decode import decode_directions, top_tokens
from tl_valuealign.errors import (
    DependencyError,
    InputError,
    ModelError,
    ResourceError,
    SelfCheckError,
    StorageError,
    ValueAlignError,
)
from tl_valuealign.identity import IdentityResult, token_identity
from tl_valuealign.nulls import NullResult, null_alignment
from tl_valuealign.plots import (
    plot_directions,
    plot_explorer,
    plot_full_stream,
    plot_norms,
    plot_projected_norms,
    plot_sources,
    post_figures,
)
from tl_valuealign.plots.contributions import plot_contributions
from tl_valuealign.plots.effect import plot_effect
from tl_valuealign.plots.identity import plot_identity
from tl_valuealign.plots.nulls import plot_null
from tl_valuealign.pocket import pocket_model
from tl_valuealign.report import write_report
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.role_result import Checks, RoleResult
from tl_valuealign.storage import load

__version__ = VERSION

__all__ = [
    "Checks",
    "Comparison",
    "ContributionResult",
    "DependencyError",
    "IdentityResult",
    "InputError",
    "ModelError",
    "NullResult",
    "ResourceError",
    "RoleResult",
    "SelfCheckError",
    "StorageError",
    "SubstitutionResult",
    "ValueAlignError",
    "ValueAlignmentResult",
    "analyze_value_alignment",
    "claims_table",
    "compare",
    "contribution_shares",
    "decode_directions",
    "load",
    "null_alignment",
    "plot_contributions",
    "plot_directions",
    "plot_effect",
    "plot_explorer",
    "plot_full_stream",
    "plot_identity",
    "plot_norms",
    "plot_null",
    "plot_projected_norms",
    "plot_sources",
    "pocket_model",
    "post_figures",
    "substitute_input",
    "token_identity",
    "top_tokens",
    "write_report",
]
