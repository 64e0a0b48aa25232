"""The one script for a lent Hopper GPU: is everything right, and how fast is it? At most 8 minutes.

    python benchmarks/gpu.py [--minutes 8] [--out FOLDER]
    python benchmarks/gpu.py --dry-run                      all stages, small, on whatever is here

In this order: the machine and its target config (to replace jaxspec/h200.textproto); each kernel
against its reference; whole decoding, speculative and plain, with every implementation; the times
of kernels.py, the foremost cases first. What it knows is written after every stage, and a stage
that the time left does not suffice for is named instead.

jaxspec need not be installed: PYTHONPATH=. is enough where its dependencies are. If some are
missing and there is no network, unpack their wheels into a folder elsewhere (`pip install --target
wheels --no-deps beartype`) and name it too: PYTHONPATH=.:wheels.

Ends with a line of JSON, which is in gpu-DEVICE.json too. Exits with 1 if something was wrong.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_timing
import numpy as np
from flax import nnx
from jaxlib import xla_client
from ops import OPS, chosen

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    Numerics,
    Request,
    TreeConfig,
    load_draft,
    load_target,
)
from jaxspec.config import LlamaDraftConfig, RotaryConfig, TargetConfig
from jaxspec.contracts import Boundaries, TargetIds
from jaxspec.draft import Draft
from jaxspec.generator import implementations
from jaxspec.kernels.hopper import why_not_hopper
from jaxspec.mla import Pass
from jaxspec.target import Target

CORRECTNESS = {
    "mla_attention": ("8h-1t-4k", "64h-16t-4k", "ragged-8", "tree-23", "tree-128", "chunk-first"),
    "expert_matmul": ("eighth-1t", "eighth-8t", "eighth-17t", "shared-16t", "eighth-256t"),
}
"""Every tuning, lengths around a block, trees, a chunk; other kernels: their foremost three."""
CONTEXT = 128
NEW_TOKENS = 48
TREE = "3x4x16"
MAX_REGRET = {"float32": 0.02, "bfloat16": 0.25}
"""By which an emitted token's logit may miss the best one's, in standard deviations of the logits.
Rounding makes near-ties fall either way; a random token misses by about three."""
SECONDS = {"agreement": 15.0, "decoding": 60.0, "times": 20.0}
"""What a case of a stage takes about, compilation included: with less time left it is not begun."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What is done in one way of running.

    Attributes:
      agreement, times: (kernel, case's name, case) to check and to time.
      implementations: of the kernels; the first is what is measured.
      ceilings: the sizes with which they are measured.
      rotated_bytes, rounds: see kernel_timing.
      decodings: by name, what makes the models and how they are decoded.
    """

    agreement: Sequence[tuple[str, str, Any]]
    times: Sequence[tuple[str, str, Any]]
    implementations: Sequence[str]
    ceilings: tuple[int, int, int]
    rotated_bytes: int
    rounds: int
    decodings: Mapping[str, Callable[[], dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the files")
    parser.add_argument("--dry-run", action="store_true", help="small, and without a GPU")
    args = parser.parse_args()
    reason = why_not_hopper()
    if reason is not None and not args.dry_run:
        parser.error(f"{reason}; --dry-run goes through all stages")
    figures: dict[str, Any] = {"kind": "dry run; its times say nothing"} if args.dry_run else {}
    end = time.monotonic() + 60 * args.minutes
    device = jax.devices()[0].device_kind
    name = ("gpu-dry-run" if args.dry_run else f"gpu-{device}").lower().replace(" ", "-")
    for stage, found in stages(dry_run() if args.dry_run else full_run(), end, args.out):
        figures[stage] = found
        path = common.write_result(name, figures, args.out)
        print(f"-- {stage}: {end - time.monotonic():.0f} s left", file=sys.stderr)
    wrong = list(faults(figures))
    figures["wrong"], figures["is_correct"] = wrong, not wrong
    print(json.dumps(json.loads(common.write_result(path.stem, figures, args.out).read_text())))
    return 1 if wrong else 0


def full_run() -> Run:
    """Everything, on a Hopper GPU."""
    checks = [
        (op, name, OPS[op].cases[name])
        for op in OPS
        for name in CORRECTNESS.get(op, OPS[op].foremost[:3])
    ]
    times = [(op, name, OPS[op].cases[name]) for op, name in chosen(None, quick=False)]
    decodings = {
        "shipped, float32, xla": lambda: shipped("float32", "xla"),
        "shipped, bfloat16, best": lambda: shipped("bfloat16", None),
        "random, bfloat16, mosaic": lambda: random_pair("mosaic"),
        "random, bfloat16, xla": lambda: random_pair("xla"),
    }
    rotated = kernel_timing.ROTATED_BYTES
    return Run(checks, times, ("mosaic", "xla"), (2**31, 8192, 20), rotated, 7, decodings)


def dry_run() -> Run:
    """A small case of each, in plain XLA."""
    small = [(op, "small", OPS[op].small) for op in OPS]
    decodings = {"shipped, float32, best": lambda: shipped("float32", None, 1, new_tokens=8)}
    return Run(small, small, ("xla",), (2**20, 64, 2), 10**6, 1, decodings)


def stages(run: Run, end: float, folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, what was found) of each stage; those that grow are given again and again."""
    yield "gpu", machine(folder)
    for stage, todo in (
        ("agreement", {f"{op}/{name}": (op, case) for op, name, case in run.agreement}),
        ("decoding", run.decodings),
    ):
        found: dict[str, Any] = {}
        for name, what in todo.items():
            found[name] = common.attempt(
                SECONDS[stage], end, what if callable(what) else lambda what=what: check(*what, run)
            )
            print(f"{stage:12}{name:34}{json.dumps(common.rounded(found[name]))}", flush=True)
            yield stage, found
    ceilings = kernel_timing.measure_ceilings(*run.ceilings)
    overhead = {"harness_us": kernel_timing.harness_us()}
    yield "ceilings", kernel_timing.ceilings_to_dict(ceilings) | overhead
    kernel_timing.print_ceilings(kernel_timing.ceilings_to_dict(ceilings) | overhead)
    kernel_timing.print_header()
    cases: list[dict[str, Any]] = []
    for op, name, case in run.times:
        described = kernel_timing.described(op, name, case, ceilings)
        measured = common.attempt(
            SECONDS["times"],
            end,
            lambda op=op, name=name, case=case: kernel_timing.measure(
                name, case, op, ceilings, run.rounds, run.implementations, run.rotated_bytes
            ),
        )
        cases.append(described | measured)
        if "why_not" not in measured:
            kernel_timing.print_case(cases[-1])
        yield "times", cases


def faults(figures: Mapping[str, Any]) -> Iterator[str]:
    """The names of what was wrong."""
    for stage in ("agreement", "decoding"):
        for name, found in figures.get(stage, {}).items():
            if not found.get("is_correct", True):
                yield f"{stage} {name}"
    for case in figures.get("times", []):
        if not case.get("is_correct", True):
            yield f"times {case['kernel']}/{case['case']}"


def machine(folder: Path) -> dict[str, Any]:
    """The device; and its target config, from which programs are compiled where it is not."""
    device = jax.devices()[0]
    found: dict[str, Any] = {"device": device.device_kind, "platform": device.platform}
    found["runtime"] = device.client.platform_version.strip()
    try:
        config = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
    except Exception as error:  # what is raised differs between platforms
        return found | {"why_no_target_config": f"{type(error).__name__}: {error}"[:200]}
    name = device.device_kind.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"target_config-{name}.textproto"
    path.write_text(config)
    return found | {"target_config": path.name}


def check(op: str, case: Any, run: Run) -> dict[str, Any]:
    """A kernel's distance from its reference in the implementation that matters."""
    implementation = run.implementations[0]
    layers = min(2, kernel_timing.layers_of(OPS[op], OPS[op].work(case), run.rotated_bytes))
    arguments = OPS[op].arguments(case, layers)
    found = kernel_timing.checked(OPS[op], arguments, implementation)
    return {
        "implementation": implementation,
        "is_correct": found.holds,
        **kernel_timing.to_dict(found),
    }


def shipped(
    dtype: Any, implementation: Any, num_prompts: int = 8, new_tokens: int = NEW_TOKENS
) -> dict[str, Any]:
    """Decoding with the shipped pair. Its attention is too narrow for the Mosaic kernel."""
    numerics = Numerics(dtype=dtype, implementation=implementation)
    target = load_target(SHIPPED_TARGET, numerics)
    draft = load_draft(SHIPPED_DRAFT, numerics, target=target)
    judge = load_target(SHIPPED_TARGET, dataclasses.replace(numerics, implementation="xla"))
    prompts = [ids[: CONTEXT // 2] for ids in common.held_out_prompts("evaluation")[:num_prompts]]
    return decoded(target, draft, judge, prompts, TREE, new_tokens)


def random_pair(implementation: Any) -> dict[str, Any]:
    """Decoding with random weights at the widths that the Mosaic kernels take."""
    numerics = Numerics(dtype="bfloat16", implementation=implementation)
    target, draft = random_target(numerics), random_draft(numerics)
    judge = random_target(dataclasses.replace(numerics, implementation="xla"))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, target.config.vocab_size, n).tolist() for n in (1, 7, 40, 64)]
    return decoded(target, draft, judge, prompts, TREE, NEW_TOKENS)


def random_target(numerics: Numerics) -> Target:
    """Three layers of Kimi-K2.5's kind: its latent widths, 8 heads, 32 experts."""
    config = TargetConfig(
        vocab_size=2048,
        hidden_size=1024,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=8,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=1024,
        moe_intermediate_size=256,
        n_routed_experts=32,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        norm_topk_prob=True,
        rms_norm_eps=1e-5,
        latent_norm_eps=1e-5,
        max_position_embeddings=4096,
        rotary=RotaryConfig(64, 50000.0, "pairs"),
        num_bits=4,
        eos_token_ids=(0,),
    )
    return _initialised(lambda: Target(config, numerics, "random", nnx.Rngs(0)))


def random_draft(numerics: Numerics) -> Draft:
    """A draft of `random_target`, which it does not foresee at all: its trees are what counts."""
    claim = Boundaries("random", (1, 2, 3), 1024, "benchmarks/gpu.py")
    config = LlamaDraftConfig(
        vocab_size=2048,
        draft_vocab_size=2048,
        hidden_size=1024,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        norm_before_residual=False,
        rotary=RotaryConfig(128, 50000.0, "halves"),
        boundaries=claim,
        has_embedding=False,
        has_head=False,
    )
    return _initialised(lambda: Draft(config, numerics, nnx.Rngs(1)))


def _initialised(make: Callable[[], Any]) -> Any:
    """The module, all its parameters drawn by one program."""
    graph, _ = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, jax.jit(lambda: nnx.split(make())[1])())


def decoded(
    target: Target,
    draft: Draft,
    judge: Target,
    prompts: Sequence[Sequence[int]],
    tree: str,
    new_tokens: int,
) -> dict[str, Any]:
    """Is greedy decoding, with a tree and without, what `judge` says in one pass over the text?

    Every emitted token is judged, so a near-tie, after which two texts differ, hides nothing.
    """
    requests = [Request(tuple(ids)) for ids in prompts]
    found: dict[str, Any] = {}
    tokens = {}
    for kind, shape in (("plain", None), ("speculative", TreeConfig.parse(tree))):
        config = GenerateConfig(
            tree=shape,
            max_new_tokens=new_tokens,
            context_length=CONTEXT,
            batch_size=len(prompts),
            prefill_chunk=16,
            ignore_eos=True,
        )
        generator = Generator(target, draft if shape else None, config)
        completions = generator.run(requests).completions
        tokens[kind] = [done.tokens for done in completions]
        regret = regrets(judge, prompts, tokens[kind])
        found[f"{kind}_regret"] = float(regret.max()) if np.isfinite(regret).all() else None
        found[f"{kind}_implementations"] = implementations(target, config)
    steps = sum(len(done.accepted) for done in completions)
    found["accept_length"] = sum(len(done.tokens) - 1 for done in completions) / steps
    found["num_tokens"] = sum(map(len, tokens["speculative"]))
    found["num_equal"] = sum(
        agreed(*pair) for pair in zip(tokens["plain"], tokens["speculative"], strict=True)
    )
    limit = MAX_REGRET[target.numerics.dtype]
    worst = [found["plain_regret"], found["speculative_regret"]]
    found["is_correct"] = all(regret is not None and regret <= limit for regret in worst)
    return found


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def regrets(
    judge: Target, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> np.ndarray:
    """By how much each emitted token's logit misses the best one, in standard deviations."""
    texts = [[*ids, *new] for ids, new in zip(prompts, completions, strict=True)]
    width = math.ceil(max(map(len, texts)) / 16) * 16
    ids_BT = np.zeros((len(texts), width), np.int32)
    for b, text in enumerate(texts):
        ids_BT[b, : len(text)] = text
    graph, params = nnx.split(judge)

    @jax.jit
    def run(params: Any, ids_BT: jax.Array) -> jax.Array:
        judge = nnx.merge(graph, params)
        batch, width = ids_BT.shape
        pos_BT = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
        at = Pass(pos_BT, jnp.zeros((batch,), jnp.int32))
        cache = judge.empty_cache(batch, 64)
        seen = judge(TargetIds(ids_BT, judge.config.vocab_size), at, cache, None)
        logits_BTV = judge.logits(seen.hidden)
        next_BT1 = jnp.roll(ids_BT, -1, axis=1)[:, :, None]
        chosen_BT = jnp.take_along_axis(logits_BTV, next_BT1, axis=-1)[:, :, 0]
        return (logits_BTV.max(-1) - chosen_BT) / logits_BTV.std(-1)

    regret_BT = np.asarray(run(params, jnp.asarray(ids_BT)))
    return np.concatenate(
        [
            regret_BT[b, len(ids) - 1 : len(text) - 1]
            for b, (ids, text) in enumerate(zip(prompts, texts, strict=True))
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
