"""EAGLE-3 speculative decoding for Kimi-K2.5 in JAX, Flax and Pallas.

from jaxspec import GenerateConfig, TreeConfig, generate, load_draft, load_target
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.checkpoint import load_draft, load_target
    from jaxspec.config import MeshConfig, Numerics, TreeConfig
    from jaxspec.contracts import ContractError
    from jaxspec.convert.export import ExportConfig
    from jaxspec.convert.export import export as export_checkpoint
    from jaxspec.convert.inspect import inspect as inspect_checkpoint
    from jaxspec.convert.rotary import RotaryChoice
    from jaxspec.convert.write import ConvertConfig
    from jaxspec.convert.write import convert as convert_checkpoint
    from jaxspec.doctor import diagnose
    from jaxspec.doctor_scores import DoctorConfig
    from jaxspec.doctor_texts import Text
    from jaxspec.environment import SHIPPED_DRAFT, SHIPPED_PROMPTS, SHIPPED_TARGET
    from jaxspec.errors import InputError
    from jaxspec.features import FeaturesDirectory, record_features
    from jaxspec.generator import GenerateConfig, Generator
    from jaxspec.hardware import Assumptions
    from jaxspec.identify import identify as identify_features
    from jaxspec.isolation import isolate_record
    from jaxspec.plan import plan as plan_devices
    from jaxspec.plan_models import PlanConfig
    from jaxspec.plan_report import PlanReport
    from jaxspec.profile_report import ProfileReport
    from jaxspec.profiling import ProfileConfig, profile_step
    from jaxspec.prompts import Prompt
    from jaxspec.record_comparison import compare_records
    from jaxspec.recording import RecordConfig, record
    from jaxspec.report import GenerateReport
    from jaxspec.requests import Completion, Request
    from jaxspec.run_comparison import compare_runs
    from jaxspec.scoring import score_gsm8k
    from jaxspec.sweep import sweep as sweep_trees
    from jaxspec.sweep_config import SweepConfig
    from jaxspec.sweep_report import SweepReport
    from jaxspec.text import SamplingConfig, generate, stream, tokenize
    from jaxspec.tokenizer import Tokenizer, load_tokenizer
    from jaxspec.training_data import Windows, read_samples
    from jaxspec.training_run import TrainConfig, TrainReport
    from jaxspec.training_run import train as train_draft

__all__ = [
    "SHIPPED_DRAFT",
    "SHIPPED_PROMPTS",
    "SHIPPED_TARGET",
    "Assumptions",
    "Completion",
    "ContractError",
    "ConvertConfig",
    "DoctorConfig",
    "ExportConfig",
    "FeaturesDirectory",
    "GenerateConfig",
    "GenerateReport",
    "Generator",
    "InputError",
    "MeshConfig",
    "Numerics",
    "PlanConfig",
    "PlanReport",
    "ProfileConfig",
    "ProfileReport",
    "Prompt",
    "RecordConfig",
    "Request",
    "RotaryChoice",
    "SamplingConfig",
    "SweepConfig",
    "SweepReport",
    "Text",
    "Tokenizer",
    "TrainConfig",
    "TrainReport",
    "TreeConfig",
    "Windows",
    "compare_records",
    "compare_runs",
    "convert_checkpoint",
    "diagnose",
    "export_checkpoint",
    "generate",
    "identify_features",
    "inspect_checkpoint",
    "isolate_record",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "plan_devices",
    "profile_step",
    "read_samples",
    "record",
    "record_features",
    "score_gsm8k",
    "stream",
    "sweep_trees",
    "tokenize",
    "train_draft",
]

_MODULES = {
    "checkpoint": ("load_draft", "load_target"),
    "config": ("MeshConfig", "Numerics", "TreeConfig"),
    "contracts": ("ContractError",),
    "convert.export": ("ExportConfig", "export_checkpoint"),
    "convert.inspect": ("inspect_checkpoint",),
    "convert.rotary": ("RotaryChoice",),
    "convert.write": ("ConvertConfig", "convert_checkpoint"),
    "doctor": ("diagnose",),
    "doctor_scores": ("DoctorConfig",),
    "doctor_texts": ("Text",),
    "environment": ("SHIPPED_DRAFT", "SHIPPED_PROMPTS", "SHIPPED_TARGET"),
    "errors": ("InputError",),
    "features": ("FeaturesDirectory", "record_features"),
    "generator": ("GenerateConfig", "Generator"),
    "hardware": ("Assumptions",),
    "identify": ("identify_features",),
    "isolation": ("isolate_record",),
    "plan": ("plan_devices",),
    "plan_models": ("PlanConfig",),
    "plan_report": ("PlanReport",),
    "profile_report": ("ProfileReport",),
    "profiling": ("ProfileConfig", "profile_step"),
    "prompts": ("Prompt",),
    "record_comparison": ("compare_records",),
    "recording": ("RecordConfig", "record"),
    "report": ("GenerateReport",),
    "requests": ("Completion", "Request"),
    "run_comparison": ("compare_runs",),
    "scoring": ("score_gsm8k",),
    "sweep": ("sweep_trees",),
    "sweep_config": ("SweepConfig",),
    "sweep_report": ("SweepReport",),
    "text": ("SamplingConfig", "generate", "stream", "tokenize"),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
    "training_data": ("Windows", "read_samples"),
    "training_run": ("TrainConfig", "TrainReport", "train_draft"),
}
_OWN_NAMES = {
    "convert_checkpoint": "convert",
    "export_checkpoint": "export",
    "identify_features": "identify",
    "inspect_checkpoint": "inspect",
    "plan_devices": "plan",
    "sweep_trees": "sweep",
    "train_draft": "train",
}
"""Of what has another name here, because a module has its own."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: `jaxspec --help` needs no JAX."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    module = importlib.import_module(f"jaxspec.{_MODULE_OF[name]}")
    return getattr(module, _OWN_NAMES.get(name, name))
