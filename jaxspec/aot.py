"""Compile-only H200s: XLA and ptxas for a GPU that is not there.

With the `cuda` extra installed and no device, a program lowered onto these devices goes through all
of XLA:GPU, and its memory and its scheduled HLO can be read. Nothing can be run.
"""

import importlib.resources
import importlib.util

import jax
import numpy as np
from jax.experimental import topologies

__all__ = ["h200s"]


def h200s(count: int = 1) -> jax.sharding.Mesh:
    """A mesh of `count` compile-only H200s, one axis named "model".

    Raises:
      ModuleNotFoundError: the CUDA plugin is not installed.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError(
            "compiling for an H200 needs the CUDA plugin: pip install 'jaxspec[cuda]'"
        )
    config = importlib.resources.files("jaxspec").joinpath("h200.textproto").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{count}"
    )
    return jax.sharding.Mesh(np.array(topology.devices), ("model",))
