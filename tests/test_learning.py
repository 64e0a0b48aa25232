"""A draft that has learned for minutes knows more than what token follows which.

From nothing, on features that the shipped target recorded of standard library text, three times
around; held against counts of neighbouring tokens of the same text, on other text.
"""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxspec import (
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    Numerics,
    RecordConfig,
    Request,
    load_draft,
    load_target,
    load_tokenizer,
    record,
)
from jaxspec.config import TreeConfig
from jaxspec.features import record_features
from jaxspec.fresh_draft import DraftShape, fresh_draft
from jaxspec.optimizer import OptimizerConfig
from jaxspec.training import LossConfig
from jaxspec.training_acceptance import AcceptanceConfig
from jaxspec.training_data import Sample, Windows
from jaxspec.training_run import TrainConfig, train

LENGTH, BATCH = 256, 4
LEARNED, HELD_OUT = 512, 32
"""Windows."""
PROMPT, NEW, PROMPTS = 64, 64, 48
LEVELS = 3
SIZES = {"head_dim": 48, "norm_before_residual": True}
NUM_BATCHES = 3 * LEARNED // BATCH
CONFIG = TrainConfig(
    LossConfig(num_steps=2, one_step_batches=NUM_BATCHES * 5 // 8),
    OptimizerConfig(
        learning_rate=1e-2,
        num_batches=NUM_BATCHES,
        warm_up=10,
        clip=1.0,
        weight_decay=0.1,
        name="muon",
        final_rate=0.0,
    ),
    BATCH,
    evaluate_every=NUM_BATCHES,
    acceptance=AcceptanceConfig(num_prompts=0),
)


def texts() -> tuple[list[str], list[str]]:
    """The modules of the standard library, and those of them that are held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = [path.read_text("utf-8") for path in paths]
    return [text for i, text in enumerate(found) if i % 8], found[::8]


def spread(windows: Windows, count: int) -> Windows:
    """So many whole ones, evenly over all."""
    whole = np.flatnonzero(windows.lengths == LENGTH)
    return windows.take(whole[np.linspace(0, len(whole) - 1, count).astype(int)])


def followers(tokens_NT: np.ndarray, vocab_size: int) -> np.ndarray:
    """Of each token the one that follows it oftest; of one never seen the most frequent of all."""
    counts = np.zeros((vocab_size, vocab_size))
    np.add.at(counts, (tokens_NT[:, :-1].ravel(), tokens_NT[:, 1:].ravel()), 1)
    return (counts + 1e-3 * counts.mean(0)).argmax(1)


def accepted(tokens: list[int], follower: np.ndarray) -> list[int]:
    """What verify would accept in each step of a chain of followers; past the end it is cut."""
    steps, at = [], 0
    while at < len(tokens) - 1:
        guess, count, ahead = tokens[at], 0, tokens[at + 1 :]
        for token in ahead[:LEVELS]:
            guess = int(follower[guess])
            if guess != token:
                break
            count += 1
        steps.append(count)
        at += min(count + 1, len(ahead))
    return steps


@pytest.mark.slow
def test_it_beats_a_bigram_draft(tmp_path):
    numerics = Numerics(dtype="float32")
    target, tokenizer = load_target(SHIPPED_TARGET, numerics), load_tokenizer(SHIPPED_TARGET)
    vocab_size = target.config.vocab_size
    learned, held_out = (
        spread(Windows.of([sample(tokenizer, text) for text in part], LENGTH, vocab_size), count)
        for part, count in zip(texts(), (LEARNED, HELD_OUT), strict=True)
    )
    shape = DraftShape(capture=(2, 3, 5), vocab_size=vocab_size, sizes=SIZES)
    fresh = fresh_draft(target, shape, np.arange(vocab_size), seed=0)
    recorded = record_features(target, fresh.config.boundaries, learned, tmp_path / "features")
    report = train(target, fresh, recorded.windows(), held_out, CONFIG, tmp_path / "run")
    shutil.rmtree(tmp_path / "features")

    follower = followers(learned.tokens, vocab_size)
    said = record(target, None, held_out.tokens.tolist(), RecordConfig(boundaries=()))
    likeliest = said.arrays["logits"].argmax(-1)[:, 1:]
    of_bigrams = float((follower[held_out.tokens[:, 1:]] == likeliest).mean())
    (top1, _) = report.evaluations[-1].accuracy
    assert of_bigrams > 0.15
    assert top1 > of_bigrams + 0.1, f"top-1 {top1:.3f}, of bigrams {of_bigrams:.3f}"

    draft = load_draft(report.draft, numerics, target=target)
    config = GenerateConfig(
        TreeConfig(LEVELS, 1, LEVELS + 1), NEW, PROMPT + NEW + 16, 16, ignore_eos=True
    )
    rows = np.resize(held_out.tokens.reshape(-1, PROMPT), (PROMPTS, PROMPT))
    requests = [Request(tuple(row.tolist()), 0.8, seed=seed) for seed, row in enumerate(rows)]
    done = Generator(target, draft, config).run(requests).completions
    reached = np.concatenate([one.accepted for one in done]).mean() + 1
    by_bigrams = np.concatenate([accepted(one.tokens, follower) for one in done]).mean() + 1
    assert by_bigrams > 1.1
    assert reached > by_bigrams + 0.06, f"accept_length {reached:.3f}, of bigrams {by_bigrams:.3f}"


def sample(tokenizer, text: str) -> Sample:
    ids = np.array(tokenizer.encode(text), np.int32)
    return Sample(ids, np.ones(len(ids), bool), "the standard library")
