"""The interface that an event implements to be accounted, and the table of all events.

An event is data: an object of a class of dp_accounting or dpjax. Its `EventKind` defines all that
accounting knows about it: its JSON form, its normal form, the relations and accountants for which
it is proved, its privacy loss, and its description in words. To add an event, write one file here,
and register it in `dpjax.accounting.event_kinds`.

A Gaussian's noise multiplier is std / l2_clip_norm. `under_replace_one` doubles the sensitivity.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.accounting.proved import ACCOUNTANTS
from dpjax.validate import UserError, Verbatim

DpEvent = dpa.DpEvent
# Class of the events of one kind.
Event = TypeVar("Event", bound=DpEvent)
Parts = Mapping[DpEvent, int]
_TOO_DEEP = "holds events in events beyond the depth of Python's stack"
ORDERS = rdp_lib.DEFAULT_RDP_ORDERS
# Smallest probability of a Poisson sample for which dp_accounting does not overflow.
LEAST_PROB = 1e-200

# Smallest Renyi divergence that a part may have. A computed one errs by about 3e-16. So it may come
# out zero or negative, which dp_accounting would read as "costs nothing".
_RDP_ROUNDING = 1e-14
# Smallest and largest noise multiplier, whose squares neither overflow nor underflow, and smallest
# square of a probability.
_LEAST_LEVEL = 1e-100
_LARGEST_LEVEL = 1e100
_LEAST_SQUARE = 1e-300


class EventKind(Generic[Event]):
  """Base class: all that the accountants know about the events of one class.

  Subclasses override what differs. A kind whose events are taken apart, such as a composition,
  overrides `elements`, and needs none of the methods that are defined below `elements`.

  `EventKind[MyDpEvent]` tells a type checker which events the methods take.

  Attributes:
    name: name of the kind in JSON.
    event: class of the events.
    fields: names of the event's fields that JSON holds, in the order of the event's constructor.
    relations: neighbouring relations under which the cost is proved; () for a kind whose events are
      taken apart.
    accountants: accountants that have an analysis, tightest first.
    rdp_relation: relation for which dp_accounting is asked for the Renyi curve. Noise is already
      relative to the sensitivity, so the relation matters only if the curve itself depends on the
      relation.
    selects: whether the event includes the choice between several runs.
    replaced_in_two: whether replacing a record is accounted as removing one and adding one.
    points_per_deviation: number of grid points per standard deviation of a step's privacy loss. A
      grid of interval h adds about h^2 / 4 to the variance; 60 points add about 7e-5 of it.
  """

  name: ClassVar[str]
  event: ClassVar[type[DpEvent]]
  fields: ClassVar[tuple[str, ...]] = ()
  relations: ClassVar[tuple[str, ...]] = ()
  accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
  rdp_relation: ClassVar[str] = "ADD_OR_REMOVE_ONE"
  selects: ClassVar[bool] = False
  replaced_in_two: ClassVar[bool] = False
  points_per_deviation: ClassVar[int] = 60

  def to_json(self, event: Event) -> dict[str, Any]:
    """Returns the fields of an event, inner events included, as values that JSON can hold."""
    fields = {name: getattr(event, name) for name in self.fields}
    if "event" in fields:
      fields["event"] = event_to_json(fields["event"])
    if "events" in fields:
      fields["events"] = [event_to_json(inner) for inner in fields["events"]]
    return fields

  def from_json(self, fields: Mapping[str, Any]) -> DpEvent:
    """Returns the event of fields that `to_json` returned."""
    fields = dict(fields)
    if "event" in fields:
      fields["event"] = event_from_json(fields["event"])
    if "events" in fields:
      fields["events"] = [event_from_json(inner) for inner in fields["events"]]
    return self.event(**fields)

  def elements(self, event: Event) -> Iterable[tuple[DpEvent, int]]:
    """Yields (part, times) for each elementary mechanism that ran, in its normal form.

    An event that costs nothing yields nothing. An event without noise yields `NonPrivateDpEvent`.

    Raises:
      UserError: a field out of its range, or an inner event that this kind does not allow.
    """
    raise NotImplementedError

  def relations_of(self, part: Event) -> tuple[str, ...]:
    """Returns the relations under which one elementary event is proved."""
    del part
    return self.relations

  def accountants_of(self, part: Event) -> tuple[str, ...]:
    """Returns the accountants that have an analysis of one elementary event, tightest first."""
    del part
    return self.accountants

  def repeated(self, part: Event) -> Iterable[DpEvent]:
    """Returns the events that the part repeats, by default none. Each one needs a proof."""
    del part
    return ()

  def accounted_as(self, part: Event) -> DpEvent:
    """Returns the event that accountants compose in place of the part. Default: the part itself.

    The returned event must cost no less than the part, under every relation of the proof."""
    return part

  def under_replace_one(self, part: Event) -> DpEvent:
    """Returns the part with noise relative to 2 l2_clip_norm, the sensitivity to a replacement.

    Default: the part itself, for events whose cost is already stated for replacement."""
    return part

  def under_add_or_remove_one(self, part: Event) -> DpEvent:
    """Returns the event that is accounted under add_or_remove_one. Default: the part itself.

    A sample of fixed size differs, since a joining record pushes another one out."""
    return part

  def unamplified(self, part: Event) -> DpEvent:
    """Returns an unamplified event that costs no less. Default: the part, amplified or not."""
    return part

  def rdp(self, part: Event) -> np.ndarray:
    """Returns the Renyi divergences at `ORDERS` of the part, run once, [len(ORDERS)]."""
    relation = dpa.NeighboringRelation[self.rdp_relation]
    with quiet():
      curve = rdp_lib.RdpAccountant(neighboring_relation=relation).compose(part).rdp
    return curve

  def pld(self, part: Event, interval: float) -> pld_lib.PrivacyLossDistribution:
    """Returns the privacy loss distribution of the part, on a grid of this interval.

    It must be an upper bound for every interval."""
    raise NotImplementedError

  def renyi_two(self, part: Event) -> float:
    """Returns the approximate Renyi divergence of order 2, from which the grid is chosen."""
    raise NotImplementedError

  def largest_loss(self, part: Event) -> float:
    """Returns roughly the largest loss on the grid, such as that at 10 deviations of the noise."""
    raise NotImplementedError

  def mu_squared(self, part: Event) -> tuple[float, bool]:
    """Returns mu^2 of Gaussian DP, and whether it is exact (True) or a central limit (False).

    Default: raises UserError."""
    raise UserError(
      "the central limit is known here for Gaussian noise, unsampled or Poisson "
      "sampled; use accountant='pld' or 'rdp'",
      field="event",
      value=part,
    )

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

  def joining_prob(self, part: Event) -> float | None:
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


KINDS: dict[str, EventKind[Any]] = {}
_KIND_OF: dict[type, EventKind[Any]] = {}


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
    for known in (KINDS.get(kind.name), _KIND_OF.get(kind.event)):
      if known is not None and type(known).__module__.startswith("dpjax."):
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
    known = ", ".join(sorted(KINDS))
    raise UserError(f"must be one of the known events: {known}", field="event", value=event)
  return kind


def event_to_json(event: DpEvent) -> dict[str, Any]:
  """Returns the event as a dict that `json` can write; raises UserError for an unknown event.

  >>> from dpjax.accounting import gaussian_event
  >>> event_to_json(gaussian_event(2))
  {'kind': 'gaussian', 'noise_multiplier': 2.0}
  """
  kind = kind_of(event)
  try:
    return {"kind": kind.name, **kind.to_json(event)}
  except RecursionError:
    raise UserError(_TOO_DEEP, field="event", value=Verbatim(kind.name)) from None


def event_from_json(data: Mapping[str, Any]) -> DpEvent:
  """Returns the event that `event_to_json` wrote; raises UserError for anything else.

  >>> event_from_json({"kind": "gaussian", "noise_multiplier": 2.0})
  GaussianDpEvent(noise_multiplier=2.0)
  """
  if not isinstance(data, Mapping):
    raise UserError("must be a mapping with a 'kind'", field="event", value=data)
  validate.one_of(KINDS, kind=data.get("kind"))
  kind = KINDS[data["kind"]]
  # Guessing a missing field, or ignoring an unknown one, could change the guarantee.
  if set(data) != {"kind", *kind.fields}:
    raise UserError(
      f"must have exactly the fields {list(kind.fields)}", field="event", value=dict(data)
    )
  if not isinstance(data.get("events", []), (list, tuple)):
    raise UserError("must be a list of events", field="events", value=data["events"])
  try:
    return kind.from_json({name: data[name] for name in kind.fields})
  except RecursionError:
    raise UserError(_TOO_DEEP, field="event", value=Verbatim(kind.name)) from None


def parts(event: DpEvent) -> Counter[DpEvent]:
  """Returns part -> how often it ran, for the elementary mechanisms of an event.

  Compositions are taken apart. A sampled composition of Gaussians becomes one sampled Gaussian,
  exactly. Zero noise becomes NonPrivateDpEvent. Raises UserError for an unknown event.

  >>> from dpjax.accounting import composed, gaussian_event, poisson_sampled_event
  >>> parts(composed(poisson_sampled_event(gaussian_event(1), sampling_prob=0.5), 3))
  Counter({PoissonSampledDpEvent(...): 3})
  """
  counts: Counter[DpEvent] = Counter()
  try:
    for part, times in kind_of(event).elements(event):
      # A negative count of a user's event would cancel the cost of another event.
      validate.integer_at_least(0, times=times)
      # Fields are converted to Python's numbers: NumPy's narrow types could overflow or round.
      fields = {name: getattr(part, name) for name in kind_of(part).fields}
      if any(isinstance(value, np.generic) for value in fields.values()):
        plain = {
          name: value.item() if isinstance(value, np.generic) else value
          for name, value in fields.items()
        }
        part = kind_of(part).event(**plain)
      counts[part] += int(times)
  except RecursionError:
    raise UserError(
      _TOO_DEEP, field="event", value=Verbatim(type(event).__name__)
    ) from None
  return counts


def merged_parts(event: DpEvent) -> Counter[DpEvent]:
  """Returns the counts of `parts`, with all unsampled Gaussians merged into one.

  This merging is exact: Gaussians of noise multipliers z_i compose to one of
  (sum_i 1 / z_i^2)^(-1/2) (Dong, Roth and Su 2019, arXiv:1905.02383, corollary 3.3).

  >>> from dpjax.accounting import composed, gaussian_event
  >>> merged_parts(composed(gaussian_event(2), 4))
  Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
  """
  counts = parts(event)
  gaussians = [part for part in counts if isinstance(part, dpa.GaussianDpEvent)]
  if gaussians:
    # fsum rounds only once. A run may have many terms, one for each noise level.
    precision = math.fsum(counts.pop(part) / part.noise_multiplier**2 for part in gaussians)
    counts[dpa.GaussianDpEvent(precision**-0.5)] = 1
  return counts


def converted(steps: Parts, convert: Callable[[DpEvent], DpEvent]) -> Counter[DpEvent]:
  """Returns the parts with `convert` applied to each; counts are kept."""
  # Two parts may become equal, such as a sample of fixed size and a Poisson sample. Then their
  # counts are added.
  counts: Counter[DpEvent] = Counter()
  for part, times in steps.items():
    counts[convert(part)] += times
  return counts


def with_noise(
  noise_multiplier: float, rebuild: Callable[[float], DpEvent]
) -> list[tuple[DpEvent, int]]:
  """Returns the elements of a noisy event, with a noise multiplier in [1e-100, 1e100].

  A smaller noise multiplier counts as no noise, whose epsilon is infinite. A larger one counts as
  1e100. Both results cost no less than the event.

  Args:
    noise_multiplier: noise multiplier of the event.
    rebuild: function noise multiplier -> event.
  """
  # Half precision does not hold the limits, so the number is converted to float64.
  noise_multiplier = float(noise_multiplier)
  if noise_multiplier < _LEAST_LEVEL:
    return [(dpa.NonPrivateDpEvent(), 1)]
  return [(rebuild(min(noise_multiplier, _LARGEST_LEVEL)), 1)]


def sampled(
  event: Any, allowed: tuple[type, ...], rebuild: Callable[[DpEvent], DpEvent]
) -> list[tuple[DpEvent, int]]:
  """Returns the elements of an event that runs one mechanism on a sample; [] if nothing runs.

  Args:
    event: sampled event, with the mechanism in its field `event`.
    allowed: classes of mechanisms that may be sampled.
    rebuild: function from the mechanism in its normal form to the sampled event.

  Raises:
    UserError: several mechanisms, or one that is not `allowed`.
  """
  inner = merged_parts(event.event)
  if not inner:
    return []
  # Sampling is no protection without noise, as a drawn record is released as it is.
  if dpa.NonPrivateDpEvent() in inner:
    return [(dpa.NonPrivateDpEvent(), 1)]
  (part, times), *others = inner.items()
  if others or times > 1 or not isinstance(part, allowed):
    names = " or ".join(cls.__name__ for cls in allowed)
    raise UserError(f"what is sampled must be one {names}", field="event", value=event)
  return [(rebuild(part), 1)]


def noise_multiplier_of(event: DpEvent) -> float:
  """Returns the noise multiplier of a Gaussian or Laplace sum; raises UserError for another event.

  >>> noise_multiplier_of(dpa.LaplaceDpEvent(2.0))
  2.0
  """
  if not isinstance(event, dpa.GaussianDpEvent | dpa.LaplaceDpEvent):
    raise UserError("must be a Gaussian or Laplace sum", field="event", value=event)
  return event.noise_multiplier


def rdp_of(steps: Parts) -> np.ndarray:
  """Returns the Renyi divergences at `ORDERS` of all parts composed, [len(ORDERS)]."""
  total = np.zeros(len(ORDERS))
  for part, times in steps.items():
    total += times * _rdp_once(type(part), part)
  return total


@functools.lru_cache(maxsize=256)
def _rdp_once(cls: type, part: DpEvent) -> np.ndarray:
  # The class is in the cache's key, since a user's event could compare equal to an event of another
  # class.
  del cls
  # If the divergence rounded to zero or below, any number of steps would seem to cost nothing.
  return np.maximum(kind_of(part).rdp(part), _RDP_ROUNDING)


def describe(event: DpEvent, unit: str) -> str:
  """Returns all parts of an event in words, each with the number of times that it ran."""
  each = (
    f"{times} x {kind_of(part).describe(part, unit)}"
    for part, times in parts(event).items()
  )
  return "; ".join(each)


def amplified(loss: float, prob: float) -> float:
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
