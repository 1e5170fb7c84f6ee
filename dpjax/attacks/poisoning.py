"""Poisoning of federated rounds: some clients lie in otherwise unchanged rounds.

| attack          | what an attacker's client does                         | source               |
| --------------- | ------------------------------------------------------ | -------------------- |
| `label_flip`    | gives its records of one class the label of another    | Tolpegin et al. 2020 |
| `scaled_update` | multiplies what it sends: model replacement, sabotage  | Bagdasaryan 2020     |
| `backdoor`      | stamps a pattern on some records and gives them one    | Gu et al. 2017       |
|                 | label; may multiply what it sends, too                 |                      |

A label flip succeeds on a test record of class `source` if the model calls it `target`. A backdoor
succeeds on a stamped test record of any other class if the model calls it the backdoor's label. A
scaled update has no such records and is measured by the accuracy alone.

An attack has two parts: `poison_rows` changes the attackers' records in a `Federation`, and
`scaled_messages` multiplies what their `ClientAlgorithm` sends. Client, cohorts, execution and
aggregator are those of the run, which gets no other change than `wrap` and `memory`.

An attacker knows the model, the training and its own records, and can send anything.
`federated.aggregators.robust` bounds how far any message can move an aggregator. These three
attacks can only show that a defence fails. `attacks.collusion` has attackers who agree, and adapt
to honest messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import metrics, validate
from dpjax.attacks.roc import Counted, with_interval
from dpjax.data import Dataset, Federation
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import LocalWork
from dpjax.federated.round import FederatedAlgorithm, FederatedState
from dpjax.metrics import Apply
from dpjax.types import Array, HostArray, Params
from dpjax.validate import UserError

_MEMORY = {"own", "attacker"}


class Poisoning(NamedTuple):
  """An attack by clients: its method and its aim. Functions such as `label_flip` return it."""

  # Function (all records, rows of each attacker) -> all records, changed in these rows alone.
  poison: Callable[[Dataset, Sequence[np.ndarray]], Dataset]
  # Function from test records to the victims among them, with the label that the attackers want.
  # None: the attack has no victims.
  victims: Callable[[Dataset], Dataset] | None
  factor: float = 1.0  # multiplies what attackers send
  # Function from what attackers know of a round to the message [d] that each of them sends; see
  # `attacks.collusion`. None: attackers do not collude.
  collude: Callable[[Any], Array] | None = None


class Colluders(NamedTuple):
  """State of the aggregator that `attacks.collusion.colluding` returns."""

  own: Any  # state of the aggregator without the attack


def _labels_within(dataset: Dataset, **named: int | None) -> None:
  validate.integer_in(0, dataset.num_classes - 1, **named)


def label_flip(source: int, target: int, *, factor: float = 1.0) -> Poisoning:
  """Returns an attack that relabels the attackers' records of class `source` as `target`.

  Args:
    factor: number by which attackers multiply what they send; see `scaled_update`.

  >>> from dpjax.data import from_arrays
  >>> attack = label_flip(1, 7)
  >>> test = from_arrays(np.zeros((3, 1)), [1, 2, 1], num_classes=10)
  >>> attack.poison(test, [np.array([0, 1])]).y.tolist(), attack.victims(test).y.tolist()
  ([7, 2, 1], [7, 7])
  """
  validate.integer_at_least(0, source=source, target=target)
  _check_factor(factor)
  if source == target:
    raise UserError(
      f"must be another class than source={source}", field="target", value=target
    )

  def poison(dataset: Dataset, held: Sequence[np.ndarray]) -> Dataset:
    _labels_within(dataset, source=source, target=target)
    rows = _together(held)
    y = np.array(dataset.y)
    y[rows] = np.where(y[rows] == source, target, y[rows])
    return dataclasses.replace(dataset, y=y)

  return Poisoning(poison, _relabel(lambda y: y == source, target), factor)


def scaled_update(factor: float) -> Poisoning:
  """Returns an attack that trains on the attackers' records, and sends `factor` times the update.

  Let k of n clients agree on the factor n / k. They replace the mean model by their model, once the
  other clients have converged. A negative factor moves the model away from what the clients learn.

  >>> scaled_update(-5.0).victims is None
  True
  """
  _check_factor(factor)
  return Poisoning(lambda dataset, held: dataset, None, factor)


@dataclasses.dataclass(frozen=True)
class Trigger:
  """A square of `size` x `size` pixels of one `value`, in the lower right corner.

  >>> Trigger(size=1).stamp(np.zeros((1, 2, 2, 1)))[0, :, :, 0].tolist()
  [[0.0, 0.0], [0.0, 1.0]]
  """

  size: int = 3
  value: float = 1.0

  def __post_init__(self):
    validate.integer_at_least(1, size=self.size)
    validate.finite(value=self.value)

  def stamp(self, x: HostArray) -> np.ndarray:
    """Returns images [n, H, W, C] with the pattern. Raises UserError for other records, or for
    images that are not larger than the pattern."""
    stamped = np.array(x)
    if stamped.ndim != 4 or min(stamped.shape[1:3]) <= self.size:
      raise UserError(
        f"needs images [n, H, W, C] of more pixels a side, got {stamped.shape}",
        field="trigger.size",
        value=self.size,
      )
    stamped[:, -self.size :, -self.size :] = self.value
    return stamped


def backdoor(
  target: int, *, trigger: Trigger = Trigger(), share: float = 0.5, factor: float = 1.0
) -> Poisoning:
  """Returns an attack that stamps the trigger on attackers' records and relabels them `target`.

  Args:
    target: label of the stamped records.
    trigger: the pattern that is stamped.
    share: share of each attacker's records that are stamped, in (0, 1]; the first ones are taken.
    factor: number by which attackers multiply what they send; see `scaled_update`.

  >>> from dpjax.data import from_arrays
  >>> attack = backdoor(3, trigger=Trigger(size=1))
  >>> test = from_arrays(np.zeros((4, 2, 2, 1)), [1, 2, 3, 4], num_classes=5)
  >>> attack.poison(test, [np.array([0, 3])]).y.tolist(), float(attack.victims(test).x[0].max())
  ([3, 2, 3, 4], 1.0)
  """
  validate.integer_at_least(0, target=target)
  validate.probability(share=share)
  _check_factor(factor)

  def poison(dataset: Dataset, held: Sequence[np.ndarray]) -> Dataset:
    _labels_within(dataset, target=target)
    chosen = _together([rows[: math.ceil(share * len(rows))] for rows in held])
    x = np.array(dataset.x)
    y = np.array(dataset.y)
    x[chosen] = trigger.stamp(x[chosen])
    y[chosen] = target
    return dataclasses.replace(dataset, x=x, y=y)

  wanted = _relabel(lambda y: y != target, target)
  stamped = lambda test: dataclasses.replace(test, x=trigger.stamp(test.x))
  return Poisoning(poison, lambda test: wanted(stamped(test)), factor)


def _together(held: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int64), *held])


def _check_factor(factor: float) -> None:
  if not isinstance(factor, int | float) or not math.isfinite(factor) or factor == 0:
    raise UserError("must be a finite number other than 0", field="factor", value=factor)


def _relabel(
  chosen: Callable[[np.ndarray], np.ndarray], target: int
) -> Callable[[Dataset], Dataset]:
  def wanted(test: Dataset) -> Dataset:
    _labels_within(test, target=target)
    rows = np.flatnonzero(chosen(test.y))
    if not len(rows):
      raise UserError(
        f"holds no record that could be called target={target} wrongly", field="test"
      )
    part = test.subset(rows)
    return dataclasses.replace(part, y=np.full(len(rows), target, np.int32))

  return wanted


# --- choice of attackers, and their clients


def choose_attackers(num_clients: int, fraction: float, *, seed: int) -> np.ndarray:
  """Draws round(fraction * num_clients) clients, and returns their places in ascending order.

  >>> choose_attackers(10, 0.2, seed=0).tolist()
  [5, 6]
  """
  validate.integer_at_least(1, num_clients=num_clients)
  validate.integer_at_least(0, seed=seed)
  validate.share(fraction=fraction)
  count = round(fraction * num_clients)
  order = np.random.default_rng([seed, 0xB1A5]).permutation(num_clients)
  return np.sort(order[:count])


def _check_attackers(attackers: Sequence[int] | np.ndarray, num_clients: int) -> np.ndarray:
  places = np.asarray(attackers)
  places = places.astype(np.int64) if not places.size else places
  right = places.ndim == 1 and places.dtype.kind in "iu"
  if not right or len(np.unique(places)) != len(places):
    raise UserError(
      "must be distinct places of clients", field="attackers", value=attackers
    )
  if places.size and not 0 <= places.min() <= places.max() < num_clients:
    raise UserError(f"must lie in [0, {num_clients}), as the clients do", field="attackers")
  return places


def poison_rows(
  federation: Federation, attack: Poisoning, attackers: Sequence[int] | np.ndarray
) -> Federation:
  """Returns the federation with the attackers' rows poisoned; all other rows are unchanged.

  Raises UserError for attackers that are no clients, labels out of range, or records on which the
  trigger cannot be stamped.
  """
  places = _check_attackers(attackers, federation.num_clients)
  held = [federation.indices[place] for place in places]
  dataset = attack.poison(federation.dataset, held)
  return dataclasses.replace(federation, dataset=dataset)


def attacker_memory(inner: Any = None) -> Any:
  """Returns the initial memory (state between rounds) of a client that lies after `recruit`.

  Args:
    inner: initial memory of the client without the attack; None: it keeps no memory.
  """
  return {"own": inner, "attacker": jnp.zeros((), bool)}


def scaled_messages(client: ClientAlgorithm, factor: float) -> ClientAlgorithm:
  """Returns a client that sends `factor` times its message once it is recruited.

  Its memory says whether it is an attacker; see `attacker_memory` and `recruit`.

  Raises UserError, while tracing, if the memory was not made by `attacker_memory`.
  """
  _check_factor(factor)
  return _lying(client, lambda leaf: factor * leaf, abs(factor))


def marked_messages(client: ClientAlgorithm) -> ClientAlgorithm:
  """Returns a client that sends only NaN once it is recruited: a mark that `colluding` replaces.

  Raises UserError as `scaled_messages` does.
  """
  return _lying(client, lambda leaf: jnp.full_like(leaf, jnp.nan), 1.0)


def _lying(
  client: ClientAlgorithm, change: Callable[[Array], Array], norm: float
) -> ClientAlgorithm:
  """Returns a client that lies once recruited. `change` maps each leaf of its message; `norm`
  multiplies the length that it reports."""

  def init(received: Any, memory: Any, num_examples: Array, key: Array) -> Any:
    if not (isinstance(memory, dict) and set(memory) == _MEMORY):
      raise UserError(
        "needs memory=lambda params: attacker_memory(own)", field="scaled_messages"
      )
    return client.init(received, memory["own"], num_examples, key), memory["attacker"]

  def step(received: Any, carry: Any, examples: Any, mask: Array) -> Any:
    return client.step(received, carry[0], examples, mask), carry[1]

  def finish(received: Any, carry: Any) -> Any:
    local, attacker = carry
    sent, inner, info = client.finish(received, local)
    lie = lambda leaf: jnp.where(attacker, change(leaf), leaf)
    # A scaled message is reported with its own length, and a mark of NaN with the honest length.
    info = info._replace(update_norm=jnp.where(attacker, norm, 1.0) * info.update_norm)
    memory = {"own": inner, "attacker": attacker}
    return sent._replace(message=jax.tree.map(lie, sent.message)), memory, info

  # Whether a client lies is set from outside, and follows from no round.
  return client.wrap(init=init, step=step, finish=finish)


def recruit(state: FederatedState, attackers: Sequence[int] | np.ndarray) -> FederatedState:
  """Returns the state in which the clients `attackers`, and no others, are attackers.

  Raises UserError for clients whose memory was not made by `attacker_memory`, or for unknown
  clients.
  """
  memories = state.memories
  initial = getattr(memories, "initial", None)
  if memories is None or not (isinstance(initial, dict) and set(initial) == _MEMORY):
    raise UserError("its clients were not made with memory=attacker_memory", field="state")
  places = _check_attackers(attackers, memories.num_clients)
  # A client that still has its first memory is no attacker, so it needs no write.
  who = np.union1d(memories.touched, places)
  rows = {**memories.rows(who), "attacker": np.isin(who, places)}
  return state._replace(memories=memories.replace_rows(who, rows))


def poisoned_training(
  algorithm: Callable[..., FederatedAlgorithm],
  attack: Poisoning,
  attackers: Sequence[int] | np.ndarray,
  *,
  federation: Federation,
  work: LocalWork,
  params: Params,
  rng: int,
) -> Params:
  """Runs all rounds of the algorithm's plan, with these attackers among the clients.

  Args:
    algorithm: `(wrap=, memory=) -> FederatedAlgorithm`, such as `lambda **lies: fed_avg(loss_fn,
      tx, aggregator=..., key=key, **lies)`. Its aggregator must know the plan that draws the
      cohorts: `median().drawn_by(plan)`, `central(plan, noise_key)`.
    attackers: places of the clients that attack; empty: the same run without an attack.
    params: the server's first parameters.
    rng: seed of the cohorts.

  Returns:
    The server's parameters after the last round.

  Raises:
    UserError: the attackers collude, and the aggregator is not `colluding(aggregator, attack)`.
  """
  if attack.collude is None:
    wrap = lambda client: scaled_messages(client, attack.factor)
  else:
    wrap = marked_messages
  lying = algorithm(wrap=wrap, memory=lambda params: attacker_memory())
  state = recruit(lying.init(params, federation.num_clients), attackers)
  if attack.collude is not None and not isinstance(state.aggregator, Colluders):
    raise UserError(
      "its attackers collude, so its aggregator must be "
      "attacks.collusion.colluding(aggregator, attack)",
      field="algorithm",
    )
  held = poison_rows(federation, attack, attackers)
  for cohort in lying.cohorts(held, work, rng=rng):
    state, _ = lying.round(state, cohort)
  return state.params


# --- what it does


class PoisoningOutcome(NamedTuple):
  """Result of one attack against one defence."""

  num_attackers: int
  # Attackers that the defence is made for. None: it bounds each message but ignores none, as a
  # clipped mean does.
  tolerates: int | None
  accuracy: Counted  # on the untouched test records
  success: Counted | None  # victims that are called what the attacker wants
  # Accuracy and success of this defence without attackers.
  clean_accuracy: Counted
  clean_success: Counted | None

  @property
  def beyond(self) -> bool:
    """Whether there are more attackers than the defence tolerates."""
    return self.tolerates is not None and self.num_attackers > self.tolerates

  @property
  def fails(self) -> str:
    """Returns what the attack did beyond chance: the exact interval with attackers does not meet
    that without; "" if nothing did."""
    if self.accuracy.interval[1] < self.clean_accuracy.interval[0]:
      return "accuracy falls"
    if self.success is None or self.clean_success is None:
      return ""
    rose = self.success.interval[0] > self.clean_success.interval[1]
    return "victims are misled" if rose else ""

  def verdict(self, *, private: bool = False) -> str:
    """Returns the verdict on the defence. It may say that a defence fails, but never that it holds.

    A defence claims nothing if there are more attackers than its breakdown point. The verdict then
    names both numbers.

    Args:
      private: whether the server adds noise for a user's epsilon, which bounds the effect of one
        client.

    >>> ten, none = with_interval(10, 10), with_interval(0, 10)
    >>> PoisoningOutcome(2, 0, ten, ten, ten, none).verdict()
    'FAILS: victims are misled (2 attackers, its breakdown point is 0)'
    >>> PoisoningOutcome(2, None, ten, none, ten, none).verdict(private=True)
    'not shown to fail (epsilon bounds one client, 2 attack)'
    """
    word = f"FAILS: {self.fails}" if self.fails else "not shown to fail"
    count = self.num_attackers
    if self.beyond:
      return f"{word} ({count} attackers, its breakdown point is {self.tolerates})"
    return f"{word} (epsilon bounds one client, {count} attack)" if private else word


def measure_poisoning(
  apply: Apply, params: Params, attack: Poisoning, test: Dataset
) -> tuple[Counted, Counted | None]:
  """Returns (accuracy on the test records, success on the attack's victims among them).

  Success is None for an attack without victims.

  Raises UserError if there is no test record, or none that could be a victim.
  """
  right = lambda part: with_interval(
    round(metrics.accuracy(apply, params, part) * len(part)), len(part)
  )
  return right(test), None if attack.victims is None else right(attack.victims(test))
