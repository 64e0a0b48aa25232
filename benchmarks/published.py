"""What others publish of drafts for Kimi, beside what was measured here, as a table.

From `results/published.json`: figures as they stand in their sources. `measured` is filled by hand,
with what the draft's command reports; `front_page.py` then writes the table into `README.md` beside
this file.
"""

from typing import Any


def command(entry: dict[str, Any]) -> str:
    """The command that measures a draft on a file of prompts; none where the tree is not said."""
    if not entry["tree"][0].isdigit():
        return ""
    target = entry.get("target_here", entry["target"])
    return (
        f"jaxspec generate --target {target} --draft {entry['draft']} --tree "
        f"{entry['tree']} --mesh 1x8 --batch-size 8 --chat --prompt-file DATA.jsonl "
        "--max-new-tokens 2048 --context-length 8192 --json"
    )


def page(entries: list[dict[str, Any]]) -> str:
    """The table, and the commands under it."""
    lines = [
        "| draft | figure | tree | engine | data set | n | published | measured | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        site = entry["source"].removeprefix("https://").partition("/")[0]
        date = entry.get("published_on", f"read {entry['read']}")
        source = f"[{site}]({entry['source']}), {date}"
        note = f" ({entry['note']})" if entry["note"] else ""
        for index, one in enumerate(entry["figures"]):
            same = index > 0
            cells = [
                "" if same else f"`{entry['draft']}` of `{entry['target']}`",
                "" if same else f"`{entry['kind']}`{note}",
                "" if same else entry["tree"],
                "" if same else entry["engine"],
                one["data"],
                "" if one["n"] is None else str(one["n"]),
                one["published"],
                "" if one["measured"] is None else str(one["measured"]),
                "" if same else source,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    commands = dict.fromkeys(filter(None, map(command, entries)))
    return "\n".join([*lines, "", "```sh", *commands, "```"])
