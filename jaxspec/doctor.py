"""Why is acceptance low? A draft as declared and under other readings of it, on one target pass.

The target reads the texts once, and every boundary that a reading may want is kept. All readings
are scored over the same tokens, and each is compared with the declared one, token by token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxspec.aliases import Progress
from jaxspec.ceiling import accept_ceiling
from jaxspec.config import TreeConfig
from jaxspec.convert.prepare import abstract_draft
from jaxspec.doctor_readings import FAMILIES, Case, Family, Reading, readings_of
from jaxspec.doctor_report import DoctorReport, Figures, ReadingReport, TreeFigures
from jaxspec.doctor_scores import DoctorConfig, Scores, States, read_states, score_all
from jaxspec.doctor_texts import Text, num_steps, replay
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.report import command, machine
from jaxspec.requests import Request
from jaxspec.target import Target
from jaxspec.walk import Walker, steps_along

__all__ = ["diagnose"]

DEFAULT_CONFIG = DoctorConfig()
BLOCK = 32
"""Rows of a text that are resampled together: neighbours are not independent."""
FEWEST = 8
"""Texts, below which their blocks are resampled; and blocks, below which nothing is said."""
RESAMPLES = 20000


def diagnose(
    target: Target,
    draft: Draft,
    texts: Sequence[Text] | States,
    config: DoctorConfig = DEFAULT_CONFIG,
    *,
    families: tuple[Family, ...] = FAMILIES,
    declared: Case | None = None,
    engine: str = "the engine",
    progress: Progress | None = None,
) -> DoctorReport:
    """The draft as declared, and under all other readings, on the texts.

    A target on a mesh reads them there; the draft, which is one layer or a few, on one device.

    Args:
      draft: loaded without a mesh.
      texts: or the states of an earlier pass over them, which hold every boundary wanted here.
      families: of the readings that are tried.
      declared: how the engine runs the draft; None is as the checkpoint says, and as EAGLE-3 does.
      engine: what to call who counted what it accepted of the texts, if anyone did.
      progress: called with what is done, and how much of how much.

    Raises:
      ContractError: the draft is another target's, or wants boundaries that are not there.
      InputError: a text is a single token, or too little is left to say anything.
    """
    config.check()
    if draft.numerics.mesh is not None:
        raise InputError(
            f"doctor: the draft is on mesh {draft.numerics.mesh}, and is read on one device: load "
            "it without a mesh, and the target on one"
        )
    want = draft.config.boundaries
    target.asked_for(want).require(want, "doctor")
    declared = declared or Case.declared(draft)
    ends = target.on_one_device()
    readings = readings_of(declared, ends, families)
    cases = [declared, *(reading.case for reading in readings)]
    states = texts
    if not isinstance(states, States):
        wanted = sorted({b for case in cases for b in case.boundaries})
        states = read_states(target, states, wanted, config.batch_size, progress)
    scored = score_all(ends, states, cases, config, progress)
    report = _report(target, draft, states, readings, scored, config)
    if config.tree is not None:
        of_tree = _of_tree(target, draft, states.texts, config, config.tree, progress)
        report = dataclasses.replace(report, of_tree=of_tree)
    if any(text.accepted is None for text in states.texts):
        return report
    observed = replay(engine, states.texts, scored[0].is_next, scored[-1].is_next)
    return dataclasses.replace(report, observed=observed)


def _report(
    target: Target,
    draft: Draft,
    states: States,
    readings: Sequence[Reading],
    scored: Sequence[Scores],
    config: DoctorConfig,
) -> DoctorReport:
    """The figures over the rows that count, which are the same ones for all readings."""
    row = np.arange(states.tokens.shape[1])
    counts = np.zeros(states.tokens.shape, bool)
    for text, of_text in zip(states.texts, counts, strict=True):
        # Features may be read from a row before or after: the first and the last are left out.
        of_text[:] = (row >= 1) & (row + 1 + config.levels < len(text.ids))
    clusters = _clusters(counts)
    if len(clusters) < FEWEST:
        raise InputError(
            f"{int(counts.sum())} tokens of {len(states.texts)} texts that do not loop: too few to "
            f"say anything; give more or longer prompts ({FEWEST * BLOCK} tokens are enough)"
        )
    *of_cases, perfect = (_figures(one, counts, states.texts) for one in scored)
    base, *others = (np.where(counts, one.score.mean(axis=-1), 0.0) for one in scored[:-1])
    gains = np.array([(other - base)[rows].sum() for other in others for rows in clusters])
    gains = gains.reshape(len(others), len(clusters))
    sizes = np.array([counts[rows].sum() for rows in clusters], float)
    drawn = np.random.default_rng(0).multinomial(
        len(clusters), np.full(len(clusters), 1 / len(clusters)), size=RESAMPLES
    )
    resampled = (drawn @ gains.T) / (drawn @ sizes)[:, None]
    # 95 % of all intervals together: of forty readings one would else be better by chance.
    tail = 2.5 / max(len(readings), 1)
    found = []
    for index, reading in enumerate(readings):
        low, high = np.percentile(resampled[:, index], [tail, 100 - tail])
        found.append(
            ReadingReport(
                reading.family,
                reading.name,
                reading.fault,
                reading.change,
                float(gains[index].sum() / sizes.sum()),
                (float(low), float(high)),
                of_cases[index + 1],
            )
        )
    found.sort(key=lambda one: -one.gain)
    better = [one.name for one in found if one.verdict == "better"]
    column = {reading.name: resampled[:, index] for index, reading in enumerate(readings)}
    ahead = {name: column[better[0]] - column[name] for name in better[1:]}
    return DoctorReport(
        target=target.identity,
        draft=draft.identity,
        claim=str(draft.config.boundaries),
        dtype=draft.numerics.dtype,
        levels=config.levels,
        top=config.top,
        num_texts=len(states.texts),
        num_rows=int(counts.sum()),
        looping=states.looping,
        declared=of_cases[0],
        ceiling=perfect,
        readings=tuple(found),
        rivals=tuple(name for name in ahead if np.percentile(ahead[name], 2.5) <= 0),
        machine=machine(),
        command=command(),
    )


def _of_tree(
    target: Target,
    draft: Draft,
    texts: Sequence[Text],
    config: DoctorConfig,
    tree: TreeConfig,
    progress: Progress | None,
) -> TreeFigures:
    """What a tree accepts along the texts, of the draft and of the target's own probabilities."""
    pairs = [(text.ids[: text.first_root], text.ids[text.first_root :]) for text in texts]
    longest = max(len(text.ids) for text in texts)
    most = max(text.num_from_steps for text in texts)
    # The draft as the target's mesh would have it, whose parts it then gets.
    numerics = dataclasses.replace(draft.numerics, mesh=target.numerics.mesh)
    graph, _ = nnx.split(abstract_draft(draft.config, numerics, draft.identity))
    beside = nnx.merge(graph, nnx.split(draft)[1])
    walker = Walker(target, beside, longest, most, config.batch_size)
    accepted = walker.accepted(pairs, [tree], progress)[tree]
    requests = [Request(prompt, temperature=1.0) for prompt, _ in pairs]
    written = [written for _, written in pairs]
    batch = config.batch_size
    best = accept_ceiling(target, requests, written, tree, batch_size=batch, progress=progress)
    emitted = sum(text.num_from_steps for text in texts)
    num_steps = sum(len(steps_along(of_text)) for of_text in accepted)
    assert best.accept_length is not None, "a text has steps"
    return TreeFigures(str(tree), emitted / num_steps, best.accept_length)


def _clusters(counts: np.ndarray) -> list[tuple[Any, ...]]:
    """What is resampled: texts, or of few texts their blocks; each as an index of [B,T]."""
    texts = [(b,) for b in np.flatnonzero(counts.any(axis=1))]
    if len(texts) >= FEWEST:
        return texts
    starts = range(0, counts.shape[1], BLOCK)
    blocks = [(b, slice(start, start + BLOCK)) for (b,) in texts for start in starts]
    return [rows for rows in blocks if counts[rows].any()]


def _figures(scores: Scores, counts: np.ndarray, texts: Sequence[Text]) -> Figures:
    """What a reader is told of some scores."""
    steps = sum(num_steps(text, right) for text, right in zip(texts, scores.is_next, strict=True))
    return Figures(
        score=float(scores.score.mean(axis=-1)[counts].mean()),
        top1=tuple(scores.agrees[counts].mean(axis=0).tolist()),
        topk=tuple(scores.is_in_top[counts].mean(axis=0).tolist()),
        accept_length=sum(text.num_from_steps for text in texts) / steps,
    )
