"""Computes the inputs of models that take features, or reads them from a cache.

Features of scattering and of patches depend on no one's data. Features of public networks depend
on the data that the networks were trained on (`public_features`).
"""

from __future__ import annotations

import dataclasses
import functools
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

from dpjax import data
from dpjax.data import cache, identity, rows
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.run import writers
from dpjax.parallel import made_for
from dpjax.validate import UserError
from dpjax.zoo.networks import registry


def check_images(dataset: data.Dataset, field: str, value: str) -> None:
  """Raises UserError unless examples are images [H, W, C], which this field's value needs."""
  shape = dataset.x.shape[1:]
  if len(shape) != 3:
    raise UserError(
      f"needs images [H, W, C]; an example is of shape {shape}", field=field, value=value
    )


@dataclasses.dataclass(frozen=True)
class ComputedFeatures:
  """Describes the features of one data set; `make` computes them."""

  shape: tuple[int, ...]
  # Settings that decide a feature. They enter the key of the cache, so that a run with a changed
  # setting never reads old features.
  settings: tuple[Any, ...]
  code: tuple[str, ...]  # modules that decide the last bit
  make: Callable[[], Iterator[np.ndarray]]  # -> rows, in chunks


# Bytes of features that stay in memory by default.
_MOST_IN_MEMORY = 2**26
# Maps a kind of features to the module of this package that computes them. These two kinds depend
# on no one's data. All other kinds are features of public networks.
_OF_NO_DATA = {"scattering": "scattering_features", "patches": "patch_features"}


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns names of the data that a model's features were trained on.

  Returns () if the model takes no features, or if they depend on no data. Raises UserError if the
  run's data `data_name` hold records of those data.
  """
  kind = registry.entry(model).features
  if kind is None or kind in _OF_NO_DATA:
    return ()
  # Imported here, since few runs need features of public networks.
  from dpjax.experiments.kinds.central import public_features

  return public_features.trained_on(model, data_name)


def add_note(config: Any, promised: Any, dataset: data.Dataset) -> Any:
  """Returns the guarantee, with assumptions on the data that features and tokenizer were learnt
  from."""
  if known := trained_on(config.model.name, config.data.name):
    from dpjax.experiments.kinds.central import public_features

    promised = public_features.add_note(promised, config.model.name, known)
  if dataset.tokenizer is not None:
    from dpjax.experiments.kinds.central import public_tokenizers

    promised = public_tokenizers.add_note(promised, dataset.tokenizer)
  return promised


def add_features(
  config: ModelConfig,
  dataset: data.Dataset,
  standardized: bool = True,
  kept: pathlib.Path | None = None,
  resident: bool | None = True,
) -> Any:
  """Returns the data set as inputs of the model: with features if the model takes features.

  Args:
    standardized: for scattering features, whether each example is standardised by itself; if
      not, each channel is divided by its typical size. Other features are always standardised.
    kept: folder of the feature cache (`data.cache`); None: no cache.
    resident: whether features lie in memory; False: read from a file when needed; None: by size
      (`stay_in_file`).

  Raises:
    UserError: examples without such features, such as images of an unsupported size; a disk without
      space for features outside memory; weights of a public network that are not installed.
  """
  kind = registry.entry(config.name).features
  if kind is None:
    return dataset
  # The module is imported by name, since few runs need features, and no run needs every kind.
  home = _OF_NO_DATA.get(kind, "public_features")
  module = importlib.import_module(f"dpjax.experiments.kinds.central.{home}")
  computed = module.describe_features(config, dataset, standardized)
  shape = computed.shape
  make = functools.partial(_with_bar, computed, kind, len(dataset))
  in_file = stay_in_file(shape, resident)
  if kept is not None:
    key = cache.key(data.digest(dataset), *computed.settings, *_makers(computed.code))
    tell = lambda line: print(line, file=sys.stderr, flush=True)
    cached = cache.rows(kept, key, shape, make, tell)
    x = cached if in_file else _join(cached.chunks(), shape)
  else:
    x = cache.unnamed_rows(shape, make) if in_file else _join(make(), shape)
  return identity.with_inputs(dataset, x)


def stay_in_file(shape: tuple[int, ...], resident: bool | None) -> bool:
  """Returns whether features [n, *features] stay in a file until they are drawn.

  With resident=True they do not, with False they do. With None they do on a CPU if they take more
  than 64 MiB, since rows are read from a file there almost as fast as from memory. An accelerator
  has them in its own memory, so None there is as for other data (`rows.stay_in_files`).

  >>> stay_in_file((1797, 2, 2, 81), None), stay_in_file((60000, 7, 7, 81), True)
  (False, False)
  """
  nbytes = 4 * math.prod(shape)
  if resident is None and made_for.platform() == "cpu":
    return nbytes > _MOST_IN_MEMORY
  return rows.stay_in_files(nbytes, resident)


def _join(blocks: Iterable[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
  """Returns the rows of all blocks as one array; nor does a CPU device hold them twice."""
  out = rows.aligned_empty(shape)
  done = 0
  for block in blocks:
    out[done : done + len(block)] = block
    done += len(block)
  return out


def _makers(names: Sequence[str]) -> tuple[str, ...]:
  """Returns what decides a feature's bits beside the settings: code, jaxlib's version, device."""
  code = "".join(inspect.getsource(sys.modules[name]) for name in names)
  device = jax.devices()[0]
  return (
    hashlib.sha256(code.encode()).hexdigest(),
    importlib.metadata.version("jaxlib"),
    device.platform,
    device.device_kind,
  )


def _with_bar(computed: ComputedFeatures, kind: str, count: int) -> Iterator[np.ndarray]:
  """Yields the features of `count` examples, beside a progress bar in percent, since the number of
  examples may be secret."""
  chunks = computed.make()
  done = 0
  with writers.Progress(100, 0, f"{kind} features, percent") as bar:
    for chunk in chunks:
      before = 100 * done // count
      done += len(chunk)
      bar.update(100 * done // count - before)
      yield chunk
