"""The doctor against copies of the shipped draft with one fault planted in each."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    Numerics,
    Request,
    SamplingConfig,
    cli,
    load_draft,
    load_target,
    load_tokenizer,
)
from jaxspec.contracts import ContractError
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.doctor import diagnose
from jaxspec.doctor_readings import BASES, FAMILIES, Case, readings_of
from jaxspec.doctor_report import LEAST, DoctorReport
from jaxspec.doctor_scores import DoctorConfig, States, read_states
from jaxspec.doctor_texts import Text, write_on
from jaxspec.errors import InputError
from jaxspec.prompts import EncodedPrompt
from tests import draft_kinds, make_checkpoint

NUMERICS = Numerics(dtype="float32")
NUM_TEXTS, LENGTH = 8, 72
Checkpoint = tuple[dict[str, Any], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def mini():
    """The shipped target."""
    return load_target(SHIPPED_TARGET, NUMERICS)


@pytest.fixture(scope="module")
def states(mini) -> States:
    """All boundaries of some held-out text, in the one target pass of this file."""
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    prompts = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())["golden"]
    ids = [tokenizer.encode(prompt["text"]) for prompt in prompts]
    joined = [itertools.chain(*ids[i::NUM_TEXTS]) for i in range(NUM_TEXTS)]
    texts = [
        Text(str(i), tuple(itertools.islice(text, LENGTH)), LENGTH) for i, text in enumerate(joined)
    ]
    return read_states(mini, texts, range(7), NUM_TEXTS)


@pytest.fixture(scope="module")
def shipped() -> Checkpoint:
    config = json.loads((SHIPPED_DRAFT / "config.json").read_text())
    return config, load_file(SHIPPED_DRAFT / "model.safetensors")


@pytest.fixture
def diagnosis(mini, states, shipped, tmp_path):
    """What the doctor says of a copy of the shipped draft in which something was changed."""

    def of(
        plant: Callable[[dict, dict], None] = lambda config, tensors: None,
        families: tuple[str, ...] = (),
        **declared: Any,
    ) -> DoctorReport:
        config, tensors = json.loads(json.dumps(shipped[0])), dict(shipped[1])
        plant(config, tensors)
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        make_checkpoint.write(tmp_path / "draft", config, tensors)
        draft = load_draft(tmp_path / "draft", NUMERICS, target=mini)
        case = dataclasses.replace(Case.declared(draft), **declared)
        chosen = tuple(one for one in FAMILIES if not families or one.name in families)
        config = DoctorConfig(levels=2, batch_size=NUM_TEXTS)
        return diagnose(mini, draft, states, config, families=chosen, declared=case)

    return of


def claims(*ids: int) -> Callable[[dict, dict], None]:
    """Other boundaries than it was trained on: (2, 3, 5)."""

    def plant(config, tensors):
        config["eagle_config"] |= {
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "capture_convention": "before",
        }

    return plant


def chunks_reversed(config, tensors):
    """fc takes 5, 3, 2, under the claim that it takes 2, 3, 5."""
    low, middle, high = np.split(tensors["fc.weight"], 3, axis=1)
    tensors["fc.weight"] = np.concatenate([high, middle, low], axis=1)


def hidden_first(config, tensors):
    """The first layer takes [hidden, embedding]."""
    for name in "qkv":
        name = f"midlayer.self_attn.{name}_proj.weight"
        tensors[name] = np.roll(tensors[name], 256, axis=1)


def in_pairs(config, tensors):
    """The rotated dims stand as DeepSeek stores them: 0, 24, 1, 25, ... of Llama's 48."""
    for name in "qk":
        name = f"midlayer.self_attn.{name}_proj.weight"
        heads = tensors[name].reshape(4, 2, 24, 512)
        tensors[name] = heads.swapaxes(1, 2).reshape(192, 512)


def random_head(config, tensors):
    rng = np.random.default_rng(0)
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = rng.normal(0, 0.05, head.shape).astype(head.dtype)


def wrong_embedding(config, tensors):
    """An embedding of its own that is another model's, where the draft learned the target's."""
    rng = np.random.default_rng(0)
    like, shape = tensors["lm_head.weight"].dtype, (config["vocab_size"], config["hidden_size"])
    tensors["embed_tokens.weight"] = rng.normal(0, 0.05, shape).astype(like)


def head_of_first_ids(config, tensors):
    """Row i of the head is of target id i, where d2t says id i + 20."""
    ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    config["draft_vocab_size"] = count = config["vocab_size"] - 32  # all but the special tokens
    own, head = ids < count, np.empty((count, 256), tensors["lm_head.weight"].dtype)
    head[:] = tensors["lm_head.weight"].mean(axis=0)
    head[ids[own]] = tensors["lm_head.weight"][own]
    tensors["lm_head.weight"], tensors["d2t"] = head, np.full(count, 20)
    del tensors["t2d"]


def absolute_ids(config, tensors):
    """The lower half of its vocabulary, d2t saved as ids: read as offsets, all are valid."""
    half = len(tensors["d2t"]) // 2
    config["draft_vocab_size"] = half
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:half]
    tensors["d2t"] = (np.arange(len(tensors["d2t"])) + tensors["d2t"])[:half]
    del tensors["t2d"]


def normed_features(config, tensors):
    config["fc_norm"] = True
    for index in range(3):
        tensors[f"fc_norm.{index}.weight"] = np.ones_like(tensors["norm.weight"])


def says(**values: Any) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.update(values)


QUICK = ("boundaries", "order", "token shift", "halves", "vocabulary", "borrowed")
"""Families that share one program, whatever the draft's config is."""


@pytest.mark.parametrize(
    ("plant", "families", "declared", "expected"),
    [
        (claims(1, 2, 4), ("boundaries",), {}, "boundaries (2, 3, 5)"),
        (chunks_reversed, ("order", "halves"), {}, "boundaries (5, 3, 2)"),
        (says(), ("token shift", "halves"), {"lag": 1}, "features 1 behind their token"),
    ],
)
def test_finds_a_fault(diagnosis, plant, families, declared, expected):
    report = diagnosis(plant, families, **declared)
    assert report.best is not None and report.best.name == expected
    assert report.best.name in report.finding() and not report.holds
    assert report.best.figures.accept_length > report.declared.accept_length


def test_healthy_is_as_declared(diagnosis):
    report = diagnosis(families=("boundaries",))
    assert report.holds and report.finding().startswith("as declared")
    # The founding story's two mistakes, and what they would have cost.
    of = {one.name: one for one in report.readings}
    for name in ("boundaries (1, 2, 4)", "boundaries (3, 4, 6)", "boundaries (2, 0, 5)"):
        assert of[name].verdict == "worse"
    assert report.declared.top1[0] > 0.5
    assert 1 < report.declared.accept_length < report.ceiling.accept_length < 4


EVERY = ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "families", "declared", "expected"),
    [
        (says(), EVERY, {}, None),
        (claims(3, 4, 6), QUICK, {}, "boundaries (2, 3, 5)"),
        (claims(2, 3, 0), QUICK, {}, "boundaries (2, 3, 5)"),
        (claims(2, 0, 5), QUICK, {}, "boundaries (2, 3, 5)"),
        (chunks_reversed, QUICK, {}, "boundaries (5, 3, 2)"),
        (hidden_first, QUICK, {}, "hidden state before the embedding"),
        (in_pairs, (*QUICK, "pairing", "positions"), {}, "rotary pairs"),
        (random_head, QUICK, {}, "the target's head"),
        (head_of_first_ids, QUICK, {}, "draft ids as target ids"),
        (says(), QUICK, {"lag": 1}, "features 1 behind their token"),
        (says(), QUICK, {"lag": -1}, "features 1 behind their token"),
        (
            says(),
            (*QUICK, "feature norm"),
            {"final_norm": True},
            "boundaries before the final norm",
        ),
        # The other families are each compiled again for another config.
        (absolute_ids, QUICK, {}, "d2t as absolute ids"),
        (wrong_embedding, QUICK, {}, "the target's embedding"),
        (normed_features, (*QUICK, "feature norm"), {}, "no fc_norm"),
        (says(norm_output=True), (*QUICK, "recurrence", "residual"), {}, "norm_output false"),
        (
            says(norm_before_residual=False),
            (*QUICK, "recurrence", "residual"),
            {},
            "norm_before_residual true",
        ),
    ],
)
def test_finds_a_fault_among_others(diagnosis, plant, families, declared, expected):
    report = diagnosis(plant, families, **declared)
    assert (report.best and report.best.name) == expected


@pytest.fixture(scope="module")
def long_states(mini) -> States:
    """Texts of up to 400 tokens, nearly all of the target's own writing, as the command has it
    written: bases differ by how they turn keys that are far away."""
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    golden = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())["golden"]
    prompts = [
        EncodedPrompt(str(i), tuple(tokenizer.encode(prompt["text"]))[:40])
        for i, prompt in enumerate(golden[:24])
    ]
    texts = write_on(mini, prompts, tokenizer, SamplingConfig(temperature=0.8), 360, len(prompts))
    return read_states(mini, texts, (2, 3, 5, 6), NUM_TEXTS)


@pytest.mark.slow
def test_finds_a_rotary_base(mini, long_states):
    """The draft learned with 10000, and drafts as well with 50000: under 1000000 both are found."""
    report = with_base(mini, long_states, 1e6)
    first, second, *_ = report.readings
    assert report.best == first and first.name == "rotary base 10000"
    assert second.name == "rotary base 50000" and report.rivals == (second.name,)
    assert first.gain > 3 * LEAST
    assert "--draft-rotary '{\"rope_theta\": 10000}'" in report.finding()
    assert {f"rotary base {base:g}" for base in BASES} - {"rotary base 1e+06"} <= {
        one.name for one in report.readings
    }


@pytest.mark.slow
def test_a_rotary_base_that_does_as_well(mini, long_states):
    """Nothing is said to be wrong that costs nothing."""
    report = with_base(mini, long_states, 50000.0)
    first = report.readings[0]
    assert first.name == "rotary base 10000" and abs(first.gain) < LEAST
    assert first.verdict == "indistinguishable" and report.holds


def with_base(mini, long_states, base: float) -> DoctorReport:
    """What the doctor says of the shipped draft where another base is stated."""
    choice = RotaryChoice.parse(json.dumps({"rope_theta": base}))
    draft = load_draft(SHIPPED_DRAFT, NUMERICS, target=mini, rotary=choice)
    families = ("token shift", "positions", "rotary", "pairing")
    chosen = tuple(one for one in FAMILIES if one.name in families)
    config = DoctorConfig(levels=2, batch_size=NUM_TEXTS)
    return diagnose(mini, draft, long_states, config, families=chosen)


@pytest.mark.slow
def test_short_texts_do_not_tell_bases_apart(diagnosis):
    """Of those that fit, all are named."""
    report = diagnosis(says(rope_theta=100.0), ("rotary", "pairing"))
    assert report.best is not None and report.best.family == "rotary"
    assert "rotary base 10000" in (report.best.name, *report.rivals) and report.rivals
    assert all("rotary" in name for name in report.rivals)
    assert "these texts cannot tell; longer or more ones may" in report.finding()


@pytest.mark.slow
def test_readings_of_other_kinds(target, tmp_path):
    """Latent attention and EAGLE-3.1's norms; three layers over norms of another kind."""
    names, changes = {}, {}
    for kind in ("TorchSpec", "speculators"):
        directory = make_checkpoint.write(tmp_path / kind, *draft_kinds.LAYOUTS[kind]())
        draft = load_draft(directory, NUMERICS, target=target)
        found = readings_of(Case.declared(draft), target, FAMILIES)
        names[kind] = {one.name for one in found}
        changes |= {one.name: one.change for one in found}
        assert len(names[kind]) == len(found)
    of_both = {"the draft in bfloat16", "hidden state before the embedding", "rotary base 10000"}
    assert names["TorchSpec"] >= of_both | {
        "no fc_norm",
        "norm_output false",
        "norm_before_residual true",
        "the target's embedding",
        "the target's head",
        "rotary halves",
        "rotary scaled as the target's",
        "boundaries (1, 2, 3)",
    }
    assert names["speculators"] >= of_both | {
        "no norm_before_fc",
        "norm_output true",
        "norm_before_residual false",
        "the target's embedding",
        "rotary pairs",
        "boundaries (1, 2, 3)",
        "boundaries (3, 2, 4)",
    }
    assert changes["rotary base 10000"] == "--draft-rotary '{\"rope_theta\": 10000}'"
    assert changes["rotary halves"] == "--draft-rotary '{\"rope_interleave\": false}'"


def test_readings_of_a_scaling(mini, shipped, tmp_path):
    """Llama-3's goes where another one, or none, takes its place."""
    config = json.loads(json.dumps(shipped[0]))
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_scaling"] = factors | {
        "rope_type": "llama3",
        "original_max_position_embeddings": 512,
    }
    draft = load_draft(make_checkpoint.write(tmp_path / "d", config, shipped[1]), target=mini)
    family = next(one for one in FAMILIES if one.name == "rotary")
    found = readings_of(Case.declared(draft), mini, (family,))
    rotary = {one.name: one.case.draft.config.rotary for one in found}
    assert draft.config.rotary.llama3 is not None and mini.config.rotary.yarn is not None
    assert rotary["rotary without scaling"].scaling is None
    assert rotary["rotary scaled as the target's"].scaling == mini.config.rotary.yarn
    assert all(None in (one.yarn, one.llama3) for one in rotary.values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2], "1 boundaries of 256 each are 256 wide, and tensor fc.weight takes 768"),
        ([2, 3, 7], "boundaries"),
    ],
)
def test_refused_outright(diagnosis, ids, message):
    """One hidden state in place of three, and a boundary past the last: neither is ever read."""
    with pytest.raises((CheckpointError, ContractError), match=message):
        diagnosis(claims(*ids), QUICK)


def test_bad_texts(mini):
    draft = load_draft(SHIPPED_DRAFT, NUMERICS, target=mini)
    with pytest.raises(InputError, match="'a' is a single token"):
        diagnose(mini, draft, [Text("a", (5,), 1)])
    with pytest.raises(InputError, match="all of 1 texts repeat themselves"):
        diagnose(mini, draft, [Text("a", (5, 6, 7) * 20, 3)])


@pytest.mark.slow
def test_writes_as_a_prompt_says(target):
    """The target's continuation of a prompt is that of its own settings, and of its own limit."""
    ids = (5, 9, 11)
    own = ({"seed": 7}, {"temperature": 0.0}, {"max_new_tokens": 2}, {})
    prompts = [EncodedPrompt(str(i), ids, settings=some) for i, some in enumerate(own)]
    texts = write_on(target, prompts, None, SamplingConfig(temperature=0.9), 6, 4)
    config = GenerateConfig(None, 6, 9, 4)
    wanted = [
        Request(ids, 0.9, seed=7),
        Request(ids),
        Request(ids, 0.9, seed=2, max_new_tokens=2),
        Request(ids, 0.9, seed=3),
    ]
    done = Generator(target, None, config).run(wanted).completions
    assert [text.ids for text in texts] == [ids + one.tokens for one in done]
    assert len({text.ids for text in texts}) == 4 and {text.prompt_len for text in texts} == {3}


@pytest.mark.slow
def test_command(states, shipped, tmp_path, monkeypatch, capsys):
    """A draft whose ids were read in the other convention: found, drawn and written as JSON."""
    config, tensors = json.loads(json.dumps(shipped[0])), dict(shipped[1])
    claims(1, 2, 4)(config, tensors)
    make_checkpoint.write(tmp_path / "one-off", config, tensors)
    looping = [5, 6, 7] * 20
    ids = [looping, *(text.ids for text in states.texts)]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    monkeypatch.chdir(tmp_path)
    flags = "--draft one-off --tokens ids.json --max-new-tokens 0 --levels 2 --plot p.png --json"
    argv = ["jaxspec", "doctor", *flags.split(), "--compile-cache", "none"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["kind"] == "measured" and not found["is_as_declared"]
    assert found["best"] == found["readings"][0]["name"] == "boundaries (2, 3, 5)"
    assert "eagle_aux_hidden_state_layer_ids [2, 3, 5]" in found["finding"]
    assert found["looping"] == ["0"] and err == "left out, since they repeat themselves: 0\n"
    assert (tmp_path / "p.png").stat().st_size > 5000
