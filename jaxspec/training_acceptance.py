"""What the real step accepts of a draft that is being trained."""

import dataclasses
from typing import Any

from jaxspec.ceiling import accept_ceiling
from jaxspec.config import TreeConfig
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.figures import accept_per_depth, ratio
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from jaxspec.target import Target
from jaxspec.training_data import Windows

__all__ = ["Acceptance", "AcceptanceConfig"]

CHAIN = TreeConfig(3, 1, 4)


@dataclasses.dataclass(frozen=True)
class AcceptanceConfig:
    """How acceptance is measured at each evaluation, on held-out prompts, through the real step.

    Attributes:
      num_prompts: the first held-out windows; 0 measures none.
      prompt_len: tokens of each window that are the prompt; of a short one, half of it.
    """

    num_prompts: int = 16
    prompt_len: int = 64
    max_new_tokens: int = 64
    temperature: float = 0.8
    tree: TreeConfig = CHAIN

    def check(self) -> None:
        """Raises InputError for what would fail at the first evaluation, batches later."""
        self.tree.check()
        Request((), self.temperature, max_new_tokens=self.max_new_tokens).check_settings()


class Acceptance:
    """What the real step accepts of a draft, over the same prompts each time.

    Sampled tokens depend on the target alone, so that the texts, and their ceiling, stay.
    """

    def __init__(
        self, target: Target, held_out: Windows, config: AcceptanceConfig, draft: Draft
    ) -> None:
        """Raises InputError for a prompt that leaves no room in the target's context."""
        self._target, self._config = target, config
        self._requests = _requests(held_out, config)
        self._ceiling: float | None = None
        if not self._requests:
            return
        mesh, batch_size = target.numerics.mesh, min(8, len(self._requests))
        if mesh is not None:
            batch_size += -batch_size % mesh.data
        slots = min(
            config.prompt_len + config.max_new_tokens + config.tree.nodes,
            target.config.max_position_embeddings,
        )
        longest = max(len(request.prompt_ids) for request in self._requests)
        if longest >= slots:
            raise InputError(
                f"acceptance: a held-out prompt of {longest} tokens leaves no room for a new one "
                f"in a context of {slots}; give a smaller prompt_len, or shorter windows"
            )
        self._generator = Generator(
            target,
            draft,
            GenerateConfig(
                config.tree,
                config.max_new_tokens,
                slots,
                batch_size=batch_size,
                ignore_eos=True,
            ),
        )

    def measure(self, draft: Draft) -> dict[str, Any]:
        """The figures of an evaluation; none where there are no prompts."""
        if not self._requests:
            return {}
        self._generator.use(draft)
        done = self._generator.run(self._requests).completions
        accepted = [count for one in done for count in one.accepted]
        levels = self._config.tree.levels
        if self._ceiling is None:
            texts = [one.tokens for one in done]
            ceiling = accept_ceiling(self._target, self._requests, texts, self._config.tree)
            self._ceiling = ceiling.accept_length
        num_decoded = sum(len(one.tokens) - 1 for one in done)  # all but prefill's
        return {
            "accept_length": ratio(num_decoded, len(accepted)),
            "accept_per_depth": list(accept_per_depth(accepted, levels)),
            "accept_ceiling": self._ceiling,
        }


def _requests(held_out: Windows, config: AcceptanceConfig) -> list[Request]:
    rows = range(min(config.num_prompts, len(held_out)))
    prompts = [
        held_out.tokens[row, : min(config.prompt_len, held_out.lengths[row] // 2)] for row in rows
    ]
    return [
        Request(tuple(ids.tolist()), temperature=config.temperature, seed=seed)
        for seed, ids in enumerate(prompts)
    ]
