"""All kinds of events that are accounted. Each kind has one line in the call of `register`."""

from dpjax.accounting.event_kinds import (
  bounded_contribution,
  composition,
  discrete_gaussian,
  fixed_size,
  k_out_of_t,
  noisy_sum,
  random_allocation,
  randomized_response,
  repeat_and_select,
  skellam,
  smooth_sensitivity,
  truncated_poisson,
  with_replacement,
)
from dpjax.accounting.event_kinds.kind import register

register(
  composition.NoOpKind(),
  composition.NonPrivateKind(),
  noisy_sum.GaussianKind(),
  noisy_sum.LaplaceKind(),
  randomized_response.RandomizedResponseKind(),
  composition.SelfComposedKind(),
  composition.ComposedKind(),
  noisy_sum.PoissonSampledKind(),
  bounded_contribution.BoundedContributionKind(),
  fixed_size.FixedSizeKind(),
  with_replacement.WithReplacementKind(),
  truncated_poisson.TruncatedPoissonKind(),
  random_allocation.RandomAllocationKind(),
  k_out_of_t.KOutOfTKind(),
  skellam.SkellamKind(),
  discrete_gaussian.DiscreteGaussianKind(),
  smooth_sensitivity.SmoothSensitivityKind(),
  repeat_and_select.RepeatAndSelectKind(),
)
