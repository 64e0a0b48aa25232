"""The one letter key of array axes, and the decorator that checks it.

| letter | meaning                                   | Kimi-K2.5    |
|--------|-------------------------------------------|--------------|
| B      | sequences in the batch                    |              |
| T      | query tokens in this call                 |              |
| S      | cache slots                               |              |
| D      | model width                               | 7168         |
| N      | query heads                               | 64           |
| Q      | query latent (`q_lora_rank`)              | 1536         |
| C      | KV latent (`kv_lora_rank`)                | 512          |
| R      | rotary part per head                      | 64           |
| H      | non-rotary q.k width per head             | 128          |
| O      | value width per head                      | 128          |
| E      | routed experts                            | 384          |
| X      | experts per token                         | 8            |
| F      | MLP hidden (dense / expert)               | 18432 / 2048 |
| L      | layers in a stack                         | 1 + 60       |
| K      | captured boundaries                       | 3            |
| G      | K * D, width of the features              | 21504        |
| J      | tree nodes, root first                    |              |
| W      | branches kept per draft level             |              |
| P      | path length (deepest depth + 1)           |              |
| V, U   | target / draft vocabulary                 | 163840 / the draft's |
| I      | candidates of a draft tree, all levels    |              |
| M      | draft candidates kept between steps; in `expert_matmul`, tokens | 32 |
| A      | any other width, named where it is used   |              |

An array inside a function ends in its letters: `latent_LBSC`. Static ints and scalars carry no
suffix. Public functions repeat the letters in jaxtyping annotations, and `typed` checks them
whenever the function is traced: two arrays that disagree about `D` never reach the compiler.
"""

import beartype
import jaxtyping

__all__ = ["typed"]

typed = jaxtyping.jaxtyped(typechecker=beartype.beartype)
