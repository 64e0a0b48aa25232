"""What `run_engine.py` asks a running SGLang or vLLM server, and how it reads the answers.

The fields are those of the engines' sources: of SGLang `srt/entrypoints/http_server.py` and
`srt/managers/tokenizer_manager.py`; of vLLM `entrypoints/openai/completion/protocol.py`,
`entrypoints/generate/base/protocol.py` and `v1/spec_decode/metrics.py`. Neither engine has run
here: the tests have a small fake of each.
"""

import contextlib
import dataclasses
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxspec.errors import InputError
from jaxspec.requests import Finish

GOES_ON = "give the same command again, and the run goes on"


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a request's tokens are chosen; the seed is sent where any are drawn."""

    max_new_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server gave for one prompt.

    Attributes:
      tokens: the emitted ids, as the engine counts them.
      accepted: drafted tokens accepted in each verify step; None where the server does not say.
        Where it says no order, ascending.
      accepted_from: the server's field that says so.
      verify_steps: None where the server does not say.
      reported: all it says of speculation, as it says it.
      ttft_ms: from sending the prompt to its first token, by the clock here; `decode_ms`, from
        there to the end.
    """

    tokens: tuple[int, ...]
    finish: Finish
    accepted: tuple[int, ...] | None
    accepted_from: str | None
    verify_steps: int | None
    reported: dict[str, Any]
    ttft_ms: float
    decode_ms: float


class Connection:
    """Calls to one server. Each has a connection of its own, so that threads may share this."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        """Nothing is sent yet.

        Args:
          timeout_s: how long the server may say nothing.

        Raises:
          InputError: it is no address.
        """
        wanted = f"--base-url {base_url}: expected one such as http://127.0.0.1:30000"
        try:
            parts = urlsplit(base_url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:  # a port that is no number
            raise InputError(wanted) from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise InputError(wanted)
        self._parts, self._timeout_s = parts, timeout_s

    def url(self, path: str) -> str:
        """The address that an error names."""
        return f"{self._parts.scheme}://{self._parts.netloc}{self._path(path)}"

    def get(self, path: str) -> str | None:
        """The text at a path; None where the server has no such path.

        Raises:
          InputError: names the address, and what is there instead of an answer.
        """
        with self._response("GET", path, None) as response:
            return None if response is None else response.read().decode("utf-8", "replace")

    def get_json(self, path: str) -> Any:
        """The JSON at a path, likewise."""
        text = self.get(path)
        try:
            return None if text is None else json.loads(text)
        except ValueError as error:
            raise InputError(f"{self.url(path)}: what it answers is no JSON ({error})") from error

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pieces of a streamed answer, as they come.

        Raises:
          InputError: there is no answer, or it is an error, or breaks off.
        """
        with self._response("POST", path, json.dumps(body)) as response:
            if response is None:
                raise InputError(f"{self.url(path)}: status 404; is this the server of --backend?")
            for line in response:
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise InputError(f"{self.url(path)}: streams what is no JSON") from error
                if "error" in event:
                    raise InputError(f"{self.url(path)}: answers with an error: {event['error']}")
                yield event
        raise InputError(f"{self.url(path)}: the answer breaks off; {GOES_ON}")

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: str | None
    ) -> Iterator[http.client.HTTPResponse | None]:
        """A response of status 200, or None of status 404."""
        kind = http.client.HTTPConnection
        if self._parts.scheme == "https":
            kind = http.client.HTTPSConnection
        # Not urllib, which a proxy of the environment would take elsewhere.
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, self._path(path), body, headers)
            response = connection.getresponse()
            if response.status not in (http.client.OK, http.client.NOT_FOUND):
                said = response.read(500).decode("utf-8", "replace").strip()
                raise InputError(
                    f"{self.url(path)}: status {response.status} {response.reason}: {said}"
                )
            yield response if response.status == http.client.OK else None
        except (OSError, http.client.HTTPException) as error:
            raise InputError(
                f"{self.url(path)}: no answer ({error or type(error).__name__}); is the server up? "
                f"Then {GOES_ON}"
            ) from error
        finally:
            connection.close()

    def _path(self, path: str) -> str:
        return self._parts.path.rstrip("/") + path


class Server(Protocol):
    """A running engine."""

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Its version, and what it was started with, under jaxspec's names where it has one.

        Raises:
          InputError: it is not there, or another engine.
        """

    def ask(self, prompt_ids: Sequence[int], choice: Choice) -> Answer:
        """What it gives for a prompt.

        Raises:
          InputError: it gives an error, or read other ids than it was sent.
        """

    def counters(self) -> dict[str, float]:
        """What it has counted of speculation since it was started; empty where it does not say."""


class _Watch:
    """Times of one answer, by the clock here."""

    def __init__(self) -> None:
        self._asked, self._first, self._last = time.perf_counter(), 0.0, 0.0

    def saw_tokens(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def times_ms(self) -> tuple[float, float]:
        """From asking to the first tokens, and from there to the last."""
        return 1e3 * (self._first - self._asked), 1e3 * (self._last - self._first)


class SGLang:
    """SGLang's native `/generate`.

    It reports how many steps accepted how many drafted tokens, of each request, in no order; the
    histogram's older name is `spec_accept_histogram`.
    """

    KEPT = (
        *("model_path", "speculative_algorithm", "speculative_draft_model_path", "dtype"),
        *("quantization", "kv_cache_dtype", "attention_backend", "tp_size", "dp_size", "ep_size"),
        *("max_running_requests", "enable_deterministic_inference"),
    )
    """Of its arguments, those that a run file keeps."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._is_incremental = connection, False

    def describe(self) -> tuple[str, dict[str, Any]]:
        # The second is the older name.
        info = self._connection.get_json("/server_info")
        info = info or self._connection.get_json("/get_server_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise InputError(
                f"{self._connection.url('/server_info')}: no SGLang server says there what it was "
                "started with; is this the server of --backend?"
            )
        shape = [info.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk")]
        shape.append(info.get("speculative_num_draft_tokens"))
        is_tree = bool(info.get("speculative_algorithm")) and None not in shape
        # Whether a piece of a stream holds the new tokens alone; again under an older name.
        names = ("incremental_streaming_output", "stream_output")
        self._is_incremental = any(info.get(name) for name in names)
        return str(info.get("version")), {
            "tree": "x".join(map(str, shape)) if is_tree else None,
            "prefix_cache": not info.get("disable_radix_cache", False),
            **{name: info[name] for name in self.KEPT if name in info},
        }

    def ask(self, prompt_ids: Sequence[int], choice: Choice) -> Answer:
        sampling = {
            "max_new_tokens": choice.max_new_tokens,
            "temperature": choice.temperature,
            # What a server was told to prefer must not count.
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0},
            "ignore_eos": choice.ignore_eos,
        }
        if choice.temperature > 0:
            sampling["sampling_seed"] = choice.seed
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "stream": True}
        tokens, meta, watch = [], {}, _Watch()
        for event in self._connection.events("/generate", body):
            meta, piece = event["meta_info"], event["output_ids"]
            tokens = tokens + piece if self._is_incremental else piece
            if piece:
                watch.saw_tokens()
        url = self._connection.url("/generate")
        if meta.get("prompt_tokens") != len(prompt_ids):
            raise InputError(
                f"{url}: {len(prompt_ids)} ids were sent, and it read {meta.get('prompt_tokens')}"
            )
        # A stop token is counted, and not every version returns it.
        if not 0 <= meta["completion_tokens"] - len(tokens) <= 1:
            raise InputError(
                f"{url}: {meta['completion_tokens']} tokens are counted, and {len(tokens)} returned"
            )
        reported = {name: value for name, value in meta.items() if name.startswith("spec_")}
        names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
        name = next((name for name in names if reported.get(name)), None)
        return Answer(
            tuple(tokens),
            _finish(url, (meta.get("finish_reason") or {}).get("type"), len(tokens), choice),
            None if name is None else _steps_of(reported[name]),
            name and f"meta_info.{name}",
            reported.get("spec_verify_ct"),
            reported,
            *watch.times_ms(),
        )

    def counters(self) -> dict[str, float]:
        return {}


class VLLM:
    """vLLM's `/v1/completions`.

    Acceptance of a request is there where the server was started with
    `--per-request-spec-decode-metrics detailed` (or `summary`, without the order of steps). Older
    ones count for all requests together, at `/metrics`.
    """

    COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

    def __init__(self, connection: Connection) -> None:
        self._connection, self._model = connection, ""

    def describe(self) -> tuple[str, dict[str, Any]]:
        version, models = (self._connection.get_json(path) for path in ("/version", "/v1/models"))
        try:
            model = models["data"][0]
            self._model, found = model["id"], str(version["version"])
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{self._connection.url('/v1/models')}: no vLLM server names its model there; is "
                "this the server of --backend?"
            ) from error
        metrics = self._connection.get("/metrics") or ""
        # Every position has its counter from the start.
        levels = len(set(re.findall(r'_accepted_tokens_per_pos.*position="(\d+)"', metrics)))
        cache = re.search(r'^vllm:cache_config_info.*enable_prefix_caching="(\w+)"', metrics, re.M)
        return found, {
            "tree": f"{levels}x1x{levels + 1}" if levels else None,
            "prefix_cache": None if cache is None else cache[1].lower() == "true",
            "model_path": model.get("root") or self._model,
            "max_model_len": model.get("max_model_len"),
        }

    def ask(self, prompt_ids: Sequence[int], choice: Choice) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": choice.max_new_tokens,
            "temperature": choice.temperature,
            # What the checkpoint's generation_config.json would set must not count.
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
            "ignore_eos": choice.ignore_eos,
            **{"stream": True, "stream_options": {"include_usage": True}},
            "return_token_ids": True,
        }
        if choice.temperature > 0:
            body["seed"] = choice.seed
        tokens, kind, read, reported, watch = [], None, None, {}, _Watch()
        for event in self._connection.events("/v1/completions", body):
            # The last one has no choices: it is of usage, and what was measured comes with it.
            reported = (event.get("metrics") or {}).get("speculative_decoding") or reported
            for one in event["choices"]:
                piece = one.get("token_ids") or []
                tokens += piece
                read = one.get("prompt_token_ids") or read
                kind = one.get("finish_reason") or kind
                if piece:
                    watch.saw_tokens()
        url = self._connection.url("/v1/completions")
        if read is None:
            raise InputError(f"{url}: returns no token ids: this vLLM has no return_token_ids yet")
        if read != list(prompt_ids):
            raise InputError(f"{url}: it read other ids than the {len(prompt_ids)} it was sent")
        accepted, name = None, None
        if reported.get("per_step_accepted") is not None:
            name = "per_step_accepted"
            accepted = tuple(reported[name])
        elif reported.get("acceptance_histogram") is not None:
            name = "acceptance_histogram"
            accepted = _steps_of(reported[name])
        return Answer(
            tuple(tokens),
            _finish(url, kind, len(tokens), choice),
            accepted,
            name and f"metrics.speculative_decoding.{name}",
            reported.get("num_spec_steps"),
            reported,
            *watch.times_ms(),
        )

    def counters(self) -> dict[str, float]:
        """Sums over the engines behind the server."""
        metrics = self._connection.get("/metrics") or ""
        found = {}
        for name in self.COUNTED:
            # prometheus_client appends _total; the _created beside it is a date.
            line = rf"^vllm:spec_decode_{name}(?:_total)?(?:{{.*}})? (\S+)"
            values = re.findall(line, metrics, re.M)
            found |= {name: sum(map(float, values))} if values else {}
        return found


SERVERS: dict[str, Callable[[Connection], Server]] = {"sglang": SGLang, "vllm": VLLM}


def _steps_of(histogram: Sequence[int]) -> tuple[int, ...]:
    """The steps that a histogram counts, ascending: `histogram[n]` of them accepted n."""
    return tuple(n for n, count in enumerate(histogram) for _ in range(count))


def _finish(url: str, kind: str | None, num_tokens: int, choice: Choice) -> Finish:
    """Why a text ended, in jaxspec's words. No stop strings are sent: a stop is an end of text."""
    if kind == "stop":
        return "eos"
    if kind == "length":
        return "length" if num_tokens >= choice.max_new_tokens else "capacity"
    raise InputError(f"{url}: the request was not finished ({kind}); {GOES_ON}")
