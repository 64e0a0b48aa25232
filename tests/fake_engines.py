"""Small fakes of SGLang's and vLLM's Python APIs, as far as the recorders call them.

Each says what a record of jaxspec's own says, in the engine's form and under its rules: what
SGLang 0.5.23's and vLLM 0.33.0's sources refuse is refused here.
"""

import base64
import fnmatch
import importlib
import inspect
import types
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


class Tensor:
    """What the recorders ask of a torch tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def float(self) -> "Tensor":
        return Tensor(self.array.astype(np.float32))

    def numpy(self) -> np.ndarray:
        return self.array

    def tolist(self) -> list:
        return self.array.tolist()


def log_probabilities(logits_V: np.ndarray) -> np.ndarray:
    x = logits_V.astype(np.float64) - logits_V.max()
    return x - np.log(np.exp(x).sum())


def best(logits_V: np.ndarray, count: int) -> list[tuple[float, int]]:
    """The best log-probabilities and their ids."""
    values = log_probabilities(logits_V)
    return [(float(values[i]), int(i)) for i in np.argsort(-values, kind="stable")[:count]]


class Model:
    """The rows of one sequence that a record of jaxspec's holds.

    Attributes:
      shift: boundaries are given as if they were this many further on.
    """

    shift = 0

    def __init__(self, arrays: dict[str, np.ndarray], num_layers: int, first_sparse: int) -> None:
        self.arrays, self.num_layers, self.first_sparse = arrays, num_layers, first_sparse

    def row_of(self, ids: list[int]) -> int:
        """Which sequence begins with these ids."""
        tokens = self.arrays["tokens"]
        return next(b for b, row in enumerate(tokens.tolist()) if row[: len(ids)] == ids)

    def boundary(self, b: int, ids: list[int]) -> np.ndarray:
        b = min(b + self.shift, self.num_layers) if 0 < b < self.num_layers else b
        return self.arrays[f"boundary.{b:03d}"][self.row_of(ids), : len(ids)]

    def logits(self, ids: list[int]) -> np.ndarray:
        return self.arrays["logits"][self.row_of(ids), : len(ids)]

    def experts(self, ids: list[int]) -> np.ndarray:
        """[T, L, X], zero in dense layers."""
        sparse = range(self.first_sparse, self.num_layers)
        found = [self.arrays[f"router.{i:03d}"][self.row_of(ids), : len(ids)] for i in sparse]
        return np.stack([np.zeros_like(found[0])] * self.first_sparse + found, axis=1)


def vllm(model: Model) -> dict[str, types.ModuleType]:
    """vLLM's modules, by name."""

    class SamplingParams:
        def __init__(self, *, max_tokens, temperature, logprobs=None, prompt_logprobs=None):
            assert (max_tokens, temperature) == (1, 0.0)
            self.logprobs, self.prompt_logprobs = logprobs, prompt_logprobs

    class LLM:
        def __init__(
            self,
            model,
            *,
            trust_remote_code=False,
            tensor_parallel_size=1,
            dtype="auto",
            enforce_eager=False,
            max_model_len=None,
            max_num_batched_tokens=8192,
            max_logprobs=20,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            enable_return_routed_experts=False,
            gpu_memory_utilization=0.92,
            speculative_config=None,
            kv_transfer_config=None,
        ):
            if enable_return_routed_experts and not enable_prefix_caching:
                raise ValueError("AuxOutput Connector requires prefix caching.")
            if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
                raise ValueError("max_num_batched_tokens is smaller than max_model_len")
            assert speculative_config["method"] == "extract_hidden_states"
            assert speculative_config["num_speculative_tokens"] == 1
            assert kv_transfer_config["kv_connector"] == "ExampleHiddenStatesConnector"
            hf_config = speculative_config["draft_model_config"]["hf_config"]
            self.layer_ids = hf_config["eagle_aux_hidden_state_layer_ids"]
            if 0 in self.layer_ids:
                raise TypeError("unsupported operand type(s) for +: 'Tensor' and 'NoneType'")
            extra = kv_transfer_config["kv_connector_extra_config"]
            self.folder = Path(extra["shared_storage_path"])
            self.max_model_len, self.max_logprobs = max_model_len, max_logprobs
            self.has_experts = enable_return_routed_experts

        def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
            found = []
            for index, prompt in enumerate(prompts):
                ids = prompt["prompt_token_ids"]
                assert len(ids) + 1 <= self.max_model_len
                for count in (sampling_params.logprobs, sampling_params.prompt_logprobs):
                    if (count or 0) > self.max_logprobs:
                        raise ValueError(f"Requested {count}, which is greater than max allowed")
                found.append(self._output(index, ids, sampling_params))
            return found

        def _output(self, index, ids, how):
            # In ascending order, whatever the order asked for.
            states = np.stack([model.boundary(b, ids) for b in sorted(self.layer_ids)], axis=1)
            path = str(self.folder / f"{index}.safetensors")
            save_file({"hidden_states": states, "token_ids": np.array(ids)}, path)
            Path(path + ".lock").touch()
            rows = model.logits(ids)
            prompt_logprobs, logprobs = None, None
            if how.prompt_logprobs is not None:
                # The prompt's own token comes first, and stands there once more only if it is best.
                prompt_logprobs = [None]
                for row, token in zip(rows, ids[1:], strict=False):
                    prompt_logprobs.append(_one(row, how.prompt_logprobs, token))
                logprobs = [_one(rows[-1], how.logprobs, int(rows[-1].argmax()))]
            completion = types.SimpleNamespace(
                token_ids=[int(rows[-1].argmax())],
                logprobs=logprobs,
                routed_experts=model.experts(ids) if self.has_experts else None,
            )
            return types.SimpleNamespace(
                prompt_token_ids=ids,
                prompt_logprobs=prompt_logprobs,
                outputs=[completion],
                kv_transfer_params={"hidden_states_path": path},
            )

    def _one(row, count, token):
        found = {token: log_probabilities(row)[token]} | {i: v for v, i in best(row, count)}
        return {i: types.SimpleNamespace(logprob=v, rank=None) for i, v in found.items()}

    def load_hidden_states(path):
        assert Path(path + ".lock").exists()
        return {name: Tensor(array) for name, array in load_file(path).items()}

    def cleanup_hidden_states(path):
        Path(path).unlink()
        Path(path + ".lock").unlink()

    package = types.ModuleType("vllm")
    package.LLM, package.SamplingParams, package.__version__ = LLM, SamplingParams, "0.33.0"
    name = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    connector = types.ModuleType(name)
    connector.load_hidden_states = load_hidden_states
    connector.cleanup_hidden_states = cleanup_hidden_states
    return {"vllm": package, name: connector}


class Module:
    """A part of a model, whose hooks are called as torch calls them."""

    def __init__(self, forward) -> None:
        self.forward, self.hooks = forward, []

    def __call__(self, *inputs):
        output = self.forward(*inputs)
        for hook in self.hooks:
            changed = hook(self, inputs, output)
            output = output if changed is None else changed
        return output


def sglang(model: Model, prefix: str = "language_model.") -> types.ModuleType:
    """SGLang's package. Its model is called `prefix` + "model", as Kimi-K2.5's is."""

    class Engine:
        def __init__(
            self,
            *,
            model_path,
            trust_remote_code=False,
            dtype="auto",
            tp_size=1,
            chunked_prefill_size=None,
            max_running_requests=None,
            disable_radix_cache=False,
            disable_cuda_graph=False,
            disable_overlap_schedule=False,
            enable_return_routed_experts=False,
            mem_fraction_static=None,
            forward_hooks=None,
        ):
            assert disable_radix_cache and disable_cuda_graph
            self.chunk, self.has_experts = chunked_prefill_size, enable_return_routed_experts
            self.is_open = True
            self._build()
            parts = {"": None, f"{prefix}model": self.layers}
            parts |= {f"{prefix}model.embed_tokens": self.embed, f"{prefix}model.norm": self.norm}
            for spec in forward_hooks or []:
                module, name = spec["hook_factory"].split(":")
                hook = getattr(importlib.import_module(module), name)(spec["config"])
                for path, part in parts.items():
                    if any(fnmatch.fnmatch(path, one) for one in spec["target_modules"]):
                        part.hooks.append(hook)

        def _build(self):
            def forward(input_ids, positions, forward_batch, input_embeds=None, proxy=None):
                ids, place = forward_batch
                kept = Tensor(self.embed(Tensor(place)).array)
                captured = []
                for b in range(model.num_layers):
                    if b in self.layers.layers_to_capture:
                        captured.append(model.boundary(b, ids)[place])
                kept = model.boundary(model.num_layers, ids)[place]
                normed, _ = self.norm(Tensor(0.25 * kept), Tensor(0.75 * kept))
                if captured:
                    return normed, Tensor(np.concatenate(captured, axis=-1))
                return normed

            self.layers = Module(forward)
            self.layers.layers_to_capture = []
            self.embed = Module(lambda place: Tensor(model.boundary(0, self.ids)[place.array]))
            # Adds in place, as the fused norm does: the inputs are no longer what they were.
            self.norm = Module(lambda x, y: (Tensor(x.array * 0), Tensor(x.array + y.array)))

        def generate(
            self,
            prompt=None,
            sampling_params=None,
            input_ids=None,
            return_logprob=False,
            logprob_start_len=None,
            top_logprobs_num=None,
            return_routed_experts=False,
        ):
            assert self.is_open and sampling_params["max_new_tokens"] == 1
            self.ids = input_ids
            for start in range(0, len(input_ids), self.chunk):
                place = np.arange(start, min(start + self.chunk, len(input_ids)))
                hidden = self.layers(None, Tensor(place), (input_ids, place))
                # DeepseekV2ForCausalLM was not told that anything is captured.
                assert isinstance(hidden, Tensor), "a tuple reaches the head"
            rows = model.logits(input_ids)
            meta: dict[str, Any] = {"prompt_tokens": len(input_ids), "completion_tokens": 1}
            if return_logprob:
                assert logprob_start_len == 0
                top = [[(v, i, None) for v, i in best(row, top_logprobs_num)] for row in rows]
                meta |= {"input_top_logprobs": [None, *top[:-1]], "output_top_logprobs": [top[-1]]}
            if return_routed_experts and self.has_experts:
                flat = model.experts(input_ids).astype(np.int32).tobytes()
                meta["routed_experts"] = base64.b64encode(flat).decode()
            return {"text": "", "output_ids": [int(rows[-1].argmax())], "meta_info": meta}

        def shutdown(self):
            self.is_open = False

    assert "forward_hooks" in inspect.signature(Engine).parameters
    package = types.ModuleType("sglang")
    package.Engine, package.__version__ = Engine, "0.5.23"
    return package
