"""Trains a Flax linen network with DP-SGD, in plain Optax.

  python examples/dp_sgd_linen.py

Guarantee: epsilon 3 at delta 1e-5 for each training example, under add-or-remove-one.
Source: Abadi et al. 2016, arXiv:1607.00133. Time: 5 s on two CPU cores.
"""

import flax.linen as nn
import jax
import optax

import dpjax


class Net(nn.Module):
  """A network without layers that mix examples: no BatchNorm."""

  @nn.compact
  def __call__(self, x):
    hidden = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
    return nn.Dense(10)(hidden)


train, test = dpjax.data.load("digits")
model = Net()
params = model.init(jax.random.key(0), train.x[:1])


def loss_fn(params, example):
  """Returns the loss of ONE example, because one example is what the clip bounds."""
  logits = model.apply(params, example.x[None])[0]  # [10]
  return optax.softmax_cross_entropy_with_integer_labels(logits, example.y)


# The plan holds sampler, noise and number of steps, and finds the noise for this epsilon.
plan = dpjax.Plan.for_data(
  train, batch_size=200, epochs=10, epsilon=3.0, delta=1e-5, l2_clip_norm=1.0
)
grad_fn = plan.clipped_grad(loss_fn)

# The private transform stands first: whatever comes later sees the noisy gradient alone.
tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, batch):
  updates, opt_state = tx.update(grad_fn(params, batch), opt_state, params)
  return optax.apply_updates(params, updates), opt_state


# Batches are padded to one size and masked, so that `step` is compiled once.
for batch in plan.batches(train):
  params, opt_state = step(params, opt_state, batch)

spent = plan.spent(opt_state)
accuracy = dpjax.accuracy(model.apply, params, test)
print(f"accuracy {accuracy:.3f} at epsilon {spent.epsilon:.3f}")
print(spent.statement)
