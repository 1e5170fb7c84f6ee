"""The interface that an event implements to be accounted, and the table of all events.

An event is data: an object of a class of dp_accounting or dpjax. Its `EventKind` defines all that
accounting knows about it: its JSON form, its normal form, the relations and accountants for which
it is proved, its privacy loss, and its description in words. To add an event, write one file here
that registers it at its end.

A Gaussian's noise multiplier is std / l2_clip_norm. `EventKind.under` doubles the sensitivity for
replace_one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import numbers
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import dp_accounting as dpa
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.accounting.loss_grid import LossMasses
from dpjax.accounting.proved import ACCOUNTANTS
from dpjax.validate import UserError, Verbatim

DpEvent = dpa.DpEvent
# Class of the events of one kind.
Event = TypeVar("Event", bound=DpEvent)
TOO_DEEP = "holds events in events beyond the depth of Python's stack"
ORDERS = rdp_lib.DEFAULT_RDP_ORDERS
# Smallest probability of a Poisson sample for which dp_accounting does not overflow.
LEAST_PROB = 1e-200

# Smallest and largest noise multiplier, whose squares neither overflow nor underflow.
_LEAST_LEVEL = 1e-100
_LARGEST_LEVEL = 1e100
# Smallest square of a probability: squares of smaller ones underflow.
_LEAST_SQUARE = 1e-300


class Grid(NamedTuple):
  """Numbers that guide the choice of the grid of privacy losses. They decide no bound.

  A grid of interval h adds about h^2 / 4 to the variance of a step's loss. So 60 points per
  standard deviation add about 7e-5 of the variance.
  """

  renyi_two: float  # about the Renyi divergence of order 2
  largest_loss: float  # about the largest loss, such as that at 10 deviations of the noise
  points: int = 60  # per standard deviation of a step's loss


class EventKind(Generic[Event]):
  """Base class: all that the accountants know about the events of one class.

  Subclasses override what differs. A kind whose events are taken apart, such as a composition,
  overrides `elements`, and needs none of the methods that are defined below it.

  `EventKind[MyDpEvent]` tells a type checker which events the methods take.

  Attributes:
    name: name of the kind in JSON.
    event: class of the events.
    relations: neighbouring relations under which the cost is proved; () for a kind whose events are
      taken apart.
    accountants: accountants that have an analysis, tightest first.
    replaced_in_two: whether replacing a record is accounted as removing one and adding one.
  """

  name: ClassVar[str]
  event: ClassVar[type[DpEvent]]
  relations: ClassVar[tuple[str, ...]] = ()
  accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
  replaced_in_two: ClassVar[bool] = False

  @functools.cached_property
  def fields(self) -> tuple[str, ...]:
    """Returns the names of the event's fields, in the order of its constructor. JSON holds them."""
    return tuple(inspect.signature(self.event).parameters)

  def elements(self, event: Event) -> Iterable[tuple[DpEvent, int]]:
    """Yields (part, times) for each elementary mechanism that ran, in its normal form.

    An event that costs nothing yields nothing. An event without noise yields `NonPrivateDpEvent`.
    A class of dpjax checks its fields when an event is made. The classes of dp_accounting check
    nothing, so `elements` checks theirs.

    Default: the event itself, once. A noise multiplier below 1e-100 counts as no noise, whose
    epsilon is infinite, and one above 1e100 as 1e100. Both cost no less than the event.

    Raises:
      UserError: a field out of its range, or an inner event that this kind does not allow.
    """
    noise_multiplier = getattr(event, "noise_multiplier", 1.0)
    validate.non_negative(noise_multiplier=noise_multiplier)
    # Half precision does not hold the limits, so the number is converted to float64.
    if float(noise_multiplier) < _LEAST_LEVEL:
      return [(dpa.NonPrivateDpEvent(), 1)]
    if float(noise_multiplier) > _LARGEST_LEVEL:
      return [(replace_fields(event, noise_multiplier=_LARGEST_LEVEL), 1)]
    return [(event, 1)]

  def proofs(self, part: Event) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the relations under which one elementary event is proved, and the accountants that
    have an analysis of it. Default: those of the kind."""
    del part
    return self.relations, self.accountants

  def under(self, part: Event, neighboring_relation: str) -> DpEvent:
    """Returns the event that accountants compose in place of the part. Default: the part itself.

    The returned event must cost no less than the part under this relation. Its noise is relative to
    the sensitivity under it, which is 2 l2_clip_norm for a replaced record.
    """
    del neighboring_relation
    return part

  def unamplified(self, part: Event) -> DpEvent:
    """Returns an event that costs no less than the part, whose proof is another one: the smaller of
    both epsilons holds. Default: the part itself."""
    return part

  def rdp(self, part: Event) -> np.ndarray:
    """Returns the Renyi divergences at `ORDERS` of the part, run once, [len(ORDERS)].

    Default: those of dp_accounting. The noise is already relative to the sensitivity, so any
    relation gives the curve.
    """
    return curve_of(part, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)

  def pld(self, part: Event, interval: float) -> Sequence[LossMasses]:
    """Returns the privacy loss distribution of the part, on a grid of this interval.

    It is the masses for removing a record, and those for adding one if they differ; `masses_of`
    reads them from an object of dp_accounting. It must be an upper bound for every interval."""
    raise NotImplementedError

  def grid(self, part: Event) -> Grid:
    """Returns the numbers from which the grid of `pld` is chosen, and a search for noise starts.

    Default, for a kind without `pld`: the Renyi divergence, and a loss without a limit.
    """
    return Grid(float(np.interp(2.0, ORDERS, self.rdp(part))), math.inf)

  def zcdp(self, part: Event) -> float:
    """Returns rho of zero-concentrated DP: the Renyi divergence is at most rho a, at every order a.

    Sampling the records of a step does not lower its rho.
    Default: raises UserError.
    """
    raise UserError("has no bound by zCDP here", field="event", value=part)

  def gaussian_noise(self, part: Event) -> float | None:
    """Returns the noise multiplier of the Gaussian sums that the part accounts for, or None.

    `launch.check` compares the noise of a run with this number. None means that it tests no noise.
    """
    del part
    return None

  def sampling_prob(self, part: Event) -> float | None:
    """Returns the largest probability that a record joins one of the part's steps, or None.

    A part accounts for one step, or for `Sampler.steps_per_event` steps, of which a record may then
    join at most one. `launch.check` compares counted draws with this number. None means that it
    compares none.
    """
    del part
    return None

  def describe(self, part: Event, unit: str) -> str:
    """Returns the mechanism in words, for a privacy statement; `unit` names a record."""
    raise NotImplementedError


# The kinds whose files are imported, and users' own; see `every_kind`.
KINDS: dict[str, EventKind[Any]] = {}
_KIND_OF: dict[type, EventKind[Any]] = {}


def every_kind() -> Mapping[str, EventKind[Any]]:
  """Imports all files of this package, and returns name -> kind, in the order of the names.

  >>> "k_out_of_t" in every_kind()
  True
  """
  package = importlib.import_module(__name__.rpartition(".")[0])
  for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
  return dict(sorted(KINDS.items()))


def register(*kinds: EventKind[Any]) -> None:
  """Adds kinds to the table in which all accountants look up events.

  A kind of your own may be registered again, for example when a notebook cell runs twice. An
  epsilon from it is reported as claimed by you, not as proved.

  Raises:
    UserError: an object that is no `EventKind`; or a name or a class of events of dpjax itself.
      Otherwise your claim would take the place of a proof of dpjax.
  """
  for kind in kinds:
    if not isinstance(kind, EventKind) or not hasattr(kind, "name"):
      raise UserError(
        "must be an object of an EventKind with a name", field="kind", value=kind
      )
    if is_user_defined(kind):
      every_kind()
    for known in (KINDS.get(kind.name), _KIND_OF.get(kind.event)):
      if known is not None and not is_user_defined(known):
        raise UserError(
          "dpjax accounts for these events itself; choose another name and a class of events "
          "of your own",
          field="kind",
          value=Verbatim(f"{type(kind).__name__} ({known.name})"),
        )
    KINDS[kind.name] = kind
    _KIND_OF[kind.event] = kind


def is_user_defined(kind: EventKind[Any]) -> bool:
  """Returns whether a user defined the kind, so that dpjax does not prove its accounting."""
  return not type(kind).__module__.startswith("dpjax.")


def kind_of(event: DpEvent) -> EventKind[Any]:
  """Returns the `EventKind` that is registered for the class of an event.

  Raises:
    UserError: an event whose class is not in the table.
  """
  kind = _KIND_OF.get(type(event))
  if kind is None:
    known = ", ".join(every_kind())
    kind = _KIND_OF.get(type(event))
  if kind is None:
    raise UserError(f"must be one of the known events: {known}", field="event", value=event)
  return kind


def replace_fields(event: DpEvent, /, **fields: Any) -> DpEvent:
  """Returns the event with other values of some fields."""
  kind = kind_of(event)
  for name in kind.fields:
    fields.setdefault(name, getattr(event, name))
  return kind.event(**fields)


def plain_number(value: Any) -> Any:
  """Returns a number as Python's own int or float, and any other value as it is.

  Sums of NumPy's narrow integers wrap round, and a class of numbers may define its own arithmetic.
  """
  if type(value) in (int, float, bool) or not isinstance(value, numbers.Real):
    return value
  return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_is_list(events: Any) -> None:
  """Raises UserError unless the events are in a list or a tuple.

  A generator is empty when it is read again, and a mapping's counts would be left out.
  """
  if type(events) not in (list, tuple):
    raise UserError(
      "must be a list or a tuple of events",
      field="events",
      value=Verbatim(type(events).__name__),
    )


def event_to_json(event: DpEvent) -> dict[str, Any]:
  """Returns the event as a dict that `json` can write; raises UserError for an unknown event.

  >>> from dpjax.accounting import gaussian_event
  >>> event_to_json(gaussian_event(2))
  {'kind': 'gaussian', 'noise_multiplier': 2.0}
  """
  kind = kind_of(event)
  try:
    return {"kind": kind.name} | {
      name: _to_json(name, getattr(event, name)) for name in kind.fields
    }
  except RecursionError:
    raise UserError(TOO_DEEP, field="event", value=Verbatim(kind.name)) from None


def _to_json(field: str, value: Any) -> Any:
  if field == "event":
    return event_to_json(value)
  if field == "events":
    check_is_list(value)
    return [event_to_json(inner) for inner in value]
  # Strict JSON has no infinity, so a string stands for it.
  return "inf" if value == math.inf else plain_number(value)


def event_from_json(data: Mapping[str, Any]) -> DpEvent:
  """Returns the event that `event_to_json` wrote; raises UserError for anything else.

  >>> event_from_json({"kind": "gaussian", "noise_multiplier": 2.0})
  GaussianDpEvent(noise_multiplier=2.0)
  """
  if not isinstance(data, Mapping):
    raise UserError("must be a mapping with a 'kind'", field="event", value=data)
  name = data.get("kind")
  known = isinstance(name, str) and name in KINDS
  validate.one_of(KINDS if known else every_kind(), kind=name)
  kind = KINDS[data["kind"]]
  # Guessing a missing field, or ignoring an unknown one, could change the guarantee.
  if set(data) != {"kind", *kind.fields}:
    raise UserError(
      f"must have exactly the fields {list(kind.fields)}", field="event", value=dict(data)
    )
  if not isinstance(data.get("events", []), (list, tuple)):
    raise UserError("must be a list of events", field="events", value=data["events"])
  try:
    return kind.event(**{name: _from_json(name, data[name]) for name in kind.fields})
  except RecursionError:
    raise UserError(TOO_DEEP, field="event", value=Verbatim(kind.name)) from None


def _from_json(field: str, value: Any) -> Any:
  if field == "event":
    return event_from_json(value)
  if field == "events":
    return [event_from_json(inner) for inner in value]
  return math.inf if value == "inf" else value


def curve_of(part: DpEvent, relation: dpa.NeighboringRelation) -> np.ndarray:
  """Returns dp_accounting's Renyi divergences at `ORDERS` of a part, [len(ORDERS)]."""
  with quiet():
    return rdp_lib.RdpAccountant(neighboring_relation=relation).compose(part).rdp


def amplify(loss: float, prob: float) -> float:
  """Returns log(1 + prob (e^loss - 1)), without overflow and never below 0."""
  # `prob` may be the square of a probability, which may underflow to 0. So it has a lower limit.
  prob = max(prob, _LEAST_SQUARE)
  # expm1 keeps the digits of a small loss. A large one would overflow exp.
  if loss < 1:
    return math.log1p(prob * math.expm1(loss))
  # `rounded` may be 0 or below. As e^loss - 1 >= loss, log(1 + prob * loss) is a lower bound.
  rounded = loss + math.log(prob + (1 - prob) * math.exp(-loss))
  return max(rounded, math.log1p(prob * loss))


def zcdp_of_pure(loss: float) -> float:
  """Returns rho of a mechanism of pure epsilon `loss` (Bun and Steinke 2016, proposition 3.3).

  >>> zcdp_of_pure(1.0)
  0.5
  """
  return loss**2 / 2


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Hides dp_accounting's warnings about orders it excludes; fewer orders only loosen the bound."""

  def is_kept(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in record.getMessage()

  logger = logging.getLogger("absl")
  logger.addFilter(is_kept)
  try:
    # Overflow at large orders is expected: dp_accounting then excludes the order.
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
      yield
  finally:
    logger.removeFilter(is_kept)
