"""Settings and fixtures that the tests share.

Rank promotion and implicit dtype promotion raise here: code that broadcasts or casts says so.
"""

import os
import sys
import tempfile

# Before jax is imported: the tests are for a CPU, whatever else the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"
# numpy's matrices are small here: threads would cost more than they save.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

from jaxspec import cli
from jaxspec.draft import Draft
from jaxspec.target import Target
from tests import tiny
from tests.reference.draft import ReferenceDraft
from tests.reference.target import ReferenceTarget

# Many tests compile the same program; within a run, by all its processes, it is compiled once.
# The first process makes the directory, and removes it when it ends.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="jaxspec-tests-")
    os.environ["JAXSPEC_TESTS_COMPILED"] = _compiled.name
jax.config.update("jax_compilation_cache_dir", os.environ["JAXSPEC_TESTS_COMPILED"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A busy machine is no failure, and everybody's run draws the same examples.
hypothesis.settings.register_profile("jaxspec", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxspec")


@pytest.fixture(scope="session")
def reference_target() -> ReferenceTarget:
    """The tiny target in numpy, its experts packed."""
    return ReferenceTarget(tiny.target_tensors(tiny.TARGET_CONFIG), tiny.TARGET_CONFIG)


@pytest.fixture(scope="session")
def target() -> Target:
    """The same weights in jaxspec."""
    return tiny.target_module(tiny.target_tensors(tiny.TARGET_CONFIG), tiny.TARGET_CONFIG)


@pytest.fixture(scope="session")
def draft_tensors(reference_target):
    """A draft of the tiny target, under SpecForge's names."""
    return tiny.related_draft_tensors(tiny.DRAFT_CONFIG, reference_target)


@pytest.fixture(scope="session")
def reference_draft(draft_tensors) -> ReferenceDraft:
    """That draft in numpy."""
    return ReferenceDraft(draft_tensors, tiny.DRAFT_CONFIG)


@pytest.fixture(scope="session")
def draft(target, draft_tensors) -> Draft:
    """The same weights in jaxspec."""
    claim = target.boundaries(tiny.BOUNDARIES, "tests/conftest.py")
    return tiny.draft_module(draft_tensors, tiny.draft_config(tiny.DRAFT_CONFIG, claim))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `jaxspec ARGS` in this process: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxspec", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run
