"""The command line end to end: on a tiny random pair with a tokenizer, in this process."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxspec
from jaxspec import cli, commands
from jaxspec.environment import default_compile_cache, hub_cache
from jaxspec.tokenizer import load_tokenizer
from jaxspec.version import version
from tests import make_checkpoint, tiny
from tests.test_report import KEYS, PROMPT_KEYS
from tests.tiny_tokenizer import write_tokenizer

VOCAB = 600
PROMPT = "def the(abc): return 123"
CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with `target`, `draft` and `bare`, a target without a tokenizer."""
    place = tmp_path_factory.mktemp("cli")
    config = {**make_checkpoint.target_config("flat"), "vocab_size": VOCAB}
    tensors = make_checkpoint.target_tensors(config)
    for name in ("target", "bare"):
        make_checkpoint.write(place / name, config, tensors)
    write_tokenizer(place / "target")
    draft = {**tiny.DRAFT_CONFIG, "vocab_size": VOCAB, "draft_vocab_size": 400}
    draft["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    draft["eagle_config"]["capture_convention"] = "before"
    make_checkpoint.write(place / "draft", draft, tiny.draft_tensors(draft))
    return place


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    """A cache of compiled programs for these tests alone, and JAX's settings as they were.

    Programs are compiled with little optimisation: that takes two thirds of the time, and what is
    tested here is what stands around them.
    """
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    jax.config.update("jax_disable_most_optimizations", True)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.config.update("jax_disable_most_optimizations", False)
    compilation_cache.reset_cache()


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Runs `jaxspec ARGS` in `place`: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["jaxspec", *args])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        return exit.value.code or 0, out, err

    return run


PAIR = ("--target", "target", "--draft", "draft")
SHORT = ("--tree", "2x1x3", "--max-new-tokens", "12", "--context-length", "64")


def test_json_is_the_contract(run, place):
    status, out, err = run("generate", PROMPT, *PAIR, *SHORT, "--json")
    assert status == 0, err
    assert err == ""
    report = json.loads(out.splitlines()[-1])
    assert report.keys() >= KEYS
    (prompt,) = report["prompts"]
    assert prompt.keys() >= PROMPT_KEYS
    tokenizer = load_tokenizer(place / "target")
    assert tokenizer is not None
    assert prompt["prompt_len"] == len(tokenizer.encode(PROMPT))
    assert prompt["text"] == tokenizer.decode(prompt["tokens"])
    assert len(prompt["tokens"]) == 12
    assert prompt["finish"] == "length"
    assert prompt["accept_length"] == pytest.approx(11 / prompt["num_steps"])
    assert (report["tree"], report["dtype"]) == ("2x1x3", "float32")
    assert report["implementation"] == "xla"
    ops = "mla_attention", "expert_matmul", "tree_verify"
    assert report["implementations"] == dict.fromkeys(ops, "xla")
    assert report["jax_version"] == jax.__version__
    assert "(1, 2, 4)" in report["capture"]
    assert "convention 'before'" in report["draft_claim"]
    assert report["command"].startswith("jaxspec generate 'def the")


def test_export_is_the_same_draft(run, place):
    """And what --draft-rotary asks for is told: in a run's report and in its file."""
    args = ("export", "draft", "exported", "--layout", "specforge", "--pair", "target", "--json")
    status, out, err = run(*args)
    assert status == 0, err
    assert '"num_speculative_tokens": 3' in json.loads(out)["served"]["vllm"]
    tokens = []
    for draft in ("draft", "exported"):
        pair = ("--target", "target", "--draft", draft)
        status, out, err = run("generate", PROMPT, *pair, *SHORT, "--json")
        assert status == 0, err
        tokens.append(json.loads(out)["prompts"][0]["tokens"])
    assert tokens[0] == tokens[1]
    asked = ("--draft-rotary", '{"rope_theta": 77}', "--out", "rotary.jsonl")
    status, out, err = run("generate", PROMPT, *PAIR, *SHORT, "--json", *asked)
    assert status == 0, err
    assert json.loads(out)["draft_rotary"]["theta"] == 77
    assert json.loads(out)["prompts"][0]["tokens"] == tokens[0], "no draft changes a token"
    header = json.loads((place / "rotary.jsonl").read_text().splitlines()[0])
    assert header["flags"]["draft_rotary"]["theta"] == 77
    status, _, err = run("generate", PROMPT, *PAIR, "--draft-rotary", "77")
    assert status == 2
    assert "--draft-rotary is '77': expected a JSON object" in err


def test_text_streams_and_a_run_file_resumes(run, place):
    (place / "prompts.jsonl").write_text(
        '{"id": "a", "prompt": "the abc"}\n'
        '{"id": "b", "category": "chat", "messages": [{"role": "user", "content": "hi"}]}\n'
    )
    args = ("generate", "--prompt-file", "prompts.jsonl", *PAIR, *SHORT, "--out", "run.jsonl")
    status, out, err = run(*args)
    assert status == 0, err
    assert "accept_length" in err
    assert "of 3 (bonus included)" in err
    assert "features: boundaries (1, 2, 4)" in err
    header, first, second = map(json.loads, (place / "run.jsonl").read_text().splitlines())
    assert header["format"] == "jaxspec-run-1"
    assert header["flags"]["tree"] == "2x1x3"
    assert header["target_hash"] != header["draft_hash"]
    assert (first["id"], second["id"], second["category"]) == ("a", "b", "chat")
    assert len(first["accepted"]) == first["verify_steps"]
    tokenizer = load_tokenizer(place / "target")
    assert tokenizer is not None
    texts = [tokenizer.decode(entry["output_ids"]) for entry in (first, second)]
    assert out == f"--- a\n{texts[0]}\n--- b\n{texts[1]}\n"

    # The second request is lost, as if the run had been killed, and is run again with its own seed.
    lines = (place / "run.jsonl").read_text().splitlines()
    (place / "run.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    status, again, err = run(*args)
    assert status == 0, err
    assert again == out
    resumed = json.loads((place / "run.jsonl").read_text().splitlines()[2])
    assert resumed["output_ids"] == second["output_ids"]
    status, _, err = run(*args, "--seed", "1")
    assert status == 2
    assert err.startswith("jaxspec: run.jsonl: of another run")
    assert "flags.seed is 0 there and 1 here" in err
    status, _, err = run(*args, "--capture-convention", "before")
    assert status == 2 and "flags.capture_convention is None there and 'before' here" in err
    # One prompt of the two would be given the first one's seed.
    prompts = Path(args[args.index("--prompt-file") + 1])
    alone = place / "alone.jsonl"
    alone.write_text((place / prompts).read_text("utf-8").splitlines()[1] + "\n", "utf-8")
    status, _, err = run(*(str(alone) if arg == str(prompts) else arg for arg in args))
    assert status == 2 and "flags.prompts is" in err


def test_plain_decoding_gives_the_same_tokens_and_stops_where_told(run, place):
    _, out, _ = run("generate", PROMPT, *PAIR, *SHORT, "--json")
    text = json.loads(out)["prompts"][0]["text"]
    plain = ("generate", PROMPT, "--target", "target", "--draft", "none", *SHORT[2:])
    status, out, err = run(*plain)
    assert status == 0, err
    assert out == text + "\n"
    assert err.startswith("no draft, ")
    middle = text[len(text) // 2]
    status, out, err = run(*plain, "--json", "--stop", middle)
    (prompt,) = json.loads(out)["prompts"]
    assert prompt["text"] == text.split(middle)[0]
    assert prompt["finish"] == "stop"
    assert prompt["num_steps"] == len(prompt["tokens"]) - 1
    report = json.loads(out)
    assert (report["draft"], report["tree"], report["accept_length"]) == (None, None, 1)


def test_tokens_in_and_tokens_out(run, place):
    (place / "tokens.json").write_text("[[5, 6, 7], [8]]")
    args = (*PAIR, *SHORT, "--tokens", "tokens.json")
    status, out, err = run("generate", *args, "--json")
    assert status == 0, err
    prompts = json.loads(out)["prompts"]
    assert [prompt["prompt_len"] for prompt in prompts] == [3, 1]
    assert [prompt["text"] for prompt in prompts] == [None, None]
    status, out, err = run("generate", *args)
    assert out == "".join(f"--- {i}\n{prompt['tokens']}\n" for i, prompt in enumerate(prompts))


def test_a_prompt_that_is_too_long_fails_alone(run, place):
    """The others are served; it is named, and the status is 2. So again with the file."""
    (place / "long.json").write_text(json.dumps([[5, 6, 7], [9] * 64, [8]]))
    args = ("generate", "--tokens", "long.json", *PAIR, *SHORT, "--out", "long.jsonl", "--ceiling")
    for _ in range(2):
        status, out, err = run(*args, "--json")
        assert status == 2
        assert "long.json, entry 1: a prompt of 64 tokens leaves no room for a new one" in err
        report = json.loads(out)
        prompts = report["prompts"]
        assert [len(prompt["tokens"]) for prompt in prompts] == [12, 0, 12]
        assert [prompt["finish"] for prompt in prompts] == ["length", "capacity", "length"]
        assert [prompt["error"] is None for prompt in prompts] == [True, False, True]
        assert report["accept_length"] == 2 * 11 / sum(prompt["num_steps"] for prompt in prompts)
        assert report["accept_ceiling"] >= report["accept_length"]


def test_settings_of_a_prompt_and_of_the_run(run, place):
    """As two runs with these flags; a run file does not go on with other settings."""
    lines = [
        {"prompt": "the abc"},
        {"prompt": "the abc", "sampling": {"temperature": 0, "seed": 5}},
    ]
    (place / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = (*PAIR, *SHORT, "--temperature", "1.3", "--min-p", "0.02", "--json")
    args = ("generate", "--prompt-file", "own.jsonl", *flags, "--out", "own-run.jsonl")
    status, out, err = run(*args)
    assert status == 0, err
    sampled, greedy = (prompt["tokens"] for prompt in json.loads(out)["prompts"])
    for one, more in ((sampled, ()), (greedy, ("--temperature", "0"))):
        assert (
            one == json.loads(run("generate", "the abc", *flags, *more)[1])["prompts"][0]["tokens"]
        )
    assert sampled != greedy
    lines[1]["sampling"]["seed"] = 6
    (place / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    status, _, err = run(*args)
    assert status == 2
    assert "of another run" in err and "flags.prompts is" in err


def test_a_stop_id_ends_it(run):
    plain = ("generate", PROMPT, *PAIR, *SHORT, "--json")
    tokens = json.loads(run(*plain)[1])["prompts"][0]["tokens"]
    (prompt,) = json.loads(run(*plain, "--stop-id", str(tokens[4]))[1])["prompts"]
    assert prompt["tokens"] == tokens[: tokens.index(tokens[4]) + 1]
    assert prompt["finish"] == "stop"


def test_wrong_features_are_refused_while_tracing(run):
    status, out, err = run("generate", PROMPT, *PAIR, *SHORT, "--capture", "2,3,4")
    assert (status, out) == (2, "")
    first, wants, given, last = err.splitlines()
    assert first == "jaxspec: draft.fuse: these are not the features this draft was trained on"
    assert "boundaries (1, 2, 4)" in wants
    assert "convention 'before'" in wants
    assert "boundaries (2, 3, 4)" in given
    assert "[target capture, set by --capture]" in given
    assert last == "  both are 192 wide, so nothing else would have failed."
    # The very same boundaries are not refused, whoever names them.
    status, out, err = run("generate", PROMPT, *PAIR, *SHORT, "--capture", "1,2,4", "--json")
    assert status == 0, err
    assert "set by --capture" in json.loads(out)["capture"]


def test_tokenize_gives_what_generate_reads(run, place):
    status, out, err = run("tokenize", "the abc<|im_end|>", "--target", "target")
    assert (status, err) == (0, "")
    tokenizer = load_tokenizer(place / "target")
    assert tokenizer is not None
    assert json.loads(out) == [tokenizer.encode("the abc<|im_end|>")]
    assert jaxspec.tokenize(["the abc<|im_end|>"], tokenizer) == [tuple(json.loads(out)[0])]
    status, out, _ = run("tokenize", "the", "--target", "target", "--chat", "--json")
    (prompt,) = json.loads(out)["prompts"]
    assert prompt["ids"] == tokenizer.encode_chat([{"role": "user", "content": "the"}])
    rendered = (
        "<|im_user|>user<|im_middle|>the<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    assert "".join(prompt["pieces"]) == rendered
    args = ("tokenize", "the", "--target", "target", "--chat", "--no-thinking", "--json")
    (prompt,) = json.loads(run(*args)[1])["prompts"]
    assert "".join(prompt["pieces"]) == rendered + "</think>"


def test_a_prompts_own_sampling_is_never_dropped_in_silence(run, place):
    """Ids alone have no room for it: that is said, and `--json` has it."""
    line = {"id": "mine", "prompt": "the", "sampling": {"temperature": 0.7, "seed": 3}}
    (place / "own.jsonl").write_text(json.dumps(line))
    args = ("tokenize", "--prompt-file", "own.jsonl", "--target", "target")
    status, _, err = run(*args)
    said = "'sampling' of prompt 'mine' plays no part: ids alone are printed; --json has both\n"
    assert (status, err) == (0, said)
    status, out, err = run(*args, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["prompts"][0]["sampling"] == line["sampling"]


def test_record_and_inspect_of_its_features(run, place):
    args = ("record", PROMPT, *PAIR, "--out", "r.safetensors", "--boundaries", "none", "--top", "2")
    status, out, err = run(*args, "--json")
    assert status == 0, err
    arrays = json.loads(out)["arrays"]
    assert arrays["features"]["shape"][2] == 3 * 64
    assert not any(name.startswith("boundary") for name in arrays)
    status, out, err = run("inspect", "r.safetensors", "--target", "target")
    assert status == 0, err
    assert "the file claims (1, 2, 4): this holds" in out


def test_convert_and_inspect(run, place):
    status, out, err = run("convert", "draft", "converted", "--target", "target", "--dry-run")
    assert (status, out) == (0, ""), err
    assert "converted would be the draft eagle3@" in err
    assert "trained on boundaries (1, 2, 4)   [config.json: eagle_config." in err
    assert "convention 'before' (the config says so); tied to this target by --target" in err
    assert not (place / "converted").exists()
    status, _, err = run("convert", "draft", "converted", "--target", "target")
    assert status == 0, err
    _, before, _ = run("inspect", "draft", "--json")
    _, after, _ = run("inspect", "converted", "--json")
    before, after = json.loads(before), json.loads(after)
    assert (before["form"], after["form"]) == ("hugging-face", "converted")
    assert before["identity"] == after["identity"]
    assert after["boundaries"]["ids"] == [1, 2, 4]
    status, out, _ = run("inspect", "converted")
    assert "boundaries 1, 2, 4, 64 wide each" in out
    assert "[--target]" in out
    status, out, err = run("convert", "draft", "converted")
    assert status == 2
    assert err == "jaxspec: converted: exists already; a conversion never writes over anything\n"


def test_a_target_that_ends_no_text_says_so(run, place):
    (place / "one.json").write_text("[[1]]")
    bare = ("--tokens", "one.json", "--target", "bare", "--draft", "none", *SHORT[2:])
    status, _, err = run("generate", *bare)
    assert status == 0
    assert err.startswith("bare: no config names an end-of-sequence id")
    _, _, err = run("generate", *bare, "--ignore-eos")
    assert "end-of-sequence" not in err
    assert "ends with  nothing: no config names" in run("inspect", "bare")[1]
    assert "ends with  " in run("inspect", "target")[1]


TARGET = ("--target", "target", "--draft", "none")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no prompt: give one of PROMPT, --prompt-file and --tokens"),
        (("a", "--tokens", "t"), "several sources of prompts"),
        (("--tokens", "t", "--chat"), "--chat is of text, and --tokens are ids already"),
        (("--tokens", "t", "--no-thinking"), "--thinking is of text"),
        (("a", "--no-thinking"), "PROMPT: thinking on or off is read by a chat template"),
        (("caf\udce9", *TARGET), "PROMPT: text that is not Unicode"),
        (("--prompt-file", "image.jsonl", *TARGET), "content of type 'image_url': jaxspec reads"),
        (("--prompt-file", "robot.jsonl", *TARGET), "line 1, 'messages': role 'robot': there are"),
        (("--prompt-file", "hot.jsonl", *TARGET), "hot.jsonl, line 1: temperature is -1"),
        (("",), "PROMPT: empty prompt"),
        (("a", "--target", "target"), "--target without a draft"),
        (("a", "--target", "nowhere", "--draft", "none"), "nowhere: no such directory"),
        (
            ("a", "--target", "org/model", "--draft", "none"),
            "no such repository in the local cache",
        ),
        (("a", "--target", "hot.jsonl", "--draft", "none"), "hot.jsonl: a file; a checkpoint is a"),
        (("a", "--target", ".", "--draft", "none"), ".: no config.json: expected a Hugging Face"),
        (("a", "--target", "bare", "--draft", "none"), "bare: no tiktoken.model in it"),
        (("a", *TARGET, "--tree", "1x1x2"), "--draft none decodes plainly"),
        (("a", *TARGET, "--capture", "1"), "--capture without a draft"),
        (("a", *TARGET, "--capture-convention", "after"), "there is no draft"),
        (("a", *PAIR, "--tree", "3x1"), "tree '3x1': expected LEVELSxBRANCHESxNODES"),
        (("a", *PAIR, "--tree", "1x1x9"), "offer only 1"),
        (("a", *PAIR, "--capture", "two"), "--capture is 'two': expected boundaries"),
        (("a", *PAIR, "--speculative-num-steps", "3"), "are given together or not at all"),
        (("a", *PAIR, "--tree", "1x1x2", "--speculative-num-steps", "3"), "give one of the two"),
        (("a", *TARGET, "--implementation", "cuda"), "'cuda'; there are mosaic and xla"),
        (("a", *PAIR, "--implementation", "mosaic"), "implementation mosaic of mla_attention: the"),
        (("a", *TARGET, "--ceiling"), "--ceiling is of a tree"),
        (("a", *TARGET, "--top-p", "0"), "top_p is 0.0; it lies above 0"),
        (("a", *TARGET, "--temperature", "inf"), "temperature is inf"),
        (("a", *TARGET, "--stop", ""), "a stop string is empty"),
        (("--tokens", "ids.json", *TARGET, "--stop", "a"), "there are only ids here"),
        (("--tokens", "ids.json", *TARGET), "ids.json, entry 1: token id 600"),
        (("the abc", *TARGET, "--context-length", "2"), "leave no room for a new one in a context"),
        (("--prompt-file", "absent.txt", *TARGET), "absent.txt: cannot be read"),
        (
            ("a", *TARGET, "--out", "absent/run.jsonl"),
            "run.jsonl: there is no directory absent",
        ),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, place, args, message):
    (place / "ids.json").write_text("[[1], [600]]")
    for name, role, content in (
        ("image", "user", [{"type": "image_url"}]),
        ("robot", "robot", "a"),
    ):
        line = json.dumps({"messages": [{"role": role, "content": content}]})
        (place / f"{name}.jsonl").write_text(line)
    (place / "hot.jsonl").write_text('{"prompt": "a", "sampling": {"temperature": -1}}')
    status, out, err = run("generate", *args)
    assert (status, out) == (2, "")
    assert err.startswith("jaxspec: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [("generate", "a", "--nonsense"), ("generate", "a", "--top-k", "x"), ("no-such-command",)],
)
def test_bad_usage_is_status_2(run, args):
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert "Error" in err


def test_what_is_no_number_is_not_bad_input(run, monkeypatch):
    def overflow(*_):
        raise FloatingPointError("request 0: the target's logits are NaN")

    monkeypatch.setattr(commands, "run_generate", overflow)
    status, out, err = run("generate", "a", *TARGET)
    assert (status, out) == (1, "")
    assert err == "jaxspec: request 0: the target's logits are NaN\n"


def test_sglang_spelling_of_the_tree(run):
    flags = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    flags += ("--speculative-num-draft-tokens", "3", *SHORT[2:])
    status, out, err = run("generate", PROMPT, *PAIR, *flags, "--json", "--ceiling")
    assert status == 0, err
    report = json.loads(out)
    assert report["tree"] == "2x1x3"
    # Greedy text leaves a draft that knows the target nothing to miss: 11 tokens in steps of 3.
    assert report["accept_ceiling"] == pytest.approx(11 / 4)


@pytest.mark.parametrize(
    "command", ["generate", "tokenize", "record", "convert", "export", "inspect", "plan", "profile"]
)
def test_help_states_every_default(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)((?: \S+)?)((?:.|\n(?!  -))*)", out, re.MULTILINE)
    assert "--json" in {flag for flag, _, _ in options}
    for flag, value, help_text in options:
        is_switch = not value
        assert is_switch or re.search("default|required", help_text, re.IGNORECASE), flag


def test_version(run):
    status, out, _ = run("--version")
    assert (status, out) == (0, f"jaxspec {version()}\n")


def test_a_reader_of_stdout_that_has_seen_enough(place):
    (place / "long.txt").write_text("the " * 40000)
    args = f"--target {place / 'target'} --prompt-file {place / 'long.txt'}"
    command = f"{sys.executable} -m jaxspec tokenize {args} | true; echo ${{PIPESTATUS[0]}} >&2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "1\n"


def test_help_needs_no_jax():
    code = "import sys, jaxspec.cli; print({'jax', 'numpy', 'tiktoken'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_public_names():
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
    for command in ("generate", "tokenize", "record"):
        assert callable(getattr(jaxspec, command))
    assert jaxspec.convert_checkpoint.__name__ == "convert"
    assert jaxspec.inspect_checkpoint.__name__ == "inspect"
    assert jaxspec.identify_features.__name__ == "identify"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jaxspec.nonsense


def test_where_caches_are(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HF_HOME", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    assert default_compile_cache() == tmp_path / ".cache" / "jaxspec" / "compiled"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_compile_cache() == tmp_path / "Library" / "Caches" / "jaxspec" / "compiled"
    monkeypatch.setenv("HF_HOME", "/h")
    assert hub_cache() == Path("/h/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert hub_cache() == Path("/c")


def test_a_repository_in_the_local_cache(run, place, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    repository = place / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(place / "target")
    status, out, err = run("tokenize", "the", "--target", "org/model")
    assert status == 0, err
    assert json.loads(out)


@pytest.mark.slow
def test_a_second_run_starts_in_a_third_of_the_time(place, tmp_path):
    """In processor time, so that a busy machine does not decide."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        args = ["generate", PROMPT, "--max-new-tokens", "1", "--compile-cache", str(tmp_path)]
        subprocess.run(
            [sys.executable, "-m", "jaxspec", *args], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    first, second = seconds(), seconds()
    assert second < first / 3
