"""The inputs of models that take features; computed once, or read from a cache.

Scattering features and those of patches know no data; those of public networks do
(`public_features`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dpjax import data, models
from dpjax.data import rows
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.validate import UserError


def check_images(dataset: data.Dataset, needed_by: str) -> None:
  """Raises UserError for examples that are no images."""
  shape = dataset.x.shape[1:]
  if len(shape) != 3:
    raise UserError(f"{needed_by}: needs images [H, W, C]; an example is of shape {shape}")


@dataclasses.dataclass(frozen=True)
class ComputedFeatures:
  """Features of one data set, before they are computed."""

  shape: tuple[int, ...]
  # all that decides a feature, so that a changed setting never reads old features
  settings: tuple[Any, ...]
  code: tuple[str, ...]  # modules that decide the last bit
  make: Callable[[], Iterator[np.ndarray]]


# Features that know no data -> the module beside this one that computes them. Those of every
# other name are of a public network.
_OF_NO_DATA = {"scattering": "scattering_features", "patches": "patch_features"}


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns `public_features.trained_on`: the data that the features of a model know."""
  kind = models.needs_features(model)
  if kind is None or kind in _OF_NO_DATA:
    return ()
  # Few runs need it.
  from dpjax.experiments.kinds.central import public_features

  return public_features.trained_on(model, data_name)


def noted(config: Any, promised: Any) -> Any:
  """Returns the guarantee of a run, which says what its features and its tokenizer know."""
  if known := trained_on(config.model.name, config.data.name):
    from dpjax.experiments.kinds.central import public_features

    promised = public_features.noted(promised, config.model.name, known)
  tokens = _tokens(config)
  return promised if tokens is None else tokens.noted(promised, config.data)


def tokenizer_facts(config: Any) -> dict[str, Any] | None:
  """Returns `public_tokenizers.facts`: the tokenizer that reads the texts of the data."""
  tokens = _tokens(config)
  return None if tokens is None else tokens.facts(config.data)


def _tokens(config: Any) -> Any:
  """Returns the module `public_tokenizers` for data that may have a tokenizer; else None."""
  # The declaration of the data names it.
  if not data.takes_declaration(config.data.name):
    return None
  return importlib.import_module("dpjax.experiments.kinds.central.public_tokenizers")


def featured(
  config: ModelConfig,
  dataset: data.Dataset,
  standardized: bool = True,
  kept: pathlib.Path | None = None,
  resident: bool | None = True,
) -> Any:
  """The data set as inputs of the model: the features of it, for one that takes features.

  Args:
    standardized: scattering features: each example by itself; False: each channel in units of
      its typical size. Those of a public network are always standardised by example.
    kept: folder of features that earlier runs computed (`data.cache`); None: computed here.
    resident: in memory; False: read from that folder as they are asked for; None: by size.

  Raises:
    UserError: no images, or of a size that the features do not take; features that are not to
      lie in memory, and no folder; weights of a public network that are not installed.
  """
  kind = models.needs_features(config.name)
  if kind is None:
    return dataset
  # Imported here: few runs need any, and none needs all.
  home = _OF_NO_DATA.get(kind, "public_features")
  module = importlib.import_module(f"dpjax.experiments.kinds.central.{home}")
  computed = module.computed(config, dataset, standardized)
  shape = computed.shape
  in_files = rows.stay_in_files(4 * math.prod(shape), resident)
  if kept is None:
    if in_files and not (resident is None and dataset.in_memory):
      raise UserError(
        f"the features of model.name={config.name!r} are computed once and kept on "
        f"disk: set {data.cache.VARIABLE} to a folder for them, as private as the data",
        field="resident",
        value=False,
      )
    # One array from the start: joining the blocks would hold all features twice.
    out = np.empty(shape, np.float32)
    done = 0
    for block in computed.make():
      out[done : done + len(block)] = block
      done += len(block)
    return data.computed(dataset, out)
  key = data.cache.key(data.digest(dataset), *computed.settings, *_makers(computed.code))
  tell = lambda line: print(line, file=sys.stderr, flush=True)
  cached = data.cache.rows(kept, key, shape, computed.make, tell)
  return data.computed(dataset, cached if in_files else cached[:])


def _makers(names: Sequence[str]) -> tuple[str, ...]:
  """Names what decides the last bit of a feature beside settings: code, library, platform."""
  # typical sizes are those of random images. By name: a package exports a function `scattering`
  code = "".join(inspect.getsource(sys.modules[name]) for name in names)
  device = jax.devices()[0]
  return (
    hashlib.sha256(code.encode()).hexdigest(),
    importlib.metadata.version("jaxlib"),
    device.platform,
    device.device_kind,
  )


def counted(chunks: Iterable[np.ndarray], count: int, bar: Any) -> Iterator[np.ndarray]:
  """Yields the same chunks, and moves a bar of percents."""
  done = 0
  for chunk in chunks:
    before = 100 * done // count
    done += len(chunk)
    bar.update(100 * done // count - before)
    yield chunk
