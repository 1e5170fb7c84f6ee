"""The nnx script with DP-SGD by JAX-Privacy 2.0: its sampling, noise and accountant."""

import secrets

import jax
import numpy as np
import optax
from flax import nnx
from jax_privacy import accounting, batch_selection, clipped_grad, noise_addition
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
graph, params = nnx.split(model, nnx.Param)
num_examples = len(train_x)
num_steps = EPOCHS * num_examples // BATCH
accountant = accounting.analysis.DpsgdTrainingAccountant(
  dp_accountant_config=accounting.PldAccountantConfig()
)
settings = dict(batch_sizes=BATCH, num_updates=num_steps, num_samples=num_examples)
settings |= dict(target_delta=1e-5)
noise_multiplier = accounting.calibrate_noise_multiplier(
  target_epsilon=3.0, accountant=accountant, **settings
)


def loss_fn(params, x, y):
  logits = nnx.merge(graph, params)(x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()


grad_fn = clipped_grad(loss_fn, l2_clip_norm=1.0, batch_argnums=(1, 2), normalize_by=BATCH)
privatizer = noise_addition.gaussian_privatizer(
  stddev=noise_multiplier * grad_fn.sensitivity(), prng_key=secrets.randbits(31)
)
tx = optax.chain(privatizer, optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y, is_padding):
  grads = grad_fn(params, x, y, is_padding_example=is_padding)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


sampling = batch_selection.CyclicPoissonSampling(
  sampling_prob=BATCH / num_examples, iterations=num_steps
)
for rows in sampling.batch_iterator(num_examples, rng=secrets.randbits(31)):
  rows = batch_selection.pad_to_multiple_of(rows, 32)
  step_x, step_y = train_x[rows], train_y[rows]
  params, opt_state = step(params, opt_state, step_x, step_y, rows == -1)
nnx.update(model, params)
print(f"accuracy {(model(test_x).argmax(-1) == test_y).mean():.3f}")
print("epsilon 3.000 (of the calibration)")
