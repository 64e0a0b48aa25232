"""What trees accept along texts whose tokens are known: many trees from one pass of the target.

With any tree a request's tokens are those of plain decoding, so that the text is fixed before there
is a tree. One pass of the target over it gives the features of every position, one of the draft its
rows. From every position the draft then proposes by `propose.grow`, once for each number of
branches: the candidates of fewer levels are the first of those of more, and `tree.build` is given
them for every number of nodes. What of each tree is the text's own is what a step would accept.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.aliases import Progress
from jaxspec.config import TreeConfig
from jaxspec.draft import Borrowed, Draft
from jaxspec.errors import InputError
from jaxspec.known_texts import Chunk, Texts, read_texts, texts_in, whole_chunks
from jaxspec.propose import grow, seed_from
from jaxspec.requests import Request
from jaxspec.sharding import devices_of, specs_of
from jaxspec.target import Target
from jaxspec.tree import build_from_levels
from jaxspec.verify import accept

__all__ = ["Walker", "steps_along"]


class Walker:
    """A target and a draft that read texts, and walk along them with trees.

    Reading is one compiled program, walking one for each number of branches, for texts of every
    length up to the longest.
    """

    def __init__(
        self, target: Target, draft: Draft, slots: int, num_roots: int, batch_size: int = 8
    ) -> None:
        """
        Args:
          slots: tokens of the longest text.
          num_roots: tokens of a text, at most, that steps start from.
          batch_size: texts at a time; more where a mesh has more groups.

        Raises:
          ContractError: draft and target do not belong together.
          InputError: a mesh does not fit.
        """
        if target.numerics.mesh is not None:
            batch_size += -batch_size % target.numerics.mesh.data
        self._slots, self._num_roots = whole_chunks(slots), num_roots
        self._batch, self._vocab_size = batch_size, draft.config.draft_vocab_size
        self._capture = target.asked_for(draft.config.boundaries)
        self._devices = devices_of(target, draft, batch_size)
        self._graph, params = nnx.split((target, draft))
        self._params = params if self._devices is None else self._devices.put(params)
        self._cache_shapes = jax.eval_shape(functools.partial(self._empty, target, draft))
        self._read = self._reader(functools.partial(self._empty, target, draft))

    def surprise(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Of each prompt, the mean of -log p, nats, that the target gives its tokens but the first.

        NaN of a prompt of one token. Uniform guessing has log V.
        """
        found: list[float] = []
        for some in itertools.batched(prompts, self._batch):
            texts = texts_in([(Request(tuple(ids)), ()) for ids in some], self._batch, self._slots)
            log_prob_BS = self._fetch(self._read(texts)[1])
            for ids, of_text in zip(some, log_prob_BS, strict=False):
                found.append(-float(of_text[: len(ids) - 1].mean()) if len(ids) > 1 else np.nan)
        return found

    def accepted(
        self,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        trees: Sequence[TreeConfig],
        progress: Progress | None = None,
    ) -> dict[TreeConfig, list[np.ndarray]]:
        """Drafted tokens that each tree accepts, of every text [roots]: see `steps_along`.

        Args:
          texts: prompts, and what was written after them: root r is its token r, and the first
            one is prefill's. The last is no root: nothing follows it.
          progress: called with "walking along the texts", and how many of how many are done.

        Raises:
          InputError: there is no such tree, or a text is longer than was said.
        """
        for tree in trees:
            tree.check()
            if tree.branches > self._vocab_size:
                raise InputError(
                    f"tree {tree}: {tree.branches} branches over a draft vocabulary of "
                    f"{self._vocab_size}"
                )
        for prompt, written in texts:
            if len(prompt) + len(written) > self._slots or len(written) - 1 > self._num_roots:
                raise InputError(f"a text of {len(prompt)} and {len(written)} tokens: too long")
        found: dict[TreeConfig, list[np.ndarray]] = {tree: [] for tree in trees}
        widths = sorted({tree.branches for tree in trees})
        batches = list(itertools.batched(texts, self._batch))
        walks = {branches: self._walk_of(branches, trees) for branches in widths}
        for index, some in enumerate(batches):
            pairs = [(Request(tuple(prompt)), tuple(written)) for prompt, written in some]
            arrays = texts_in(pairs, self._batch, self._slots)
            seen, _ = self._read(arrays)
            for number, branches in enumerate(widths):
                mine, walk = walks[branches]
                count_BTA = self._fetch(walk(seen, arrays))
                for (_, written), count_TA in zip(some, count_BTA, strict=False):
                    for tree, count_T in zip(mine, count_TA.T, strict=True):
                        found[tree].append(count_T[: max(len(written) - 1, 0)].astype(int))
                if progress is not None:
                    done = index * len(widths) + number + 1
                    progress("walking along the texts", done, len(batches) * len(widths))
        return found

    def _empty(self, target: Target, draft: Draft) -> tuple[Any, Any]:
        shape = self._batch, self._slots
        return target.empty_cache(*shape), draft.empty_cache(*shape)

    def _reader(self, empty: Callable[[], Any]) -> Callable[[Texts], Any]:
        """What gives, of texts, all that the walk needs, and log p of each next token."""

        def read(params: Any, caches: Any, texts: Texts) -> Any:
            return _read(*nnx.merge(self._graph, params), caches, texts, self._capture)

        devices = self._devices
        if devices is None:
            program, new_caches = jax.jit(read), jax.jit(empty)
            return lambda texts: program(self._params, new_caches(), texts)
        new_caches = jax.jit(empty, out_shardings=devices.shardings(self._cache_shapes))
        of_params, of_caches = specs_of((self._params, self._cache_shapes), devices.config)
        rows = P("data")
        spread = devices.spread(read, (of_params, of_caches, rows), ((of_caches[1], rows), rows))
        program = jax.jit(spread)
        return lambda texts: program(self._params, new_caches(), self._put(texts))

    def _walk_of(
        self, branches: int, trees: Sequence[TreeConfig]
    ) -> tuple[list[TreeConfig], Callable[[Any, Texts], Any]]:
        """All trees of so many branches, and what walks with them: [B,T,trees]."""
        mine = sorted(
            {tree for tree in trees if tree.branches == branches},
            key=lambda tree: (tree.nodes, tree.levels),
        )

        def walk(params: Any, seen: Any, texts: Texts) -> Any:
            return _walk(*nnx.merge(self._graph, params), seen, texts, mine, self._num_roots)

        devices = self._devices
        if devices is None:
            return mine, functools.partial(jax.jit(walk), self._params)
        of_params, of_caches = specs_of((self._params, self._cache_shapes), devices.config)
        rows = P("data")
        spread = jax.jit(devices.spread(walk, (of_params, (of_caches[1], rows), rows), rows))
        return mine, lambda seen, texts: spread(self._params, seen, self._put(texts))

    def _put(self, texts: Texts) -> Any:
        devices = self._devices
        assert devices is not None, "a mesh was given"
        return jax.tree.map(lambda array: devices.put_as(array, P("data")), texts)

    def _fetch(self, tree: Any) -> Any:
        return jax.device_get(tree) if self._devices is None else self._devices.fetch(tree)


def _read(
    target: Target, draft: Draft, caches: tuple[Any, Any], texts: Texts, capture: Any
) -> tuple[tuple[Any, jax.Array], jax.Array]:
    """The draft's cache and hidden states [B,S,D] of the whole texts, and [B,S] log p(next token).

    Args:
      caches: the target's and the draft's, empty.
    """

    def say(_: None, chunk: Chunk) -> tuple[None, tuple[jax.Array, jax.Array]]:
        assert chunk.drafted is not None, "there is a draft"
        log_prob_BTV = jax.nn.log_softmax(chunk.logits, axis=-1)
        log_prob_BT1 = jnp.take_along_axis(log_prob_BTV, chunk.next_ids[:, :, None], axis=-1)
        return None, (chunk.drafted.recurrent, log_prob_BT1[..., 0])

    (_, draft_cache), said = read_texts(target, draft, caches, texts, capture, say, None)
    recurrent_BSD, log_prob_BS = said
    return (draft_cache, recurrent_BSD), log_prob_BS


def _walk(
    target: Target,
    draft: Draft,
    seen: tuple[Any, jax.Array],
    texts: Texts,
    trees: Sequence[TreeConfig],
    num_roots: int,
) -> jax.Array:
    """Drafted tokens accepted from every root, [B,T,trees].

    A tree of fewer levels is made of the same candidates, those further down being impossible.

    Args:
      trees: of one number of branches, and those of one number of nodes together.
    """
    (cache, recurrent_BSD), borrowed = seen, Borrowed.of(target)
    place_B, slots = jnp.arange(texts.tokens.shape[0]), texts.tokens.shape[1]
    deepest, branches = max(tree.levels for tree in trees), trees[0].branches

    def root(_, index):
        # A root's own row is the one before: it pairs the features there with the root's token.
        pos_B = jnp.minimum(texts.prompt_len + index, slots - 1)
        seed = seed_from(draft, recurrent_BSD[place_B, jnp.maximum(pos_B - 1, 0)], borrowed)
        first, deeper = grow(draft, seed, pos_B, cache, borrowed, deepest, branches)
        root_B = texts.tokens[place_B, pos_B]

        def counts(num_nodes: int, num_levels: jax.Array) -> jax.Array:
            some = deeper
            if deeper is not None:
                is_there_L11 = (jnp.arange(1, deepest) < num_levels)[:, None, None]
                some = jnp.where(is_there_L11, deeper[0], -jnp.inf), *deeper[1:]
            tree = build_from_levels(root_B, first, some, nodes=num_nodes)
            # What followed each node's depth in the text; past its end, nothing is ever right.
            after_BJ = pos_B[:, None] + tree.depth + 1
            chosen_BJ = texts.tokens.at[place_B[:, None], after_BJ].get(mode="fill", fill_value=-1)
            chosen_BJ = jnp.where(after_BJ < texts.text_len[:, None], chosen_BJ, -1)
            return accept(tree, chosen_BJ).count

        found = []
        for nodes, some in itertools.groupby(trees, lambda tree: tree.nodes):
            levels_A = jnp.asarray([tree.levels for tree in some], jnp.int32)
            found.append(lax.map(functools.partial(counts, nodes), levels_A))
        return None, jnp.concatenate(found)

    _, count_TAB = lax.scan(root, None, jnp.arange(num_roots, dtype=jnp.int32))
    return jnp.moveaxis(count_TAB, -1, 0)


def steps_along(accepted: np.ndarray) -> tuple[int, ...]:
    """The drafted tokens accepted in each step of a walk from the first root to the text's end.

    Args:
      accepted: [roots] from every root of a text, as `Walker.accepted` has them.
    """
    steps, root = [], 0
    while root < len(accepted):
        steps.append(int(accepted[root]))
        root += 1 + steps[-1]
    return tuple(steps)
