"""Events: what a private run did, as data that an accountant can read.

A noise multiplier is ALWAYS std / l2_clip_norm (for Laplace: scale / l1 bound of one
record), whatever the neighbouring relation; `epsilon` converts it to std / sensitivity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting import tuning
from dpjax.accounting.discrete import SkellamDpEvent
from dpjax.passes import RandomAllocationDpEvent
from dpjax.validate import UserError

DpEvent = dpa.DpEvent

_FIELDS: dict[str, tuple[type[DpEvent], tuple[str, ...]]] = {
  "no_op": (dpa.NoOpDpEvent, ()),
  "non_private": (dpa.NonPrivateDpEvent, ()),
  "gaussian": (dpa.GaussianDpEvent, ("noise_multiplier",)),
  "laplace": (dpa.LaplaceDpEvent, ("noise_multiplier",)),
  "randomized_response": (
    dpa.RandomizedResponseDpEvent,
    ("noise_parameter", "num_buckets"),
  ),
  "self_composed": (dpa.SelfComposedDpEvent, ("event", "count")),
  "composed": (dpa.ComposedDpEvent, ("events",)),
  "poisson_sampled": (dpa.PoissonSampledDpEvent, ("sampling_probability", "event")),
  "sampled_without_replacement": (
    dpa.SampledWithoutReplacementDpEvent,
    ("source_dataset_size", "sample_size", "event"),
  ),
  "truncated_poisson": (
    dpa.TruncatedSubsampledGaussianDpEvent,
    ("dataset_size", "sampling_probability", "truncated_batch_size", "noise_multiplier"),
  ),
  "random_allocation": (RandomAllocationDpEvent, ("num_steps", "noise_multiplier")),
  "skellam": (SkellamDpEvent, ("variance", "l2_sensitivity", "l1_sensitivity")),
  "repeat_and_select": (dpa.dp_event.RepeatAndSelectDpEvent, ("event", "mean", "shape")),
}
_NOISE_LEVELS = (1e-100, 1e100)  # squares of noise multipliers between them are floats
_SMALL = 1e-6  # of a pure epsilon: from there on, float64 has room for it beside 1
_MOST_STEPS = 10**15  # of a pass: integers that are floats, too
_KINDS = {cls: kind for kind, (cls, _) in _FIELDS.items()}


def gaussian_event(noise_multiplier: float) -> DpEvent:
  """The event of one Gaussian sum: noise of std `noise_multiplier * l2_clip_norm`.

  Zero noise is allowed here and costs an infinite epsilon.

  >>> gaussian_event(2)
  GaussianDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.GaussianDpEvent(float(noise_multiplier))


def laplace_event(noise_multiplier: float) -> DpEvent:
  """The event of one Laplace sum: scale `noise_multiplier` * the L1 bound of one record.

  >>> laplace_event(2)
  LaplaceDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.LaplaceDpEvent(float(noise_multiplier))


def pure_dp_event(epsilon: float) -> DpEvent:
  """The event of ANY mechanism that is (epsilon, 0)-DP, of which no more is known.

  Guarantee: binary randomised response at `epsilon` dominates every such mechanism
  (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, theorem 3.1), so composing it bounds
  their composition. Laplace noise of scale 1 / epsilon does NOT dominate them: it is more
  private at every delta > 0. Epsilon is stated under the relation that it is accounted under.

  >>> import math
  >>> pure_dp_event(math.log(3))
  RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=2)
  """
  validate.non_negative(epsilon=epsilon)
  noise = 2 * math.exp(-epsilon) / (1 + math.exp(-epsilon))
  if (
    0 < epsilon < _SMALL
  ):  # 1 - epsilon / 2 is less, of which the next float64 below is, too
    noise = math.nextafter(1 - epsilon / 2, 0.0)
  return dpa.RandomizedResponseDpEvent(noise, 2)


def poisson_sampled_event(event: DpEvent, *, sampling_prob: float) -> DpEvent:
  """`event` on a batch that each record joins on its own with `sampling_prob`.

  >>> poisson_sampled_event(gaussian_event(1), sampling_prob=0.5).sampling_probability
  0.5
  """
  validate.probability(sampling_prob=sampling_prob)
  return dpa.PoissonSampledDpEvent(float(sampling_prob), event)


def fixed_size_event(event: DpEvent, *, num_examples: int, batch_size: int) -> DpEvent:
  """`event` on `batch_size` distinct records drawn uniformly out of `num_examples`.

  Such an event can be accounted only under replace_one and by RDP (pitfall P14).

  >>> fixed_size_event(gaussian_event(1), num_examples=10, batch_size=2).sample_size
  2
  """
  validate.integer_at_least(1, num_examples=num_examples, batch_size=batch_size)
  if batch_size > num_examples:
    raise UserError(
      f"must be at most num_examples={num_examples}", field="batch_size", value=batch_size
    )
  return dpa.SampledWithoutReplacementDpEvent(int(num_examples), int(batch_size), event)


def truncated_poisson_event(
  event: DpEvent, *, sampling_prob: float, num_examples: int, capacity: int
) -> DpEvent:
  """A Gaussian sum over a Poisson sample of which at most `capacity` records are kept.

  Where more are drawn, a uniformly random subset is kept. That is no Poisson sampling
  (pitfall P12): it can be accounted only under replace_special and by PLD (`epsilon`).

  >>> truncated_poisson_event(
  ...   gaussian_event(1), sampling_prob=0.5, num_examples=10, capacity=6)
  TruncatedSubsampledGaussianDpEvent(dataset_size=10, ..., noise_multiplier=1.0)
  """
  validate.probability(sampling_prob=sampling_prob)
  validate.integer_at_least(1, num_examples=num_examples, capacity=capacity)
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError(
      "a truncated Poisson sample takes a GaussianDpEvent", field="event", value=event
    )
  return dpa.TruncatedSubsampledGaussianDpEvent(
    int(num_examples), float(sampling_prob), int(capacity), event.noise_multiplier
  )


def random_allocation_event(event: DpEvent, *, num_steps: int) -> DpEvent:
  """The event of one pass of `num_steps` Gaussian sums; a record is in a uniformly drawn one.

  A record draws its step independently of the others, and anew in every pass; steps of
  records are secret. Accounted by PLD (`dpjax.accounting.random_allocation`) and by RDP
  (`dpjax.accounting.allocation_rdp`). A pass that stops early costs no more. Where every
  pass takes the SAME batches, k passes are one of noise multiplier / sqrt(k).

  >>> random_allocation_event(gaussian_event(1), num_steps=200)
  RandomAllocationDpEvent(num_steps=200, noise_multiplier=1.0)
  """
  validate.integer_in(1, _MOST_STEPS, num_steps=num_steps)
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError("random allocation takes a GaussianDpEvent", field="event", value=event)
  return RandomAllocationDpEvent(int(num_steps), event.noise_multiplier)


def repeat_and_select_event(
  event: DpEvent, *, mean_trials: float, shape: float = 1.0
) -> DpEvent:
  """The best of K independent runs of `event`, where K is random, secret, and only the
  best run is released (Papernot and Steinke 2022, arXiv:2110.03620).

  Args:
    event: ONE whole run, and whatever computes the score that selects, unless that looks
      at public data only. Runs may differ in their hyper-parameters if these are drawn at
      random, independently of the data, and every one of them costs at most `event`.
    mean_trials: E[K] >= 1.
    shape: of K's law. 1: geometric; 0: logarithmic; inf: Poisson; else truncated negative
      binomial. A smaller shape costs less, and has longer tails.

  >>> repeat_and_select_event(gaussian_event(2), mean_trials=10).mean
  10.0
  """
  tuning.check_law(mean_trials, shape)
  return dpa.dp_event.RepeatAndSelectDpEvent(event, float(mean_trials), float(shape))


def composed(step_event: DpEvent, num_steps: int) -> DpEvent:
  """The event of `num_steps` adaptive runs of `step_event`; 0 steps cost nothing.

  >>> composed(gaussian_event(1), 0)
  NoOpDpEvent()
  >>> composed(gaussian_event(1), 3).count
  3
  """
  validate.integer_at_least(0, num_steps=num_steps)
  if num_steps == 0:
    return dpa.NoOpDpEvent()
  return dpa.SelfComposedDpEvent(step_event, int(num_steps))


def _kind(event: Any) -> str:
  kind = _KINDS.get(type(event))
  if kind is None:
    known = ", ".join(sorted(_FIELDS))
    raise UserError(f"must be one of the known events: {known}", field="event", value=event)
  return kind


def event_to_json(event: DpEvent) -> dict[str, Any]:
  """The event as a dict that `json` can write; an unknown event raises UserError.

  >>> event_to_json(gaussian_event(2))
  {'kind': 'gaussian', 'noise_multiplier': 2.0}
  """
  kind = _kind(event)
  fields = {name: getattr(event, name) for name in _FIELDS[kind][1]}
  if "event" in fields:
    fields["event"] = event_to_json(fields["event"])
  if "events" in fields:
    fields["events"] = [event_to_json(inner) for inner in fields["events"]]
  if fields.get("shape") == math.inf:  # strict JSON
    fields["shape"] = "inf"
  return {"kind": kind, **fields}


def event_from_json(data: Mapping[str, Any]) -> DpEvent:
  """The inverse of `event_to_json`; anything else raises UserError.

  >>> event_from_json({"kind": "gaussian", "noise_multiplier": 2.0})
  GaussianDpEvent(noise_multiplier=2.0)
  """
  if not isinstance(data, Mapping):
    raise UserError("must be a mapping with a 'kind'", field="event", value=data)
  validate.one_of(_FIELDS, kind=data.get("kind"))
  cls, names = _FIELDS[data["kind"]]
  if set(data) != {"kind", *names}:
    raise UserError(
      f"must have exactly the fields {list(names)}", field="event", value=dict(data)
    )
  fields = {name: data[name] for name in names}
  if "event" in fields:
    fields["event"] = event_from_json(fields["event"])
  if "events" in fields:
    fields["events"] = [event_from_json(inner) for inner in fields["events"]]
  if fields.get("shape") == "inf":
    fields["shape"] = math.inf
  return cls(**fields)


def parts(event: DpEvent) -> Counter[DpEvent]:
  """How often each elementary mechanism ran: {Gaussian | Laplace | response | sampled: times}.

  Composition is taken apart; a sampled composition of Gaussians becomes one sampled
  Gaussian, exactly. Zero noise becomes NonPrivateDpEvent; unknown events raise UserError.

  >>> parts(composed(poisson_sampled_event(gaussian_event(1), sampling_prob=0.5), 3))
  Counter({PoissonSampledDpEvent(...): 3})
  """
  counts: Counter[DpEvent] = Counter()
  for part, times in _walk(event, 1):
    counts[part] += times
  return counts


def merged_parts(event: DpEvent) -> Counter[DpEvent]:
  """`parts`, with all unsampled Gaussians merged into one, which is exact.

  Noise multipliers z_i compose to (sum_i 1 / z_i^2)^(-1/2) (Dong, Roth and Su 2019,
  arXiv:1905.02383, corollary 3.3).

  >>> merged_parts(composed(gaussian_event(2), 4))
  Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
  """
  counts = parts(event)
  gaussians = [part for part in counts if isinstance(part, dpa.GaussianDpEvent)]
  if gaussians:
    precision = math.fsum(counts.pop(part) / part.noise_multiplier**2 for part in gaussians)
    counts[dpa.GaussianDpEvent(precision**-0.5)] = 1
  return counts


def unamplified(counts: Mapping[DpEvent, int]) -> DpEvent:
  """Returns the event of `parts` with one Gaussian sum for each pass of random allocation.

  A pass is the mixture of such sums, so this costs no less; where there is little noise, an
  accountant may find that it costs less.

  >>> unamplified(parts(random_allocation_event(gaussian_event(2), num_steps=9)))
  ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(...=2.0), count=1)])
  """
  plain = lambda part: (
    dpa.GaussianDpEvent(part.noise_multiplier)
    if isinstance(part, RandomAllocationDpEvent)
    else part
  )
  run = [dpa.SelfComposedDpEvent(plain(part), times) for part, times in counts.items()]
  return dpa.ComposedDpEvent([*run])


def _walk(event: Any, times: int) -> Iterator[tuple[DpEvent, int]]:
  kind = _kind(event)
  if kind == "self_composed":
    validate.integer_at_least(0, count=event.count)
    yield from _walk(event.event, times * int(event.count))
  elif kind == "composed":
    for inner in event.events:
      yield from _walk(inner, times)
  elif kind != "no_op" and times > 0:
    yield from ((part, times) for part in _elementary(event, kind))


def _elementary(event: Any, kind: str) -> list[DpEvent]:
  if kind == "poisson_sampled":
    return _poisson(event)
  if kind == "sampled_without_replacement":
    return _fixed_size(event)
  if kind == "truncated_poisson":
    return _truncated_poisson(event)
  if kind == "random_allocation":
    return _random_allocation(event)
  if kind == "repeat_and_select":
    return _repeat_and_select(event)
  if kind in ("gaussian", "laplace"):
    validate.non_negative(noise_multiplier=event.noise_multiplier)
    level = _level(event.noise_multiplier)
    return [type(event)(level) if level else dpa.NonPrivateDpEvent()]
  if kind == "skellam":
    names = _FIELDS[kind][1]
    validate.positive(**{name: getattr(event, name) for name in names})
    return [event]
  return _randomized_response(event) if kind == "randomized_response" else [event]


def _level(noise_multiplier: float) -> float:
  """The noise multiplier where its square is a float; beyond, on the private side: none
  (0) for so little noise, and no more than the largest for more."""
  if noise_multiplier < _NOISE_LEVELS[0]:
    return 0.0
  return min(noise_multiplier, _NOISE_LEVELS[1])


def _randomized_response(event: Any) -> list[DpEvent]:
  validate.integer_at_least(1, num_buckets=event.num_buckets)
  if event.num_buckets == 1 or event.noise_parameter == 1:  # says nothing of its input
    return []
  if event.noise_parameter == 0:
    return [dpa.NonPrivateDpEvent()]
  validate.probability(noise_parameter=event.noise_parameter)
  return [event]


def _poisson(event: Any) -> list[DpEvent]:
  if event.sampling_probability == 0:
    return []
  validate.probability(sampling_probability=event.sampling_probability)
  rebuild = lambda inner: dpa.PoissonSampledDpEvent(event.sampling_probability, inner)
  return _sampled(event, (dpa.GaussianDpEvent, dpa.LaplaceDpEvent), rebuild)


def _fixed_size(event: Any) -> list[DpEvent]:
  size = event.sample_size
  total = event.source_dataset_size
  if size == 0:
    return []
  fixed_size_event(event.event, num_examples=total, batch_size=size)  # checks both
  rebuild = lambda inner: dpa.SampledWithoutReplacementDpEvent(total, size, inner)
  return _sampled(event, (dpa.GaussianDpEvent,), rebuild)


def _truncated_poisson(event: Any) -> list[DpEvent]:
  prob = event.sampling_probability
  capacity = event.truncated_batch_size
  if prob == 0 or capacity == 0 or event.dataset_size == 0:
    return []
  noise = gaussian_event(event.noise_multiplier)  # checks it
  truncated_poisson_event(  # checks the rest
    noise, sampling_prob=prob, num_examples=event.dataset_size, capacity=capacity
  )
  level = _level(event.noise_multiplier)
  if not level:
    return [dpa.NonPrivateDpEvent()]
  return [dpa.TruncatedSubsampledGaussianDpEvent(event.dataset_size, prob, capacity, level)]


def _random_allocation(event: Any) -> list[DpEvent]:
  noise = gaussian_event(event.noise_multiplier)  # checks it
  random_allocation_event(noise, num_steps=event.num_steps)
  level = _level(event.noise_multiplier)
  if not level:
    return [dpa.NonPrivateDpEvent()]
  return [RandomAllocationDpEvent(event.num_steps, level)]


def _repeat_and_select(event: Any) -> list[DpEvent]:
  repeat_and_select_event(event.event, mean_trials=event.mean, shape=event.shape)  # checks
  inner = merged_parts(event.event)
  if not inner:
    return []
  if dpa.NonPrivateDpEvent() in inner:
    return [dpa.NonPrivateDpEvent()]
  run = [dpa.SelfComposedDpEvent(part, times) for part, times in inner.items()]
  whole = dpa.ComposedDpEvent(tuple(run))  # type: ignore[arg-type]  # hashable
  return [dpa.dp_event.RepeatAndSelectDpEvent(whole, event.mean, event.shape)]


def _sampled(event: Any, allowed: tuple[type, ...], rebuild: Any) -> list[DpEvent]:
  inner = merged_parts(event.event)
  if not inner:
    return []
  if dpa.NonPrivateDpEvent() in inner:
    return [dpa.NonPrivateDpEvent()]
  (part, times), *others = inner.items()
  if others or times > 1 or not isinstance(part, allowed):
    names = " or ".join(cls.__name__ for cls in allowed)
    raise UserError(f"what is sampled must be one {names}", field="event", value=event)
  return [rebuild(part)]
