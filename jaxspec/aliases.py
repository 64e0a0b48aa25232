"""Types that several files write. No JAX is needed for them."""

import os
from collections.abc import Callable
from typing import Literal

__all__ = ["CacheLayout", "Convention", "Dtype", "PathLike", "Progress"]

CacheLayout = Literal["replicated", "slots"]
"""Of the target's cache on a mesh; see `config.MeshConfig`."""
Convention = Literal["before", "after"]
"""Whether an id k means the state before layer k (EAGLE, vLLM) or after it (SpecForge)."""
Dtype = Literal["bfloat16", "float32"]
PathLike = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total); a conversion counts bytes."""
