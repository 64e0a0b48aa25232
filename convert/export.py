"""The way back: a checkpoint, converted or not, into a layout that others read.

Every rule of a conversion has a way back from parameters to tensors, so what is written converts
to the same parameters, bit by bit; int4 experts are packed again as compressed-tensors does it.
"""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.aliases import Convention, PathLike, Progress
from jaxspec.config import DraftConfig, TargetConfig, TreeConfig
from jaxspec.convert import names
from jaxspec.convert.configs import WRAPPER, Quantization
from jaxspec.convert.conversion import SOURCE_CONFIG, copied_from
from jaxspec.convert.drafts import DraftNames, draft_rules
from jaxspec.convert.export_changes import config_changes
from jaxspec.convert.export_configs import (
    IDS,
    WRAPPER_ARCHITECTURE,
    draft_json,
    speculators_json,
    target_json,
)
from jaxspec.convert.launch import Served, launch_lines
from jaxspec.convert.manifest import Manifest, is_converted
from jaxspec.convert.matrices import Matrices
from jaxspec.convert.pairing import check_pair, read_checkpoint
from jaxspec.convert.pieces import pieces_of
from jaxspec.convert.plan import Piece, Rule
from jaxspec.convert.prepare import Prepared
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.shards import ShardWriter, widest_first
from jaxspec.convert.source import read_json
from jaxspec.kernels.expert_matmul.packing import GROUP

if TYPE_CHECKING:
    from jaxspec.convert.stored import StoredPiece

__all__ = ["ExportConfig", "ExportReport", "Layout", "export"]

Layout = Literal["hf", "specforge", "speculators"]
CHAIN = TreeConfig(3, 1, 4)
NO_VISION = (
    "engines build Kimi-K2.5 with its vision tower, which is not in it: export with --flat for the "
    "commands that serve its text model"
)


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Choices of an export.

    Attributes:
      layout: "hf" is a target's; "specforge" and "speculators" are a draft's.
      capture_convention: how a draft's ids are written in SpecForge's layout. "before", which None
        means, is what SGLang and vLLM read; "after" what SpecForge's own trainer writes.
      flat: of Kimi-K2.5, the text model alone, in DeepSeek-V3's form: engines that build the
        wrapper want a vision tower, and there is none here.
      pair: the other one of the pair, for the commands that serve it; None leaves its name open.
      pair_directory: where it lies; None takes `pair` itself, if that is a directory. What is
        found there has to belong to what is exported.
      tree: that it is to be served with.
    """

    layout: Layout
    capture_convention: Convention | None = None
    flat: bool = False
    pair: str | None = None
    pair_directory: Path | None = None
    tree: TreeConfig = CHAIN


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
      identity: of the weights; what is written is they, whatever name it will be read under.
      num_tensors, num_bytes: of the weights written.
      served: the commands that serve it.
      notes: what of the source the layout cannot say, what it says otherwise, and what to know of
        the pair.
    """

    source: Path
    destination: Path
    layout: Layout
    kind: str
    identity: str
    num_tensors: int
    num_bytes: int
    served: Served
    notes: tuple[str, ...]

    def summary(self) -> str:
        """What it is, and how to serve it."""
        lines = [
            f"{self.destination} is the {self.kind} {self.identity} in the layout {self.layout}: "
            f"{self.num_tensors} tensors, {self.num_bytes / 1e9:.3f} GB"
        ]
        for engine, command in (("SGLang", self.served.sglang), ("vLLM", self.served.vllm)):
            if command is not None:
                lines += [f"{engine}:", f"  {command}"]
        lines += [f"note: {note}" for note in (*self.notes, *self.served.notes)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return dataclasses.asdict(self) | {
            "source": str(self.source),
            "destination": str(self.destination),
        }


def export(
    source: PathLike,
    destination: PathLike,
    config: ExportConfig,
    progress: Progress | None = None,
) -> ExportReport:
    """The report of exporting `source`, of either form, to `destination`, which must not exist.

    Args:
      progress: called as progress("exporting", done, total), in pieces.

    Raises:
      CheckpointError: everything that is wrong with the source, or that the layout cannot hold, or
        a pair that does not belong together; nothing is left behind then.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise CheckpointError(
            str(destination), ["exists already; an export never writes over anything"]
        )
    found = read_checkpoint(source)
    problems = Problems(str(source))
    if (config.layout == "hf") != (found.kind == "target"):
        problems.add(f"a {found.kind}, and {config.layout!r} is no layout of one")
        problems.raise_any()
    plan = (_target_plan if found.kind == "target" else _draft_plan)(found, config, problems)
    pair = _read_pair(config)
    if pair is not None:
        check_pair(found, pair, str(config.pair), problems)
    notes = (
        *plan.notes,
        *_pair_notes(pair, config),
        *_differences(source, found.kind, plan),
    )
    problems.raise_any()
    partial = destination.with_name(f"{destination.name}.partial")
    if partial.exists():
        raise CheckpointError(
            str(partial), ["is in the way, perhaps left from an export that was killed; remove it"]
        )
    try:
        partial.mkdir(parents=True)
        num_tensors, num_bytes = _write(found, source, partial, plan, problems, progress)
        problems.raise_any()
        for path in copied_from(source) if found.kind == "target" else ():
            shutil.copyfile(path, partial / path.name)
        text = json.dumps(plan.config, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(
            str(destination), [f"the export stopped: {error.strerror or error}; nothing is kept"]
        ) from error
    finally:  # where all went well, it has its name by now
        shutil.rmtree(partial, ignore_errors=True)
    served = _served(found, pair, destination, config, plan)
    return ExportReport(
        source, destination, config.layout, found.kind, found.identity, num_tensors, num_bytes,
        served, (*notes, *_missing_code(destination)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be written.

    Attributes:
      config: `config.json`.
      rules: with names of tensors as they will be.
      file_of: of a piece, by the part of its name before the dot; in the order of the pieces.
    """

    config: dict[str, Any]
    rules: list[Rule]
    file_of: dict[str, str]
    notes: tuple[str, ...]


def _target_plan(found: Prepared | Manifest, config: ExportConfig, problems: Problems) -> _Plan:
    c = found.config
    assert isinstance(c, TargetConfig)
    model_type = found.identity.partition("@")[0]
    notes = []
    if config.capture_convention is not None:
        problems.add("a target, and --capture-convention says how a draft's ids are written")
    if config.flat and model_type != WRAPPER:
        notes.append(f"{model_type} is flat by itself: --flat changes nothing")
    elif config.flat:
        model_type = "deepseek_v3"
    if c.latent_norm_eps != c.rms_norm_eps:
        notes.append(
            f"converted with latent_norm_eps {c.latent_norm_eps}, of which a config says nothing"
        )
    prefix = "language_model." if model_type == WRAPPER else ""
    quantization = Quantization("int4", group_size=GROUP) if c.num_bits else Quantization("none")
    matrices = Matrices(None, quantization)
    rules = list(names.target_rules(matrices, f"{prefix}model.", f"{prefix}lm_head.weight", c))
    groups = list(dict.fromkeys(_group(rule.piece) for rule in rules))
    file_of = {
        group: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, group in enumerate(groups, 1)
    }
    return _Plan(target_json(c, model_type), rules, file_of, tuple(notes))


def _draft_plan(found: Prepared | Manifest, config: ExportConfig, problems: Problems) -> _Plan:
    c = found.config
    assert isinstance(c, DraftConfig)
    dtype = _widest_dtype(found)
    if config.flat:
        problems.add("a draft, and --flat is of a target: Kimi-K2.5's text model alone")
    if config.layout == "speculators":
        if config.capture_convention == "after":
            problems.add(
                "speculators counts boundaries, which is --capture-convention before; after is of "
                "--layout specforge"
            )
        content = speculators_json(c, config.pair, config.tree.levels, dtype, problems)
    else:
        content = draft_json(c, config.capture_convention or "before", dtype, problems)
    first = "layers.0." if config.layout == "speculators" else "midlayer."
    rules = list(draft_rules(DraftNames(first), c, problems))
    file_of = {_group(rule.piece): "model.safetensors" for rule in rules}
    return _Plan(content, rules, file_of, ())


def _read_pair(config: ExportConfig) -> Prepared | Manifest | None:
    """What the other one of the pair says of itself; None where it is not here."""
    directory = config.pair_directory or (Path(config.pair) if config.pair else None)
    return read_checkpoint(directory) if directory is not None and directory.is_dir() else None


def _pair_notes(pair: Prepared | Manifest | None, config: ExportConfig) -> list[str]:
    """What to know of the other one."""
    if config.pair is not None and pair is None:
        return [f"{config.pair} is not here: whether they belong together has not been looked at"]
    if isinstance(pair, Manifest):
        return [f"{config.pair} is a converted checkpoint, which engines do not read: export it"]
    return []


def _differences(source: Path, kind: Literal["target", "draft"], plan: _Plan) -> tuple[str, ...]:
    """What the new config says otherwise than the checkpoint's own."""
    own = source / (SOURCE_CONFIG if is_converted(source) else "config.json")
    if not own.is_file():
        return (f"no {SOURCE_CONFIG} in {source}, so what differs from the original is not known",)
    return config_changes(read_json(own, Problems(str(source))), plan.config, kind)


def _missing_code(directory: Path) -> list[str]:
    """What of its tokenizer's own code is not there, for engines that run it."""
    config = read_json(directory / "tokenizer_config.json", Problems(str(directory)))
    missing: dict[str, None] = {}
    for classes in (config.get("auto_map") or {}).values():
        for name in classes if isinstance(classes, list) else [classes]:
            file = f"{name.partition('.')[0]}.py" if name else ""
            # Before a "--" stands another repository, where that code is.
            if file and "--" not in file and not (directory / file).is_file():
                missing[file] = None
    return [
        f"tokenizer_config.json names {file}, which the source does not have: engines need it there"
        for file in missing
    ]


def _widest_dtype(found: Prepared | Manifest) -> str:
    """The element type that holds every weight of a draft."""
    if isinstance(found, Manifest):
        dtypes = {dtype for leaf in found.leaves for dtype in leaf["dtypes"]}
    else:
        stored = {info.dtype for info in found.source.tensors.values()}
        dtypes = {"float32"} if stored & {"F32", "F16"} else set()
    return "float32" if "float32" in dtypes else "bfloat16"


def _group(piece: str) -> str:
    """What a piece is one of: however a layer was cut, its tensors share a file."""
    return piece.partition(".")[0]


def _write(
    found: Prepared | Manifest,
    source: Path,
    partial: Path,
    plan: _Plan,
    problems: Problems,
    progress: Progress | None,
) -> tuple[int, int]:
    """Writes the weights, and the index of several files; how many tensors, and bytes of them."""
    rules = {name: list(of) for name, of in itertools.groupby(plan.rules, lambda rule: rule.piece)}
    total, pieces = pieces_of(found, source, problems)
    index, num_bytes, done = {}, 0, 0
    for file, of_file in itertools.groupby(pieces, lambda piece: plan.file_of[_group(piece.name)]):
        group = [rule for rule in plan.rules if plan.file_of[_group(rule.piece)] == file]
        shapes = {want.name: want.shape for rule in group for want in rule.wants}
        with ShardWriter(partial / file, shapes) as writer:
            for piece in of_file:
                for name, array in widest_first(_restored(piece, rules, source)):
                    writer.add(name, array)
                done += 1
                if progress is not None:
                    progress("exporting", done, total)
            num_bytes += writer.data_bytes
        index |= dict.fromkeys(shapes, file)
    if len(set(index.values())) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        (partial / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
    return len(index), num_bytes


def _restored(
    piece: "Piece | StoredPiece", rules: dict[str, list[Rule]], source: Path
) -> dict[str, Any]:
    """The tensors of a piece."""
    wanted = rules.get(piece.name, [])
    if {leaf for rule in wanted for leaf in rule.leaves} != piece.leaves.keys():
        raise CheckpointError(
            str(source),
            [f"piece {piece.name} was cut otherwise by another version; convert it again"],
        )
    tensors = {}
    for rule in wanted:
        tensors |= rule.restore(*(piece.leaves[leaf][...] for leaf in rule.leaves))
    return tensors


def _served(
    found: Prepared | Manifest,
    pair: Prepared | Manifest | None,
    destination: Path,
    config: ExportConfig,
    plan: _Plan,
) -> Served:
    if plan.config["architectures"] == [WRAPPER_ARCHITECTURE]:
        return Served(None, None, (NO_VISION,))
    if found.kind == "draft":
        target, draft, is_draft, written = config.pair or "TARGET", destination, found, plan.config
    else:
        target, draft, is_draft, written = destination, config.pair or "DRAFT", pair, {}
        if isinstance(pair, Prepared):
            written = pair.source.config
    layout = "speculators" if "speculators_model_type" in written else "specforge"
    ids = (written.get("eagle_config") or {}).get(IDS) or written.get(IDS)
    of_draft = None if is_draft is None else is_draft.config
    assert of_draft is None or isinstance(of_draft, DraftConfig), "a pair has been checked"
    return launch_lines(target, draft, config.tree, layout, of_draft, ids)
