"""Plans for few examples, that a loop over examples can follow."""

from dpjax import Plan, PoissonSampler


def of_three(noise_multiplier=0.0, **options):
  """For three rows, one of them padding; divides by 2. Without noise, unless it is asked for."""
  return of(3, noise_multiplier=noise_multiplier, normalize_by=2, **options)


def of(capacity, **options):
  """Clips to 1, in four steps of half the examples."""
  return Plan(
    sampler=PoissonSampler(sampling_prob=0.5, capacity=capacity),
    l2_clip_norm=1.0,
    num_steps=4,
    delta=1e-5,
    **options,
  )
