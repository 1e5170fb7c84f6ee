"""Plans of few steps for small batches: a test names the numbers that matter to it."""

from dpjax import Plan, PoissonSampler


def of(capacity=8, *, prob=0.5, **changes):
  """Clips to 1 and divides by 4, in four steps of half the examples; `changes`: any field."""
  numbers = dict(noise_multiplier=1.0, l2_clip_norm=1.0, normalize_by=4, num_steps=4)
  sampler = PoissonSampler(sampling_prob=prob, capacity=capacity)
  return Plan(**{"sampler": sampler, "delta": 1e-5, **numbers, **changes})


def of_three(noise_multiplier=0.0, **changes):
  """For three rows, one of them padding; divides by 2. Without noise, unless it is asked for."""
  return of(3, noise_multiplier=noise_multiplier, normalize_by=2, **changes)
