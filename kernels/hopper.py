"""Whether the Mosaic kernels, which are written for Hopper GPUs, can run here."""

import jax

__all__ = ["why_not_hopper"]


def why_not_hopper() -> str | None:
    """Why no kernel of Mosaic's runs on the default device; None on a Hopper GPU."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}, not a Hopper GPU"
    device = jax.devices()[0]
    if device.compute_capability != "9.0":
        return f"{device.device_kind} has compute capability {device.compute_capability}, not 9.0"
    return None
