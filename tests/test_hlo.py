"""`hlo.loop_writes` sees a copy in a loop, and lets an update in place pass."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.hlo import loop_writes


def compiled_text(body, *shapes):
    def program(*state):
        return lax.fori_loop(0, 10, lambda i, state: body(i, *state), state)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(program, donate_argnums=range(len(args))).lower(*args).compile().as_text()


def test_a_copy_is_seen():
    text = compiled_text(lambda i, cache: (cache[::-1] + cache.mean(),), (64, 256))
    assert any(write.shape == (64, 256) for write in loop_writes(text))


def test_an_update_in_place_is_not():
    def body(i, cache):
        row = cache[i % 64] * 2.0 + 1.0
        return (cache.at[(i + 1) % 64].set(row),)

    text = compiled_text(body, (64, 256))
    writes = loop_writes(text)
    assert not any(write.shape == (64, 256) for write in writes), writes


def test_what_is_outside_a_loop_does_not_count():
    args = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    text = jax.jit(lambda x: x[::-1] + x.mean()).lower(args).compile().as_text()
    assert loop_writes(text) == []


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        loop_writes("nothing of the kind")
