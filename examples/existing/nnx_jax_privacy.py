"""The nnx script with DP-SGD by JAX-Privacy 2.0 and its experimental execution plan."""

import secrets

import jax
import numpy as np
import optax
from dp_accounting import NeighboringRelation, pld
from flax import nnx
from jax_privacy import batch_selection
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from sklearn import datasets, model_selection

images, labels = datasets.load_digits(return_X_y=True)
split = model_selection.train_test_split(np.float32(images / 16), labels, random_state=0)
train_x, test_x, train_y, test_y = split
BATCH, EPOCHS = 200, 20


class Net(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(64, 64, rngs=rngs)
    self.head = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x):
    return self.head(nnx.relu(self.hidden(x)))


model = Net(nnx.Rngs(0))
graph, params, rest = nnx.split(model, nnx.Param, ...)
num_examples = len(train_x)
num_steps = EPOCHS * num_examples // BATCH
plan = BandMFExecutionPlanConfig.default(
  num_bands=1, iterations=num_steps, sampling_prob=BATCH / num_examples,
  epsilon=3.0, delta=1e-5, l2_clip_norm=1.0, normalize_by=BATCH,
  partition_type=batch_selection.PartitionType.INDEPENDENT,
  accountant=pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE),
).plan  # fmt: skip


def loss_fn(params, x, y):
  logits = nnx.merge(graph, params, rest, copy=True)(x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()


grad_fn = plan.clipped_grad(loss_fn, batch_argnums=(1, 2))
tx = optax.chain(plan.noise_addition_transform, optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y, is_padding):
  grads = grad_fn(params, x, y, is_padding_example=is_padding)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


for rows in plan.batch_selection_strategy.batch_iterator(
  num_examples, rng=secrets.randbits(31)
):
  rows = batch_selection.pad_to_multiple_of(rows, 32)
  step_x, step_y = train_x[rows], train_y[rows]
  params, opt_state = step(params, opt_state, step_x, step_y, rows == -1)
nnx.update(model, params)
print(f"accuracy {(model(test_x).argmax(-1) == test_y).mean():.3f}")
print("epsilon 3.000 (of the calibration)")
