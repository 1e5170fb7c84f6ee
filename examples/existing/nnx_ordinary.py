"""An ordinary nnx script: digits, mini-batches, a batch loss."""

import numpy as np
import optax
from flax import nnx
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
optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)


def loss_fn(model, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def step(model, optimizer, x, y):
  grads = nnx.grad(loss_fn)(model, x, y)
  optimizer.update(model, grads)


rng = np.random.default_rng(0)
for _ in range(EPOCHS):
  order = rng.permutation(len(train_x))
  for start in range(0, len(order) - BATCH + 1, BATCH):
    rows = order[start : start + BATCH]
    step(model, optimizer, train_x[rows], train_y[rows])
print(f"accuracy {(model(test_x).argmax(-1) == test_y).mean():.3f}")
