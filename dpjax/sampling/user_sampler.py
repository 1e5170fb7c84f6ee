"""Poisson sampling of users, each with the whole block of the user's examples."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dpjax.sampling.poisson import PoissonSampler


@dataclasses.dataclass(frozen=True)
class UserSampler(PoissonSampler):
  """Each USER takes part independently with `sampling_prob`, with the user's whole block.

  Arguments and event are those of `PoissonSampler`; `capacity` counts users.

  >>> UserSampler(sampling_prob=0.5, capacity=8).unit
  'user'
  """

  name: ClassVar[str] = "users"
  unit: ClassVar[str] = "user"
  small: ClassVar[Any] = ({"sampling_prob": 0.2, "capacity": 5},)
