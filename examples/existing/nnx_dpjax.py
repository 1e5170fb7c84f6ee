"""The nnx script with DP-SGD by dpjax."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets, model_selection

import dpjax

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
train = dpjax.data.from_arrays(train_x, train_y, num_classes=10, nominal_size=1347)
plan = dpjax.Plan.for_data(
  train, batch_size=BATCH, epochs=EPOCHS, epsilon=3.0, delta=1e-5, l2_clip_norm=1.0
)
tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


def loss_fn(params, example):
  logits = nnx.merge(graph, params, rest, copy=True)(example.x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, example.y)


@jax.jit
def step(params, opt_state, batch):
  grads = plan.clipped_grad(loss_fn)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


for batch in plan.batches(train):
  params, opt_state = step(params, opt_state, batch)
nnx.update(model, params)
print(f"accuracy {(model(test_x).argmax(-1) == test_y).mean():.3f}")
print(f"epsilon {plan.spent(opt_state).epsilon:.3f}")
