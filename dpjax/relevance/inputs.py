"""Inputs and outcome of one run of one method."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import metrics
from dpjax.accounting.proved import ADD
from dpjax.data import Dataset
from dpjax.key_uses import KeyUse, key_for
from dpjax.relevance import feature_shares, train
from dpjax.relevance.lrp import Lrp
from dpjax.relevance.privacy import Privacy
from dpjax.relevance.settings import AdLM, Paper, Private, Rigorous, Training
from dpjax.types import Params

# Purposes of noise, each of which is folded into the noise key.
RELEVANCE, FEATURES, LABELS, GRADIENTS, MODEL_1, LOSS = range(1, 7)


class Keys(NamedTuple):
  """Every source of randomness. The guarantees need `noise` and `secret` to be secret.

  `pipeline.run` mixes the method, the settings and the records into `noise` and `secret`. So with
  other data or other settings, the same keys give other noise and other sampled batches.
  """

  init: jax.Array  # key of initial parameters
  noise: jax.Array  # key from which all noise comes
  order: int  # seed of the order of batches that are not sampled for privacy
  secret: int  # seed of batches that are sampled for privacy, and of the shuffler

  def key(self, purpose: int) -> jax.Array:
    """Returns the noise key of one purpose."""
    return jax.random.fold_in(self.noise, purpose)


class Nets(NamedTuple):
  """The nets of a run: linen modules, or anything with init and apply."""

  first: Any  # model 1, whose relevance is propagated
  second: Any  # model 2, which is released
  body: Any  # AdLM's net up to the last hidden layer
  tempered: Any  # model 2 with tempered sigmoids


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
  """Data, networks, keys and settings of one relevance run, for the methods to read."""

  epsilon: float
  train: Any  # a dpjax.data.Dataset, pixels in [0, 1]; plans are made for its nominal_size
  test: Any
  nets: Nets
  keys: Keys
  training: Training = dataclasses.field(default_factory=Training)
  lrp: Lrp = dataclasses.field(default_factory=Lrp)
  paper: Paper = dataclasses.field(default_factory=Paper)
  rigorous: Rigorous = dataclasses.field(default_factory=Rigorous)
  private: Private = dataclasses.field(default_factory=Private)
  adlm: AdLM = dataclasses.field(default_factory=AdLM)
  public: Any = None  # public data, which train model 1 if rigorous.model1="public"
  relevance_records: int | None = None  # relevance is averaged over this many first records
  on_epoch: train.OnEpoch | None = None  # function that gets the test scores of an epoch
  # Cache for model 1 of the paper and its relevance, which several jobs may share; see `once`.
  memo: dict[Any, Any] = dataclasses.field(default_factory=dict)

  @property
  def size(self) -> int:
    """The number of records that plans are made for: the declared one, `train.nominal_size`. The
    true one where none is declared, or where the relation makes it public."""
    declared = self.train.nominal_size
    hides = self.private.neighboring_relation == ADD
    return declared if hides and declared is not None else len(self.train)

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape of one example."""
    return self.train.x.shape[1:]

  @property
  def channels(self) -> int:
    """Number of channels of an image; 1 for inputs that are no images."""
    return self.shape[2] if len(self.shape) == 3 else 1

  @property
  def num_features(self) -> int:
    """Number of features: places of an image, entries of anything else."""
    return feature_shares.num_features(self.shape)

  def initial(self, model: Any, x: Any, index: int | None = None) -> Any:
    """Calls `model.init` on zeros in the shape of one example of x, so that no initialiser sees a
    record. Returns the first parameters.

    Args:
      index: number of the net, folded into the initial key; None: the initial key itself.
    """
    key = self.keys.init
    if index is not None:
      key = jax.random.fold_in(key_for(KeyUse.PARAMETERS, key), index)
    return model.init(key, jnp.zeros((1, *x.shape[1:]), x.dtype))

  def once(self, make: Callable[[], train.Story], *what: Any) -> train.Story:
    """Returns what the story make() returns, or its cached result. Make no noise in it.

    Jobs share a result if they share the memo, `what`, the training data, the training settings,
    model 1, the initial key and the order of batches.
    """
    init = np.asarray(jax.random.key_data(self.keys.init)).tobytes()
    mine = (id(self.train), self.nets.first, self.training, init, self.keys.order)
    if (*mine, *what) not in self.memo:
      # The cache keeps the training data alive, so that no other object can get their id.
      made = yield from make()
      self.memo[*mine, *what] = self.train, made
    return self.memo[*mine, *what][1]

  def bound(self, *how: Any) -> Inputs:
    """Returns this job with keys that depend on `how`, on the settings and on the records.

    The settings `paper`, `rigorous` and `adlm` count only if the caller adds them to `how`. The
    same noise at two scales would reveal the records. The same noise on two data sets would cancel
    in their difference. Under a secret key, each pair of settings and records gets a separate draw.
    """
    settings = (self.epsilon, *how, self.training, self.lrp, self.private, self.nets)
    settings += (self.train.num_classes, self.keys.order)
    # The repr names every setting, so that any change draws other noise.
    digest = hashlib.sha256(repr(settings).encode())
    public = [] if self.public is None else [self.public.x, self.public.y]
    init = np.asarray(jax.random.key_data(self.keys.init))
    for array in (self.train.x, self.train.y, init, *public):
      digest.update(repr(array.shape).encode())
      digest.update(np.ascontiguousarray(array).tobytes())
    key = self.keys.noise
    words = np.frombuffer(digest.digest()[:16], np.uint32)
    for word in words:
      key = jax.random.fold_in(key, word)
    secret = [self.keys.secret, int.from_bytes(digest.digest()[16:], "big")]
    mixed = np.random.SeedSequence(secret).generate_state(8, np.uint32)
    keys = self.keys._replace(noise=key, secret=int.from_bytes(mixed.tobytes(), "big"))
    return dataclasses.replace(self, keys=keys)

  def fit(
    self,
    loss: train.BatchLoss,
    initial: Params,
    records: Callable[[int], tuple[np.ndarray, np.ndarray]],
    num_records: int,
    **how: Any,
  ) -> train.Steps:
    """Returns the training `train.fit` with this job's settings and order of batches."""
    order = self.keys.order
    return train.fit(
      loss, initial, records, self.training, num_records=num_records, seed=order, **how
    )

  def outcome(
    self,
    net: Any,
    loss: train.BatchLoss,
    records: Callable[[int], tuple[np.ndarray, np.ndarray]],
    privacy: Privacy,
    num_records: int,
    test: Dataset | None = None,
    **how: Any,
  ) -> Generator[train.Steps, Params, Outcome]:
    """Trains a net by `fit` and returns its outcome. `privacy` is the guarantee that the caller has
    computed."""
    seen = self.test if test is None else test
    # Each net has another initial key. Model 1 has index 1.
    initial = self.initial(net, seen.x, 2)
    scored = self.scorer(net.apply, seen)
    params = yield self.fit(loss, initial, records, num_records, scored=scored, **how)
    per_epoch = num_records // min(self.training.batch_size, num_records)
    steps = per_epoch * self.training.num_epochs
    return Outcome(net.apply, initial, params, privacy, steps, seen)

  def model_1(self, data: Dataset) -> train.Story:
    """Returns parameters of the first net, trained on the raw data: NOT private."""
    net = self.nets.first
    records = (data.x, data.y)
    loss = train.cross_entropy(net.apply)
    initial = self.initial(net, data.x, 1)
    count = len(data.y)
    return (yield self.fit(loss, initial, lambda epoch: records, count, name=train.FIRST))

  def for_relevance(self) -> Any:
    """Returns the training records over which the relevance is averaged."""
    wanted = self.relevance_records
    return self.train if wanted is None else self.train.subset(slice(0, wanted))

  def scorer(self, apply: Callable, test: Any = None) -> train.Scored:
    """Returns a function that evaluates parameters on `test`; None: the job's test set."""
    test = self.test if test is None else test
    return lambda params: metrics.evaluate(apply, params, test)


class RecordNoise(NamedTuple):
  """Description of the noise on records, for an audit."""

  shape: tuple[int, ...]  # shape of one noisy record
  beta: np.ndarray  # [d]
  scales: np.ndarray  # [d]
  mechanism: str
  shared_channels: bool = False
  grid: float | None = None  # smallest step of the grid; None: no rounding
  l1_clip: float | None = None  # bound on a record's L1 norm, weighted by beta
  clip_after: float | None = None  # noisy entries are cut to [-clip_after, clip_after]
  # Transformation of records [n, *shape] before the noise. The proof of the noise needs it.
  clipped: Callable[[np.ndarray], np.ndarray] = lambda x: x


class Outcome(NamedTuple):
  """The outcome of a method: a trained model, its guarantee, and what an audit needs."""

  apply: Callable
  initial: Any  # parameters before training
  params: Any
  privacy: Privacy
  num_steps: int
  test: Any  # the test set as the model sees it
  prepare: Callable[[np.ndarray], np.ndarray] = lambda x: x  # transforms raw inputs
  noise: RecordNoise | None = None
  maps: dict[str, np.ndarray] = {}  # noqa: RUF012  # pictures by name; some NOT private
