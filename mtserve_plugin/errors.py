"""What can go wrong, by kind. Every message names the argument and the fix."""


class CacheError(RuntimeError):
    """Base of everything this package raises on its own account."""


class ConfigError(CacheError, ValueError):
    """An option of a configuration is unknown, contradictory or out of range."""


class InputError(CacheError, ValueError):
    """An argument of a call has the wrong shape, dtype, device or value; nothing was changed."""


class AttachError(CacheError):
    """A model cannot take a cache as it is; nothing of it was changed.

    Attributes:
        factors: the names of what stands against it, one per paragraph of the message.
    """

    def __init__(self, message: str, factors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.factors = factors


class OnloadError(CacheError):
    """Cached keys and values could not be brought to the device after the history was stripped.

    The batch must be aborted and run again without the cache; `attach` does so by itself.
    """


class MissingDependencyError(CacheError, ImportError):
    """An optional package is absent or of the wrong variant; the message holds the command that mends it."""
