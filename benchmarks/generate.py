"""Timers of decoding with the shipped pair: passes, steps, tokens per second, and transformers.

Everything is in pairs: programs take turns, and ratios are taken round by round (`common.py`).
`benchmarks/suite.py` is the program that runs them.
"""

import contextlib
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, copying, in_turn, ratio, seconds
from flax import nnx
from jax import lax

from jaxspec import SHIPPED_TARGET, GenerateConfig, Generator, Request, TreeConfig
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
from jaxspec.traffic import StepShape, work_of_step

TEMPERATURES = {"greedy": 0.0, "sampled at 0.8": 0.8}
CONTEXT = 256
NEW_TOKENS = 64
STEPS = 24
"""Steps, or passes, in one timed call, so that the call's own cost does not matter."""
REFERENCE_PROGRAM = Path(__file__).parent / "reference_env" / "time_greedy.py"


def passes(target: Target, num_tokens: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of one target pass over so many tokens, against the first number's."""
    took = in_turn({f"T={t}": verify(target, 1, t) for t in num_tokens}, rounds)
    return compared("target pass over T tokens, ms", took, 1e3 / STEPS)


def steps_and_floors(
    target: Target, draft: Draft, prompt: Sequence[int], trees: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Milliseconds of a step with each tree and of plain decoding, and of reading what it has to.

    The bandwidth of memory takes its turn in each round, so that a step and its floor are of the
    same moment.
    """
    ways = (None, *trees)
    programs = {str(tree): steps(target, draft, prompt, 1, tree) for tree in ways}
    took = in_turn({**programs, "copy": copying()}, rounds)
    bytes_per_s = took.pop("copy")
    found = compared("step, ms", took, 1e3 / STEPS)
    for tree in ways:
        # The prompt is what is cached at least.
        shape = StepShape(tree and TreeConfig.parse(tree), 1, len(prompt))
        work = work_of_step(target, draft if tree else None, shape)
        num_bytes = sum(part.num_bytes for part in work.values())
        floor = num_bytes / bytes_per_s
        found[str(tree)] |= {
            "num_bytes": num_bytes,
            "floor_ms": Spread.of(1e3 * floor).to_dict(),
            "times_floor": ratio(took[str(tree)] / STEPS, floor).to_dict(),
        }
    return {"copy_gb_per_s": Spread.of(bytes_per_s / 1e9).to_dict(), "steps": found}


def speeds(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[str],
    rounds: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Tokens per second of decoding with each tree against plain decoding, and what it accepted."""
    figures = {}
    runs = {tree: generator(target, draft, 1, tree, new_tokens) for tree in (None, *trees)}
    for name, temperature in TEMPERATURES.items():
        requests = [Request(tuple(ids), temperature, seed=seed) for seed, ids in enumerate(prompts)]
        speeds = {
            str(tree): functools.partial(decoded_per_s, runs[tree], requests) for tree in runs
        }
        title = f"tokens per second of decoding, {name}"
        figures[name] = compared(title, in_turn(speeds, rounds))
        for tree in trees:
            figures[name][tree]["accept_length"] = accept_length(runs[tree], requests)
    return figures


def against_transformers(
    plain: Generator, prompts: Sequence[Sequence[int]], python: str, rounds: int
) -> dict[str, Any]:
    """Plain greedy generation by both, in turn; the ratio is to the faster of transformers' two."""
    requests = [Request(tuple(ids)) for ids in prompts]
    new_tokens = plain.config.max_new_tokens
    with (
        reference(python, prompts, "1", new_tokens) as one_thread,
        reference(python, prompts, "default", new_tokens) as default_threads,
    ):
        speeds = {
            "transformers, 1 thread": one_thread,
            "transformers": default_threads,
            "jaxspec": functools.partial(generated_per_s, plain, requests),
        }
        took = in_turn(speeds, rounds)
    best = np.maximum(took["transformers, 1 thread"], took["transformers"])
    found = compared("tokens per second of greedy generation, prefill included", took)
    return found | {"times_transformers": ratio(took["jaxspec"], best).to_dict()}


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
        return prefill(target, draft, state, admission(prompt, batch, CONTEXT), settings)

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


def generator(
    target: Target, draft: Draft, batch: int, tree: str | None, new_tokens: int = NEW_TOKENS
) -> Generator:
    config = GenerateConfig(
        tree=tree and TreeConfig.parse(tree),
        max_new_tokens=new_tokens,
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
    python: str, prompts: Sequence[Sequence[int]], threads: str, new_tokens: int
) -> Iterator[Callable[[], float]]:
    """transformers in a process of its own, waiting: each call is one round, in tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps([list(ids) for ids in prompts]))
        command = [python, REFERENCE_PROGRAM, SHIPPED_TARGET, "--tokens", tokens]
        command += ["--max-new-tokens", str(new_tokens), "--threads", threads]
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

        try:
            yield one_round
        finally:
            process.stdin.close()
            process.wait()


def admission(prompt: Sequence[int], batch: int, slots: int) -> Admission:
    """The same prompt in every place."""
    padded = jnp.zeros((batch, slots), jnp.int32).at[:, : len(prompt)].set(jnp.asarray(prompt))
    room = jnp.full((batch,), slots - len(prompt), jnp.int32)
    length = jnp.full((batch,), len(prompt), jnp.int32)
    no_stop = jnp.full((batch, NUM_STOP_IDS), -1)
    return Admission(jnp.ones(batch, bool), padded, length, room, no_stop, Sampling.of(batch))
