"""The interface that an event implements to be accounted, and the table of all events.

An event is data: a class of dp_accounting, or one of dpjax's. Its `EventKind` holds everything
that accounting knows about it: how it is written to JSON, its normal form, under which
relations it is proved, by which accountants, its privacy loss, and its description in words.
To add an event is one file here and one row in `dpjax.accounting.event_kinds`.

Noise multipliers are std / l2_clip_norm. `EventKind.under_replace_one` doubles the sensitivity.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.accounting.proved import PROVED, Proved, declare
from dpjax.validate import UserError, Verbatim

DpEvent = dpa.DpEvent
Parts = Mapping[DpEvent, int]
_TOO_DEEP = "holds events in events beyond the depth of Python's stack"
ORDERS = rdp_lib.DEFAULT_RDP_ORDERS

# The Renyi divergence of one sampled step is computed to about 3e-16 and may come out zero
# or negative, which dp_accounting would read as "costs nothing".
_RDP_ROUNDING = 1e-14
# Squares of noise multipliers between these are floats.
_LEAST_LEVEL = 1e-100
_LARGEST_LEVEL = 1e100


class EventKind:
  """Everything that the accountants know about the events of one class.

  Subclasses override what differs. An event that cannot be accounted by itself, such as a
  composition, says so in `elements` and needs nothing of what follows it.

  Attributes:
    name: name in JSON.
    event: class of the events.
    fields: fields of the event that JSON holds, in the order of its constructor.
    scheme: names the row of `dpjax.accounting.PROVED` that holds `proof`.
    proof: relations and accountants.
    rdp_relation: under which dp_accounting is asked for the Renyi curve. Noise is relative to
      the sensitivity there, so it matters for events whose curve depends on the relation.
    selects: whether it covers the choice between several runs.
    replaced_in_two: whether replacing a record is accounted as removing one and adding one.
    points_per_deviation: grid points per standard deviation of a step's privacy loss. A grid
      of width h adds about h^2 / 4 to the variance; at 60 that is 1e-4 of it.
  """

  name: ClassVar[str]
  event: ClassVar[type[DpEvent]]
  fields: ClassVar[tuple[str, ...]] = ()
  scheme: ClassVar[str] = "none"
  proof: ClassVar[Proved]
  rdp_relation: ClassVar[str] = "ADD_OR_REMOVE_ONE"
  selects: ClassVar[bool] = False
  replaced_in_two: ClassVar[bool] = False
  points_per_deviation: ClassVar[int] = 60

  def to_json(self, event: Any) -> dict[str, Any]:
    """Returns the fields of an event as JSON can write them, inner events included."""
    fields = {name: getattr(event, name) for name in self.fields}
    if "event" in fields:
      fields["event"] = event_to_json(fields["event"])
    if "events" in fields:
      fields["events"] = [event_to_json(inner) for inner in fields["events"]]
    return fields

  def from_json(self, fields: Mapping[str, Any]) -> DpEvent:
    """Returns the event of such fields."""
    fields = dict(fields)
    if "event" in fields:
      fields["event"] = event_from_json(fields["event"])
    if "events" in fields:
      fields["events"] = [event_from_json(inner) for inner in fields["events"]]
    return self.event(**fields)

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
    """Yields (part, times): the elementary mechanisms that ran, each in its normal form.

    An event that costs nothing yields nothing; one without noise yields `NonPrivateDpEvent`.

    Raises:
      UserError: fields out of their range, or what this kind cannot hold.
    """
    raise NotImplementedError

  def rows(self) -> dict[str, Proved]:
    """Returns the rows that events of this kind need in `accounting.PROVED`."""
    return {self.scheme: self.proof} if hasattr(self, "proof") else {}

  def row_of(self, part: Any) -> tuple[str, Proved]:
    """Returns the scheme and the proof of one elementary event."""
    del part
    return self.scheme, self.proof

  def repeated(self, part: Any) -> Iterable[DpEvent]:
    """Returns the events that the part repeats, each of which must be proved as well."""
    del part
    return ()

  def accounted_as(self, part: Any) -> DpEvent:
    """Returns an event that costs no less, and that accountants compose in place of the part.

    Under every relation of the proof. Default: the part itself."""
    return part

  def under_replace_one(self, part: Any) -> DpEvent:
    """Returns the part with noise relative to 2 l2_clip_norm: replacing a record moves a
    sum by that much. Default: unchanged, for events whose proof already covers replacement."""
    return part

  def under_add_or_remove_one(self, part: Any) -> DpEvent:
    """Returns the part as adding or removing a record sees it. Default: unchanged. A sample of
    fixed size differs: a joining record pushes another one out."""
    return part

  def unamplified(self, part: Any) -> DpEvent:
    """Returns an event without amplification that costs no less, or None where it would not
    help."""
    return part

  def rdp(self, part: Any) -> np.ndarray:
    """Returns the Renyi divergences at `ORDERS` of one run of the part, [len(ORDERS)]."""
    relation = dpa.NeighboringRelation[self.rdp_relation]
    with quiet():
      curve = rdp_lib.RdpAccountant(neighboring_relation=relation).compose(part).rdp
    return curve

  def pld(self, part: Any, interval: float) -> pld_lib.PrivacyLossDistribution:
    """Returns the privacy loss distribution on a grid of this interval. It is pessimistic
    for every interval."""
    raise NotImplementedError

  def renyi_two(self, part: Any) -> float:
    """Returns the approximate Renyi divergence of order 2, from which the grid is chosen."""
    raise NotImplementedError

  def largest_loss(self, part: Any) -> float:
    """Returns the approximate largest loss that is kept: 10 standard deviations of noise."""
    raise NotImplementedError

  def mu_squared(self, part: Any) -> tuple[float, bool]:
    """Returns mu^2 of Gaussian DP by the central limit, and whether it is exact."""
    raise UserError(
      "the central limit is known here for Gaussian noise, unsampled or Poisson "
      "sampled; use accountant='pld' or 'rdp'",
      field="event",
      value=part,
    )

  def zcdp(self, part: Any) -> float:
    """Returns rho of zero-concentrated DP: the Renyi divergence is at most rho a, at every order a.

    It knows no amplification, so a sampled part has the rho of the mechanism that it samples.
    """
    raise UserError("has no bound by zCDP here", field="event", value=part)

  def gaussian_noise(self, part: Any) -> float | None:
    """Returns the noise multiplier of the Gaussian sums that the part accounts for.

    `launch.check` holds the noise of a run to it. None: the noise is not tested.
    """
    del part
    return None

  def joining_prob(self, part: Any) -> float | None:
    """Returns the largest probability with which a record takes part in what the part accounts for.

    That is one step, or `Sampler.steps_per_event` steps, of which a record is in one at most.
    `launch.check` counts draws against it. None: they are not counted.
    """
    del part
    return None

  def describe(self, part: Any, unit: str) -> str:
    """Returns the mechanism in words, as a privacy statement says it."""
    raise NotImplementedError


KINDS: dict[str, EventKind] = {}
_KIND_OF: dict[type, EventKind] = {}


# Schemes of kinds that users defined, which may be registered again.
_USERS_SCHEMES: set[str] = set()


def register(*kinds: EventKind) -> None:
  """Adds kinds to the table by which every accountant finds them.

  A kind of your own may be registered again, as when a notebook cell runs twice. What its
  methods return is your word, as the event of a sampler of your own is.

  Raises:
    UserError: a name, a class of events or a scheme that dpjax accounts for itself. Its epsilon
      would be printed as proved, by your formula. Or what is no kind.
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
    rows = kind.rows()
    if is_user_defined(kind):
      # A kind that names no scheme of its own is not amplified, and leaves the row "none"
      # as it is.
      rows = {scheme: proof for scheme, proof in rows.items() if scheme != EventKind.scheme}
      taken = [
        scheme for scheme in rows if scheme in PROVED and scheme not in _USERS_SCHEMES
      ]
      if taken:
        raise UserError(
          "dpjax has a proof of its own for it; choose another name",
          field="scheme",
          value=taken[0],
        )
      _USERS_SCHEMES.update(rows)
    KINDS[kind.name] = kind
    _KIND_OF[kind.event] = kind
    for scheme, proof in rows.items():
      declare(scheme, proof)


def is_user_defined(kind: EventKind) -> bool:
  """Whether the kind was defined by a user, so that its accounting is not proved by dpjax."""
  return not type(kind).__module__.startswith("dpjax.")


def kind_of(event: Any) -> EventKind:
  """Returns the kind of an event.

  Raises:
    UserError: of a class that is not in the table.
  """
  kind = _KIND_OF.get(type(event))
  if kind is None:
    known = ", ".join(sorted(KINDS))
    raise UserError(f"must be one of the known events: {known}", field="event", value=event)
  return kind


def event_to_json(event: DpEvent) -> dict[str, Any]:
  """Returns the event as a dict that `json` can write; an unknown event raises UserError.

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
  """Returns the event that `event_to_json` wrote; anything else raises UserError.

  >>> event_from_json({"kind": "gaussian", "noise_multiplier": 2.0})
  GaussianDpEvent(noise_multiplier=2.0)
  """
  if not isinstance(data, Mapping):
    raise UserError("must be a mapping with a 'kind'", field="event", value=data)
  validate.one_of(KINDS, kind=data.get("kind"))
  kind = KINDS[data["kind"]]
  # Neither a missing nor an unknown field is guessed: that could change the guarantee.
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
  """Counts how often each elementary mechanism ran, as {part: times}.

  Composition is taken apart; a sampled composition of Gaussians becomes one sampled
  Gaussian, exactly. Zero noise becomes NonPrivateDpEvent; unknown events raise UserError.

  >>> from dpjax.accounting import composed, gaussian_event, poisson_sampled_event
  >>> parts(composed(poisson_sampled_event(gaussian_event(1), sampling_prob=0.5), 3))
  Counter({PoissonSampledDpEvent(...): 3})
  """
  counts: Counter[DpEvent] = Counter()
  try:
    for part, times in kind_of(event).elements(event):
      # A user's event must not have negative counts, which would cancel another event's
      # cost.
      validate.integer_at_least(0, times=times)
      # NumPy's small numbers overflow or round where a cost is computed, unlike Python's.
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
  """Counts as `parts` does, with all unsampled Gaussians merged into one, which is exact.

  Noise multipliers z_i compose to (sum_i 1 / z_i^2)^(-1/2) (Dong, Roth and Su 2019,
  arXiv:1905.02383, corollary 3.3).

  >>> from dpjax.accounting import composed, gaussian_event
  >>> merged_parts(composed(gaussian_event(2), 4))
  Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
  """
  counts = parts(event)
  gaussians = [part for part in counts if isinstance(part, dpa.GaussianDpEvent)]
  if gaussians:
    # Exactly rounded. A run has one term for each noise level.
    precision = math.fsum(counts.pop(part) / part.noise_multiplier**2 for part in gaussians)
    counts[dpa.GaussianDpEvent(precision**-0.5)] = 1
  return counts


def converted(steps: Parts, convert: Callable[[DpEvent], DpEvent]) -> Counter[DpEvent]:
  """Returns the parts, each as `convert` gives it, as often as it ran."""
  # Two parts may become one, such as a sample of fixed size beside a Poisson sample.
  counts: Counter[DpEvent] = Counter()
  for part, times in steps.items():
    counts[convert(part)] += times
  return counts


def with_noise(
  noise_multiplier: float, rebuild: Callable[[float], DpEvent]
) -> list[tuple[DpEvent, int]]:
  """Returns the elements of a noisy event, with a noise multiplier whose square is a float.

  Beyond, the private side: no noise for so little, the largest for more. No accountant is asked
  about a sum without noise: its epsilon is infinite.

  Args:
    rebuild: (noise multiplier) -> event.
  """
  # In half precision the levels would be 0 and infinity.
  noise_multiplier = float(noise_multiplier)
  if noise_multiplier < _LEAST_LEVEL:
    return [(dpa.NonPrivateDpEvent(), 1)]
  return [(rebuild(min(noise_multiplier, _LARGEST_LEVEL)), 1)]


def sampled(
  event: Any, allowed: tuple[type, ...], rebuild: Callable[[DpEvent], DpEvent]
) -> list[tuple[DpEvent, int]]:
  """Returns the elements of one mechanism on a sample; none where nothing runs.

  Args:
    rebuild: (mechanism in its normal form) -> the sampled event of it.

  Raises:
    UserError: several mechanisms, or one that is not `allowed`.
  """
  inner = merged_parts(event.event)
  if not inner:
    return []
  # Without noise, sampling does not help: a record that is drawn is shown.
  if dpa.NonPrivateDpEvent() in inner:
    return [(dpa.NonPrivateDpEvent(), 1)]
  (part, times), *others = inner.items()
  if others or times > 1 or not isinstance(part, allowed):
    names = " or ".join(cls.__name__ for cls in allowed)
    raise UserError(f"what is sampled must be one {names}", field="event", value=event)
  return [(rebuild(part), 1)]


def rdp_of(steps: Parts) -> np.ndarray:
  """Returns the Renyi divergences at `ORDERS` of parts that all ran, [len(ORDERS)]."""
  total = np.zeros(len(ORDERS))
  for part, times in steps.items():
    total += times * _rdp_once(type(part), part)
  return total


@functools.lru_cache(maxsize=256)
def _rdp_once(cls: type, part: DpEvent) -> np.ndarray:
  # The class is part of the cache's key: a user's event may claim equality with another
  # one.
  del cls
  # A divergence that rounds to zero or below would make any number of steps free.
  return np.maximum(kind_of(part).rdp(part), _RDP_ROUNDING)


def describe(event: DpEvent, unit: str) -> str:
  """Returns every part of an event in words, with how often it ran."""
  each = (
    f"{times} x {kind_of(part).describe(part, unit)}"
    for part, times in parts(event).items()
  )
  return "; ".join(each)


def amplified(loss: float, prob: float) -> float:
  """Returns log(1 + prob (e^loss - 1)), without overflow."""
  # expm1 keeps the digits of a small loss. A large one would overflow exp.
  if loss < 1:
    return math.log1p(prob * math.expm1(loss))
  return loss + math.log(prob + (1 - prob) * math.exp(-loss))


def zcdp_of_pure(loss: float) -> float:
  """Returns rho of a mechanism of pure epsilon `loss` (Bun and Steinke 2016, proposition 3.3).

  >>> zcdp_of_pure(1.0)
  0.5
  """
  return loss**2 / 2


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Hides "order excluded" warnings: leaving out an order only loosens the bound."""

  def is_kept(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in record.getMessage()

  logger = logging.getLogger("absl")
  logger.addFilter(is_kept)
  try:
    # Overflow at large orders is expected there: the order is excluded.
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
      yield
  finally:
    logger.removeFilter(is_kept)
