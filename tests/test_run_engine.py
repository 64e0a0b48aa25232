"""`benchmarks/run_engine.py` against small fakes of SGLang's and vLLM's servers, on this machine.

The fakes speak what the engines' sources say: streams in chunks, cumulative or not, and acceptance
as a histogram, by step, or by counters alone.
"""

import collections
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.doctor_texts import read_observed
from jaxspec.run_comparison import compare_runs, read_run
from tests.test_readme import command_lines

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # where they import one another from

import run_engine  # noqa: E402

STEPS = [2, 0, 3]
"""Drafted tokens accepted in each step of every answer, whose first token comes from prefill."""
NUM_TOKENS = 1 + 3 + 1 + 4
PROMPTS = {"a": [5, 6], "b": [7], "c": [1, 2, 3], "d": [40, 2]}
SPECULATION = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def text(ids: list[int]) -> list[int]:
    return [100 * sum(ids) + i for i in range(NUM_TOKENS)]


class Fake(ThreadingHTTPServer):
    """A server.

    Attributes:
      asked: the bodies of the requests.
      fails_at: the request, from 0, that gets `failure`: a status, "breaks" or "streams".
      together: requests that have to be there at a time, before it answers the first.
    """

    daemon_threads = True

    def __init__(self, handler, *, fails_at=None, failure=500, together=1, **options):
        self.asked, self.options = [], options
        self.fails_at, self.failure = fails_at, failure
        self.lock, self.barrier = threading.Lock(), threading.Barrier(together, timeout=10)
        self.counted = collections.Counter()
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request, client_address):
        """A client may hang up once it has read [DONE]; all else is told on stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, format, *args):
        pass

    def send(self, found, status=200):
        data = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        found = self.look(self.path)
        self.send(*((found,) if found is not None else ({"detail": "Not Found"}, 404)))

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            index = len(server.asked)
            server.asked.append(body)
        if index < server.barrier.parties:
            server.barrier.wait()
        fails = index == server.fails_at
        if self.path != self.PATH or (fails and type(server.failure) is int):
            self.send({"error": {"message": "out of memory"}}, server.failure if fails else 404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(self.events(body)):
            if fails and number == 2:
                if server.failure == "breaks":
                    self.close_connection = True
                    return
                self.stream(json.dumps({"error": {"message": "out of memory"}}))
                break
            self.stream(json.dumps(event))
        self.stream("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def stream(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")


def pieces(ids: list[int]) -> Iterator[list[int]]:
    """The tokens of an answer, those of prefill and of each step by themselves."""
    tokens = text(ids)
    for size in [1, *(n + 1 for n in STEPS)]:
        yield tokens[:size]
        tokens = tokens[size:]


class SGLang(Handler):
    PATH = "/generate"

    def look(self, path):
        options = self.server.options
        if path != options.get("info", "/server_info"):
            return None
        return {
            "model_path": "kimi", "dtype": "bfloat16", "version": "0.5.9", "tp_size": 8,
            "disable_radix_cache": options.get("no_cache", True),
            "incremental_streaming_output": options.get("says_incremental", False),
            **options.get("spec", SPECULATION),
        }  # fmt: skip

    def events(self, body):
        done, options = [], self.server.options
        for piece in pieces(body["input_ids"]):
            done = done + piece
            is_last = len(done) == NUM_TOKENS
            meta = {
                "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(done),
                "finish_reason": {"type": "length", "length": NUM_TOKENS} if is_last else None,
            }  # fmt: skip
            if is_last:
                meta |= {"e2e_latency": 0.1} | options.get("meta", {"spec_verify_ct": 3})
            yield {
                "text": "", "output_ids": piece if options.get("incremental") else done,
                "meta_info": meta,
            }  # fmt: skip


class VLLM(Handler):
    PATH = "/v1/completions"

    def look(self, path):
        counted = self.server.counted
        label = 'engine="0",model_name="kimi"'
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{{{label}}} {1000 + counted['steps']}.0",
            f"vllm:spec_decode_num_drafts_created{{{label}}} 1.78e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {3000 + 3 * counted['steps']}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {700 + counted['accepted']}.0",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} 9.0'
                for i in range(3)
            ),
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0',
        ]
        return {
            "/version": {"version": "0.26.0"},
            "/v1/models": {"object": "list", "data": [{"id": "served", "root": "kimi"}]},
            "/metrics": "\n".join(lines) + "\n",
        }.get(path)

    def events(self, body):
        options, read = self.server.options, self.server.options.get("reads", body["prompt"])
        made = list(pieces(body["prompt"]))
        for number, piece in enumerate(made):
            choice = {"index": 0, "text": "", "token_ids": piece, "finish_reason": None}
            if number == 0:
                choice["prompt_token_ids"] = read
            if options.get("is_old"):
                del choice["token_ids"]
                choice.pop("prompt_token_ids", None)
            if number == len(made) - 1:
                choice |= {"finish_reason": options.get("finish", "length"), "stop_reason": None}
            yield {"object": "text_completion", "model": "served", "choices": [choice]}
        with self.server.lock:
            self.server.counted.update(steps=len(STEPS), accepted=sum(STEPS))
        usage = {"choices": [], "usage": {"completion_tokens": NUM_TOKENS}}
        if "speculative_decoding" in options:
            usage["metrics"] = {"speculative_decoding": options["speculative_decoding"]}
        yield usage


@contextlib.contextmanager
def serving(handler, **options) -> Iterator[Fake]:
    with Fake(handler, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the program; gives its exit status, its last line's object, stderr, and the run file."""
    tokens, out = tmp_path / "ids.json", tmp_path / "run.jsonl"
    prompts = [
        {"id": id, "category": "code" if id < "c" else None, "ids": ids, "pieces": []}
        for id, ids in PROMPTS.items()
    ]
    tokens.write_text(json.dumps({"target": "kimi", "prompts": prompts}))

    def run(backend: str, url: str, *flags: str):
        argv = ["run_engine.py", "--backend", backend, "--base-url", url]
        argv += ["--tokens", str(tokens), "--out", str(out), "--max-new-tokens", str(NUM_TOKENS)]
        monkeypatch.setattr(sys, "argv", [*argv, *flags])
        status = 0
        try:
            run_engine.main()
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        found = json.loads(said.out.splitlines()[-1]) if status == 0 else said.out
        return status, found, said.err, out

    return run


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang(run, incremental):
    meta = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 0, 1, 1]}
    how = {"incremental": incremental, "says_incremental": incremental}
    with serving(SGLang, meta=meta, **how) as server:
        status, found, error, out = run("sglang", server.url, "--ignore-eos", "--machine", "8 H200")
    assert (status, error) == (0, "")
    assert [body["input_ids"] for body in server.asked] == list(PROMPTS.values())
    assert server.asked[0]["stream"] and server.asked[0]["sampling_params"] == {
        "max_new_tokens": 9, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "ignore_eos": True,
    }  # fmt: skip
    header, entries = read_run(out)
    assert (header["engine"], header["version"], header["machine"]) == ("sglang", "0.5.9", "8 H200")
    flags = header["flags"]
    assert (flags["tree"], flags["prefix_cache"], flags["ignore_eos"]) == ("3x1x4", False, True)
    assert {id: list(one.prompt_ids) for id, one in entries.items()} == PROMPTS
    for one in entries.values():
        assert list(one.output_ids) == text(list(one.prompt_ids))
        assert (one.accepted, one.finish) == ((0, 2, 3), "length"), "ascending: it says no order"
        assert one.decode_ms is not None and one.decode_ms > 0
    line = json.loads(out.read_text().splitlines()[1])
    assert (line["category"], line["verify_steps"]) == ("code", 3)
    assert line["accepted_from"] == "meta_info.spec_correct_drafts_histogram"
    assert line["reported"] == meta
    # By hand: 8 tokens of 3 steps, in each of four requests.
    assert found["accept_length"] == pytest.approx(8 / 3)
    assert (found["num_requests"], found["num_new"]) == (4, 4)
    observed = read_observed(out)
    assert (observed.engine, observed.levels) == ("sglang", 3), "the doctor takes it"


def test_sglang_of_an_older_version_and_without_speculation(run):
    spec = {"speculative_algorithm": None}
    info = {"info": "/get_server_info", "no_cache": False, "spec": spec, "meta": {}}
    with serving(SGLang, **info) as server:
        status, found, error, out = run("sglang", server.url, "--temperature", "0.7", "--seed", "3")
    assert status == 0 and "prefix cache is on" in error
    seeds = [body["sampling_params"]["sampling_seed"] for body in server.asked]
    assert seeds == [3, 4, 5, 6]
    header, entries = read_run(out)
    assert header["flags"]["tree"] is None
    assert all(one.accepted == () for one in entries.values())
    assert "accepted" not in out.read_text().splitlines()[1], "what is not said is not there"
    assert (found["accept_length"], found["num_with_acceptance"]) == (None, 0)


@pytest.mark.parametrize(
    ("reported", "accepted", "source"),
    [
        ({"per_step_accepted": STEPS, "num_spec_steps": 3}, (2, 0, 3), "per_step_accepted"),
        ({"acceptance_histogram": [1, 0, 1, 1]}, (0, 2, 3), "acceptance_histogram"),
        (None, (), None),
    ],
)
def test_vllm(run, reported, accepted, source):
    options = {} if reported is None else {"speculative_decoding": reported}
    with serving(VLLM, **options) as server:
        status, found, _, out = run("vllm", server.url)
    assert status == 0
    first = server.asked[0]
    assert [body["prompt"] for body in server.asked] == list(PROMPTS.values())
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("served", 9, 0.0)
    assert first["return_token_ids"] and first["stream_options"] == {"include_usage": True}
    header, entries = read_run(out)
    assert (header["version"], header["flags"]["model_path"]) == ("0.26.0", "kimi")
    assert (header["flags"]["tree"], header["flags"]["prefix_cache"]) == ("3x1x4", False)
    for one in entries.values():
        assert list(one.output_ids) == text(list(one.prompt_ids))
        assert (one.accepted, one.finish) == (accepted, "length")
    line = json.loads(out.read_text().splitlines()[1])
    assert line.get("accepted_from") == (source and f"metrics.speculative_decoding.{source}")
    # Four requests of three steps, which accepted five; what was counted before is not theirs.
    assert found["counted_by_server"] == {
        "num_drafts": 12, "num_draft_tokens": 36, "num_accepted_tokens": 20
    }  # fmt: skip


def test_two_engines_are_compared(run, monkeypatch, capsys):
    meta = {"spec_correct_drafts_histogram": [1, 0, 1, 1]}
    with serving(SGLang, meta=meta) as server:
        *_, out = run("sglang", server.url)
    one = out.rename(out.with_name("sglang.jsonl"))
    with serving(VLLM, speculative_decoding={"per_step_accepted": STEPS}) as server:
        *_, out = run("vllm", server.url)
    monkeypatch.setattr(sys, "argv", ["jaxspec", "compare", str(one), str(out)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "4 of 4 requests have the same tokens" in capsys.readouterr().out
    found = compare_runs(one, out)
    lengths = found.groups[0].accept_length
    assert lengths is not None and lengths.a == lengths.b == pytest.approx(8 / 3)
    assert found.flags_that_differ == {}, "what only one of the engines says is no difference"
    with serving(VLLM) as server:
        out.unlink()
        *_, out = run("vllm", server.url, "--ignore-eos")
    assert compare_runs(one, out).flags_that_differ == {"ignore_eos": (False, True)}


@pytest.mark.parametrize(
    ("failure", "said"),
    [(500, "status 500"), ("breaks", "no answer|breaks off"), ("streams", "out of memory")],
)
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_run_goes_on_where_it_stopped(run, backend, failure, said):
    handler = {"sglang": SGLang, "vllm": VLLM}[backend]
    with serving(handler, fails_at=2, failure=failure) as server:
        status, _, error, out = run(backend, server.url)
        url = server.url
    assert status == 2
    assert "ids.json, c: " in error and url + handler.PATH in error
    assert any(part in error for part in said.split("|"))
    assert list(read_run(out)[1]) == ["a", "b"]
    with serving(handler) as server:  # on another port
        status, found, _, out = run(backend, server.url)
    assert (status, found["num_requests"], found["num_new"]) == (0, 4, 2)
    name = {"sglang": "input_ids", "vllm": "prompt"}[backend]
    assert [body[name] for body in server.asked] == [PROMPTS["c"], PROMPTS["d"]]
    assert list(read_run(out)[1]) == list(PROMPTS)
    with serving(handler) as server:
        status, _, error, _ = run(backend, server.url, "--temperature", "0.5")
    assert status == 2 and "flags.temperature is 0.0 there and 0.5 here" in error
    assert not server.asked


def test_many_requests_at_a_time(run):
    with serving(SGLang, together=4) as server:
        status, found, _, out = run("sglang", server.url, "--batch-size", "4")
    assert (status, found["num_new"]) == (0, 4)
    assert {id: list(one.output_ids) for id, one in read_run(out)[1].items()} == {
        id: text(ids) for id, ids in PROMPTS.items()
    }


def test_what_is_under_way_is_kept_when_another_fails(run):
    with serving(SGLang, together=2, fails_at=0) as server:
        status, _, error, out = run("sglang", server.url, "--batch-size", "2")
    assert status == 2 and "status 500" in error
    done = [list(one.prompt_ids) for one in read_run(out)[1].values()]
    failed, other = (body["input_ids"] for body in server.asked[:2])
    assert other in done and failed not in done


def test_no_server_and_another_one(run):
    with Fake(SGLang) as server:
        url = server.url  # closed below: nobody is there
    status, _, error, out = run("sglang", url)
    assert status == 2 and f"{url}/server_info: no answer" in error and "is the server up" in error
    assert not out.exists()
    with serving(VLLM) as server:
        status, _, error, out = run("sglang", server.url)
    assert status == 2 and "no SGLang server" in error and not out.exists()
    with serving(SGLang) as server:
        status, _, error, out = run("vllm", server.url)
    assert status == 2 and "no vLLM server" in error and not out.exists()


def test_other_ids_than_those_sent_and_what_was_cut(run):
    with serving(VLLM, reads=[1, 5, 6]) as server:
        status, _, error, _ = run("vllm", server.url)
    assert status == 2 and "it read other ids than the 2 it was sent" in error
    with serving(SGLang, incremental=True) as server:
        status, _, error, _ = run("sglang", server.url)
    assert status == 2 and "9 tokens are counted, and 4 returned" in error
    with serving(VLLM, is_old=True) as server:
        status, _, error, _ = run("vllm", server.url)
    assert status == 2 and "this vLLM has no return_token_ids yet" in error
    with serving(VLLM, finish="abort") as server:
        status, _, error, _ = run("vllm", server.url)
    assert status == 2 and "the request was not finished (abort)" in error
    with serving(VLLM) as server:
        *_, out = run("vllm", server.url, "--max-new-tokens", "50")
    assert {one.finish for one in read_run(out)[1].values()} == {"capacity"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[1, 2], []]", "entry 1: empty prompt"),
        ("{}", "not what `jaxspec tokenize --json` prints"),
        ('{"prompts": [{"id": "a", "ids": ["x"], "category": null}]}', "'a' is there twice, or"),
        ("no", "not JSON"),
    ],
)
def test_bad_files_of_ids(tmp_path, run, content, said):
    (tmp_path / "bad.json").write_text(content)
    with serving(SGLang) as server:
        status, _, error, _ = run("sglang", server.url, "--tokens", str(tmp_path / "bad.json"))
    assert status == 2 and said in error and not server.asked


def test_commands_of_the_protocol():
    page = (BENCHMARKS / "PROTOCOL.md").read_text("utf-8")
    lines = [line for line in command_lines(page) if "benchmarks/run_engine.py" in line]
    assert len(lines) == 3
    for line in lines:
        args = run_engine.parser().parse_args(line[2:])
        assert (args.tokens, args.ignore_eos, args.batch_size) == (Path("ids.json"), True, 8)


def test_ids_alone_and_bad_addresses(tmp_path, run):
    (tmp_path / "list.json").write_text("[[1, 2], [3]]")
    with serving(SGLang) as server:
        *_, out = run("sglang", server.url, "--tokens", str(tmp_path / "list.json"))
    assert list(read_run(out)[1]) == ["0", "1"], "as `jaxspec generate --tokens` names them"
    for url in ("127.0.0.1:30000", "http://127.0.0.1:port"):
        status, _, error, _ = run("sglang", url)
        assert status == 2 and "expected one such as http://127.0.0.1:30000" in error
