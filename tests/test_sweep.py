"""A sweep from prompts to a sentence: figures by hand, a real one resumed, what it refuses."""

import json
import math
from pathlib import Path

import jax
import pytest

from jaxspec import sweep as sweeping
from jaxspec import sweep_timing as timing
from jaxspec.config import TreeConfig
from jaxspec.doctor_texts import Text
from jaxspec.errors import InputError
from jaxspec.sweep import sweep
from jaxspec.sweep_config import SweepConfig, grid
from jaxspec.sweep_log import SweepLog
from jaxspec.sweep_report import PLAIN, Figure, report_of
from tests.test_ceiling import sampled_text

TREE = TreeConfig(2, 3, 6)
CONFIG = SweepConfig((TREE,), (4,), max_new_tokens=20, temperature=0.7, rounds=2)
HEADER = {
    "version": "0", "target_hash": "t@1", "draft_hash": "d@2", "machine": "m",
    "flags": {"dtype": "float32", "temperature": 0.0},
}  # fmt: skip


def log(plain_ms=1.0, wrong=0) -> list[dict]:
    """Six texts; steps of `a` take twice a plain one and accept 1, 1, 0; of `b` four times, 3."""
    texts = [
        {"id": str(i), "seed": i, "prompt_ids": [1], "output_ids": [0] * 6, "loops": i == 6}
        for i in range(7)
    ]
    a, b = "1x1x2", "4x1x5"
    walk = {b: [[3, 0]] * 6, a: [[1, 1, 0]] * 6}
    cells = {
        PLAIN: {"ms": 4 * plain_ms, "steps": 4, "emitted": [4, 4]},
        a: {"ms": 4.0, "steps": 2, "emitted": [4 - wrong, 4]},
        b: {"ms": 4.0, "steps": 1, "emitted": [4, 4]},
    }
    here = {"env": {}, "batch_size": 2}
    whole = {PLAIN: {"ms": 10.0, "emitted": [5, 5]}, a: {"ms": 8.0, "emitted": [5, 5]}}
    return [
        {"what": "texts", "texts": texts, "surprise": 2.0, "uniform": 7.0},
        {"what": "walk", "steps": walk},
        *({"what": "round", **here, "round": r, "texts": [0, 1], "cells": cells} for r in range(3)),
        *(
            {"what": "whole", **here, "round": r, "tree": a, "texts": [0, 1], "cells": whole}
            for r in range(3)
        ),
    ]  # fmt: skip


def test_figures_by_hand():
    report = report_of(HEADER, log(), "c")
    (batch,) = report.settings[0].batches
    assert (report.num_texts, report.looping, report.num_tokens) == (6, ("6",), 36)
    assert list(report.accept_length) == ["1x1x2", "4x1x5"]
    a, b = batch.trees
    assert (a.tree, a.accept_length.value, a.step_ms) == ("1x1x2", 5 / 3, 2.0)
    assert a.speed.value == pytest.approx(5 / 3 / 2)
    assert a.tokens_per_s == pytest.approx(1e3 * 2 * (5 / 3) / 2)
    for one in batch.trees:
        assert one.tokens_per_s == pytest.approx(one.speed.value * batch.plain_tokens_per_s)
    assert (b.accept_length.value, b.step_ms) == (2.5, 4.0)
    assert b.speed.value == pytest.approx(2.5 / 4) and not b.is_rival
    assert a.speed.interval == pytest.approx((5 / 6, 5 / 6))  # nothing varies here
    assert (batch.plain_ms, batch.plain_tokens_per_s) == (1.0, 2000.0)
    assert batch.whole is not None and batch.whole.value == pytest.approx(1.25)
    assert a.check is not None and (a.check.real, a.check.walked) == (2.0, 2.0)
    assert report.holds
    assert "1x1x2 is the fastest tree; over whole texts 1.25 (1.25 to 1.25)" in report.finding()
    assert "it pays" in report.finding()
    assert json.loads(json.dumps(report.to_dict()))["settings"][0]["batches"][0]["best"] == "1x1x2"


def test_a_walk_that_is_wrong():
    """Half a token in four is more than 3 %."""
    report = report_of(HEADER, log(wrong=1), "c")
    assert not report.holds and "DOES NOT AGREE" in report.finding()
    assert report.checks["1x1x2"].difference == pytest.approx(2 / 1.75 - 1)


def test_too_few_to_say():
    """Fewer rounds: no interval, so that no tree is told from another."""
    report = report_of(HEADER, log()[:4], "c")
    (batch,) = report.settings[0].batches
    assert [tree.speed.interval for tree in batch.trees] == [None, None]
    assert batch.trees[1].is_rival and batch.whole is None
    assert Figure(1.2, (0.9, 1.5)).beats_one is None
    assert Figure(0.8, (0.7, 0.9)).beats_one is False


def test_grid():
    found = set(map(str, grid((1, 2, 3), (1, 2), (2, 3, 4, 8))))
    # 1x2x4 has no such candidates, 2x2x2 and 3x2x3 no room for their own levels.
    assert found == {
        "1x1x2", "2x1x3", "3x1x4", "1x2x2", "1x2x3", "2x2x3", "2x2x4", "3x2x4", "3x2x8",
    }  # fmt: skip
    with pytest.raises(InputError, match="no tree"):
        grid((1,), (2,), (9,))


def test_what_is_timed():
    """Corners far from each other; guesses that are right where the sum is."""
    trees = grid(range(1, 11), (1, 2, 4, 8), (3, 8, 32))
    corners = timing._corners(trees, 5)
    assert corners[0] == TreeConfig(1, 1, 2) and TreeConfig(10, 8, 32) in corners
    assert len(set(corners)) == 5

    def ms(tree: TreeConfig) -> float:
        return 1 + 0.5 * tree.levels + 0.1 * tree.levels * tree.branches + 0.3 * tree.nodes

    guessed = timing._guess_ms(corners, [ms(tree) for tree in corners], trees)
    assert guessed == pytest.approx([ms(tree) for tree in trees])


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled():
    """Programs that run for moments: a third of the time goes with the optimising."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def prompts(reference_target) -> list[Text]:
    """What the target itself might have written, not what random numbers give."""
    found = []
    for seed in range(4):
        request, more = sampled_text(reference_target, 2, 10, seed, temperature=0.4)
        ids = (*request.prompt_ids, *more)
        found.append(Text(str(seed), ids, len(ids)))
    return found


@pytest.fixture(scope="module")
def swept(target, draft, prompts, tmp_path_factory) -> Path:
    """The log of a whole sweep, and its report beside it."""
    path = tmp_path_factory.mktemp("sweep") / "log.jsonl"
    report = sweep(target, draft, prompts, CONFIG, out=path)
    assert report.holds and list(report.accept_length) == [str(TREE)]
    assert report.checks[str(TREE)].difference == 0
    path.with_name("report.json").write_text(json.dumps(report.to_dict()))
    return path


def test_its_walk_is_what_was_timed(swept):
    """The log has both: every place's tokens in the timed steps are the walk's own."""
    lines = [json.loads(line) for line in swept.read_text().splitlines()]
    assert lines[0]["format"] == "jaxspec-sweep-1"
    assert [line["what"] for line in lines[1:]] == [
        "texts", "walk", "trees", "round", "round", "whole", "whole",
    ]  # fmt: skip
    steps = lines[2]["steps"][str(TREE)]
    assert sum(map(sum, steps)) > 10
    for line in lines[4:6]:
        cell = line["cells"][str(TREE)]
        wanted = [cell["steps"] + sum(steps[text][: cell["steps"]]) for text in line["texts"]]
        assert cell["emitted"] == wanted
        assert line["cells"]["plain"]["emitted"] == [19] * 4 and cell["ms"] > 0


def test_goes_on(target, draft, prompts, swept, tmp_path, monkeypatch):
    """Killed within its second round: only that, and what comes after, is timed again."""
    lines = swept.read_text().splitlines(keepends=True)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines[:5]) + lines[5][:30])

    def write_on(*_):
        raise AssertionError("it has been written")

    calls = []

    def call(self, name, texts):
        calls.append(name)
        return json.loads(lines[5])["cells"][name]

    def whole(self, name, texts):
        return json.loads(lines[6])["cells"][name]

    monkeypatch.setattr(sweeping, "write_on", write_on)
    monkeypatch.setattr(timing.Timer, "_compile", lambda *_: None)
    monkeypatch.setattr(timing.Timer, "_call", call)
    monkeypatch.setattr(timing.Timer, "_whole", whole)
    sweep(target, draft, prompts, CONFIG, out=path)
    assert path.read_text() == "".join([*lines[:7], path.read_text().splitlines(True)[7]])
    assert sorted(calls) == [str(TREE), PLAIN]
    calls.clear()
    sweep(target, draft, prompts, CONFIG, out=path)
    assert not calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 3}, "flags.rounds is 2 there and 3 here"),
        ({"temperature": 0.5}, "flags.temperature is 0.7 there and 0.5 here"),
    ],
)
def test_another_sweep(target, draft, prompts, swept, change, message):
    config = SweepConfig(**{**vars(CONFIG), **change})
    with pytest.raises(InputError, match=message):
        sweep(target, draft, prompts, config, out=swept)


def test_random_prompts_are_refused(target, draft, prompts):
    """As unlikely as guessing, to this target; others beside them do not help."""
    random = Text("made up", (23, 1, 17, 4, 19, 8, 2, 21, 13, 6, 11, 3), 12)
    with pytest.raises(InputError, match=rf"1 of 4 .*guessing among 24 has {math.log(24):.2f}"):
        sweep(target, draft, [*prompts[1:], random], CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trees": ()}, "nothing to sweep"),
        ({"rounds": 0}, "rounds is 0"),
        ({"max_new_tokens": 5}, "it starts at 16"),
        ({"batch_sizes": (0,)}, "they start at 1"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"trees": (TreeConfig(1, 1, 9),)}, "8 nodes below the root"),
        ({"trees": (TreeConfig(47, 1, 48),), "max_new_tokens": 48}, "may emit 48 tokens, and"),
    ],
)
def test_bad_configs(target, draft, prompts, change, message):
    with pytest.raises(InputError, match=message):
        sweep(target, draft, prompts, SweepConfig(**{**vars(CONFIG), **change}))


def test_more_places_than_texts(target, draft, prompts, swept, tmp_path):
    """A text in two places would share its experts with itself."""
    content = swept.read_text().replace('"batch_sizes": [4]', '"batch_sizes": [5]')
    (tmp_path / "log.jsonl").write_text(content)
    config = SweepConfig(**{**vars(CONFIG), "batch_sizes": (5,)})
    with pytest.raises(InputError, match=r"batch size 5 \(--batch-size\) and 4 prompts"):
        sweep(target, draft, prompts, config, out=tmp_path / "log.jsonl")


def test_too_few_texts_that_do_not_loop(target, draft, prompts, monkeypatch):
    """Said before any batch size is timed, not when its turn comes."""
    loops = iter([None, 0, 0, 0])
    monkeypatch.setattr(sweeping, "loop_start", lambda ids: next(loops))
    written = [Text(prompt.id, prompt.ids, len(prompt.ids) - 3) for prompt in prompts]
    monkeypatch.setattr(sweeping, "write_on", lambda *_: written)
    config = SweepConfig(**{**vars(CONFIG), "batch_sizes": (1, 2)})
    with pytest.raises(InputError, match=r"batch size 2 .*: only 1 of 4 texts do not loop"):
        sweep(target, draft, prompts, config)


@pytest.mark.parametrize("line", ['{"what": "round", "round": 0}', '{"what": "rest"}', "[1]"])
def test_a_damaged_line(target, draft, prompts, swept, tmp_path, line):
    """JSON, and no entry."""
    (tmp_path / "log.jsonl").write_text(f"{swept.read_text()}{line}\n")
    number = len(swept.read_text().splitlines()) + 1
    with pytest.raises(InputError, match=rf"log\.jsonl, line {number}: damaged"):
        sweep(target, draft, prompts, CONFIG, out=tmp_path / "log.jsonl")


def test_a_log_that_is_none(tmp_path):
    for content in ("notes", "[1]", "{}"):
        (tmp_path / "log").write_text(content)
        with pytest.raises(InputError, match=r"log: no jaxspec-sweep-1 file can be read there"):
            SweepLog.read(tmp_path / "log")


def test_all_texts_loop(target, draft, prompts, monkeypatch):
    monkeypatch.setattr(sweeping, "loop_start", lambda ids: 0)
    monkeypatch.setattr(sweeping, "write_on", lambda *_: prompts)
    with pytest.raises(InputError, match="all of 4 texts repeat themselves"):
        sweep(target, draft, prompts, CONFIG)
