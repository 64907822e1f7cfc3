"""What can go wrong, as types a caller can catch.

Every error of the package derives from :class:`ValueAlignError`. Those about arguments and data
are also ``ValueError``, so that ordinary code catches them without importing this module.
"""


class ValueAlignError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(ValueAlignError, ValueError):
    """An argument or the text handed in cannot be used as it is."""


class ModelError(ValueAlignError, ValueError):
    """The model is of a kind, or in a state, that cannot be measured."""


class SelfCheckError(ValueAlignError, RuntimeError):
    """The streams or read-in matrices did not reproduce the model's own activations."""


class ResourceError(ValueAlignError, RuntimeError):
    """The run would need more memory than there is."""


class DependencyError(ValueAlignError, ImportError):
    """An optional package that only this call needs is not installed."""


class StorageError(ValueAlignError, ValueError):
    """A result file is foreign, damaged, of another version, or cannot be written."""
