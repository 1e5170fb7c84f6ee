"""Strictness for every test: rank promotion raises; compilations are cached on disk."""

import os
import pathlib
import tempfile

_CACHE = os.environ.get(
  "DPJAX_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "dpjax-xla"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # these three hold for commands of tests too
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
  """Float64 for the oracles of one test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_let_go():
  """A worker that kept those of every file would grow to several gigabytes."""
  yield
  jax.clear_caches()
