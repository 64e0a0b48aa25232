"""A Hugging Face checkpoint, read from its headers and found whole: what it is, how it is built."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from flax import nnx

from jaxspec.aliases import Convention
from jaxspec.config import DraftConfig, Numerics, TargetConfig
from jaxspec.contracts import Boundaries
from jaxspec.convert import drafts, names
from jaxspec.convert.configs import LatentNormEps, Quantization, read_target_config
from jaxspec.convert.draft_configs import AS_STATED, read_draft
from jaxspec.convert.fields import Claim
from jaxspec.convert.matrices import Matrices
from jaxspec.convert.plan import FLOAT, HALF, Piece, Reader, Rule, build_piece, check_plan
from jaxspec.convert.problems import Problems
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.kernels.expert_matmul.packing import GROUP
from jaxspec.target import Target

__all__ = [
    "Experts",
    "Prepared",
    "TargetCard",
    "abstract_draft",
    "abstract_target",
    "parameters_of",
    "prepare_draft",
    "prepare_target",
    "tie",
]

Experts = Literal["stored", "int4"]
"""Routed experts as the checkpoint stores them, or quantised to int4 on the way."""

NOT_OF_THE_FUNCTION = ("eos_token_ids", "latent_norm_eps", "max_position_embeddings", "num_bits")
"""Config fields that may differ between two forms of one target."""

_LATER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")


@dataclasses.dataclass(frozen=True)
class TargetCard:
    """What a draft has to know of its target."""

    identity: str
    config: TargetConfig


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checkpoint whose headers hold no problem.

    Attributes:
      claims: every fact, with where it was read.
      unused: tensors that no parameter is built from, `{"tensor", "reason"}` each.
    """

    kind: Literal["target", "draft"]
    identity: str
    config: TargetConfig | DraftConfig
    claims: dict[str, Claim]
    rules: list[Rule]
    unused: list[dict[str, str]]
    source: Source
    quantization: Quantization

    def rules_by_piece(self) -> dict[str, list[Rule]]:
        """The rules of each piece, in the order of the model."""
        groups = itertools.groupby(self.rules, key=lambda rule: rule.piece)
        return {name: list(rules) for name, rules in groups}

    def reader(self, problems: Problems) -> Reader:
        """What the rules read with; what is wrong with values goes to `problems`."""
        return Reader(self.source, problems, self.quantization.block)

    def pieces(
        self, problems: Problems, is_needed: Callable[[Rule], bool] = lambda _: True
    ) -> Iterator[Piece]:
        """Builds the pieces one by one; what is wrong with their values goes to `problems`.

        Args:
          is_needed: of the rules of a piece, whether it is built.
        """
        reader = self.reader(problems)
        for rules in self.rules_by_piece().values():
            if any(map(is_needed, rules)):
                yield build_piece(rules, reader)


def abstract_target(config: TargetConfig, numerics: Numerics, identity: str) -> Target:
    """The target with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Target(config, numerics, identity, nnx.Rngs(0)))


def abstract_draft(config: DraftConfig, numerics: Numerics, identity: str) -> Draft:
    """The draft with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Draft(config, numerics, nnx.Rngs(0), identity))


def parameters_of(model: nnx.Module) -> dict[str, Any]:
    """The model's parameters by path, `sparse.attention.q_a`."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}


def prepare_target(
    source: Source,
    experts: Experts = "stored",
    latent_norm_eps: LatentNormEps = "rms_norm_eps",
) -> Prepared:
    """The target in a Hugging Face directory.

    Raises:
      CheckpointError: everything that is wrong with its configs and headers.
    """
    problems = Problems(str(source.directory))
    facts = read_target_config(source, problems, latent_norm_eps)
    prefix, head = names.find_prefix(source, problems)
    config, claims, quantization = facts.config, dict(facts.claims), facts.quantization
    if experts == "int4" and config.num_bits is None:
        config = dataclasses.replace(config, num_bits=4)
        claims["experts"] = Claim("int4, groups of 32", "quantised on the way, as asked for")
    else:
        claims["experts"] = Claim("int4" if config.num_bits else "plain", "as stored")
    for key in ("hidden_size", "moe_intermediate_size") if config.num_bits else ():
        if getattr(config, key) % max(quantization.group_size, GROUP):
            problems.add(
                f"config.json: {key} is {getattr(config, key)}, no multiple of the experts' group "
                f"size {max(quantization.group_size, GROUP)}"
            )
    problems.raise_any()
    matrices = Matrices(source, quantization)
    rules = list(names.target_rules(matrices, prefix, head, config))
    left = names.unused_target_tensors(prefix, config, facts.num_unused_layers)
    unused = check_plan(rules, left, source, problems)
    problems.raise_any()
    function = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if key not in NOT_OF_THE_FUNCTION
    }
    identity = f"{facts.model_type}@{_fingerprint(function, rules, source)}"
    return Prepared("target", identity, config, claims, rules, unused, source, quantization)


def prepare_draft(
    source: Source,
    convention: Convention | None = None,
    target: TargetCard | None = None,
    choice: RotaryChoice = AS_STATED,
    latent_norm_eps: LatentNormEps = "rms_norm_eps",
) -> Prepared:
    """The draft in a Hugging Face directory, tied to `target` if one is given.

    Args: see `read_draft`.

    Raises:
      CheckpointError: everything that is wrong with its config and headers.
    """
    problems = Problems(str(source.directory))
    config, claims = read_draft(source, problems, convention, choice, latent_norm_eps)
    names = drafts.draft_names(source, problems)
    rules = list(drafts.draft_rules(names, config, problems))
    unused = check_plan(rules, drafts.unused_draft_tensors(), source, problems)
    problems.raise_any()
    identity = f"eagle3@{_fingerprint(_function_of(config), rules, source)}"
    claims["target"] = Claim(None, "nothing in the checkpoint names it")
    if target is not None:
        config = tie(config, target, problems, "by --target")
        problems.raise_any()
        claims["boundaries"] = Claim(list(config.boundaries.ids), config.boundaries.origin)
        claims["target"] = Claim(target.identity, "--target")
    none = Quantization("none")
    return Prepared("draft", identity, config, claims, rules, unused, source, none)


def tie(config: DraftConfig, target: TargetCard, problems: Problems, when: str) -> DraftConfig:
    """The config of a draft that belongs to `target`; shapes that cannot belong become problems.

    Args:
      when: how the tie came about, for the origin of the claim.
    """
    want, of_target = config.boundaries, target.config
    layers = of_target.num_hidden_layers
    ids = want.ids or (2, layers // 2, layers - 3)
    if len(ids) != config.num_aux_hidden_states:
        problems.add(
            f"the draft's fc takes {config.num_aux_hidden_states} boundaries, and {want.origin} "
            f"names {len(ids)}; say which it was trained on with --capture"
        )
    if min(ids) < 0 or max(ids) > layers:
        problems.add(
            f"boundaries {ids} [{want.origin}]: {target.identity} has boundaries 0 (the embedding "
            f"output) to {layers} (before the final norm)"
        )
    if want.width != of_target.hidden_size:
        problems.add(
            f"the draft's fc takes states {want.width} wide; {target.identity} has hidden_size "
            f"{of_target.hidden_size}"
        )
    if config.vocab_size != of_target.vocab_size:
        problems.add(
            f"the draft's vocab_size is {config.vocab_size}; that of {target.identity} is "
            f"{of_target.vocab_size}"
        )
    if not (config.has_embedding and config.has_head) and want.width != config.hidden_size:
        problems.add(
            f"the draft's hidden_size is {config.hidden_size}, and it borrows the embedding or the "
            f"head of a target {want.width} wide"
        )
    origin = f"{want.origin}; tied to this target {when}"
    tied = Boundaries(target.identity, ids, want.width, origin)
    return dataclasses.replace(config, boundaries=tied)


def _function_of(config: DraftConfig) -> dict[str, Any]:
    """What of the config is part of the function, as far as it is not what every draft has."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    sizes = dataclasses.asdict(config)
    del sizes["boundaries"]
    return {key: value for key, value in sizes.items() if value != defaults[key]}


def _fingerprint(function: dict[str, Any], rules: list[Rule], source: Source) -> str:
    """Twelve hex digits over the config, every vector, and the first row of every matrix.

    Of a layer's routed experts the first one speaks for all: that is cheap at any size, and no
    training leaves it as it was. Plain weights are hashed as f32, so that their element type does
    not matter; packed ones as they are stored.
    """
    # What came later and is not there is no part of it, so that identities stay what they were.
    rotary = {key: value for key, value in function["rotary"].items() if key != "llama3" or value}
    function = function | {"rotary": rotary}
    digest = hashlib.sha256(json.dumps(function, sort_keys=True).encode())
    seen: set[str] = set()
    for rule in rules:
        whole = rule.piece.partition(".")[0]  # however it was cut
        for name in rule.names:
            tensor = source.tensors[name]
            if _LATER_EXPERT.search(name) or name in seen:
                continue
            seen.add(name)
            digest.update(f"{whole} {rule.leaves} {tensor.shape}".encode())
            rows = source.read(name, None if len(tensor.shape) < 2 else range(1))
            is_plain = tensor.dtype in (*FLOAT, HALF)
            digest.update((rows.astype(np.float32) if is_plain else rows).tobytes())
    return digest.hexdigest()[:12]
