"""Computes the inputs of models that take features, or reads them from a cache.

Features of scattering and of patches depend on no one's data. Features of frozen public networks
depend on the data that the network was trained on (`networks.public_trunks`), and tokens on the
texts that their vocabulary was learnt from. So the guarantee of such a run is a claim, as of one
that starts from public weights (`saved.assumption`): it assumes that no record of the run is among
those data.
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
from dpjax.accounting.text import paragraph
from dpjax.data import cache, identity, rows, text
from dpjax.experiments.config.sections import ModelConfig
from dpjax.experiments.run import guarantee, writers
from dpjax.parallel import made_for
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks import registry

# Features that depend on no one's data. All others are those of frozen public networks.
_OF_NO_DATA = (None, "scattering", "patches")
# Bytes of features that stay in memory by default.
_MOST_IN_MEMORY = 2**26
# Number of examples standardised at a time. It is constant, since the shape decides the last bit.
_BLOCK = 1000
# Random processes, and images of each, from which a dictionary of patches is learnt.
_PROCESSES = 64
_IMAGES = 125
# Beginnings of the names of TFDS data sets that hold records of ImageNet.
_OF_IMAGENET = (
  "imagenet2012", "imagenet_resized", "imagenet_lt", "imagenette", "imagewang",
  "downsampled_imagenet",
)  # fmt: skip
# Beginnings of the names of data sets whose texts all-MiniLM-L6-v2 was trained on.
_OF_SENTENCES = (
  "eli5", "glue/mnli", "glue/qqp", "gooaq", "ms_marco", "multi_nli", "natural_questions", "reddit",
  "snli", "squad", "trivia_qa", "wikihow", "yahoo_answers",
)  # fmt: skip


def check_images(dataset: data.Dataset, field: str, value: str) -> None:
  """Raises UserError unless examples are images [H, W, C], which this field's value needs."""
  shape = dataset.x.shape[1:]
  if len(shape) != 3:
    raise UserError(
      f"needs images [H, W, C]; an example is of shape {shape}", field=field, value=value
    )


# --- what features and tokens were learnt from


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns names of the data that a model's features were trained on; () if the model takes no
  features, or if they depend on no data.

  Args:
    data_name: name of the run's data.

  Raises:
    UserError: the run's data hold records that the features were trained on.

  >>> trained_on("vgg16_linear", "cifar10"), trained_on("scatter_linear", "cifar10")
  (('ImageNet',), ())
  """
  network = registry.entry(model).features
  if network in _OF_NO_DATA:
    return ()
  # Imported here, since few runs need features of public networks.
  from dpjax.zoo.networks import public_trunks, sentence_encoder

  of_texts = network in sentence_encoder.ENCODERS
  known: Any = sentence_encoder.ENCODERS if of_texts else public_trunks.TRUNKS
  knows = known[network].knows
  if data_name.startswith(_OF_SENTENCES if of_texts else _OF_IMAGENET):
    raise UserError(
      f"its features were trained on {knows}, whose records are in data.name="
      f"{data_name!r}; no epsilon would hold, so data or model must be others",
      field="model.name",
      value=model,
    )
  return (knows,)


def add_note(config: Any, promised: Any, dataset: data.Dataset) -> Any:
  """Returns the guarantee as a claim that names the data which features and tokenizer were learnt
  from; unchanged if there are none."""
  network = registry.entry(config.model.name).features
  for knows in trained_on(config.model.name, config.data.name):
    note = (
      f"Features. The inputs of the model are features of the public network {network}, which "
      f"was trained on {knows}. Nothing is promised to records that are in those data, too; "
      "that there are none is assumed, not checked."
    )
    assumed = f"no record of this run is known to {network}, which was trained on {knows}"
    promised = guarantee.add_note(promised, paragraph(note), assumed)
  tokenizer = dataset.tokenizer
  if tokenizer is None:
    return promised
  # A vocabulary reveals something of the texts that it was learnt from, which are unknown.
  path = tokenizer["path"]
  note = (
    f"Tokens. The texts are read by the tokenizer {path} of {tokenizer['vocab_size']} "
    f"tokens (SHA-256 {tokenizer['sha256'][:16]}...). Nothing is promised to texts that it was "
    "learnt from; that none of this run's records are among them is assumed, not checked."
  )
  assumed = f"the tokenizer {path} was learnt from no record of this run"
  return guarantee.add_note(promised, paragraph(note), assumed)


# --- the features of a data set


@dataclasses.dataclass(frozen=True)
class ComputedFeatures:
  """Describes the features of one data set; `make` computes them."""

  shape: tuple[int, ...]
  # Settings that decide a feature. They enter the key of the cache, so that a run with a changed
  # setting never reads old features.
  settings: tuple[Any, ...]
  code: tuple[str, ...]  # modules that decide the last bit, beside this one
  make: Callable[[], Iterator[np.ndarray]]  # -> rows, in chunks


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
  computed = describe_features(config, dataset, standardized)
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


def describe_features(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> ComputedFeatures:
  """Returns a description of the features that the model takes of a data set.

  Args:
    standardized: as of `add_features`.

  Raises:
    UserError: examples without such features.
  """
  kind = registry.entry(config.name).features or ""
  if kind == "scattering":
    return _scattering(config, dataset, standardized)
  if kind == "patches":
    return _patches(config, dataset)
  # Imported here, since few runs need features of public networks.
  from dpjax.zoo.networks import public_trunks, sentence_encoder

  if kind in sentence_encoder.ENCODERS:
    return _of_sentences(config, dataset, kind)
  check_images(dataset, "model.name", config.name)
  # The settings hold the digest of the weights, since other weights give other features.
  network = public_trunks.TRUNKS[kind]
  shape = public_trunks.trunk_shape(kind, dataset.x.shape)
  return ComputedFeatures(
    shape,
    (shape, kind, network.sha256, network.size, config.mirrored),
    ("dpjax.zoo.networks.public_trunks", "dpjax.models.pooling"),
    functools.partial(
      public_trunks.trunk_chunks, dataset.x, kind, mirrored=config.mirrored
    ),
  )


def _of_sentences(
  config: ModelConfig, dataset: data.Dataset, encoder: str
) -> ComputedFeatures:
  from dpjax.zoo.networks import sentence_encoder

  is_bytes = dataset.vocab_size == text.VOCAB_SIZE and len(dataset.x.shape) == 2
  if dataset.x.dtype != np.int32 or not is_bytes:
    raise UserError(
      f"needs texts as bytes, which data without a tokenizer give, not {dataset!r}",
      field="model.name",
      value=config.name,
    )
  if config.mirrored:
    raise UserError("is of images", field="model.mirrored", value=True)
  known = sentence_encoder.ENCODERS[encoder]
  shape = sentence_encoder.sentence_shape(encoder, dataset.x.shape)
  return ComputedFeatures(
    shape,
    (shape, encoder, known.weights_sha256, known.tokenizer_sha256),
    ("dpjax.zoo.networks.sentence_encoder", "dpjax.zoo.networks.bert"),
    functools.partial(sentence_encoder.sentence_chunks, dataset.x, encoder),
  )


# --- scattering


def _scattering(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> ComputedFeatures:
  # Imported here, since few runs need scattering.
  from dpjax.zoo.networks.scattering import features_shape

  check_images(dataset, "model.name", config.name)
  if config.colours == "opponent" and dataset.x.shape[-1] != 3:
    depth = dataset.x.shape[-1]
    raise UserError(
      f"needs images of 3 colours, not of {depth}", field="model.colours", value="opponent"
    )
  options: Any = {"num_classes": dataset.num_classes, **config.options}
  groups = networks.build(config.name, **options).num_groups if standardized else None
  shape = features_shape(dataset.x.shape)
  seen = {"mirrored": config.mirrored, "colours": config.colours}
  return ComputedFeatures(
    shape,
    (shape, groups, standardized, *seen.values()),
    (
      "dpjax.zoo.networks.scattering",
      "dpjax.zoo.networks.scatter_heads",
      "dpjax.zoo.random_images",
    ),
    functools.partial(scattering_blocks, dataset, groups, standardized, seen),
  )


def scattering_blocks(
  dataset: data.Dataset, groups: int | None, standardized: bool, seen: dict[str, Any]
) -> Iterator[np.ndarray]:
  """Yields the scattering features of all examples, in order. Images in memory or in files give
  equal bits."""
  from dpjax.zoo.networks import scattering
  from dpjax.zoo.networks.scatter_heads import standardized_features

  images = dataset.x.shape[1:]
  scales = None
  if not standardized:
    scales = scattering.typical_scales(images, colours=seen["colours"])
  for block in _regroup(scattering.scattering_chunks(dataset.x, **seen), _BLOCK):
    if scales is None:
      yield standardized_features(block, groups, in_place=True)
    else:
      block /= scales
      yield block


def _regroup(chunks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
  """Yields the rows of all chunks in arrays of `size` rows; the last array may have fewer."""
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


# --- patches, whose dictionary is learnt from images of random processes


def _patches(config: ModelConfig, dataset: data.Dataset) -> ComputedFeatures:
  # Imported here, since few runs need patches.
  import scipy

  from dpjax.zoo.networks import patches

  check_images(dataset, "model.name", config.name)
  shape = patches.patch_shape(dataset.x.shape)

  def make() -> Iterator[np.ndarray]:
    # Images are checked first, since learning takes minutes.
    patches.check_images(dataset.x)
    network = learned_network(tuple(dataset.x.shape[1:]))
    return patches.patch_chunks(dataset.x, network, mirrored=config.mirrored)

  # Matrix decompositions of NumPy and SciPy decide the last digits of the directions.
  libraries = (np.__version__, scipy.__version__)
  return ComputedFeatures(
    shape,
    (shape, dataset.x.shape[1:], config.mirrored, *libraries),
    (
      "dpjax.zoo.networks.patches",
      "dpjax.models.pooling",
      "dpjax.zoo.datasets.random_process",
      "dpjax.zoo.random_images",
    ),
    make,
  )


# The network is cached, since training and test data have the same shape, and learning takes some
# minutes.
@functools.lru_cache(maxsize=1)
def learned_network(shape: tuple[int, int, int]) -> Any:
  """Returns the `PatchNetwork` for images of a shape, learnt from random images of that shape."""
  from dpjax.zoo.datasets import random_process
  from dpjax.zoo.networks import patches

  random = np.random.Generator(np.random.PCG64(0))
  height, width, colours = shape
  blocks = []
  with writers.Progress(_PROCESSES, 0, "images of random processes") as bar:
    for _ in range(_PROCESSES):
      process = random_process.drawn_process(random, colours)
      blocks.append(random_process.images_of(process, random, _IMAGES, height, width))
      bar.update(1)
  line = "learns words and directions of patches from them, in some minutes"
  print(line, file=sys.stderr, flush=True)
  return patches.learned_patches(np.concatenate(blocks), words=patches.WORDS)


# --- where they lie


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
  sources = [importlib.import_module(name) for name in (*names, __name__)]
  code = "".join(map(inspect.getsource, sources))
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
