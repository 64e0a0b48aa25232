import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import Completion, GenerateConfig, Run
from jaxspec.prompts import EncodedPrompt
from jaxspec.text import SamplingConfig, Stopper, continue_prompts
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


class ScriptedGenerator:
    """Stands in for `Generator`: plays given tokens, `stride` at a time."""

    def __init__(self, scripts: list[list[int]], stride: int, levels: int = 3) -> None:
        self.config = GenerateConfig(TreeConfig(levels, 1, levels + 1))
        self.scripts, self.stride, self.requests = scripts, stride, []

    def run(self, requests, should_stop=None, on_finish=None) -> Run:
        self.requests = list(requests)
        completions = []
        for index, request in enumerate(requests):
            script = self.scripts[request.prompt_ids[0]]
            kept, finish = script, "length"
            for end in [*range(self.stride, len(script), self.stride), len(script)]:
                keep = should_stop and should_stop(index, script[:end])
                if keep is not None:
                    kept, finish = script[:keep], "stop"
                    break
            completions.append(Completion(tuple(kept), finish, (0,) * (len(kept) - 1), 1.0, 2.0))
            if on_finish:
                on_finish(index, completions[-1])
        return Run(tuple(completions), 1.0, 2.0)


def continue_texts(tokenizer, texts, stop, stride=3, **kwargs):
    generator = ScriptedGenerator([tokenizer.encode(text) for text in texts], stride)
    prompts = [EncodedPrompt(str(i), (i,)) for i in range(len(texts))]
    sampling = SamplingConfig(seed=7, stop=stop)
    return continue_prompts(generator, prompts, tokenizer, sampling, **kwargs), generator


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
    (reports, _), _ = continue_texts(tokenizer, [text], tuple(stop), stride)
    (report,) = reports
    assert len(report.completion.tokens) == min(hits, default=len(tokens))
    assert report.completion.finish == ("stop" if hits else "length")
    kept = prefixes[len(report.completion.tokens)]
    assert report.text == min((kept.split(s)[0] for s in stop), key=len, default=kept)


@given(st.text("ab\u8a9e", max_size=20), st.text("ab", min_size=1, max_size=3), st.integers(1, 5))
def test_streamed_text_is_never_taken_back(tokenizer, text, stop, stride):
    streamed = []
    (reports, _), _ = continue_texts(
        tokenizer, [text + "."], (stop,), stride, on_text=lambda _, text: streamed.append(text)
    )
    for part in streamed:
        assert reports[0].text.startswith(part)


def test_streams_all_of_it_without_stop_strings(tokenizer):
    streamed = []
    continue_texts(tokenizer, ["語abc"], (), 2, on_text=lambda _, text: streamed.append(text))
    assert streamed == ["", "語abc"]


def test_every_prompt_has_its_seed_and_known_ones_are_not_run_again(tokenizer):
    known = {1: Completion(tuple(tokenizer.encode("abc")), "eos", (), 0.5, 0.5)}
    finished = []
    (reports, run), generator = continue_texts(
        tokenizer, ["a", "b", "th"], (), known=known, on_finish=finished.append
    )
    assert [report.text for report in reports] == ["a", "abc", "th"]
    assert [report.id for report in finished] == ["0", "2"]
    assert [request.seed for request in generator.requests] == [7, 9]
    assert len(run.completions) == 2


def test_without_a_tokenizer_there_is_no_text():
    generator = ScriptedGenerator([[5, 6]], 1)
    prompts = [EncodedPrompt("0", (0,))]
    (report,), _ = continue_prompts(generator, prompts, None, SamplingConfig())
    assert (report.text, report.completion.tokens, report.levels) == (None, (5, 6), 3)
    with pytest.raises(InputError, match="only ids"):
        continue_prompts(generator, prompts, None, SamplingConfig(stop=("a",)))


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(InputError, match="empty"):
        continue_texts(tokenizer, ["a"], ("",))


def test_stopper_keeps_requests_apart(tokenizer):
    stopper = Stopper(tokenizer, ["bc"])
    assert stopper.should_stop(0, [98]) is None
    assert stopper.should_stop(1, [99]) is None
    assert stopper.should_stop(0, [98, 99, 97]) == 2
