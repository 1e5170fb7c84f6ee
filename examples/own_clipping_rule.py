"""Trains with a clipping rule of your own.

  python examples/own_clipping_rule.py

A rule says by how much a gradient of some length is shortened. dpjax shows it one length at a
time, refuses callbacks that would see all of them, and cuts off whatever exceeds the bound all the
same. So a wrong rule cannot break the sensitivity. A rule in a module of your own is named by
--config.privacy.clipping=my_rules:Psac.
Guarantee: proved, as with the rules of dpjax.
Source: Xia et al. 2023, arXiv:2212.00328 (PSAC). Time: 5 s on two CPU cores.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax.gradients import ClipRule


@dataclasses.dataclass(frozen=True)
class Psac(ClipRule):
  """Shortens by C / (n + r / (n + r)): short gradients are enlarged less than by AUTO-S."""

  r: float = 0.1

  def top(self, bound):
    # Factors above 1 are not allowed, so the numerator is at most the least denominator.
    return min(bound, 2 * self.r**0.5 - self.r)

  def factors(self, lengths, top, most):
    # `top` and `most` come multiplied by one power of two, and so do the factors.
    return top / (lengths + self.r / (lengths + self.r))  # [B]


train, test = dpjax.data.load("digits")
model = dpjax.models.Mlp(num_classes=10)
params = model.init(jax.random.key(0), train.x[:1])
loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

# The rule keeps its guarantee on every length, also on 0 and on very long gradients.
rule = Psac()
lengths = jnp.logspace(-6, 6, 1000)
longest = float((rule.factors(lengths, rule.top(1.0), 1.0) * lengths).max())
bound = rule.top(1.0)

# `Clip` carries bound and rule through plan, gradients and noise.
plan = dpjax.Plan.for_data(
  train,
  batch_size=200,
  epochs=10,
  epsilon=3.0,
  delta=1e-5,
  l2_clip_norm=dpjax.Clip(1.0, rule),
)
grad_fn = plan.clipped_grad(loss_fn)
tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, batch):
  updates, opt_state = tx.update(grad_fn(params, batch), opt_state, params)
  return optax.apply_updates(params, updates), opt_state


for batch in plan.batches(train):
  params, opt_state = step(params, opt_state, batch)

accuracy = dpjax.accuracy(model.apply, params, test)
epsilon = plan.spent(opt_state).epsilon
print(f"longest gradient {longest:.4f} of {bound:.4f} allowed")
print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.3f}")
