"""The one script for a node of several GPUs: is a mesh right, what does it cost, how fast is it?

    python benchmarks/node.py --target kimi --draft kimi-eagle3 [--minutes 60] [--out FOLDER]
    python benchmarks/node.py --cpu-devices 8                   all stages with the shipped pair

In this order, and none is begun that the time left does not suffice for:

- weights: how long they take to load, and what each device holds of them;
- correctness: greedy tokens with a draft, without one, with the cache by slots, and on every mesh
  of --against, each judged by the mesh in one pass over the text; features and logits besides;
- collectives: each that a step's program holds, of its own size, alone in a loop;
- sweep: steps and tokens per second of each tree and of plain decoding, for each batch size.

--mesh is by default all devices in one group, or in as few as the models allow. --against takes
other meshes, or 1x1; each of them loads the weights anew, and has to hold them. What is known is
written after every stage. Ends with a line of JSON, which is in node-DEVICE.json too. Exits with 1
if something was wrong.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
from common import Spread, in_turn, ratio
from exchanges import exchange
from flax import nnx
from gpu import MAX_REGRET, agreed

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    MeshConfig,
    Numerics,
    Request,
    TreeConfig,
    inspect_checkpoint,
    load_draft,
    load_target,
    load_tokenizer,
)
from jaxspec.checkpoint import locate
from jaxspec.config import DraftConfig, TargetConfig
from jaxspec.convert.prepare import abstract_draft, abstract_target
from jaxspec.draft import Draft
from jaxspec.environment import default_compile_cache, use_compile_cache
from jaxspec.errors import InputError
from jaxspec.flags import dtype_of
from jaxspec.generator import implementations
from jaxspec.hlo import collectives
from jaxspec.recording import RecordConfig, record
from jaxspec.sharding import Devices, check_draft, check_target
from jaxspec.target import Target

NUM_PROMPTS = 4
"""Texts that are judged."""
PROMPT_LEN = 64
"""Tokens of a prompt, at most."""
JUDGED_LEN = 160
"""Of one that is judged, its text repeated: more than `record` reads at once, so that it reads the
cache too."""
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a position's features or logits, as a share of their norm, for half of the positions. Others
may differ more: where rounding sends a token to another expert, everything after it changes."""
SECONDS = {"correctness": 60.0, "collectives": 10.0, "sweep": 60.0}
"""What a part of a stage takes about, at the least. Once one has taken longer, that counts."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and its draft, on a mesh."""

    target: Target
    draft: Draft

    def on(self, mesh: MeshConfig) -> "Pair":
        """The same arrays, computed on a mesh that cuts them alike."""
        t, d = self.target, self.draft
        numerics = dataclasses.replace(t.numerics, mesh=mesh)
        target = abstract_target(t.config, numerics, t.identity)
        draft = abstract_draft(d.config, numerics, d.identity)
        return Pair(
            nnx.merge(nnx.split(target)[0], nnx.state(t)),
            nnx.merge(nnx.split(draft)[0], nnx.state(d)),
        )


def main() -> int:
    args = parse()
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    use_compile_cache(default_compile_cache())  # a text is judged by one program again and again
    end = time.monotonic() + 60 * args.minutes
    device = jax.devices()[0]
    is_dry = device.platform == "cpu"
    figures: dict[str, Any] = {"kind": "dry run; its times say nothing"} if is_dry else {}
    name = ("node-dry-run" if is_dry else f"node-{device.device_kind}").lower().replace(" ", "-")
    try:
        for stage, found in stages(args, end):
            figures[stage] = found
            common.write_result(name, figures, args.out)
            print(f"-- {stage}: {end - time.monotonic():.0f} s left", file=sys.stderr)
    except InputError as error:
        print(f"node.py: {error}", file=sys.stderr)
        return 2
    wrong = list(faults(figures))
    figures["wrong"], figures["is_correct"] = wrong, not wrong
    print(json.dumps(json.loads(common.write_result(name, figures, args.out).read_text())))
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--target", default=str(SHIPPED_TARGET), help="default: the one that ships")
    add("--draft", default=str(SHIPPED_DRAFT), help="default: the one that ships")
    add("--mesh", help="DATAxMODEL; default: all devices in one group, if the models allow")
    add("--against", nargs="*", default=[], metavar="MESH", help="other meshes, for correctness")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU")
    add("--trees", nargs="+", default=["3x1x4", "3x4x16"], help="the first is judged")
    add("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    add("--context", type=int, default=2048, help="slots of the cache")
    add("--new-tokens", type=int, default=64, help="of every text")
    add("--rounds", type=int, default=5, help="of every comparison")
    add("--minutes", type=float, default=60.0, help="for everything together")
    add("--out", type=Path, default=common.RESULTS, help="folder of the result")
    add("--cpu-devices", type=int, help="on so many virtual CPU devices; its times say nothing")
    return parser.parse_args()


def stages(args: argparse.Namespace, end: float) -> Iterator[tuple[str, Any]]:
    """(name, what was found) of each stage; those that grow are given again and again."""
    dtype = dtype_of(args.dtype)
    runtime = jax.devices()[0].client.platform_version.strip()
    yield "devices", {"num": len(jax.devices()), "runtime": runtime}
    started = time.monotonic()
    mesh = MeshConfig.parse(args.mesh) if args.mesh else widest_mesh(args)
    pair = load(args, mesh, dtype)
    yield (
        "weights",
        {
            "target": pair.target.identity,
            "draft": pair.draft.identity,
            "dtype": dtype,
            "mesh": str(mesh),
            "load_s": time.monotonic() - started,
            "bytes_per_device": max(held_bytes((nnx.state(pair.target), nnx.state(pair.draft)))),
            **peak_bytes(),
        },
    )
    prompts = prompts_of(args, pair.target)
    box, programs = Box(end), Programs(args)
    found: dict[str, Any] = {}
    for name, judged in correctness(args, programs, pair, prompts, dtype):
        found[name] = box.run("correctness", judged)
        print(f"correctness {name:34}{json.dumps(common.rounded(found[name]))}", flush=True)
        yield "correctness", found
    found = {}
    listed = box.run("collectives", lambda: {"asked": messages(args, programs, pair)})
    if "asked" not in listed:
        yield "collectives", {"those of a step": listed}
    for (opcode, num_bytes), in_program in sorted(listed.get("asked", {}).items()):
        name = f"{opcode} {num_bytes} bytes"
        measured = functools.partial(exchange, Devices.of(mesh), opcode, num_bytes, args.rounds)
        found[name] = box.run("collectives", measured) | {"in_program": in_program}
        print(f"collectives {name:34}{json.dumps(common.rounded(found[name]))}", flush=True)
        yield "collectives", found
    found = {}
    for batch in args.batch_sizes:
        name = f"batch {batch}"
        found[name] = box.run(
            "sweep", functools.partial(sweep, args, programs, pair, prompts, batch)
        )
        print_sweep(name, found[name])
        yield "sweep", found
    yield "memory", peak_bytes()


class Box:
    """What is still begun in the time that is left."""

    def __init__(self, end: float) -> None:
        self._end, self._takes_s = end, dict(SECONDS)

    def run(self, stage: str, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What it found, how long that took; or why it was not begun, or which error it raised."""
        found = common.attempt(self._takes_s[stage], self._end, what)
        self._takes_s[stage] = max(self._takes_s[stage], found.get("took_s", 0.0))
        return found


def load(args: argparse.Namespace, mesh: MeshConfig, dtype: Any) -> Pair:
    """The pair on a mesh."""
    numerics = Numerics(dtype=dtype, mesh=mesh)
    target = load_target(args.target, numerics)
    return Pair(target, load_draft(args.draft, numerics, target=target))


def widest_mesh(args: argparse.Namespace) -> MeshConfig:
    """All devices, in the largest groups that both models allow."""
    target, draft = (
        inspect_checkpoint(locate(path)).manifest.config for path in (args.target, args.draft)
    )
    assert isinstance(target, TargetConfig)
    assert isinstance(draft, DraftConfig)
    num = len(jax.devices())
    for size in (size for size in range(num, 1, -1) if num % size == 0):
        with contextlib.suppress(InputError):
            mesh = MeshConfig(num // size, size)
            check_target(mesh, target)
            check_draft(mesh, draft)
            return mesh
    return MeshConfig(num, 1)


def prompts_of(args: argparse.Namespace, target: Target) -> list[list[int]]:
    """Ids of text, where the target has a tokenizer, and else at random; half a context at most."""
    room = min(PROMPT_LEN, args.context // 2)
    tokenizer = load_tokenizer(locate(args.target))
    if tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, target.config.vocab_size, room).tolist() for _ in range(8)]
    texts = [prompt["text"] for prompt in json.loads(common.PROMPTS.read_text())["evaluation"]]
    return [tokenizer.encode(text)[:room] for text in texts]


class Programs:
    """What is compiled for one batch size: kept until another one is asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._batch = args, 0
        self._known: dict[tuple[MeshConfig | None, str | None], Generator] = {}

    def of(self, pair: Pair, tree: str | None, batch: int) -> Generator:
        if batch != self._batch:
            self._known.clear()  # their caches too
            self._batch = batch
        key = pair.target.numerics.mesh, tree
        if key not in self._known:
            config = GenerateConfig(
                tree=tree and TreeConfig.parse(tree),
                max_new_tokens=self._args.new_tokens,
                context_length=min(self._args.context, pair.target.config.max_position_embeddings),
                batch_size=batch,
                prefill_chunk=PROMPT_LEN,
                ignore_eos=True,
            )
            self._known[key] = Generator(pair.target, pair.draft if tree else None, config)
        return self._known[key]


def batch_of(mesh: MeshConfig, num: int) -> int:
    """The least batch of at least `num` that the groups of a mesh share evenly."""
    return -(-num // mesh.data) * mesh.data


def correctness(
    args: argparse.Namespace,
    programs: Programs,
    pair: Pair,
    prompts: Sequence[list[int]],
    dtype: Any,
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What there is to judge, by name; the first gives the tokens that the others are compared to.

    Every emitted token is judged by the pair in one pass over the text, so a near-tie, after which
    two texts differ, hides nothing; what all of it has in common is compared between meshes.
    """
    mesh, tree = pair.target.numerics.mesh, args.trees[0]
    assert mesh is not None
    room = min(JUDGED_LEN, args.context // 2)
    asked = [(ids * room)[:room] for ids in prompts[:NUM_PROMPTS]]
    tokens: dict[str, list[list[int]]] = {}

    def texts() -> list[list[int]]:
        return [[*ids, *new] for ids, new in zip(asked, tokens["plain"], strict=True)]

    @functools.cache
    def said() -> Mapping[str, np.ndarray]:
        return record(pair.target, pair.draft, texts(), RecordConfig(boundaries=())).arrays

    def decoded(name: str, make: Callable[[], Pair], tree: str | None) -> dict[str, Any]:
        made = make()
        own = made.target.numerics.mesh
        assert own is not None
        run = programs.of(made, tree, batch_of(own, len(asked)))
        completions = run.run([Request(tuple(ids)) for ids in asked]).completions
        mine = tokens[name] = [list(done.tokens) for done in completions]
        regret = float(regrets(pair.target, asked, mine).max())
        found: dict[str, Any] = {"mesh": str(own), "cache": own.cache, "tree": tree}
        found["regret"] = regret if math.isfinite(regret) else None
        found["num_tokens"] = sum(map(len, mine))
        found["num_equal"] = sum(map(agreed, tokens["plain"], mine))
        found["implementations"] = implementations(made.target, run.config)
        found["is_correct"] = regret <= MAX_REGRET[dtype]
        if own != mesh:
            there = record(made.target, made.draft, texts(), RecordConfig(boundaries=())).arrays
            for key in ("features", "logits", "draft.logits"):
                found[key] = difference(there[key], said()[key], said()["lengths"])
                found["is_correct"] &= found[key]["median"] <= MAX_DIFFERENCE[dtype]
        return found

    yield "plain", functools.partial(decoded, "plain", lambda: pair, None)
    yield "speculative", functools.partial(decoded, "speculative", lambda: pair, tree)
    if mesh.model > 1:
        by_slots = functools.partial(pair.on, dataclasses.replace(mesh, cache="slots"))
        yield "cache by slots", functools.partial(decoded, "cache by slots", by_slots, tree)
    for text in args.against:
        other = functools.partial(load, args, MeshConfig.parse(text), dtype)
        yield f"mesh {text}", functools.partial(decoded, f"mesh {text}", other, tree)


def regrets(
    judge: Target, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> np.ndarray:
    """By how much each emitted token's logit misses the best one, in standard deviations."""
    texts = [[*ids, *new] for ids, new in zip(prompts, completions, strict=True)]
    logits_BTV = record(judge, None, texts, RecordConfig(boundaries=())).arrays["logits"]
    found = []
    for logits_TV, ids, text in zip(logits_BTV, prompts, texts, strict=True):
        at = logits_TV[len(ids) - 1 : len(text) - 1]
        chosen = np.take_along_axis(at, np.asarray(text[len(ids) :])[:, None], axis=1)[:, 0]
        found.append((at.max(1) - chosen) / at.std(1))
    return np.concatenate(found)


def difference(got: np.ndarray, want: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """Of vectors [B,T,.], position by position, as a share of the wanted one's norm."""
    is_real = np.arange(want.shape[1]) < lengths[:, None]
    got, want = got[is_real].astype(np.float64), want[is_real].astype(np.float64)
    shares = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    return {"median": float(np.median(shares)), "max": float(shares.max())}


def messages(
    args: argparse.Namespace, programs: Programs, pair: Pair
) -> dict[tuple[str, int], dict[str, int]]:
    """How many collectives of each kind and size a step's program holds, by the cache's layout."""
    mesh = pair.target.numerics.mesh
    assert mesh is not None
    if mesh.model == 1:
        return {}
    layouts = {"replicated": pair, "slots": pair.on(dataclasses.replace(mesh, cache="slots"))}
    asked: dict[tuple[str, int], dict[str, int]] = {}
    for layout, made in layouts.items():
        program = programs.of(made, args.trees[0], batch_of(mesh, NUM_PROMPTS))
        for found in collectives(program._decode.as_text()).values():
            for one in found:
                counted = asked.setdefault((one.opcode, int(one.num_bytes)), {})
                counted[layout] = counted.get(layout, 0) + 1
    return asked


def sweep(
    args: argparse.Namespace,
    programs: Programs,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    batch: int,
) -> dict[str, Any]:
    """Every tree and plain decoding, in turn; a batch of texts each, generated to their end.

    `break_even` is the accept_length above which a tree pays: its step's time over a plain one's.
    """
    mesh = pair.target.numerics.mesh
    assert mesh is not None
    num = batch_of(mesh, batch)
    requests = [Request(tuple(prompts[i % len(prompts)]), seed=i) for i in range(num)]
    runs = {tree or "plain": programs.of(pair, tree, num) for tree in (None, *args.trees)}
    done: dict[str, list[dict[str, float]]] = {name: [] for name in runs}

    def one_round(name: str) -> float:
        run = runs[name].run(requests)
        steps = [len(completion.accepted) for completion in run.completions]
        tokens = sum(len(completion.tokens) - 1 for completion in run.completions)
        done[name].append({"prefill_ms": run.prefill_ms, "accept_length": tokens / sum(steps)})
        done[name][-1] |= {"step_ms": run.decode_ms / max(steps)}
        return 1e3 * tokens / run.decode_ms

    speeds = in_turn({name: functools.partial(one_round, name) for name in runs}, args.rounds)
    step_ms = {name: np.asarray([r["step_ms"] for r in rows[1:]]) for name, rows in done.items()}
    found: dict[str, Any] = {"batch": num}
    for name, speed in speeds.items():
        found[name] = {
            "tokens_per_s": Spread.of(speed).to_dict(),
            "times_plain": ratio(speed, speeds["plain"]).to_dict(),
            "step_ms": Spread.of(step_ms[name]).to_dict(),
            "break_even": ratio(step_ms[name], step_ms["plain"]).to_dict(),
            "accept_length": done[name][-1]["accept_length"],
            "prefill_ms": Spread.of([row["prefill_ms"] for row in done[name][1:]]).to_dict(),
            "compile_s": runs[name].compile_s,
        }
    return found


def print_sweep(name: str, found: Mapping[str, Any]) -> None:
    if "plain" not in found:
        print(f"sweep {name}: {json.dumps(common.rounded(dict(found)))}", flush=True)
        return
    print(f"sweep {name}: step ms, tokens/s, times plain, accept_length (break-even)")
    for tree, row in ((tree, row) for tree, row in found.items() if isinstance(row, dict)):
        figures = [row[key]["median"] for key in ("step_ms", "tokens_per_s", "times_plain")]
        even = row["break_even"]["median"]
        print(
            f"  {tree:10}{figures[0]:9.4g}{figures[1]:10.4g}{figures[2]:8.3g}"
            f"{row['accept_length']:8.3g} ({even:.3g})",
            flush=True,
        )


def held_bytes(tree: Any) -> list[int]:
    """Bytes of a tree that each device holds."""
    held: dict[int, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return list(held.values())


def peak_bytes() -> dict[str, int]:
    """The most that a device has held so far, where the runtime counts it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return {"peak_bytes": max(peaks)} if peaks else {}


def faults(figures: Mapping[str, Any]) -> Iterator[str]:
    """The names of what was wrong."""
    for stage in SECONDS:
        for name, found in figures.get(stage, {}).items():
            if not found.get("is_correct", True):
                yield f"{stage} {name}"


if __name__ == "__main__":
    sys.exit(main())
