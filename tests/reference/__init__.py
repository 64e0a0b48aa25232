"""Slow, independent models in numpy: what the fast ones are compared with.

They are written from the formulas, import neither jaxspec nor jax, read tensors under their Hugging
Face names, and know neither caches nor batches: one whole sequence at a time, in float64.
"""
