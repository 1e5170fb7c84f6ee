"""Every event that is accounted: one file each, and one row here."""

from dpjax.accounting.event_kinds import (
  composition,
  fixed_size,
  gaussian,
  laplace,
  poisson,
  random_allocation,
  randomized_response,
  repeat_and_select,
  skellam,
  truncated_poisson,
)
from dpjax.accounting.event_kinds.kind import register

register(
  composition.NoOp(),
  composition.NonPrivate(),
  gaussian.Gaussian(),
  laplace.Laplace(),
  randomized_response.RandomizedResponse(),
  composition.SelfComposed(),
  composition.Composed(),
  poisson.PoissonSampled(),
  fixed_size.FixedSize(),
  truncated_poisson.TruncatedPoisson(),
  random_allocation.RandomAllocation(),
  skellam.Skellam(),
  repeat_and_select.RepeatAndSelect(),
)
