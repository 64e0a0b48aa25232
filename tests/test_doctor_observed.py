"""Replaying an engine's run: against the engine itself, step by step, and with faults in it."""

import dataclasses
import json

import numpy as np
import pytest

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_PROMPTS,
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    Numerics,
    Request,
    TreeConfig,
    load_draft,
    load_target,
    load_tokenizer,
)
from jaxspec.doctor import diagnose
from jaxspec.doctor_scores import DoctorConfig
from jaxspec.doctor_texts import ObservedRun, Text, loop_start, num_steps, read_observed, replay
from jaxspec.errors import InputError
from tests import draft_kinds
from tests.test_doctor import make_checkpoint, shipped  # noqa: F401
from tests.test_planted_faults import own_hidden_in_accepted_rows

CHAIN = TreeConfig(3, 1, 4)


def run(target, draft, prompts, max_new_tokens, temperature, tree=CHAIN) -> list[Text]:
    """What the engine of this package writes, and accepts."""
    longest = max(map(len, prompts))
    config = GenerateConfig(
        tree, max_new_tokens, longest + max_new_tokens + 8, 8, 32, ignore_eos=True
    )
    requests = [Request(tuple(ids), temperature, seed=i) for i, ids in enumerate(prompts)]
    completions = Generator(target, draft, config).run(requests).completions
    return [
        Text(str(i), (*ids, *done.tokens), len(ids), done.accepted)
        for i, (ids, done) in enumerate(zip(prompts, completions, strict=True))
    ]


@pytest.mark.slow
def test_replays_the_engine_exactly(target, tmp_path):
    """Every step of the real, cached, chunked one is found again by the teacher-forced walk; with
    a latent draft of EAGLE-3.1. `test_blames` has one of Llama's attention."""
    directory = make_checkpoint.write(tmp_path / "draft", *draft_kinds.LAYOUTS["TorchSpec"]())
    draft = load_draft(directory, target.numerics, target=target)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 20, size=n).tolist() for n in range(4, 12)]
    texts = run(target, draft, prompts, 24, 1.0)
    assert sum(sum(text.accepted or ()) for text in texts) > 5
    report = diagnose(target, draft, texts, DoctorConfig(batch_size=8), families=())
    observed = report.observed
    assert observed is not None and not report.looping
    assert observed.replayed == observed.accept_length
    assert observed.interval == (0, 0) and observed.blames == "draft"


@pytest.mark.slow
def test_a_tree_accepts_what_the_engine_does(target, draft):
    """Every step of the real one, and a ceiling above it; with prompts alone, from their second
    token on."""
    tree = TreeConfig(3, 2, 5)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 20, size=n).tolist() for n in range(4, 12)]
    texts = run(target, draft, prompts, 24, 1.0, tree)
    accepted = [count for text in texts for count in text.accepted or ()]
    uncounted = [dataclasses.replace(text, accepted=None) for text in texts]
    config = DoctorConfig(batch_size=4, tree=tree)
    report = diagnose(target, draft, uncounted, config, families=())
    found = report.of_tree
    assert found is not None and not report.looping and found.tree == "3x2x5"
    assert found.accept_length == sum(text.num_from_steps for text in texts) / len(accepted)
    assert sum(accepted) > 5 and found.accept_length < found.ceiling <= 4
    said = f"of the tree 3x2x5 {found.accept_length:.2f} of at best {found.ceiling:.2f}"
    assert said in report.finding()


def test_steps_along_a_text():
    """Prompt a b, written c d e f g h: guesses after b c, c d, ... as they may come."""
    text = Text("", tuple(range(8)), 2)
    right = np.zeros((8, 3), bool)
    assert num_steps(text, right) == 5  # c is prefill's, and each step gives one
    right[1] = [True, True, False]  # from c: d, e and the bonus f
    assert num_steps(text, right) == 3
    right[1] = [False, True, True]  # what comes after a wrong guess was never verified
    assert num_steps(text, right) == 5
    right[:] = True
    assert num_steps(text, right) == 2
    assert num_steps(Text("", tuple(range(8)), 8), right) == 2  # nothing written: from the second


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        (range(60), None),
        ([*range(100, 130), *[7] * 30], 30),
        ([*range(100, 130), *[7, 8] * 11], None),  # 22 tokens are no loop yet
        ([*range(100, 130), *[7, 8] * 12], 30),
        ([*range(10)] * 4, 0),
    ],
)
def test_loops(ids, start):
    assert loop_start(list(ids)) == start


def test_a_short_loop():
    """What `evaluate_mini` counts: a period four times."""
    assert loop_start([1, 2, 7, 8, 7, 8, 7, 8, 7, 8], min_loop=4) == 2
    assert loop_start([1, 2, 7, 8, 7, 8, 7, 8, 7], min_loop=4) is None


def test_verdicts():
    """An engine that accepts less than these weights would, as much, and more."""
    right = np.zeros((10, 41, 1), bool)
    right[:, ::2] = True  # every step but the last accepts one: two tokens each
    ids = tuple(range(41))
    for accepted, blames, said in (
        ((0,) * 39, "engine", "the engine is at fault"),
        ((1,) * 19 + (0,), "draft", "the engine does what they say"),
        ((3,) * 10, "engine", "other weights"),
    ):
        texts = [Text(str(i), ids, 1, accepted) for i in range(10)]
        found = replay("theirs", texts, right, right)
        assert found.blames == blames and said in found.finding()
    assert replay("theirs", texts[:3], right[:3], right[:3]).blames is None


def lines(**flags) -> str:
    header = {"format": "jaxspec-run-1", "engine": "sglang", "flags": flags}
    entry = {"id": "x", "prompt_ids": [1, 2], "output_ids": [3, 4, 5], "accepted": [1]}
    return "".join(json.dumps(line) + "\n" for line in (header, entry))


def test_run_files(tmp_path):
    path = tmp_path / "run.jsonl"
    for flags in (
        {"tree": "3x1x4"},
        {
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
    ):
        path.write_text(lines(**flags))
        texts = [Text("x", (1, 2, 3, 4, 5), 2, (1,))]
        assert read_observed(path) == ObservedRun("sglang", None, 3, texts)
    for flags, message in (
        ({}, "its flags name no tree"),
        ({"tree": "3x4x16"}, "with one branch"),
    ):
        path.write_text(lines(**flags))
        with pytest.raises(InputError, match=message):
            read_observed(path)
    path.write_text(lines(tree="3x1x4").replace('"accepted": [1]', '"accepted": [4]'))
    with pytest.raises(InputError, match="accepted 4 drafted tokens, of a chain of 3"):
        read_observed(path)


@pytest.fixture(scope="module")
def mini():
    """The shipped target and the ids of the prompts that ship with it."""
    target = load_target(SHIPPED_TARGET, Numerics(dtype="float32"))
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    prompts = [json.loads(line)["prompt"] for line in SHIPPED_PROMPTS.read_text().splitlines()]
    return target, [tokenizer.encode(prompt) for prompt in prompts]


def other_claim(shipped, directory, **changes):  # noqa: F811
    """The shipped draft under other words of its config or with other tensors."""
    config, tensors = json.loads(json.dumps(shipped[0])), dict(shipped[1])
    config["eagle_config"] |= changes.pop("eagle_config", {})
    return make_checkpoint.write(directory, config, tensors | changes)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["boundaries", "stale rows", "bad draft"])
def test_blames(mini, shipped, tmp_path, monkeypatch, fault):  # noqa: F811
    """Features one boundary off at run time and the draft's own rows left in its cache are the
    engine's; noise in the draft's weights is the draft's."""
    target, prompts = mini
    numerics = target.numerics
    of_engine = of_doctor = load_draft(SHIPPED_DRAFT, numerics, target=target)
    with monkeypatch.context() as patch:
        if fault == "boundaries":
            ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
            wrong = other_claim(shipped, tmp_path / "draft", eagle_config=ids)
            of_engine = load_draft(wrong, numerics, target=target)
        elif fault == "stale rows":
            own_hidden_in_accepted_rows(patch)
        else:
            fc = shipped[1]["fc.weight"]
            noise = np.random.default_rng(0).normal(0, 1, fc.shape).astype(fc.dtype)
            bad = other_claim(shipped, tmp_path / "draft", **{"fc.weight": fc + noise})
            of_engine = of_doctor = load_draft(bad, numerics, target=target)
        # Stale rows cost little here: they need many tokens, and steps that accept many.
        count, length = (32, 64) if fault == "stale rows" else (16, 32)
        texts = run(target, of_engine, prompts[:count], length, 0.3)
    config = DoctorConfig(batch_size=16)
    report = diagnose(target, of_doctor, texts, config, families=(), engine="another engine")
    observed = report.observed
    assert observed is not None
    assert observed.blames == ("draft" if fault == "bad draft" else "engine")
    assert report.finding().startswith(f"another engine got {observed.accept_length:.2f}; these")
    if fault == "bad draft":
        assert observed.replayed == observed.accept_length < 0.8 * observed.ceiling
    else:
        assert observed.replayed > observed.accept_length
