"""Runs inference on encrypted images: the model trains as in `launch.train`, then answers
queries."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

import numpy as np

from dpjax import data as data_lib
from dpjax import training
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.config.sections import DataConfig
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings, facts
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.secure.task import Computed, Measuring, SecureTask
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import NONE
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.homomorphic import ckks, inference
from dpjax.secure.homomorphic.inference import LAYOUTS
from dpjax.validate import UserError

_HIDES = "images and answers from the model's owner; of the model, nothing is promised"


def _questions(layout: str, x: np.ndarray, net: inference.SquareNetwork) -> Phase:
  """Returns a phase with one query in each step. A resumed run draws new encryption keys."""
  d, hidden = net.kernel.shape
  classes = net.head.shape[1]
  begun = time.monotonic()
  owner = inference.ImageOwner(d, hidden, classes, layout=layout)
  model = inference.ModelOwner(net, owner.public, layout=layout)
  setup = time.monotonic() - begun
  each = owner.images_each
  count = len(x)

  def init() -> Arrays:
    return {
      "labels": np.full(count, -1, np.int64),
      "error": np.zeros(1),
      "numbers": np.array([setup, 0.0, owner.public.size]),  # seconds, bytes, key bytes
    }

  def ask(held: Arrays, place: int) -> None:
    part = slice(place * each, (place + 1) * each)
    images = x[part]
    start = time.monotonic()
    question = owner.encrypt(images)
    answer = model.answer(question)
    logits = owner.logits(answer, len(images))
    held["numbers"][0] += time.monotonic() - start
    held["numbers"][1] += sum(map(len, [*question, *answer]))
    held["labels"][part] = logits.argmax(axis=1)
    apart = float(np.abs(logits - net.logits(images)).max())
    held["error"] = np.maximum(held["error"], apart)

  # The last query may hold fewer images than a ciphertext can hold.
  number = -(-count // each)
  return pieces.fill_pieces(number, init, ask, name="questions", subfolder="questions")


@dataclasses.dataclass(frozen=True)
class InferTask(SecureTask):
  """`secure.homomorphic.inference` by the model of `train`, on the first test images."""

  train: TrainConfig = dataclasses.field(default_factory=TrainConfig, kw_only=True)

  num_images: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "how many are asked about"
  ] = 1000
  layout: Annotated[
    str,
    rules.among(LAYOUTS),
    "packed: several images in a ciphertext; pixels: thousands of images, a ciphertext for "
    "each pixel",
  ] = "packed"
  needs = (ckks.library,)

  @property
  def data(self) -> DataConfig:
    return self.train.data

  @property
  def is_private(self) -> bool:
    return self.train.is_private

  def check(self) -> None:
    with within("task.train", holds_config=True):
      _check_train(self.train)

  def load(self) -> tuple[Any, Any]:
    """Loads (train, test) of the `train` section."""
    with within("task.train", holds_config=True):
      loaded = central.load_data(dataclasses.replace(self.train, resident=True))
      name = self.train.data.name
      needs_classes(loaded[0], "data.name", name)
      return loaded

  def digest(self, loaded: tuple[Any, Any]) -> bytes:
    """Returns the digest of the training data."""
    return data_lib.digest(loaded[0])

  def execute(self, loaded: tuple[Any, Any], random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome: trains the model, then queries it about batches of encrypted images, the
    first of the test set.

    Raises UserError if there are fewer test images than `task.num_images`.
    """
    del seed
    with within("task.train", holds_config=True):
      run = central.assemble(self.train, loaded, random)
    count = self.num_images
    name = self.train.data.name
    why = f", the test images of task.train.data.name={name!r}"
    with within("task"):
      common.at_most(self, "num_images", len(run.test), why)
    x = np.asarray(run.test.x[:count], np.float64).reshape(count, -1)
    y = np.asarray(run.test.y[:count])
    phase = central.phase(self.train, run)
    trained = yield dataclasses.replace(phase, subfolder="model")
    params = training.eval_params(trained.state)
    net = inference.network_of(params)
    asked = (yield _questions(self.layout, x, net)).state
    labels = np.asarray(asked["labels"])
    plain = net.logits(x).argmax(axis=1)
    accuracy, usual = (float(np.mean(answers == y)) for answers in (labels, plain))
    seconds, sent, keys = (float(n) for n in np.asarray(asked["numbers"]))
    return Computed(
      protocol=f"ckks, {self.layout}",
      sizes=f"{count} images of {x.shape[1]} pixels, {net.kernel.shape[1]} hidden units",
      seconds=seconds,
      num_bytes=int(sent + keys),
      error=float(np.asarray(asked["error"])[0]),
      error_is="largest, of a logit",
      found=f"accuracy {accuracy:.4f}, in the clear {usual:.4f}; "
      f"{seconds / count:.3f} s and {sent / count / 1e3:.0f} kB an image",
      hides=_HIDES,
      num_steps=self.train.num_steps,
      params=params,
      facts=(trained.phase.guarantee or NONE).facts(trained.ledger, trained.epsilon),
      more={
        "test_accuracy": accuracy,
        "plain_accuracy": usual,
        "agreement": float(np.mean(labels == plain)),
        "seconds_per_image": seconds / count,
        "bytes_per_image": sent / count,
        "key_bytes": int(keys),
        "ledger": trained.ledger.to_json(),
        **facts.pretraining(run),
      },
    )


def _check_train(train: TrainConfig) -> None:
  central.Central(train).check()
  common.read_if(
    train, False, "launch.train itself", "seed", "noise_seed", *TrainConfig.where
  )
  common.only(train, "audit", ["none"], "; audit a run of launch.train")
  common.only(train, "release", [False], "; this is a rehearsal")
  embeddings.refuse(train)
  common.only(train, "trainable", ["all"], ", whose weights are encrypted")
  common.only(train, "model.name", ["mlp"], "")
  options = train.model.options
  if options.get("activation") != "square":
    raise UserError(
      "must be 'square', all that a ciphertext can be put through",
      field="model.options.activation",
      value=options.get("activation"),
    )
  if len(options.get("features", (128,))) != 1:
    raise UserError(
      "must be one hidden layer",
      field="model.options.features",
      value=options["features"],
    )
