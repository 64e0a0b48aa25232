"""User directories and environment variables; nothing else in the package looks there."""

import os
import sys
from pathlib import Path

import jax

__all__ = [
    "KIMI_DRAFT_CONFIG",
    "KIMI_TARGET_CONFIG",
    "SHIPPED_DRAFT",
    "SHIPPED_TARGET",
    "default_compile_cache",
    "hub_cache",
    "start_jax",
    "use_compile_cache",
]

SHIPPED_TARGET = Path(__file__).parent / "checkpoints" / "mini-target"
SHIPPED_DRAFT = Path(__file__).parent / "checkpoints" / "mini-draft"
"""The small trained pair that comes with the package."""
KIMI_TARGET_CONFIG = Path(__file__).parent / "configs" / "kimi-k2.5"
KIMI_DRAFT_CONFIG = Path(__file__).parent / "configs" / "kimi-k2.5-eagle3"
"""Kimi-K2.5's sizes and those of a published draft for it, to plan with: there are no weights."""


def hub_cache() -> Path:
    """Where Hugging Face keeps downloaded repositories: $HF_HUB_CACHE, or under $HF_HOME."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def default_compile_cache() -> Path:
    """Where compiled programs are kept: $JAX_COMPILATION_CACHE_DIR, or this user's caches."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "jaxspec" / "compiled"


def use_compile_cache(directory: Path) -> None:
    """Makes JAX keep compiled programs in a directory, the small and quick ones too.

    JAX by itself keeps what took a second or more to compile; here the many small programs of
    loading add up to more than that.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def start_jax(choice: str | None) -> None:
    """Makes JAX keep compiled programs where --compile-cache says: "none", or None for the usual
    place."""
    if choice != "none":
        use_compile_cache(Path(choice) if choice else default_compile_cache())
