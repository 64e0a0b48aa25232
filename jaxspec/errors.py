"""The error of bad input, which a command prints as its one message."""

__all__ = ["InputError"]


class InputError(ValueError):
    """What the user gave cannot be used: which file or flag, what was found, what was expected."""
