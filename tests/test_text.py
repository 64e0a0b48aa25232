import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig
from jaxspec.prompts import EncodedPrompt
from jaxspec.requests import Completion, Piece
from jaxspec.text import SamplingConfig, Stopper, TextRun
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


class ScriptedStream:
    """Plays given tokens, `stride` at a time."""

    prefill_ms, decode_ms = 1.0, 2.0

    def __init__(self, scripts, stride, should_stop) -> None:
        self.pieces = self.play(scripts, stride, should_stop)

    def __next__(self) -> Piece:
        return next(self.pieces)

    def play(self, scripts, stride, should_stop):
        for index, script in enumerate(scripts):
            shown, ends = 0, [*range(stride, len(script), stride), len(script)]
            for end in ends:
                keep = should_stop and should_stop(index, script[:end])
                finish = None if end < len(script) else "length"
                if keep is not None:
                    end, finish = keep, "stop"
                kept, new = tuple(script[:end]), tuple(script[shown:end])
                done = finish and Completion(kept, finish, (0,) * (len(kept) - 1), 1.0, 2.0)
                yield Piece(index, new, done)
                shown = end
                if finish:
                    break


class ScriptedGenerator:
    """Stands in for `Generator`: a request's first prompt id says which script is played."""

    def __init__(self, scripts: list[list[int]], stride: int, levels: int = 3) -> None:
        self.config = GenerateConfig(TreeConfig(levels, 1, levels + 1))
        self.scripts, self.stride, self.requests = scripts, stride, []

    def check(self, requests) -> None:
        self.requests = list(requests)

    def stream(self, requests, should_stop=None) -> ScriptedStream:
        scripts = [self.scripts[request.prompt_ids[0]] for request in requests]
        return ScriptedStream(scripts, self.stride, should_stop)


def run_of(tokenizer, texts, stop, stride=3, settings=(), known=()) -> tuple[TextRun, list]:
    """A run that plays the texts, and the requests that it made."""
    generator = ScriptedGenerator([tokenizer.encode(text) for text in texts], stride)
    own = dict(settings)
    prompts = [
        EncodedPrompt(str(i), (i,), settings=own.get(i, {}), where=f"line {i}")
        for i in range(len(texts))
    ]
    run = TextRun(generator, prompts, tokenizer, SamplingConfig(seed=7, stop=stop), dict(known))
    return run, generator.requests


@given(
    st.text("abx\u8a9e", max_size=20),
    st.lists(st.text("abx\u8a9e", min_size=1, max_size=3), max_size=2),
    st.integers(1, 5),
)
def test_stop_is_the_earliest_token_that_completes_one(tokenizer, text, stop, stride):
    """Against the definition: the shortest prefix of the tokens whose text holds a stop string."""
    text += "end"
    tokens = tokenizer.encode(text)
    prefixes = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    hits = [n for n, prefix in enumerate(prefixes) if any(s in prefix for s in stop)]
    (report,) = run_of(tokenizer, [text], tuple(stop), stride)[0].finish()
    assert len(report.completion.tokens) == min(hits, default=len(tokens))
    assert report.completion.finish == ("stop" if hits else "length")
    kept = prefixes[len(report.completion.tokens)]
    assert report.text == min((kept.split(s)[0] for s in stop), key=len, default=kept)


@given(st.text("ab\u8a9e", max_size=20), st.text("ab", min_size=1, max_size=3), st.integers(1, 5))
def test_pieces_of_text_are_the_text(tokenizer, text, stop, stride):
    """Nothing is taken back, nothing is half a character, and what is certain is not held back."""
    run, _ = run_of(tokenizer, [text + "."], (stop,), stride)
    streamed, tokens = "", []
    for piece in run:
        streamed, tokens = streamed + piece.text, [*tokens, *piece.tokens]
        whole = tokenizer.bytes_of(tokens).decode("utf-8", errors="ignore")
        assert whole.startswith(streamed)
        assert piece.report or len(whole) - len(streamed) == min(len(whole), len(stop) - 1)
    (report,) = run.finish()
    assert (streamed, tuple(tokens)) == (report.text, report.completion.tokens)


def test_streams_all_of_it_without_stop_strings(tokenizer):
    run, _ = run_of(tokenizer, ["\u8a9eabc"], (), 2)
    assert [piece.text for piece in run] == ["", "\u8a9eabc"]


def test_every_prompt_has_its_seed_and_known_ones_are_not_run_again(tokenizer):
    known = {1: Completion(tuple(tokenizer.encode("abc")), "eos", (), 0.5, 0.5)}
    run, requests = run_of(tokenizer, ["a", "b", "th"], (), known=known)
    assert [piece.report.id for piece in run if piece.report] == ["0", "2"]
    assert [report.text for report in run.finish()] == ["a", "abc", "th"]
    assert [request.seed for request in requests] == [7, 9]
    assert len(run.run.completions) == 2


def test_a_prompt_has_settings_of_its_own(tokenizer):
    """They come before those of the run, a stop string too; the others count their seeds on."""
    own = {"temperature": 0.5, "top_k": 4, "min_p": 0.1, "seed": 3, "max_new_tokens": 9}
    own |= {"stop_ids": (5,), "stop": ("c",)}
    run, requests = run_of(tokenizer, ["xbyc", "xbyc", "xbyc"], ("b",), settings={1: own})
    assert [report.text for report in run.finish()] == ["x", "xby", "x"]
    assert [request.seed for request in requests] == [7, 3, 9]
    mine = requests[1]
    assert (mine.temperature, mine.top_k, mine.min_p, mine.max_new_tokens) == (0.5, 4, 0.1, 9)
    assert (mine.stop_ids, requests[0].stop_ids) == ((5,), ())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"temperature": -1}, "line 1: temperature is -1; 0 is greedy"),
        ({"top_p": 0}, "line 1: top_p is 0; it lies above 0"),
        ({"min_p": 1.5}, "line 1: min_p is 1.5; it lies between 0"),
        ({"seed": -1}, "line 1: seed is -1; it lies between 0 and 4294967295"),
        ({"max_new_tokens": 0}, "line 1: max_new_tokens is 0"),
        ({"stop": ("",)}, "line 1: a stop string is empty"),
    ],
)
def test_bad_settings_of_a_prompt_name_it(tokenizer, own, message):
    with pytest.raises(InputError, match=message):
        run_of(tokenizer, ["a", "b"], (), settings={1: own})


def test_without_a_tokenizer_there_is_no_text():
    generator = ScriptedGenerator([[5, 6]], 1)
    prompts = [EncodedPrompt("0", (0,))]
    run = TextRun(generator, prompts, None, SamplingConfig())
    assert [(piece.text, piece.tokens) for piece in run] == [(None, (5,)), (None, (6,))]
    (report,) = run.finish()
    assert (report.text, report.completion.tokens, report.levels) == (None, (5, 6), 3)
    with pytest.raises(InputError, match="only ids"):
        TextRun(generator, prompts, None, SamplingConfig(stop=("a",)))


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(InputError, match="empty"):
        run_of(tokenizer, ["a"], ("",))


def test_a_stop_string_across_two_tokens(tokenizer):
    stopper = Stopper(tokenizer, ["bc"])
    assert stopper.should_stop([98]) is None
    assert stopper.new_text() == ""
    assert stopper.should_stop([98, 99, 97]) == 2
    assert (stopper.new_text(), stopper.finish()) == ("", "")
