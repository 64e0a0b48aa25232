"""EAGLE-3 speculative decoding for Kimi-K2.5 in JAX, Flax and Pallas.

from jaxspec import GenerateConfig, TreeConfig, generate, load_draft, load_target
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.checkpoint import load_draft, load_target
    from jaxspec.config import Numerics, TreeConfig
    from jaxspec.contracts import ContractError
    from jaxspec.environment import SHIPPED_DRAFT, SHIPPED_TARGET
    from jaxspec.errors import InputError
    from jaxspec.generator import GenerateConfig, Generator, Request
    from jaxspec.recording import RecordConfig, record
    from jaxspec.report import GenerateReport
    from jaxspec.text import SamplingConfig, generate
    from jaxspec.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "SHIPPED_DRAFT",
    "SHIPPED_TARGET",
    "ContractError",
    "GenerateConfig",
    "GenerateReport",
    "Generator",
    "InputError",
    "Numerics",
    "RecordConfig",
    "Request",
    "SamplingConfig",
    "Tokenizer",
    "TreeConfig",
    "generate",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "record",
]

_MODULES = {
    "checkpoint": ("load_draft", "load_target"),
    "config": ("Numerics", "TreeConfig"),
    "contracts": ("ContractError",),
    "environment": ("SHIPPED_DRAFT", "SHIPPED_TARGET"),
    "errors": ("InputError",),
    "generator": ("GenerateConfig", "Generator", "Request"),
    "recording": ("RecordConfig", "record"),
    "report": ("GenerateReport",),
    "text": ("SamplingConfig", "generate"),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: `jaxspec --help` needs no JAX."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxspec.{_MODULE_OF[name]}"), name)
