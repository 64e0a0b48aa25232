"""The version of this package."""

import importlib.metadata

__all__ = ["version"]


def version() -> str:
    """The installed version; "source" where the package runs without having been installed."""
    try:
        return importlib.metadata.version("jaxspec")
    except importlib.metadata.PackageNotFoundError:
        return "source"
