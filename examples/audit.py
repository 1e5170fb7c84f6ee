"""Audits a plan: a lower bound on epsilon from canaries, against what the plan claims.

  python examples/audit.py

Each canary joins by a fair coin. An auditor sees all updates and guesses the coins. Too many
right guesses refute the claim; few right guesses prove nothing.
Guarantee of the bound: it exceeds the true epsilon with probability 5 % at most.
Source: Steinke et al. 2023, arXiv:2305.08846. Time: 10 s on two CPU cores.
"""

import jax

import dpjax
from dpjax import auditing

plan = dpjax.Plan.calibrated(
  epsilon=1.0,
  delta=1e-5,
  num_steps=20,
  l2_clip_norm=1.0,
  normalize_by=500,
  sampler=dpjax.PoissonSampler(sampling_prob=1.0, capacity=1001),
)


def audited(transform=None):
  """Returns the verdict on one run with 1,000 canaries."""
  # Each canary has a coordinate of its own: the strongest canary for a white-box auditor.
  scores = auditing.gradient_canaries(
    plan, num_canaries=1000, seed=0, key=jax.random.key(1), transform=transform
  )
  # The method is chosen before the scores are seen. The largest of several bounds would
  # exceed the truth more often than 5 %.
  return auditing.audit(
    scores,
    delta=plan.delta,
    epsilon_claimed=plan.epsilon(),
    method="one_run",
    neighboring_relation=plan.neighboring_relation,
  )


honest = audited()
print(f"as planned: {honest.verdict}")


# An audit that cannot fail shows nothing. Here is a bug: a tenth of the noise.
def too_little_noise(key):
  """Returns a transform that draws a tenth of the plan's noise."""
  return dpjax.clip_and_noise(
    l2_clip_norm=plan.l2_clip_norm,
    noise_multiplier=plan.noise_multiplier / 10,
    normalize_by=plan.normalize_by,
    key=key,
  )


broken = audited(too_little_noise)
print(f"with a tenth of the noise: {broken.verdict}")
