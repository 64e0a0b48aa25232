"""Times decoding with the shipped pair, everything in pairs and in one run.

    python benchmarks/generate.py [--reference-python PYTHON] [--rounds 15] [--only transformers]

- verify(T), one target pass over T tokens and the choice after each, against T = 1;
- a step with every tree, against a plain decode step;
- tokens per second with a draft against `--draft none`, greedy and at temperature 0.8;
- `--draft none` against transformers' own greedy generation in f32, with one thread and with as
  many as torch takes, if the Python of its environment (benchmarks/reference_env/) is given.

Prints a table of each, writes results/generate.json, and ends with that object on one line.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, in_turn, ratio, seconds
from flax import nnx
from jax import lax

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
from jaxspec.contracts import TargetIds
from jaxspec.draft import Draft
from jaxspec.mla import Pass
from jaxspec.sampling import Sampling, choose
from jaxspec.step import (
    NUM_STOP_IDS,
    Admission,
    Settings,
    State,
    compiler_options,
    decode,
    empty_state,
    prefill,
)
from jaxspec.target import Target

TREES = ("1x1x2", "2x1x3", "3x1x4", "3x4x16")
VERIFY_TOKENS = (1, 2, 3, 4, 8, 16, 32)
TEMPERATURES = {"greedy": 0.0, "sampled at 0.8": 0.8}
CONTEXT = 256
NEW_TOKENS = 64
NUM_PROMPTS = 8
STEPS = 24
"""Steps, or passes, in one timed call, so that the call's own cost does not matter."""
REFERENCE_PROGRAM = Path(__file__).parent / "reference_env" / "time_greedy.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reference-python", help="of the reference environment")
    parser.add_argument("--rounds", type=int, default=15, help="of every comparison")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--only", choices=["transformers"], help="default: everything")
    args = parser.parse_args()
    if args.only and not args.reference_python:
        parser.error("--only transformers wants --reference-python")
    numerics = Numerics(dtype=args.dtype)
    target = load_target(SHIPPED_TARGET, numerics)
    draft = load_draft(SHIPPED_DRAFT, numerics, target=target)
    prompts = common.held_out_prompts("evaluation")[:NUM_PROMPTS]
    batch, rounds = args.batch_size, args.rounds
    figures: dict[str, Any] = {
        "target": target.identity,
        "draft": draft.identity,
        "dtype": args.dtype,
        "batch_size": batch,
        "rounds": rounds,
        "load_before": os.getloadavg()[0],
    }
    if not args.only:
        figures |= decoding(target, draft, prompts, batch, rounds)
    if args.reference_python:
        plain = generator(target, draft, batch, None)
        figures["transformers"] = against_transformers(
            plain, prompts, args.reference_python, rounds
        )
    figures["load_after"] = os.getloadavg()[0]
    parts = ["generate"] + [args.only] * bool(args.only)
    if (args.dtype, batch) != ("float32", 1):
        parts += [args.dtype, str(batch)]
    print(json.dumps(json.loads(common.write_result("-".join(parts), figures).read_text())))


def decoding(
    target: Target, draft: Draft, prompts: Sequence[Sequence[int]], batch: int, rounds: int
) -> dict[str, Any]:
    """jaxspec against itself: passes, steps, and tokens per second."""
    took = in_turn({f"T={t}": verify(target, batch, t) for t in VERIFY_TOKENS}, rounds)
    figures = {"verify": compared("target pass over T tokens, ms", took, 1e3 / STEPS)}
    took = in_turn(
        {str(tree): steps(target, draft, prompts[0], batch, tree) for tree in (None, *TREES)},
        rounds,
    )
    figures["step"] = compared("step, ms", took, 1e3 / STEPS)
    runs = {tree: generator(target, draft, batch, tree) for tree in (None, *TREES)}
    for name, temperature in TEMPERATURES.items():
        requests = [Request(tuple(ids), temperature, seed=seed) for seed, ids in enumerate(prompts)]
        speeds = {
            str(tree): functools.partial(decoded_per_s, runs[tree], requests) for tree in runs
        }
        title = f"tokens per second of decoding, {name}"
        figures[name] = compared(title, in_turn(speeds, rounds))
        for tree in TREES:
            figures[name][tree]["accept_length"] = accept_length(runs[tree], requests)
    return figures


def against_transformers(
    plain: Generator, prompts: Sequence[Sequence[int]], python: str, rounds: int
) -> dict[str, Any]:
    """Plain greedy generation by both, in turn."""
    requests = [Request(tuple(ids)) for ids in prompts]
    with (
        reference(python, prompts, "1") as one_thread,
        reference(python, prompts, "default") as default_threads,
    ):
        speeds = {
            "transformers, 1 thread": one_thread,
            "transformers": default_threads,
            "jaxspec": functools.partial(generated_per_s, plain, requests),
        }
        title = "tokens per second of greedy generation, prefill included"
        return compared(title, in_turn(speeds, rounds))


def compared(title: str, figures: dict[str, np.ndarray], unit: float = 1.0) -> dict[str, Any]:
    """Every program's figure and its ratio to the first one's, printed as a table."""
    first = next(iter(figures.values()))
    print(f"\n{title}: median (10 % to 90 %), and the ratio to the first")
    found = {}
    for name, values in figures.items():
        value, against = Spread.of(values * unit), ratio(values, first)
        print(f"  {name:24}{value!s:28}{against}")
        found[name] = {"value": value.to_dict(), "ratio": against.to_dict()}
    return found


def verify(target: Target, batch: int, num_tokens: int) -> Callable[[], float]:
    """Times STEPS passes over `num_tokens` tokens of every sequence, half the context cached."""
    graph, params = nnx.split(target)
    vocab_size = target.config.vocab_size
    row_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
    length_B = jnp.full((batch,), CONTEXT // 2, jnp.int32)
    apart_BT = 37 * row_BT
    greedy = Sampling.of(batch)

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def run(params, cache):
        target = nnx.merge(graph, params)

        def one(_, ids_BT):
            at = Pass(length_B[:, None] + row_BT, length_B)
            seen = target(TargetIds(ids_BT, vocab_size), at, cache, None)
            logits = target.logits(seen.hidden)
            chosen_BT = choose(logits, row_BT, length_B, greedy, levels=num_tokens - 1)
            # What this pass chose decides what the next one reads, so none starts before its turn;
            # and all rows differ, as a tree's do, or they would share their experts.
            return (chosen_BT[:, :1] + apart_BT) % vocab_size

        return lax.fori_loop(0, STEPS, one, apart_BT)

    cache = target.empty_cache(batch, CONTEXT)
    return lambda: seconds(run, params, cache)


def steps(
    target: Target, draft: Draft, prompt: Sequence[int], batch: int, tree: str | None
) -> Callable[[], float]:
    """Times STEPS steps after the same prompt in every place; no tree is plain decoding."""
    capture = target.boundaries(draft.config.boundaries.ids, "benchmark") if tree else None
    settings = Settings(tree and TreeConfig.parse(tree), capture, chunk=16)
    graph, params = nnx.split((target, draft if tree else None))

    @jax.jit
    def admit(params) -> State:
        target, draft = nnx.merge(graph, params)
        state = empty_state(target, draft, batch, CONTEXT)
        return prefill(target, draft, state, _admission(prompt, batch), settings)

    @functools.partial(
        jax.jit, donate_argnums=1, compiler_options=compiler_options(jax.default_backend())
    )
    def run(params, state: State) -> State:
        return decode(*nnx.merge(graph, params), state, jnp.int32(STEPS), settings)

    start = admit(params)

    def timed() -> float:
        state = jax.block_until_ready(jax.tree.map(jnp.copy, start))
        return seconds(run, params, state)

    return timed


def generator(target: Target, draft: Draft, batch: int, tree: str | None) -> Generator:
    config = GenerateConfig(
        tree=tree and TreeConfig.parse(tree),
        max_new_tokens=NEW_TOKENS,
        context_length=CONTEXT,
        batch_size=batch,
        prefill_chunk=16,
        ignore_eos=True,
    )
    return Generator(target, draft if tree else None, config)


def decoded_per_s(generator: Generator, requests: Sequence[Request]) -> float:
    """Tokens that steps gave, per second of decoding."""
    run = generator.run(requests)
    return 1e3 * sum(len(done.tokens) - 1 for done in run.completions) / run.decode_ms


def generated_per_s(generator: Generator, requests: Sequence[Request]) -> float:
    """All new tokens per second, prefill and decoding."""
    run = generator.run(requests)
    took_ms = run.prefill_ms + run.decode_ms
    return 1e3 * sum(len(done.tokens) for done in run.completions) / took_ms


def accept_length(generator: Generator, requests: Sequence[Request]) -> float:
    """Tokens emitted by steps per step, bonus included."""
    completions = generator.run(requests).completions
    emitted = sum(len(done.tokens) - 1 for done in completions)
    return round(emitted / sum(len(done.accepted) for done in completions), 3)


@contextlib.contextmanager
def reference(
    python: str, prompts: Sequence[Sequence[int]], threads: str
) -> Iterator[Callable[[], float]]:
    """transformers in a process of its own, waiting: each call is one round, in tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps([list(ids) for ids in prompts]))
        command = [python, REFERENCE_PROGRAM, SHIPPED_TARGET, "--tokens", tokens]
        command += ["--max-new-tokens", str(NEW_TOKENS), "--threads", threads]
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def one_round() -> float:
            process.stdin.write("go\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{REFERENCE_PROGRAM.name} ended with {process.wait()}")
            return json.loads(line)["tokens_per_s"]

        yield one_round
        process.stdin.close()
        process.wait()


def _admission(prompt: Sequence[int], batch: int) -> Admission:
    padded = jnp.zeros((batch, CONTEXT), jnp.int32).at[:, : len(prompt)].set(jnp.asarray(prompt))
    room = jnp.full((batch,), CONTEXT - len(prompt), jnp.int32)
    length = jnp.full((batch,), len(prompt), jnp.int32)
    no_stop = jnp.full((batch, NUM_STOP_IDS), -1)
    return Admission(jnp.ones(batch, bool), padded, length, room, no_stop, Sampling.of(batch))


if __name__ == "__main__":
    main()
