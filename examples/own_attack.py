"""Measures a membership attack of your own beside LiRA and beside what a proof allows.

  python examples/own_attack.py

An attack is a function of `Evidence`: the target's answers and those of shadow models. It
never sees who the members are; `measure` compares its scores with the truth afterwards.
An attack that finds little shows that it is weak or that the model is private, never which.
Time: 20 s on two CPU cores.
"""

import jax
import numpy as np
import optax

import dpjax
from dpjax import attacks, training
from dpjax.attacks import allowed, signals


def gap_attack(evidence):
  """Scores [n] records: how much surer the target is than shadows that never saw them."""
  out = np.where(evidence.included, np.nan, evidence.shadows)  # [shadows, n]
  return evidence.target - np.nanmean(out, axis=0)


train, test = dpjax.data.load("digits")
# A subset keeps the declared size of the whole, so the part declares its own.
records = train.subset(slice(0, 300)).declared(300)
model = dpjax.models.Mlp(num_classes=10, features=(32,))
loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

# Nine models, each trained on its own random half; each is the target once.
halves = attacks.random_halves(9, len(records), seed=0)
sampler = dpjax.PoissonSampler(sampling_prob=0.2, capacity=192)
settings = {"sampler": sampler, "num_steps": 60, "normalize_by": 30, "delta": 1e-5}


def attacked(plan):
  """Returns what each attack finds in models that this plan trained."""
  scores = attacks.train_shadows(
    records,
    halves,
    algorithm=lambda key: training.dp_sgd(loss_fn, plan, optax.sgd(0.5), noise_key=key),
    batches=plan.batches,
    init_params=jax.jit(lambda key: model.init(key, records.x[:1])),
    signal=signals.log_odds_of_model(model.apply),
    seed=0,
  )
  targets = list(attacks.each_as_target(scores, halves))
  # All targets are asked about the same records: [targets, n].
  truth = np.stack([members for _, members in targets])
  methods = {
    "gap (mine)": gap_attack,
    "lira_fixed": attacks.MEMBERSHIP_ATTACKS["lira_fixed"],
  }
  leakage = {}
  for name, method in methods.items():
    guesses = np.stack([method(evidence) for evidence, _ in targets])
    leakage[name] = attacks.measure(guesses, truth)
  return leakage


# Without noise the attack should find something; else it proves nothing about the other.
open_plan = dpjax.Plan(noise_multiplier=0.0, l2_clip_norm=100.0, **settings)
without = attacked(open_plan)
print(attacks.table(without))

private_plan = dpjax.Plan.calibrated(epsilon=4.0, l2_clip_norm=0.5, **settings)
with_noise = attacked(private_plan)
print(attacks.table(with_noise))

# The line of the proof: no attack may lie above it.
line = allowed.by_plan(private_plan)
verdicts = {name: attacks.judge(row.curve, line) for name, row in with_noise.items()}
for name, verdict in verdicts.items():
  print(f"{name}: {verdict.words}")
