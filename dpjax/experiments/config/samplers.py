"""Samplers as values of a config: each name with the numbers that a run may give to it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from dpjax import sampling
from dpjax.experiments.config import rules, user_code
from dpjax.experiments.config.choices import Choice, at_path
from dpjax.sampling.registry import SCHEMES, Scheme, Sizing, used_for

# Numbers that a config may give to samplers whose rows name them.
_NUMBERS: dict[str, Any] = {
  "capacity": Annotated[
    int | None,
    rules.at_least(1),
    "padded size of a batch; none: overflow is negligible, or truncation is rare",
  ],
  "steps_apart": Annotated[
    int | None,
    rules.between(1, rules.MOST_SHAPED),
    "least steps between participations; none: steps of a pass",
  ],
  "num_selected": Annotated[
    int | None,
    rules.at_least(1),
    "k, steps of each example in a pass of t = k / sampling_prob steps",
  ],
}


class SamplerChoice:
  """Base of the values: a sampler's name, and the numbers that it reads."""

  name: ClassVar[str]  # in a config; an import path for a user's own
  # Of dpjax's own samplers; `launch.list` describes its class.
  scheme: ClassVar[Scheme | None] = None

  def number(self, name: str) -> int | None:
    """Returns one of its numbers; None if it is open, or the sampler has no such number."""
    return getattr(self, name, None)

  def sizing(self, **numbers: Any) -> Sizing:
    """Returns the numbers of a run, together with those of this sampler."""
    return Sizing(**numbers, **vars(self))


@functools.cache
def _value(name: str, numbers: tuple[str, ...]) -> type[SamplerChoice]:
  """Returns the class of the values of a sampler: of a name, or of a user's import path.

  Args:
    numbers: numbers that the config gives to the samplers that read them.
  """
  scheme = SCHEMES.get(name)
  read = ("capacity", "steps_apart") if scheme is None else scheme.numbers
  kind = dataclasses.make_dataclass(
    name,
    [(number, _NUMBERS[number], None) for number in numbers if number in read],
    bases=(SamplerChoice,),
    namespace={"name": name, "scheme": scheme, "__doc__": SamplerChoice.__doc__},
    frozen=True,
  )
  return at_path(kind, name) if scheme is None else kind


def choice(purpose: str, *numbers: str) -> Choice:
  """Returns the choice among the samplers for a purpose, and users' own.

  Args:
    purpose: as for `registry.used_for`.
    numbers: as for `_value`.

  >>> sorted(choice("examples", "capacity").owners()["capacity"])[:2]
  ['k_out_of_t', 'poisson']
  """
  table = {name: _value(name, numbers) for name in used_for(purpose)}
  return Choice(table, users=lambda sampler, path: _value(path, numbers))


def make(value: SamplerChoice, size: Sizing) -> sampling.Sampler:
  """Returns the sampler of a config's value of `privacy.sampler`, for the numbers of a run."""
  scheme = value.scheme
  if scheme is None:
    return user_code.sampler(value.name, "privacy.sampler", size)
  return scheme.kind.sized(size)
