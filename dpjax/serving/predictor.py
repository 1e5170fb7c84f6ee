"""A finished run as a function from raw inputs to logits, by the code that evaluated it.

Where training and serving preprocess in two ways, a model may be worse in use than in its test. So
there is one preprocessing: a `Predictor` is built from params.npz, and from the run's own
config.json by the functions of `launch.train`. Before that it checks the digests that the run
wrote.

XLA may add up a product of 8 rows in another order than one of 500 rows. Then logits of two batch
sizes differ in their last bits. Evaluation computes in batches of 500. A predictor pads requests to
a few sizes, those whose logits on 500 probe rows have the bits of a batch of 500. `row_exact` is
False where the place of a row in its batch decides the last bits. Then logits of two sizes may
differ by rounding, and only the same rows in the same places, such as the whole test set, have the
bits of evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dpjax import data, trees, validate
from dpjax.data import tables
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import (
  embeddings,
  normalization,
  starting_point,
)
from dpjax.experiments.kinds.central.config import (
  AllWeights,
  HeadFirst,
  TrainConfig,
  Whitened,
)
from dpjax.experiments.kinds.central.features import add_features
from dpjax.experiments.run import (
  finished,
  model_inputs,
  provenance,
  saved,
  workdir,
  writers,
)
from dpjax.experiments.run.folder import STARTS
from dpjax.experiments.run.kind import command_of
from dpjax.experiments.run.model_inputs import ModelInputs
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.mechanisms.channel_statistics import ChannelMoments
from dpjax.mechanisms.whitening import Spread
from dpjax.types import Params
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import entry

# Batch size of the evaluation of runs, which is the default of dpjax.metrics.
EVALUATION = 500
SIZES = (8, 32, 128, EVALUATION)
_PROBE_SEED = 20_480
_MOVED = 13
_CLOSE = 1e-4
# Packages whose versions decide the last bits of a logit.
_ROUNDING = ("jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class _Model:
  """Everything that turns raw inputs into logits."""

  config: TrainConfig
  inputs: ModelInputs
  apply: Callable[[Params, Any], Any]
  params: Params
  standardize_by: Any  # released statistics of the features; None: there are none

  def logits(self, x: np.ndarray) -> np.ndarray:
    """Computes logits [B, K] of raw inputs [B, ...] in one batch of exactly B rows. K is the number
    of classes or outputs."""
    raw = self.inputs.zeros()
    rows = dataclasses.replace(raw, x=x, y=np.repeat(raw.y, len(x), axis=0))
    if self.config.data.center:
      rows = data.preprocess.center(rows)
    # Progress bars are turned off, since each request would write one to the log of a server.
    with writers.silent():
      rows = add_features(
        self.config.model, rows, normalization.per_example(self.config), None, True
      )
    if self.standardize_by is not None:
      rows = normalization.normalize(rows, self.standardize_by)
    return np.asarray(_jit(self.apply)(self.params, rows.x))


# The cache is bounded, so that a server that replaces its model many times frees the old models.
@functools.lru_cache(maxsize=8)
def _jit(apply: Callable[..., Any]) -> Callable[..., Any]:
  return jax.jit(lambda params, x: trees.at_least_float32(apply(params, x)))


class Predictor:
  """The model of a finished run: raw inputs in, logits out.

  Attributes:
    differences: versions, the user's modules and a device that differ from those of the training.
      Each may change the rounding. Without any, logits have the bits of evaluation (`row_exact`).

  >>> import tempfile
  >>> from dpjax.experiments.kinds.central.config import *
  >>> from dpjax.experiments.run import loop
  >>> config = TrainConfig(
  ...   data=DataConfig(name="digits", center=True), model=ModelConfig(name="mlp"),
  ...   privacy=DpSgd(epsilon=8.0), num_steps=1, eval_every=1)
  >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
  ...   _ = loop.train(config, folder + "/run")
  ...   predictor = Predictor.load(folder + "/run")
  >>> predictor(np.zeros((3, 8, 8, 1), np.float32)).shape  # doctest: +SKIP
  (3, 10)
  """

  def __init__(
    self,
    model: _Model,
    result: Mapping[str, Any],
    folder: pathlib.Path,
    sizes: Sequence[int] = SIZES,
  ):
    validate.integer_at_least(1, **validate.entries(sizes=sizes))
    self._folder = folder
    self.folder = str(folder.resolve())
    self.name = folder.resolve().name
    self.result = dict(result)
    self.inputs = model.inputs
    self._model = model
    # `row_exact` says whether a row's logits have the bits of evaluation in every batch and place.
    self.sizes, self.row_exact = self._checked_sizes(sorted({*sizes, EVALUATION}))
    # Computed once: it reads the user's modules, and a later edit changes no loaded model.
    self.differences = _differences(self.result)

  @classmethod
  def load(
    cls, run_folder: str | os.PathLike[str], *, sizes: Sequence[int] = SIZES
  ) -> Predictor:
    """Loads a finished run of `launch.train` or `launch.federate`.

    The folder needs config.json, result.json, params.npz and the other files that result.json has
    a digest of. Neither the training data nor the folder `checkpoints/`, which is as secret, need
    be there.

    Args:
      run_folder: folder of the run.
      sizes: batch sizes that requests are padded to. A size is left out if its logits differ in a
        bit from those of evaluation. If `row_exact` is False, differences by rounding are allowed.

    Raises:
      UserError: the folder holds no finished run of these launchers; a file is not what the run
        wrote; the model predicts embeddings or the next token; its examples are dicts. The message
        is one line.
    """
    path = pathlib.Path(run_folder)
    with validate.about("run", str(run_folder)[-100:], but=("run",)):
      if not path.is_dir():
        raise UserError("must be the folder of a finished run; there is none")
      config, train = _configs(path)
      _check_kind(train)
      result = workdir.finished_result(path, config)
      if result is None:
        raise UserError(
          f"is not finished: it has no {writers.RESULT}; run its command again"
        )
      if not _holds_all_weights(train):
        workdir.check_weights(config, result)
      inputs = model_inputs.read(path)
      if inputs is None:
        raise UserError(
          f"has no {model_inputs.NAME}: its examples are dicts, or it was written by another "
          "version of dpjax"
        )
      model = _rebuilt(train, inputs, path, result)
    return cls(model, result, path, sizes)

  def __call__(self, x: Any) -> np.ndarray:
    """Computes logits [n, K] of raw inputs, for K classes or outputs.

    If `differences` is empty, they have the bits of the run's evaluation. If `row_exact` is False,
    this holds only for the same rows in the same places.

    Args:
      x: raw inputs [n, ...] as the run's data had them, before they were centred or turned into
        features; or of a table what `data.table` takes in memory: a frame, a dict of columns or a
        list of dicts. It may hold the target and the columns that were not read in training.

    Raises:
      UserError: in the cases that `raw` names.
    """
    return self.logits(self.raw(x))

  def raw(self, x: Any) -> np.ndarray:
    """Checks raw inputs and converts them to an array [n, ...] of the model's input type.

    Raises:
      UserError: the inputs have another shape or type; a number is not finite or out of range; a
        token is beyond the vocabulary; a cell is not as declared. The message is one line.
    """
    wanted = self.inputs
    columns = None if wanted.declaration is None else tables.columns_of(x)
    if wanted.declaration is not None and columns is not None:
      return tables.inputs(columns, wanted.declaration)
    try:
      array = np.asarray(x)
    except (ValueError, OverflowError, RecursionError):
      raise UserError("must be a rectangular array of numbers", field="rows") from None
    kinds = "iu" if wanted.dtype == "int32" else "iuf"
    if array.dtype.kind not in kinds:
      kind = "integers (tokens)" if wanted.dtype == "int32" else "numbers"
      raise UserError(
        f"must hold {kind} of at most 64 bits, got {array.dtype}", field="rows"
      )
    if array.shape[1:] != wanted.shape or not array.ndim:
      shape = ", ".join(map(str, wanted.shape))
      raise UserError(f"must be of shape [n, {shape}], got {array.shape}", field="rows")
    if array.dtype == np.uint8 and wanted.unit_range:
      # `data.from_arrays` divides the bytes of images by 255 in the same way.
      return np.divide(array, 255, dtype=np.float32)
    return self._check(array)

  def _check(self, array: np.ndarray) -> np.ndarray:
    wanted = self.inputs
    if wanted.dtype == "int32":
      high = wanted.vocab_size if wanted.vocab_size is not None else 2**31
      if array.size and (array.min() < 0 or array.max() >= high):
        raise UserError(f"must hold tokens in [0, {high})", field="rows")
      return array.astype(np.int32)
    with np.errstate(over="ignore"):
      cast = array.astype(np.float32)
    if not np.isfinite(cast).all():
      raise UserError("every number must be finite in float32", field="rows")
    if wanted.unit_range and cast.size and (cast.min() < 0 or cast.max() > 1):
      raise UserError(
        "must lie in [0, 1], as the inputs of training did; divide bytes by 255",
        field="rows",
      )
    return cast

  def logits(self, x: np.ndarray) -> np.ndarray:
    """Computes logits [n, K] of an array that `raw` returned, in padded batches."""
    if not len(x):
      return np.zeros((0, self.inputs.num_classes), np.float32)
    # If one batch does not hold all rows, all batches have the size of the run's evaluation.
    size = next((size for size in self.sizes if size >= len(x)), EVALUATION)
    missing = -len(x) % size
    padded = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
    starts = range(0, len(padded), size)
    parts = [self._model.logits(padded[start : start + size]) for start in starts]
    return np.concatenate(parts)[: len(x)]

  def classes(self, logits: np.ndarray) -> np.ndarray:
    """Returns the answer to each row: its class [n]; for several labels 0 or 1 [n, labels]; for a
    predicted number its value [n] in the units of the data."""
    if self.inputs.target is None:
      return np.argmax(logits, axis=-1)
    if isinstance(self.inputs.target, data.Labels):
      return (logits > 0).astype(np.int32)
    # Values are clipped to the bounds of the target, public facts that no answer may contradict.
    return self.inputs.target.original(np.clip(logits[:, 0], -1, 1))

  @property
  def config(self) -> TrainConfig:
    """The run's config; for a federated run, the central config that reads the same data.

    `pretrained` is None if params.npz holds every weight, so that this file is not needed.
    """
    return self._model.config

  def _checked_sizes(self, sizes: list[int]) -> tuple[list[int], bool]:
    """Returns (batch sizes to use, whether a row has the same bits in every place of a batch)."""
    probe = self.probe()
    wanted = self._model.logits(probe)
    if wanted.ndim != 2:
      raise UserError(
        f"must be a model of logits [n, K], not of shape {wanted.shape}",
        field="run",
        value=self.name,
      )
    # `_MOVED` is odd, so that every row moves to another place of a vector register.
    moved = self._model.logits(np.roll(probe, _MOVED, axis=0))
    anywhere = np.array_equal(np.roll(moved, -_MOVED, axis=0), wanted)
    kept = []
    for size in sizes:
      if size == EVALUATION:
        kept.append(size)
      # Sizes above that of evaluation are left out, since `logits` never needs them.
      if size >= EVALUATION:
        continue
      # Every place of a batch is tried, since other code may compute the last rows of a product.
      starts = range(0, EVALUATION - size + 1, size)
      parts = [self._model.logits(probe[start : start + size]) for start in starts]
      there = np.concatenate(parts)
      here = wanted[: len(there)]
      # If the place of a row decides its bits, no size keeps the bits. Then small sizes are used
      # if they agree up to rounding, since they are faster.
      same = (
        np.array_equal(there, here) if anywhere else np.allclose(there, here, atol=_CLOSE)
      )
      if same:
        kept.append(size)
    return kept, anywhere

  def probe(self) -> np.ndarray:
    """Returns 500 raw inputs, drawn at random from a fixed seed, so that they hold no record."""
    rng = np.random.default_rng(_PROBE_SEED)
    shape = (EVALUATION, *self.inputs.shape)
    if self.inputs.dtype == "int32":
      return rng.integers(0, self.inputs.vocab_size or 256, shape).astype(np.int32)
    return rng.random(shape, np.float32)


def _differences(result: Mapping[str, Any]) -> list[str]:
  """Lists versions, the user's modules and a device that differ from those of the training; [] if
  none differs."""
  differences = []
  versions = result.get("versions")
  before = versions if isinstance(versions, dict) else {}
  now = provenance.libraries()
  for name in _ROUNDING:
    if before.get(name) != now.get(name):
      differences.append(f"{name} {before.get(name)} there, {now.get(name)} here")
  starts = result.get(STARTS)
  theirs = starts[-1]["modules"] if starts else {}
  ours = provenance.own_modules()
  for name in sorted(theirs.keys() & ours.keys()):
    if theirs[name] != ours[name]:
      differences.append(f"module {name!r} was edited since")
  device = str(result.get("device"))
  if device != provenance.device():
    differences.append(f"{device} there, {provenance.device()} here")
  return differences


def digest_of(run: Predictor) -> str:
  """Returns the digest of a run's config and result, which identifies the run."""
  return str(run.result["run_sha256"])


def _configs(path: pathlib.Path) -> tuple[Any, TrainConfig]:
  """Returns (the run's config, the central config that reads the same inputs)."""
  config: Any = finished.config_of(path, "run")
  if isinstance(config, TrainConfig):
    return config, config
  kind = command_of(config)
  if kind == "pate":
    # The student's inputs are principal components of public examples, which the folder lacks.
    raise UserError(
      f"is a run of launch.pate, whose student needs its public examples; train a run on "
      f"them with the pool_labels of its {workdir.PARAMS}, at no cost, and serve that one"
    )
  if kind != "federate":
    raise UserError("is no run of launch.train or launch.federate, but of another kind")
  # Imported here, since a server of a central run needs no federated code.
  from dpjax.experiments.kinds.federated import loading

  return config, dataclasses.replace(loading.central(config), seed=config.seed)


def _holds_all_weights(config: TrainConfig) -> bool:
  """Returns whether params.npz holds every weight. If so, the file `pretrained` is not needed."""
  return isinstance(config.trainable, (AllWeights, HeadFirst))


def _check_kind(config: TrainConfig) -> None:
  if config.loss == embeddings.NAME or entry(config.model.name).is_language:
    if config.loss == embeddings.NAME:
      what = "embeddings"
      instead = "a run with pretrained='RUN/params.npz' and labels"
    else:
      what = "the next token"
      instead = "a run of a model with classes, labels or a number"
    raise UserError(f"its model predicts {what}; must answer by a label: serve {instead}")


def _rebuilt(
  config: TrainConfig,
  inputs: ModelInputs,
  path: pathlib.Path,
  result: Mapping[str, Any],
) -> _Model:
  """Builds the model as the launcher does, and puts the run's parameters into it."""
  if _holds_all_weights(config):
    config = dataclasses.replace(config, pretrained=None)
  like = add_features(
    config.model, inputs.zeros(), normalization.per_example(config), None, True
  )
  # The initial parameters depend on the seed alone; nothing is drawn from the other keys.
  key = jax.random.key(config.seed)
  public = RunKeys(init=key, noise=key, local=key, sampler=0, order=0)
  task, model, params = central.start(config, like, public)
  trained = starting_point.trainable_part(config, task, model, params, public.init)
  params, apply = audits.beside(config, trained.params, trained.apply)
  file = str(path / workdir.PARAMS)
  if not os.path.exists(file):
    raise UserError(f"has no {workdir.PARAMS}, so there is no model to serve")
  with validate.about(workdir.PARAMS):
    arrays = saved.read(file)
  statistics = None
  if normalization.statistics_of(config) is not None:
    kind: Any = ChannelMoments
    if isinstance(getattr(config.privacy, "normalization", None), Whitened):
      kind = Spread
    prefix = f"{normalization.RELEASED}/"
    try:
      # `pop` removes the statistics, so that only the parameters of the model are left.
      statistics = kind(*(arrays.pop(prefix + name) for name in kind._fields))
    except KeyError as error:
      raise UserError(f"its {workdir.PARAMS} has no {error.args[0]}") from None
  with validate.about(workdir.PARAMS):
    params = saved.in_place_of(params, arrays)
  whole = normalization.beside(params, statistics)
  if trees.sha256(whole) != result.get("params_sha256"):
    raise UserError(
      f"its {workdir.PARAMS} does not hold the parameters that its {writers.RESULT} names"
    )
  return _Model(config, inputs, apply, jax.device_put(params), statistics)
