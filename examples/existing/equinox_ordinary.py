"""An ordinary Equinox script: digits, mini-batches, a batch loss."""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn import datasets, model_selection

images, labels = datasets.load_digits(return_X_y=True)
split = model_selection.train_test_split(np.float32(images / 16), labels, random_state=0)
train_x, test_x, train_y, test_y = split
BATCH, EPOCHS = 200, 20

model = eqx.nn.MLP(in_size=64, out_size=10, width_size=64, depth=1, key=jax.random.key(0))
tx = optax.sgd(0.5, momentum=0.9)
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, x, y):
  logits = jax.vmap(model)(x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def step(model, opt_state, x, y):
  grads = eqx.filter_grad(loss_fn)(model, x, y)
  updates, opt_state = tx.update(grads, opt_state, model)
  return eqx.apply_updates(model, updates), opt_state


rng = np.random.default_rng(0)
for _ in range(EPOCHS):
  order = rng.permutation(len(train_x))
  for start in range(0, len(order) - BATCH + 1, BATCH):
    rows = order[start : start + BATCH]
    model, opt_state = step(model, opt_state, train_x[rows], train_y[rows])
print(f"accuracy {(jax.vmap(model)(test_x).argmax(-1) == test_y).mean():.3f}")
