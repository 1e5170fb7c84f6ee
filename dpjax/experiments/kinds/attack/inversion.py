"""Inversion of clients' messages: each client of the federation is the victim once.

With a secure sum, the adversary (the server) gets no single message. It inverts the mean message of
each cohort in turn, by simulating a mean of equally many messages.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util

from dpjax import attacks, trees, validate
from dpjax.accounting.text import round_out
from dpjax.attacks import recovery
from dpjax.attacks.leakage import dense_leakage, distance_correlation, recovered_leakage
from dpjax.attacks.reconstructions import match, mse
from dpjax.attacks.recovery import NothingSent
from dpjax.attacks.rogue_server import read_imprint
from dpjax.attacks.views import View
from dpjax.experiments.config import rules
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  check_algorithm,
  counted_row,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated import privacy
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.federated.cohort import LocalBatches
from dpjax.types import ArrayTree, Example, Params
from dpjax.validate import UserError

_NOT_AGAINST_SERVER = "holds for what the server releases; the server sees every message"
_STEPS = rules.between(1, rules.MOST_STEPS)
_SHOWN = 8  # largest number of examples in the picture


class Victims(NamedTuple):
  """Holds the clients' messages in one round, and the adversary's simulation of a message."""

  truths: list[Example]  # examples behind each message, leaves [b, ...]
  params: Any  # parameters that every client has received
  send: Any  # (index in `truths`) -> message, with noise and compression
  guess: View  # the adversary's simulation, without noise and compression
  batches: LocalBatches  # [steps, batch size], the same for every client
  num_classes: int
  random: RunKeys
  guarantee: Guarantee
  note: str  # remark on the guarantee
  together: int  # clients behind one message: 1, or all of a cohort with a secure sum

  @property
  def local_steps(self) -> int:
    """Number of steps of a client."""
    return int(self.batches.mask.any(axis=1).sum())


@dataclasses.dataclass(frozen=True)
class _Inversion(AttackSettings):
  """Settings that all inversions of messages share."""

  uniform_init: Annotated[
    float | None,
    rules.POSITIVE,
    "a: every weight from U(-a, a), as the first papers did; none: the model's own",
  ] = None
  labels: Annotated[
    str, rules.among(("infer", "known")), "infer: from the last layer's gradient"
  ] = "infer"
  section: ClassVar[str] = "federate"
  task: ClassVar[str] = "inversion"
  # Fields that change no inversion: they decide how a round is computed, or what the server does
  # with messages that it has seen.
  unread: ClassVar[tuple[str, ...]] = (
    "memory_budget_gb",
    "weighting",
    "secure_sum.simulated",
    "secure_sum.dropout_prob",
    "server_optimizer",
    "execution",
    "num_devices",
    "num_threads",
    "aggregator",
  )

  def __post_init__(self):
    rules.check_settings(self)

  def check_target(self, target: FedConfig) -> None:
    check_algorithm(target, "plain_client", "whose clients are inverted")

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Victims:
    """Returns the clients' messages, made with the keys and defences of the run, and its guarantee.

    Raises UserError unless all clients have equally many examples, and, with a secure sum, can be
    divided into whole cohorts.
    """
    federate = config.federate
    count = _size(loaded[0])
    fed = federated.assemble_loaded(federate, loaded, random)
    params = fed.params
    if self.uniform_init is not None:
      # The first papers on inversion attacked networks with uniform weights of a wide range.
      width: float = self.uniform_init
      leaves, treedef = jax.tree.flatten(params)
      keys = jax.random.split(random.init, len(leaves))
      draw = lambda k, leaf: jax.random.uniform(k, leaf.shape, minval=-width, maxval=width)
      params = jax.tree.unflatten(treedef, list(map(draw, keys, leaves)))
    params = self.sent_params(params, fed, seed=config.seed)
    loss = attacks.soft_labels(fed.task.loss(fed.apply))
    batches = fed.work.rows(count, np.random.default_rng(0))
    client, memory = federated.client_of(federate, loss)
    guessed, _ = federated.client_of(federate, loss, guessed=True)
    rows = fed.federation.dataset
    truths = [
      Example(jnp.asarray(rows.x[at]), jnp.asarray(rows.y[at]))
      for at in fed.federation.indices
    ]

    @jax.jit  # compiled once for all clients
    def message(truth: Example, key: jax.Array) -> Any:
      kept = None if memory is None else memory(params)
      return attacks.client_view(client, params, batches, memory=kept, key=key)(truth)

    def send(place: int) -> Any:
      return message(truths[place], jax.random.fold_in(random.local, place))

    guess = attacks.client_view(guessed, params, batches)
    together = int(federate.clients_per_round) if federate.is_summed else 1
    seen = truths
    show = send
    if together > 1:
      aggregator = federated.secure_aggregator(fed, together)
      bound = None if fed.mechanism is None else fed.mechanism.l2_clip_norm
      seen, show = _cohorts(truths, send, aggregator, together)
      guess = _mean_view(guess, together, bound)
    # With privacy="both" the stated epsilon comes from the server's noise alone. The server
    # sees messages without this noise, so the note applies.
    hidden = name_of(federate, "privacy") in privacy.SUMMED
    return Victims(
      truths=seen,
      params=params,
      send=show,
      guess=guess,
      batches=batches,
      num_classes=rows.num_classes,
      random=random,
      guarantee=fed.guarantee,
      note="" if hidden else _NOT_AGAINST_SERVER,
      together=together,
    )

  def phase(self, config: AttackConfig, attacked: Victims) -> Phase:
    """Returns a phase that sends and inverts one message in each step."""
    invert = self.inverter(attacked)
    first = attacked.truths[0]
    number = len(attacked.truths)
    shape = np.shape(first.x)

    def init() -> Arrays:
      return {
        "found": np.zeros((number, *shape), np.float32),
        "labels": np.zeros((number, shape[0]), np.int32),
        "error": np.full(number, np.inf, np.float32),
      }

    def fill(state: Arrays, place: int) -> None:
      truth = attacked.truths[place]
      seen = attacked.send(place)
      labels = np.asarray(truth.y)
      if self.labels == "infer":
        # Labels are inferred from a gradient. A message of one SGD step, without a defence, gives
        # it exactly. Other messages give it only approximately.
        rate = config.federate.client_optimizer.learning_rate
        gradient = attacks.as_gradient(
          seen["delta"], learning_rate=rate, num_steps=attacked.local_steps
        )
        labels = attacks.infer_labels(gradient, batch_size=shape[0])
      x = invert(seen, labels, place)
      order = match(truth.x, x)  # inverted examples have no order
      state["found"][place] = x[order]
      state["labels"][place] = labels
      state["error"][place] = np.mean(mse(truth.x, x[order]))

    def error(state: Arrays) -> dict[str, float]:
      known = np.asarray(state["error"])
      return {"mse": float(np.mean(known[np.isfinite(known)]))}

    return pieces.fill_pieces(number, init, fill, name="messages", evaluate=error)

  def measure(
    self, config: AttackConfig, attacked: Victims, state: Mapping[str, Any]
  ) -> MeasuredAttack:
    """Returns the results of an attack, and a function that writes its picture.

    The results hold the number of successes by each criterion, the number of correct labels, and
    leakage scores. Only images have a picture.
    """
    truth = np.concatenate([np.asarray(truth_of.x) for truth_of in attacked.truths])
    recovered = np.asarray(state["found"]).reshape(truth.shape)
    span = 2.0 if config.federate.data.center else 1.0
    fidelity = attacks.fidelity(truth, recovered, data_range=span)
    rows = attacks.success(fidelity)
    right = sum(
      in_common(np.asarray(truth_of.y), labels)
      for truth_of, labels in zip(attacked.truths, np.asarray(state["labels"]))
    )
    result = {
      "test_accuracy": None,  # nothing is trained
      "num_messages": len(attacked.truths),
      "num_records": len(truth),
      "examples_per_message": len(attacked.truths[0].x),
      "clients_per_message": attacked.together,
      "local_steps": attacked.local_steps,
      "labels_right": int(right),
      "mse": fidelity.mse.tolist(),
      "median_psnr": float(np.median(fidelity.psnr)),
      "success": {
        row.criterion: row.recovered._asdict() | {"verdict": row.verdict} for row in rows
      },
      # Rows begin with the strictest criterion, "exact". The verdict states the first criterion by
      # which any record was recovered.
      "verdict": next((row for row in rows if row.recovered.count), rows[0]).verdict,
      "leakage": _leakage(config, attacked, truth, recovered),
      "epsilon_note": attacked.note,
    }  # fmt: skip
    result["rows"] = [_table_row(result)]
    captions = [f"{value:.0f} dB" for value in fidelity.psnr[:_SHOWN]]

    def write(folder: pathlib.Path) -> None:
      if truth.ndim != 4 or truth.shape[-1] not in (1, 3):
        return
      # Centered pixels lie in [-1, 1], others in [0, 1].
      shown = lambda part: (part[:_SHOWN] + (span - 1.0)) / span
      path = folder / "reconstructions.png"
      attacks.picture(shown(truth), shown(recovered), path, captions=captions)

    held = {name: np.asarray(state[name]) for name in ("found", "labels", "error")}
    return MeasuredAttack(held, result, write)

  def inverter(self, attacked: Victims) -> Callable[[Any, np.ndarray, int], np.ndarray]:
    """Returns a function (message, its labels [b], its index) -> examples [b, ...]."""
    raise NotImplementedError

  def sent_params(self, params: Params, fed: federated.FedRun, *, seed: int) -> Params:
    """Returns the parameters that the server sends. This server is honest and changes nothing."""
    del fed, seed
    return params


@dataclasses.dataclass(frozen=True)
class DenseFirst(_Inversion):
  """Reads the input of a first dense layer by one division; exact for a batch of one example."""

  layer: Annotated[str, "name of its module"] = "dense_0"

  def inverter(self, attacked: Victims) -> Callable[[Any, np.ndarray, int], np.ndarray]:
    """Returns a function that reads examples from the first layer's part of a message.

    The examples are 0 if the gradient of the layer's bias is 0.
    """
    shape = np.shape(attacked.truths[0].x)
    size = math.prod(shape[1:])

    def divide(seen: Any, labels: np.ndarray, place: int) -> np.ndarray:
      del labels, place
      try:
        with within("attack"):
          guesses = self.read(seen, shape[0])
      except NothingSent:
        guesses = np.zeros((shape[0], size))
      if guesses.shape[1] != size:
        raise UserError(
          f"takes {guesses.shape[1]} numbers, an example has {size}; must be the first layer",
          field="attack.layer",
          value=self.layer,
        )
      return guesses.reshape(shape)

    return divide

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns one guess for all B examples of a message, [B, d]; d is the layer's input width."""
    guess = attacks.first_dense(seen, self.layer)
    return np.broadcast_to(guess, (batch_size, guess.size))


@dataclasses.dataclass(frozen=True)
class Imprint(DenseFirst):
  """`attacks.imprint`: a server that sends a leaking model, and reads one input from each bin.

  The bins are quantiles of the test inputs. The server is assumed to have these inputs.

  Args:
    gain: scale of the kernels that have one row for each unit of the first layer.
  """

  gain: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    validate.positive(gain=self.gain)

  def sent_params(self, params: Params, fed: federated.FedRun, *, seed: int) -> Params:
    """Returns the malicious parameters that the server sends. The server has the test inputs.

    Raises:
      UserError: the model's activation is not "relu", which is 0 below the threshold.
    """
    model = central.make_model(fed.config.model, fed.federation.dataset.num_classes)
    activation = getattr(model, "activation", "relu")
    if activation != "relu":
      raise UserError(
        "must be 'relu' for attack='imprint', whose units are bins",
        field="target.model.options.activation",
        value=activation,
      )
    public = np.asarray(fed.test.x)
    return attacks.imprint(params, public, layer=self.layer, gain=self.gain, seed=seed)

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns the inputs in the fullest bins, [batch_size, d]; rows of 0 if fewer are full."""
    return read_imprint(seen, batch_size=batch_size, layer=self.layer)


@dataclasses.dataclass(frozen=True)
class Fishing(Imprint):
  """`attacks.fish`: a server that reads inputs of one class, from the bins of `attacks.imprint`.

  Args:
    gain: scale of the kernels that have one row for each unit of the first layer.
    label: class that is fished for.
    head: name of the last layer.
  """

  label: Annotated[int, rules.at_least(0), "class that is fished for"] = 0
  head: Annotated[str, "name of the last layer"] = "head"

  def sent_params(self, params: Params, fed: federated.FedRun, *, seed: int) -> Params:
    """Returns the malicious parameters that the server sends: the parameters of `Imprint` with a
    changed last layer."""
    trap = super().sent_params(params, fed, seed=seed)
    try:
      return attacks.fish(trap, self.label, layer=self.head)
    except UserError as error:
      # Errors of `attacks.fish` call the last layer `layer`. The field for it here is `head`.
      field = "head" if error.field.startswith("layer") else error.field
      raise error.of(field=f"attack.{field}") from error


@dataclasses.dataclass(frozen=True)
class _SearchInversion(_Inversion):
  """Settings of a search for inputs, as in `attacks.Inversion`."""

  steps: Annotated[int, _STEPS, "of a search that is carried to its end"] = 3000
  restarts: Annotated[int, _STEPS, "random guesses that begin"] = 12
  finalists: Annotated[int, _STEPS, "guesses that go on after the trial"] = 2
  trial: Annotated[int, _STEPS, "steps of every guess"] = 200

  def method(self) -> Any:
    """Returns the `attacks.gradient_inversion.Method` that moves the guesses."""
    raise NotImplementedError

  def inverter(self, attacked: Victims) -> Callable[[Any, np.ndarray, int], np.ndarray]:
    """Returns a function that searches for the examples behind a message."""
    attack = attacks.Inversion(
      attacked.guess,
      np.shape(attacked.truths[0].x),
      num_classes=attacked.num_classes,
      method=self.method(),
      restarts=self.restarts,
      finalists=self.finalists,
      trial=self.trial,
    )

    def search(seen: Any, labels: np.ndarray, place: int) -> np.ndarray:
      key = jax.random.fold_in(attacked.random.noise, place)
      return attack(seen, labels, key=key).x

    return search


@dataclasses.dataclass(frozen=True)
class DlgInversion(_SearchInversion):
  """Settings of `attacks.Dlg`, which matches messages by L-BFGS."""

  line_search: Annotated[
    bool, "false: L-BFGS steps of a fixed length, which fail on tanh networks"
  ] = True

  def method(self) -> attacks.Dlg:
    """Returns the method that moves the guesses."""
    return attacks.Dlg(steps=self.steps, line_search=self.line_search)


@dataclasses.dataclass(frozen=True)
class CosineInversion(_SearchInversion):
  """Settings of `attacks.CosineAdam` on inputs in [0, 1]."""

  total_variation: Annotated[
    float, rules.NON_NEGATIVE, "weight of smoothness in the search"
  ] = 0.1

  def method(self) -> attacks.CosineAdam:
    """Returns the method that moves the guesses."""
    return attacks.CosineAdam(steps=self.steps, total_variation=self.total_variation)


def _cohorts(
  truths: list[Example], send: Any, aggregator: Any, together: int
) -> tuple[list[Example], Any]:
  """Returns the examples of each cohort, and a function (cohort) -> mean message at the server.

  Raises UserError unless cohorts of `together` clients hold every client once.
  """
  if len(truths) % together:
    raise UserError(
      f"must divide partition.num_clients={len(truths)}, so that each client is in one sum",
      field="clients_per_round",
      value=together,
    )
  places = [range(i, i + together) for i in range(0, len(truths), together)]
  joined = lambda *leaves: jnp.concatenate(leaves)

  def mean(cohort: int) -> Any:
    sent = [send(place) for place in places[cohort]]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
    there = np.ones(together, bool)
    return aggregator.update(stacked, there, jnp.int32(cohort), np.ones(together))[0]

  groups = [jax.tree.map(joined, *(truths[place] for place in group)) for group in places]
  return groups, mean


def _mean_view(view: View, together: int, bound: float | None) -> View:
  """Returns the simulation of a cohort's mean message: it deals examples equally to the clients of
  the cohort, and averages the clients' messages.

  Args:
    view: simulation of one client's message.
    together: number of clients in the cohort.
    bound: norm to which each message is clipped; None: no clip.
  """

  def clipped(message: Any) -> Any:
    if bound is None:
      return message
    leaves = jax.tree.leaves(message)
    length = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in leaves) + 1e-30)
    return trees.scale(message, jnp.minimum(1.0, bound / length))

  def mean(examples: Example) -> Any:
    split = lambda leaf: leaf.reshape(together, -1, *leaf.shape[1:])
    each = jax.vmap(lambda example: clipped(view(example)))(jax.tree.map(split, examples))
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)

  return jax.jit(mean)


def _size(federation: Any) -> int:
  """Returns the number of examples of a client. Raises UserError unless it is the same for all
  clients, and positive."""
  sizes = sorted({len(rows) for rows in federation.indices})
  if len(sizes) > 1 or sizes[0] == 0:
    raise UserError(
      f"deals {sizes[0]} to {sizes[-1]} examples to a client; must deal "
      f"equally many, {len(federation.dataset)} in all",
      field="partition.num_clients",
      value=federation.num_clients,
    )
  return sizes[0]


def in_common(truth: np.ndarray, labels: np.ndarray) -> int:
  """Returns how many labels of a batch were found, in any order."""
  return (Counter(truth.tolist()) & Counter(labels.tolist())).total()


def _leakage(
  config: AttackConfig, attacked: Victims, truth: np.ndarray, recovered: np.ndarray
) -> dict[str, Any]:
  """Returns up to three estimates of the gradient leakage score, by name.

  An estimate is missing if there are too few records or messages, or no dense first layer.
  """
  messages = [attacked.send(place) for place in range(len(attacked.truths))]
  inputs = np.stack([np.asarray(truth_of.x) for truth_of in attacked.truths])  # [N, b, ...]
  scores: dict[str, Any] = {}
  if len(truth) >= 3:
    scores["recovered"] = recovered_leakage(truth, recovered)
  kernels = _first_kernels(config, messages, truth[0].size)
  if kernels is not None and len(messages) >= 3:
    scores["dense"] = dense_leakage(kernels, inputs)
  if len(messages) >= 4:
    flat = [np.asarray(flatten_util.ravel_pytree(message)[0]) for message in messages]
    scores["distance"] = distance_correlation(np.stack(flat), inputs)
  return {
    name: {
      "score": score.score,
      "interval": score.interval,
      "null": float(np.mean(score.null)),
      "p_value": score.p_value,
    }
    for name, score in scores.items()
  }


def _first_kernels(config: AttackConfig, messages: list[Any], size: int) -> Any:
  """Returns the kernel of the dense first layer in each message, [N, d, units].

  Returns None if there is no such layer, or if it does not take `size` numbers, a whole example.
  """
  name = getattr(config.attack, "layer", "dense_0")
  try:
    kernels = np.stack(
      [recovery.dense_layer(message, name)["kernel"] for message in messages]
    )
  except UserError:
    return None
  return kernels if kernels.shape[1] == size else None


def _table_row(result: Row) -> Row:
  exact = result["success"]["exact"]
  scores = result["leakage"]
  low, high = exact["interval"]
  text = f"{exact['count']} of {exact['total']} ({round_out((low, high), 2)}) exactly"
  text += f", median {result['median_psnr']:.0f} dB"
  text += f", labels {result['labels_right']} of {result['num_records']}"
  text += "".join(
    f", GLS {name} {leakage['score']:.3f} (null {leakage['null']:.2f})"
    for name, leakage in scores.items()
  )
  row = counted_row(
    exact, "inversion", "recovered exactly, of the records", text,
    median_psnr=result["median_psnr"], verdict=result["verdict"],
  )  # fmt: skip
  row |= {f"gls_{name}": leakage["score"] for name, leakage in scores.items()}
  return row | {f"gls_{name}_null": leakage["null"] for name, leakage in scores.items()}
