"""Writes the figures of README.md, and the list of results and the table of what others publish in
benchmarks/README.md, from the JSON files in results/.

    python benchmarks/front_page.py [--check]

What it writes stands between two markers, and nothing else of the pages is touched. With --check it
writes nothing, and exits with 1 if a page says something else than the files do.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import published

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
WIDTH = 100
TREE, LARGE_TREE = "3x1x4", "3x4x16"
BATCH = 8
"""Of the plan whose figures stand on the front page."""
ACCEPT_LENGTH = 3
"""What public drafts of Kimi-K2.5 report, about (benchmarks/README.md)."""


Row = tuple[str, str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1: changed"
    )
    args = parser.parse_args()
    changed = [page for page in PAGES if made(page) != page.read_text("utf-8")]
    for page in changed:
        if args.check:
            print(f"{page.relative_to(ROOT)} is not what the files in benchmarks/results say: "
                  "run python benchmarks/front_page.py")  # fmt: skip
        else:
            page.write_text(made(page), "utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if args.check and changed else 0


def made(page: Path) -> str:
    """A page, its blocks as the results have them.

    Raises:
      ValueError: a block's markers are not there, once each.
    """
    text = page.read_text("utf-8")
    for name, block in PAGES[page].items():
        begin, end = f"<!-- {name}: by benchmarks/front_page.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{page.name} wants {begin} and, after it, {end}, once")
        between = f"{begin}\n\n{block()}\n\n{end}"
        text = pattern.sub(lambda _, between=between: between, text)
    return text


def figures() -> str:
    """The table of the front page: what is measured and what is predicted, each in a column."""
    mini, suite, plan = read("mini"), read("suite-cpu"), read("plan_h200")
    case = next(case for case in plan["cases"] if case["batch_size"] == BATCH)
    sampled, thousands = mini[TREE]["sampled"], case["context_length"] // 1024
    header = (
        "",
        f"measured: the shipped pair, {suite['dtype']}, CPU",
        f"predicted: Kimi-K2.5, bfloat16, mesh {case['mesh']} of "
        f"{case['device'].removeprefix('NVIDIA ')}s, batch {BATCH}, {thousands}k tokens",
    )
    accepted = f"{with_error(sampled['accept_length'])} of 4"
    ceiling = f"{sampled['accept_ceiling']['value']:.2f}"
    rows = [
        (f"`accept_length`, tree {TREE}, sampled at 0.8", accepted, "wants the weights"),
        ("the same of a draft that knew the target", ceiling, ""),
        *steps(suite, case),
        *speeds(suite),
    ]
    where = (
        f"Measured on {machine(suite)}: [`suite-cpu.json`](benchmarks/results/suite-cpu.json) "
        f"({suite['date']}, load {suite['load_before']:.1f} before; medians, and what a tenth of "
        "the rounds lies below and above) and [`mini.json`](benchmarks/results/mini.json) "
        f"({mini['date']}). Predicted: [`plan_h200.json`](benchmarks/results/plan_h200.json) "
        f"({plan['date']}). What each is: [`benchmarks/README.md`](benchmarks/README.md)."
    )
    return f"{table(header, rows)}\n\n{wrapped(where)}"


def steps(suite: dict[str, Any], case: dict[str, Any]) -> Iterator[Row]:
    """What a tree costs, and from which acceptance on it pays."""
    pays = {tree["tree"]: tree["break_even_accept_length"] for tree in case["speculative"]}
    for tree in (TREE, LARGE_TREE):
        yield (
            f"`accept_length` above which tree {tree} pays",
            measured(suite, "step", lambda part, tree=tree: pays_above(part, tree)),
            f"{pays[tree]:.2f}",
        )
    yield (
        f"tokens per second over plain decoding's, tree {TREE}, sampled",
        measured(suite, "speed", lambda part: spread(part["sampled at 0.8"][TREE]["ratio"])),
        f"{ACCEPT_LENGTH / pays[TREE]:.2f} at an `accept_length` of {ACCEPT_LENGTH}",
    )
    yield (
        "a step of plain decoding",
        measured(suite, "step", lambda part: f"{spread(part['steps']['None']['value'])} ms"),
        f"{case['autoregressive']['step_ms']:.1f} ms",
    )


def pays_above(part: dict[str, Any], tree: str) -> str:
    """An accept_length, and whether there is none so large."""
    ratio, most = part["steps"][tree]["ratio"], int(tree.split("x")[0]) + 1
    return f"{spread(ratio)}{f': never, at most {most}' * (ratio['median'] > most)}"


def speeds(suite: dict[str, Any]) -> Iterator[Row]:
    """What is measured, and not predicted."""
    for label, part, say in (
        (
            "that step over the time to read its weights at a copy's bandwidth",
            "step",
            lambda part: spread(part["steps"]["None"]["times_floor"]),
        ),
        (
            "a pass over 4 tokens, each with its own 2 of 16 experts, over one's",
            "verify",
            lambda part: spread(part["T=4"]["ratio"]),
        ),
        (
            "plain greedy decoding over transformers'",
            "transformers",
            lambda part: spread(part["times_transformers"]),
        ),
        (
            "`jaxspec generate`, 16 tokens, nothing compiled before",
            "start",
            lambda part: f"{spread(part[TREE]['cold']['wall_s'])} s",
        ),
        (
            "the same again, from its compile cache",
            "start",
            lambda part: f"{spread(part[TREE]['warm']['wall_s'])} s",
        ),
    ):
        yield label, measured(suite, part, say), ""


def measured(suite: dict[str, Any], name: str, say: Callable[[dict[str, Any]], str]) -> str:
    """What a part of the suite says, or why it says nothing."""
    part = suite["parts"].get(name, {"why_not": "not asked for"})
    reason = part.get("why_not") or part.get("error")
    return f"not measured: {reason}" if reason else say(part)


def story() -> str:
    """What the founding story's mistakes cost."""
    one = read("founding_story")
    told = {name: stage["accept_length"] for name, stage in one["story"].items()}
    return wrapped(
        "What it costs where nothing checks, "
        "[measured](benchmarks/results/founding_story.png) with this pair on CPU by "
        f"`benchmarks/founding_story.py`: accept_length {told['the right boundaries']:.2f} becomes "
        f"{told['one state instead of three']:.2f} with one state in place of three, "
        f"{told['boundaries one too early']:.2f} with boundaries one too early, "
        f"{told['boundaries one too late']:.2f} with boundaries one too late, and "
        f"{told['the embedding in place of a layer']:.2f} with the embedding in place of the first."
    )


def pair() -> str:
    """Acceptance of the shipped pair."""
    mini = read("mini")
    trees, text = [mini[tree] for tree in (TREE, LARGE_TREE)], mini["held_out_text"]
    rows = [
        (
            f"`accept_length`, sampled at {mini['temperature']}",
            *(f"{with_error(tree['sampled']['accept_length'])} of 4" for tree in trees),
        ),
        ("its ceiling", *(f"{tree['sampled']['accept_ceiling']['value']:.2f}" for tree in trees)),
        (
            "greedy, before a loop begins",
            *(f"{tree['greedy']['accept_length_before_a_loop']['value']:.2f}" for tree in trees),
        ),
        (
            "greedy prompts that loop",
            *(f"{100 * tree['greedy']['looping_share']:.0f} %" for tree in trees),
        ),
    ]
    before = (
        f"The shipped pair, measured on {machine(mini)} with `{mini['command']}` "
        f"({mini['date']}; {mini['num_prompts']} held-out prompts, {mini['num_seeds']} seeds, all "
        "in [`benchmarks/results/mini.json`](benchmarks/results/mini.json)):"
    )
    after = (
        "On held-out text, the true tokens before each guess, the target's loss is "
        f"{text['nats_per_token']:.2f} nats a token, {text['bits_per_character']:.2f} bits a "
        "character, and the draft's guess:"
    )

    def shares(name: str) -> list[str]:
        return [f"{100 * share:.1f} %" for share in text[name]]

    def chances(name: str) -> list[str]:
        return [f"{chance:.2f}" for chance in text[name]]

    at = f"sampled at {mini['temperature']}"
    guesses = [
        ("is the target's likeliest token", *shares("top1_agreement")),
        (f"is accepted, {at}, with probability", *chances("accepted")),
        ("where no guess could exceed", *chances("ceiling")),
        ("which is a share of", *shares("share_of_ceiling")),
    ]
    header = ("", f"tree {TREE}", f"tree {LARGE_TREE}")
    depths = [f"depth {depth}" for depth in range(1, len(text["accepted"]) + 1)]
    of_depths = table(("", *depths), guesses)
    return f"{wrapped(before)}\n\n{table(header, rows)}\n\n{wrapped(after)}\n\n{of_depths}"


def sweep() -> str:
    """Whether speculation pays here, by the trees that are fastest."""
    suite = read("suite-cpu")

    def say(part: dict[str, Any]) -> str:
        told = "; ".join(
            f"at batch {batch['batch_size']}, {batch['best']} is the fastest, and decodes "
            f"{interval(batch['whole'])} times as fast as plain decoding"
            for batch in part["batches"]
        )
        return (
            f"Of {part['num_trees']} trees, over whole greedy texts of the shipped pair: {told} "
            f"(`{part['command']}` on {machine(suite)}, {suite['date']})."
        )

    return wrapped(measured(suite, "sweep", say))


def results() -> str:
    """Every file of results: what it is, and what it was made with, on what and when."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        one = json.loads(path.read_text())
        if "command" not in one:
            continue  # quoted from others: `published` makes a table of it
        load = f"{one['load_before']:.1f}" if "load_before" in one else ""
        command = f"`{one['command'].removeprefix('python benchmarks/')}`"
        file = f"[`{path.name}`](results/{path.name})"
        jax = one["versions"]["jax"]
        rows.append((file, one["kind"], command, one["date"], machine(one), jax, load))
    header = ("file", "kind", "command", "date", "machine", "jax", "load before")
    return table(header, rows)


def of_others() -> str:
    """What others publish of Kimi's drafts."""
    return published.page(read("published")["drafts"])


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def machine(one: dict[str, Any]) -> str:
    return one["machine"].replace(", 1 x cpu", "")


def with_error(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} +- {value['standard_error']:.2f}"


def spread(value: dict[str, float]) -> str:
    """Median, and the 10 % and 90 % quantiles."""
    return "{median:.3g} ({low:.3g} to {high:.3g})".format(**value)


def interval(value: dict[str, Any]) -> str:
    """A value, and where 95 % of the resampled ones lie."""
    return "{:.2f} ({:.2f} to {:.2f})".format(value["value"], *value["interval"])


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def wrapped(text: str) -> str:
    """Lines; what stands between backquotes stays on one."""
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(kept, WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"figures": figures, "story": story, "pair": pair, "sweep": sweep},
    ROOT / "benchmarks" / "README.md": {"results": results, "published": of_others},
}
"""The pages, and the blocks of each, by name."""


if __name__ == "__main__":
    sys.exit(main())
