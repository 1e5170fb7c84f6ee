"""A plan for three examples, one of them padding, that a loop over examples can follow."""

from dpjax import Plan, PoissonSampler


def of_three(noise_multiplier=0.0, **options):
  """Clips to 1 and divides by 2; without noise, unless it is asked for."""
  return Plan(
    sampler=PoissonSampler(prob=0.5, capacity=3),
    noise_multiplier=noise_multiplier,
    l2_clip_norm=1.0,
    normalize_by=2,
    num_steps=4,
    delta=1e-5,
    **options,
  )
