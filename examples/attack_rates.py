"""Chooses the noise by what an attacker may do, and hands the curve to others.

  python examples/attack_rates.py

The guarantee: no test of membership finds more than 10 % of the members while it accuses 1 % of
the others wrongly. It is read from the whole trade-off curve of the run.
Source: Kulynych et al. 2024, arXiv:2407.02191. Time: 10 s on two CPU cores.
"""

import math
import pathlib
import tempfile

import numpy as np

import dpjax
from dpjax import accounting
from dpjax.accounting import trade_off_files

numbers = {
  "delta": 1e-5,
  "num_steps": 100,
  "l2_clip_norm": 1.0,
  "normalize_by": 500,
  "sampler": dpjax.PoissonSampler(sampling_prob=0.05, capacity=10_000),
}
bound = accounting.TruePositiveRate(tpr=0.1, fpr=0.01)
plan = dpjax.Plan.calibrated(attack=bound, **numbers)
profile = plan.privacy_profile()
tpr = accounting.true_positive_rate(profile, fpr=bound.fpr)
mu = accounting.pairs_of(profile, plan.delta).mu(plan.delta)
print(f"noise multiplier {plan.noise_multiplier:.3f}: TPR <= {accounting.upper(tpr)}")
# Epsilon does not follow from two rates: it also bounds rarer events. Print it beside them.
print(f"epsilon {accounting.upper(plan.epsilon())}, mu {accounting.upper(mu)}")

# One pair (epsilon, delta) says only TPR <= e^epsilon FPR + delta, so that the epsilon which
# keeps the same rates needs more noise.
epsilon = math.log((bound.tpr - plan.delta) / bound.fpr)
by_epsilon = dpjax.Plan.calibrated(epsilon=epsilon, **numbers)
print(f"by epsilon {accounting.upper(epsilon)}: {by_epsilon.noise_multiplier:.3f}")

# The curve as a file: lines between its rows are the proved bound.
folder = pathlib.Path(tempfile.mkdtemp())
path = folder / trade_off_files.CURVE
trade_off_files.write_curve(accounting.pairs_of(profile, plan.delta), path)
alphas, betas = trade_off_files.read_curve(path)
drawn = 1 - float(np.interp(bound.fpr, alphas, betas))
print(f"{path}: {len(alphas)} rows, TPR <= {accounting.upper(drawn)} at FPR {bound.fpr}")
