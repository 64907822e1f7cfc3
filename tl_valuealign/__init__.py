"""Which earlier outputs do attention heads look for? Measured on any TransformerLens model."""

from tl_valuealign._version import VERSION
from tl_valuealign.analysis import analyze_value_alignment
from tl_valuealign.errors import (
    InputError,
    ModelError,
    ResourceError,
    SelfCheckError,
    StorageError,
    ValueAlignError,
)
from tl_valuealign.result import Checks, RoleResult, ValueAlignmentResult
from tl_valuealign.storage import load

__version__ = VERSION

__all__ = [
    "Checks",
    "InputError",
    "ModelError",
    "ResourceError",
    "RoleResult",
    "SelfCheckError",
    "StorageError",
    "ValueAlignError",
    "ValueAlignmentResult",
    "analyze_value_alignment",
    "load",
]
