"""Trains an Equinox network with DP-SGD.

  python examples/dp_sgd_equinox.py

The module is partitioned into arrays, which are trained, and everything else.
Guarantee: epsilon 3 at delta 1e-5 for each training example, under add-or-remove-one.
Source: Abadi et al. 2016, arXiv:1607.00133. Time: 5 s on two CPU cores.
"""

import equinox as eqx
import jax
import optax

import dpjax

train, test = dpjax.data.load("digits")
model = eqx.nn.MLP(in_size=64, out_size=10, width_size=64, depth=1, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, example):
  """Returns the loss of ONE example."""
  logits = eqx.combine(params, static)(example.x.reshape(-1))  # [10]
  return optax.softmax_cross_entropy_with_integer_labels(logits, example.y)


plan = dpjax.Plan.for_data(
  train, batch_size=200, epochs=10, epsilon=3.0, delta=1e-5, l2_clip_norm=1.0
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


def apply(params, x):
  """Returns logits [B, 10]."""
  return jax.vmap(eqx.combine(params, static))(x.reshape(len(x), -1))


spent = plan.spent(opt_state)
accuracy = dpjax.accuracy(apply, params, test)
print(f"accuracy {accuracy:.3f} at epsilon {spent.epsilon:.3f}")
