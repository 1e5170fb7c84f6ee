"""Strictness for every test: rank promotion raises; compilations are cached on disk."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
  "jax_compilation_cache_dir",
  os.environ.get(
    "DPJAX_TEST_CACHE", str(pathlib.Path(tempfile.gettempdir()) / "dpjax-xla")
  ),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture
def x64():
  """Float64 for the oracles of one test."""
  with jax.enable_x64(True):
    yield
