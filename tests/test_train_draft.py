"""`jaxspec train-draft`: data, a run that is killed and goes on, what it leaves, bad input."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec import cli
from jaxspec.checkpoint import load_draft, load_target
from jaxspec.errors import InputError
from jaxspec.fresh_draft import DraftShape, fresh_draft
from jaxspec.optimizer import OptimizerConfig
from jaxspec.tokenizer import load_tokenizer
from jaxspec.training import LossConfig, TrainState
from jaxspec.training_acceptance import Acceptance, AcceptanceConfig
from jaxspec.training_data import Sample, Windows, read_samples
from jaxspec.training_run import TrainConfig, train
from jaxspec.training_store import Checkpoints, Evaluation, Metrics
from tests import make_checkpoint, tiny
from tests.tiny_tokenizer import TEMPLATE, write_tokenizer

VOCAB = 600
RNG = np.random.default_rng(0)
# The tiny target says the next token of what it once began to repeat: there is something to learn.
IDS = np.tile(RNG.integers(0, 24, 6), 40).astype(np.int32)
SAMPLE = Sample(IDS, np.ones(len(IDS), bool), "the test's")
SHAPE = DraftShape(capture=tiny.BOUNDARIES, vocab_size=20, sizes={"head_dim": 16})
CONFIG = TrainConfig(
    LossConfig(2),
    OptimizerConfig(learning_rate=1e-2, num_batches=8, warm_up=2, clip=10.0, accumulate=2),
    batch_size=2,
    evaluate_every=4,
    acceptance=AcceptanceConfig(num_prompts=0),
)


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def windows() -> tuple[Windows, Windows]:
    """Those to learn from, and those held out."""
    all_of_them = Windows.of([SAMPLE], 12, 24)
    return all_of_them.take(slice(None, -3)), all_of_them.take(slice(-3, None))


def run(target, windows, out, config=CONFIG, **options):
    learned, held_out = windows
    draft = fresh_draft(target, SHAPE, learned.frequent_ids(24, 20), seed=1)
    return train(target, draft, learned, held_out, config, out, **options)


def tensors_in(directory: Path) -> bytes:
    return (directory / "draft" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(target, windows, tmp_path_factory):
    """A run that nothing interrupts: its directory and its report."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(target, windows, out)


def test_what_a_run_leaves(whole, target, windows):
    out, report = whole
    first, last = report.evaluations
    assert (first.batch, last.batch, report.resumed_at) == (4, 8, 0)
    assert last.loss[0] < first.loss[0]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    draft = load_draft(out / "draft", tiny.NUMERICS, target=target)
    assert draft.config.boundaries.ids == tiny.BOUNDARIES
    learned = windows[0]
    # The first token of a window is never what the target is to say.
    said = np.concatenate(
        [row[1:n] for row, n in zip(learned.tokens, learned.lengths, strict=True)]
    )
    assert set(said) <= set(np.asarray(draft.target_of_draft[...]))
    again = draft.config
    assert (again.head_dim, again.draft_vocab_size, again.has_embedding) == (16, 20, False)


MUON = dataclasses.replace(
    CONFIG,
    loss=LossConfig(2, one_step_batches=5),
    optimizer=dataclasses.replace(CONFIG.optimizer, name="muon", weight_decay=0.1, final_rate=0.0),
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_interrupted_it_goes_on_to_the_same_bits(config, whole, target, windows, tmp_path):
    def interrupt(_: str, done: int, __: int) -> None:
        if done == 6:  # two batches after the checkpoint, and amid an accumulation
            raise KeyboardInterrupt

    if config is MUON:
        whole = tmp_path / "whole", run(target, windows, tmp_path / "whole", config)
        assert whole[1].evaluations[1].loss[0] < whole[1].evaluations[0].loss[0]
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(target, windows, out, config, progress=interrupt)
    metrics = out / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"batch": 7, "lo')  # as a kill leaves it
    kept = metrics.rename(tmp_path / "kept")
    metrics.symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"No space left on device\); the last checkpoint is kept"):
        run(target, windows, out, config)
    kept.replace(metrics)
    report = run(target, windows, out, config)
    assert report.resumed_at == 4
    assert tensors_in(out) == tensors_in(whole[0])
    assert report.evaluations == whole[1].evaluations
    lines = [json.loads(line)["batch"] for line in metrics.read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    other = dataclasses.replace(config, seed=3)
    with pytest.raises(
        InputError, match=r"run\.json: of another run, .*: config\.seed is 0 there and 3 here"
    ):
        run(target, windows, out, other)


def test_a_full_disk(tmp_path, monkeypatch):
    """One message, of metrics as of a checkpoint, and nothing is lost."""
    found = Evaluation(1, [2.0], [0.5])
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.add_evaluation(found)
    (tmp_path / "full").symlink_to("/dev/full")
    message = r"^--out \S+: cannot be written \({}\); the last checkpoint is kept, and the same "
    with pytest.raises(InputError, match=message.format("No space left on device")):
        Metrics(tmp_path / "full", 0).add_evaluation(found)
    assert Metrics(tmp_path / "metrics.jsonl", 1).evaluations == [found]
    state = TrainState({"w": np.ones(8, np.float32)}, ())
    with Checkpoints(tmp_path / "run", {}) as checkpoints:
        checkpoints.save(1, state)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(
            InputError, match=message.format("no room for a checkpoint of 0.000 GB")
        ):
            checkpoints.save(2, state)
        assert checkpoints.newest(TrainState({"w": np.zeros(8, np.float32)}, ()))[1] == 1


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_it(target, windows, tmp_path):
    """The batch, the sample and the largest gradient are named, the state before is kept."""
    wild = OptimizerConfig(learning_rate=1e30, num_batches=6, warm_up=0, accumulate=1)
    config = dataclasses.replace(CONFIG, optimizer=wild, evaluate_every=1)
    with pytest.raises(FloatingPointError) as stopped:
        run(target, windows, tmp_path, config)
    said = str(stopped.value)
    assert "training stopped at batch 2: the loss is" in said
    assert "the test's, token" in said and "largest gradient" in said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with `target`, which has a tokenizer."""
    place = tmp_path_factory.mktemp("place")
    config = {**make_checkpoint.target_config("flat"), "vocab_size": VOCAB}
    make_checkpoint.write(place / "target", config, make_checkpoint.target_tensors(config))
    write_tokenizer(place / "target")
    return place


def test_of_a_conversation_the_assistants_turns_are_learned(place, tmp_path):
    tokenizer = load_tokenizer(place / "target")
    assert tokenizer is not None
    turns = [("user", "abc"), ("assistant", "the 12"), ("user", "3"), ("assistant", "return")]
    path = tmp_path / "data.jsonl"
    messages = [{"role": role, "content": content} for role, content in turns]
    names = {"user": "human", "assistant": "gpt"}
    share_gpt = [{"from": names[role], "value": content} for role, content in turns]
    lines = [{"messages": messages}, {"conversations": share_gpt}, {"text": "def the"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tiny.target_config(tiny.TARGET_CONFIG | {"vocab_size": VOCAB})
    config = dataclasses.replace(config, eos_token_ids=(7,))
    sample, same, text = read_samples(path, tokenizer, config)
    np.testing.assert_array_equal(sample.ids, same.ids)
    said = [tokenizer.piece(i) for i in sample.ids[1:][sample.is_learned[:-1]]]
    assert "".join(said) == "the 12<|im_end|>return<|im_end|>"
    assert text.ids.tolist() == [*tokenizer.encode("def the"), 7] and text.is_learned.all()


def test_lines_end_with_a_newline_only(place, tmp_path):
    """JSON may hold a line separator as it is, and an empty line is none."""
    path = tmp_path / "data.txt"  # an object in the first line says what it is, too
    path.write_text('{"text": "the\u2028abc"}\n\n{"text": "12"}\n', "utf-8")
    tokenizer, config = load_tokenizer(place / "target"), tiny.target_config(tiny.TARGET_CONFIG)
    first, second = read_samples(path, tokenizer, config)
    assert second.where.endswith("line 3")
    assert tokenizer.encode("the\u2028abc") == first.ids.tolist()
    path = tmp_path / "data.json"
    path.write_text('[{"text": "the"}]')
    with pytest.raises(InputError, match="line 1: expected an object, found"):
        read_samples(path, tokenizer, config)


def test_tools_and_thinking_reach_the_template(place, tmp_path):
    directory = tmp_path / "tools"
    directory.mkdir()
    write_tokenizer(directory, "{{ tools | length }}{{ thinking }}" + TEMPLATE)
    path = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    line = {"messages": turns, "tools": [{}, {}], "thinking": False}
    path.write_text(json.dumps(line))
    tokenizer, config = load_tokenizer(directory), tiny.target_config(tiny.TARGET_CONFIG)
    (sample,) = read_samples(path, tokenizer, config)
    text = "".join(tokenizer.piece(i) for i in sample.ids)
    assert text.startswith("2False<|im_user|>")
    said = [tokenizer.piece(i) for i in sample.ids[1:][sample.is_learned[:-1]]]
    assert "".join(said) == "b<|im_end|>"
    path.write_text(json.dumps(line | {"thinking": "no"}))
    with pytest.raises(InputError, match="line 1: 'thinking': expected true or false"):
        read_samples(path, tokenizer, config)


def test_a_prompt_without_room_is_refused_at_once(target, draft):
    """Windows longer than the target's context can come from Python alone."""
    most = target.config.max_position_embeddings
    sample = Sample(np.ones(2 * most, np.int32), np.ones(2 * most, bool), "F")
    windows = Windows.of([sample], 2 * most, 24)
    config = AcceptanceConfig(1, prompt_len=most)
    with pytest.raises(InputError, match=f"a held-out prompt of {most} tokens leaves no room"):
        Acceptance(target, windows, config, draft)


def test_a_directory_of_something_else(target, windows, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"^--out \S+: not empty, and no training run$"):
        run(target, windows, tmp_path)


def test_windows():
    sample = Sample(np.arange(10, dtype=np.int32), np.arange(10) >= 6, "F, line 1")
    windows = Windows.of([sample], 4, 24)
    # The first has nothing to learn, the last is too short.
    assert windows.where == ["F, line 1, token 4"]
    assert windows.tokens.tolist() == [[4, 5, 6, 7]] and windows.lengths.tolist() == [4]
    many = Windows.of([SAMPLE], 12, 24)
    some = many.take(slice(18))
    rows, batches = zip(*some.batches(4, 0, 0, 8), strict=True)
    once, again = np.concatenate(rows[:4]), np.concatenate(rows[4:])
    assert len(set(once)) == len(set(again)) == 16 and (once != again).any()
    np.testing.assert_array_equal(batches[5].tokens, some.tokens[rows[5]])
    # A run that goes on gets what it would have got.
    later = [of.tolist() for of, _ in some.batches(4, 0, 3, 8)]
    assert later == [of.tolist() for of in rows[3:]]


@pytest.mark.parametrize(
    ("ids", "is_learned", "message"),
    [
        ([1, 2, 3, 4], [False] * 4, "nothing to learn from: of 1 samples"),
        ([1, 2], [True] * 2, "none has 3 tokens"),
        ([1, 2, 24], [True] * 3, "F: token id 24, but the target's vocabulary has ids 0 to 23"),
    ],
)
def test_data_that_cannot_be_used(ids, is_learned, message):
    sample = Sample(np.array(ids, np.int32), np.array(is_learned), "F")
    with pytest.raises(InputError, match=message):
        Windows.of([sample], 4, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capture": None}, r"no usual choice of boundaries \(\(2, 2, 1\) are no three\)"),
        ({"sizes": {"heads": 3}}, "a llama draft has no heads to choose"),
        ({"sizes": {"head_dim": 15}}, "15 dims of a head would be rotated"),
        ({"sizes": {"num_hidden_layers": "2"}}, "num_hidden_layers is '2'; expected an integer"),
        ({"sizes": {"rms_norm_eps": "1e-5"}}, "rms_norm_eps is '1e-5'; expected a number"),
        ({"sizes": {"rope_theta": True}}, "rope_theta is True; expected a number"),
        ({"capture": (1, 2, 9)}, r"boundaries \(1, 2, 9\) .* has boundaries 0"),
    ],
)
def test_drafts_that_there_are_not(change, message, target):
    shape = dataclasses.replace(SHAPE, **change)
    with pytest.raises(InputError, match=message):
        fresh_draft(target, shape, np.arange(20), seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "D"], "D: cannot be read"),
        ([], "give one of --data, --tokens and --features"),
        (
            ["--tokens", "IDS", "--draft", "D", "--attention", "llama"],
            "--attention: a fresh draft's, and --draft is not one",
        ),
        (["--features", "F", "--length", "64"], "--length: --features bring their own boundaries"),
        (["--tokens", "IDS", "--seed", "-1"], "seed is -1; it lies between 0 and"),
        (["--tokens", "IDS", "--accept-temperature", "-1"], "temperature is -1.0; 0 is greedy"),
        (["--tokens", "IDS", "--tree", "1x1x9"], "offer only 1"),
        (["--tokens", "IDS", "--final-rate", "2"], "a final rate of 2.0: it is a share"),
        (["--tokens", "IDS", "--accumulate", "3"], "1000 batches, of which 3 make an update"),
        (["--tokens", "IDS", "--length", "4096"], "--length 4096: the target was made for 2048"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, place, tmp_path, monkeypatch, capsys):
    argv = ["jaxspec", "train-draft", "--out", str(tmp_path / "out"), *flags]
    argv += ["--target", str(place / "target"), "--compile-cache", "none"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_any_moment(place, tmp_path):
    """SIGKILL, twice; then the same draft, bit for bit, as of a run that nobody killed."""
    ids = np.tile(np.random.default_rng(2).integers(0, VOCAB, 9), 60).tolist()
    (tmp_path / "ids.json").write_text(json.dumps([ids]))
    flags = "--capture 1,2,4 --draft-vocab-size 64 --length 16 --batch-size 2 --batches 24"
    flags += " --warm-up 2 --evaluate-every 3 --num-steps 2 --accept-prompts 2 --tree 2x1x3"
    flags += " --learning-rate 1e-2 --json"

    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def start(out: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxspec", "train-draft", *flags.split()]
        command += ["--target", str(place / "target"), "--tokens", str(tmp_path / "ids.json")]
        command += ["--out", str(tmp_path / out), "--compile-cache", str(tmp_path / "compiled")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    done, _ = start("whole").communicate(timeout=300)
    wanted = json.loads(done.splitlines()[-1])
    killed = 0
    for num_lines in (8, 17):
        process, metrics = start("killed"), tmp_path / "killed" / "metrics.jsonl"
        while process.poll() is None:
            if metrics.is_file() and metrics.read_text().count("\n") >= num_lines:
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.01)
        process.communicate(timeout=60)
    assert killed == 2, "it ended before it was killed"
    done, _ = start("killed").communicate(timeout=300)
    found = json.loads(done.splitlines()[-1])
    assert found["resumed_at"] > 0
    assert found["evaluations"] == wanted["evaluations"]
    assert tensors_in(tmp_path / "killed") == tensors_in(tmp_path / "whole")
    for one in wanted["evaluations"]:
        assert 1 <= one["accept_length"] <= 3 and 1 <= one["accept_ceiling"] <= 3
    target = load_target(place / "target", tiny.NUMERICS)
    draft = load_draft(tmp_path / "whole" / "draft", tiny.NUMERICS, target=target)
    assert draft.config.draft_vocab_size == 64
