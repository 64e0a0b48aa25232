"""Sends exact ids to a running SGLang or vLLM server, and writes a run file for `jaxspec compare`.

    jaxspec tokenize --prompt-file F --chat --json > ids.json
    python benchmarks/run_engine.py --backend sglang --base-url http://127.0.0.1:30000 \\
        --tokens ids.json --out sglang.jsonl [--max-new-tokens N] [--temperature T] [--seed S]
        [--ignore-eos] [--batch-size N] [--machine TEXT]

The ids are what `jaxspec tokenize` prints, with or without --json; with it, requests keep the ids
and categories of their prompts. A request's line is written once it is done. When the server is
gone or answers with an error, the message names its address, and the same command goes on later.

Acceptance is what the engine reports of each request. SGLang does, and a vLLM server that was
started with --per-request-spec-decode-metrics detailed. Another vLLM server counts for all requests
together: the lines then have no `accepted`, and what it counted meanwhile is printed. Ends with a
line of JSON.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from servers import SERVERS, Answer, Choice, Connection

from jaxspec.errors import InputError
from jaxspec.figures import ratio
from jaxspec.prompts import EncodedPrompt, encode_prompts, read_tokens
from jaxspec.run_comparison import read_run
from jaxspec.runfile import RunFile


def parser() -> argparse.ArgumentParser:
    """The flags; those of `jaxspec generate` mean the same here."""
    flags = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flags.add_argument("--backend", required=True, choices=sorted(SERVERS))
    flags.add_argument("--base-url", required=True, help="such as http://127.0.0.1:30000")
    flags.add_argument("--tokens", required=True, type=Path, help="ids, of `jaxspec tokenize`")
    flags.add_argument("--out", required=True, type=Path, help="the run file")
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    flags.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first prompt, counting up; SGLang has to have been started with "
        "--enable-deterministic-inference to obey it",
    )
    flags.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence")
    flags.add_argument("--batch-size", type=int, default=1, help="requests in flight at a time")
    flags.add_argument("--timeout", type=float, default=600.0, help="seconds without a word")
    flags.add_argument("--machine", help="what the server runs on: GPUs, driver, clocks")
    return flags


def main() -> None:
    args = parser().parse_args()
    try:
        found = run(args)
    except InputError as error:
        print(f"run_engine: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(found))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What was run, after every prompt has its line in the run file.

    Raises:
      InputError: a flag or a file cannot be used, or the server gave no answer; what it gave before
        is in the file.
    """
    if args.max_new_tokens < 1 or args.batch_size < 1 or args.temperature < 0:
        raise InputError(
            "--max-new-tokens and --batch-size start at 1, and --temperature at 0; given were "
            f"{args.max_new_tokens}, {args.batch_size} and {args.temperature}"
        )
    prompts = read_prompts(args.tokens)
    server = SERVERS[args.backend](Connection(args.base_url, args.timeout))
    version, started_with = server.describe()
    run_file = RunFile(args.out, _header(args, version, started_with))
    missing = [
        (index, prompt)
        for index, prompt in enumerate(prompts)
        if run_file.completion(prompt.id, prompt.ids) is None
    ]
    if started_with["prefix_cache"]:
        print(
            "run_engine: the server's prefix cache is on, and prompts with a common start cost it "
            "less: SGLang's --disable-radix-cache, vLLM's --no-enable-prefix-caching",
            file=sys.stderr,
        )

    def ask(numbered: tuple[int, EncodedPrompt]) -> Answer:
        index, prompt = numbered
        choice = Choice(args.max_new_tokens, args.temperature, args.ignore_eos, args.seed + index)
        try:
            return server.ask(prompt.ids, choice)
        except InputError as error:
            raise InputError(f"{prompt.where}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{prompt.where}: {args.base_url} does not answer as {args.backend} does, or is of "
                f"too old a version ({error!r})"
            ) from error

    before = server.counters()
    for (_, prompt), answer in answers(ask, missing, args.batch_size):
        run_file.append(entry(prompt, answer))
    counted = {name: value - before.get(name, 0.0) for name, value in server.counters().items()}
    return _summary(args.out, len(missing), counted)


def read_prompts(path: Path) -> list[EncodedPrompt]:
    """The ids in a file that `jaxspec tokenize` wrote.

    Raises:
      InputError: it is none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        found = None  # `read_tokens` says what is wrong with it
    if not isinstance(found, dict):
        return encode_prompts(read_tokens(path), None)
    prompts: dict[str, EncodedPrompt] = {}
    try:
        for one in found["prompts"]:
            name, ids = one["id"], one["ids"]
            if name in prompts or not ids or any(type(i) is not int for i in ids):
                raise InputError(f"{path}: prompt {name!r} is there twice, or has no ids")
            prompts[name] = EncodedPrompt(
                name, tuple(ids), one["category"], where=f"{path}, {name}"
            )
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not what `jaxspec tokenize --json` prints ({error!r})"
        ) from error
    return list(prompts.values())


def answers[T](
    ask: Callable[[T], Answer], prompts: Sequence[T], batch_size: int
) -> Iterator[tuple[T, Answer]]:
    """Each prompt with its answer, in the order in which they are done.

    Raises what the first failure raised, after the answers that were under way have come.
    """
    has_failed, failure = threading.Event(), None

    def turn(prompt: T) -> Answer | None:
        if has_failed.is_set():
            return None
        try:
            return ask(prompt)
        except BaseException:
            has_failed.set()
            raise

    pool = ThreadPoolExecutor(batch_size)
    try:
        futures = {pool.submit(turn, prompt): prompt for prompt in prompts}
        for future in as_completed(futures):
            error = future.exception()
            failure = failure or error
            if error is None and (answer := future.result()) is not None:
                yield futures[future], answer
    finally:
        pool.shutdown(cancel_futures=True)
    if failure is not None:
        raise failure


def entry(prompt: EncodedPrompt, answer: Answer) -> dict[str, Any]:
    """A request's line. What the server does not say of acceptance is not there."""
    optional = {
        "verify_steps": answer.verify_steps,
        "accepted": answer.accepted and list(answer.accepted),
        "accepted_from": answer.accepted_from,
        "reported": answer.reported or None,
    }
    return {
        "id": prompt.id,
        "category": prompt.category,
        "prompt_ids": list(prompt.ids),
        "output_ids": list(answer.tokens),
        "finish": answer.finish,
        "ttft_ms": answer.ttft_ms,
        "decode_ms": answer.decode_ms,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _header(args: argparse.Namespace, version: str, started_with: dict[str, Any]) -> dict[str, Any]:
    """The first line of the run file. No engine names the hash of its weights."""
    return {
        "engine": args.backend,
        "version": version,
        "flags": {
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "seed": args.seed,
            "stop": [],
            "ignore_eos": args.ignore_eos,
            "batch_size": args.batch_size,
            **started_with,
        },
        "target_hash": None,
        "draft_hash": None,
        "machine": args.machine,
    }


def _summary(path: Path, num_new: int, counted: dict[str, float]) -> dict[str, Any]:
    """The run in figures, told on stdout too; `counted` is of the server, whoever asked it."""
    header, entries = read_run(path)
    told = [one for one in entries.values() if one.accepted]
    steps = sum(len(one.accepted) for one in told)
    drafts = counted.get("num_drafts", 0.0)
    found = {
        "engine": header["engine"],
        "version": header["version"],
        "out": str(path),
        "num_requests": len(entries),
        "num_new": num_new,
        "num_with_acceptance": len(told),
        "accept_length": ratio(sum(len(one.output_ids) - 1 for one in told), steps),
        "counted_by_server": counted,
    }
    print(f"{path}: {len(entries)} requests, {num_new} of them new")
    if told:
        print(f"accept_length {found['accept_length']:.3f}, of {len(told)} requests")
    elif header["flags"]["tree"]:
        print("no acceptance: the server does not report it of single requests")
    if drafts and not told:
        mean = 1 + counted["num_accepted_tokens"] / drafts
        print(
            f"over all clients it counted {drafts:.0f} steps meanwhile, {mean:.3f} tokens each; "
            "started with --per-request-spec-decode-metrics detailed, it reports each request's"
        )
    return found


if __name__ == "__main__":
    main()
