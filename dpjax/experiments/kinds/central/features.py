"""The inputs of models that take features; computed once, or read from a cache.

Scattering features know no data; those of public networks do (`public_features`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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
from dpjax.experiments.run import writers
from dpjax.validate import UserError

_CODE = (
  "dpjax.models.scattering", "dpjax.models.scatter_heads", "dpjax.random_images", __name__
)  # fmt: skip
# Examples standardised at a time. The shape of a block decides the last bit.
_BLOCK = 1000


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


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns `public_features.trained_on`: the data that the features of a model know."""
  if models.needs_features(model) in (None, "scattering"):
    return ()
  # Few runs need it.
  from dpjax.experiments.kinds.central import public_features

  return public_features.trained_on(model, data_name)


def noted(promised: Any, model: str, known: Sequence[str]) -> Any:
  """Returns `public_features.noted`: the guarantee, which says what the features know."""
  if not known:
    return promised
  from dpjax.experiments.kinds.central import public_features

  return public_features.noted(promised, model, known)


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
    UserError: no images; features that are not to lie in memory, and no folder; weights of a
      public network that are not installed.
  """
  kind = models.needs_features(config.name)
  if kind is None:
    return dataset
  check_images(dataset, f"model.name={config.name!r}")
  if kind == "scattering":
    computed = _of_scattering(config, dataset, standardized)
  else:
    from dpjax.experiments.kinds.central import public_features

    computed = public_features.computed(config, dataset, kind)
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


def _of_scattering(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> ComputedFeatures:
  if config.colours == "opponent" and dataset.x.shape[-1] != 3:
    depth = dataset.x.shape[-1]
    raise UserError(
      f"needs images of 3 colours, not of {depth}", field="model.colours", value="opponent"
    )
  options: Any = {"num_classes": dataset.num_classes, **config.options}
  groups = models.build(config.name, **options).num_groups if standardized else None
  shape = models.features_shape(dataset.x.shape)
  seen = {"mirrored": config.mirrored, "colours": config.colours}
  make = functools.partial(_blocks, dataset, groups, standardized, seen)
  return ComputedFeatures(shape, (shape, groups, standardized, *seen.values()), _CODE, make)


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


def _blocks(
  dataset: data.Dataset, groups: int | None, standardized: bool, seen: dict[str, Any]
) -> Iterator[np.ndarray]:
  """The features of all examples, in order; equal bit by bit wherever they are put."""
  images = dataset.x.shape[1:]
  scales = None
  if not standardized:
    scales = models.typical_scales(images, colours=seen["colours"])
  # In percent: the number of examples may be a secret.
  with writers.progress(100, 0, "scattering features, percent") as bar:
    chunks = models.scattering_chunks(dataset.x, **seen)
    for block in _regrouped(counted(chunks, len(dataset), bar), _BLOCK):
      if scales is None:
        yield models.standardized_features(block, groups, in_place=True)
      else:
        block /= scales
        yield block


def counted(chunks: Iterable[np.ndarray], count: int, bar: Any) -> Iterator[np.ndarray]:
  """Yields the same chunks, and moves a bar of percents."""
  done = 0
  for chunk in chunks:
    before = 100 * done // count
    done += len(chunk)
    bar.update(100 * done // count - before)
    yield chunk


def _regrouped(chunks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
  """The same rows in arrays of `size`, the last of fewer."""
  held: list[np.ndarray] = []
  for chunk in chunks:
    held.append(chunk)
    while sum(map(len, held)) >= size:
      whole = np.concatenate(held)
      yield whole[:size].copy()
      held = [whole[size:]]
  remaining = np.concatenate(held) if held else np.zeros((0,))
  if len(remaining):
    yield remaining
