"""DLG on the LeNet of Zhu et al. 2019 and CIFAR-10: what it recovers of a client, and from
which noise on no longer. `python -m pytest -m long tests/published/test_gradient_inversion.py`.

Needs the prepared CIFAR-10 (TFDS_DATA_DIR).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import attacks, data, federated, losses, models, trees
from dpjax.attacks import reconstructions
from dpjax.types import Example
from dpjax.validate import UserError

_SHAPE, _COUNT = (1, 32, 32, 3), 8


def _loss_and_params():
  """Sigmoid, strides 2, 2, 1, all weights U(-.5, .5), as in the paper's code."""
  model = models.ConvNet(
    num_classes=10,
    filters=(12, 12, 12),
    strides=(2, 2, 1),
    kernel_size=5,
    activation="sigmoid",
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(_SHAPE))
  leaves, treedef = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(0), len(leaves))
  drawn = [
    jax.random.uniform(k, s.shape, minval=-0.5, maxval=0.5) for k, s in zip(keys, leaves)
  ]
  return losses.softmax_cross_entropy(model.apply), jax.tree.unflatten(treedef, drawn)


def run(count=_COUNT, sigmas=(0.0, 1e-4, 1e-3, 1e-2), tell=print):
  """{sigma: (labels that were inferred, rows of success, truth, found)}.

  Each client sends one step of SGD on one image, clipped to the longest of the messages and
  noised by itself (`client_noise`); sigma is its noise multiplier. The adversary simulates the
  client without noise.
  """
  train, _ = data.load("cifar10")
  loss, params = _loss_and_params()
  plain = federated.local_training(loss, optax.sgd(1.0))
  batches = attacks.all_at_once(1)
  view = attacks.client_view(plain, params, batches)
  truths = [
    Example(jnp.asarray(train.x[i : i + 1]), jnp.asarray(train.y[i : i + 1]))
    for i in range(count)
  ]
  bound = max(float(optax.global_norm(view(truth))) for truth in truths)
  tell(f"{trees.size(params)} parameters, l2_clip_norm {bound:.3g}")
  method = attacks.Dlg(steps=2500, line_search=False)
  attack = attacks.Inversion(view, _SHAPE, num_classes=10, method=method)
  results = {}
  for sigma in sigmas:
    client = federated.client_noise(plain, l2_clip_norm=bound, noise_multiplier=sigma)
    right, found = 0, []
    for place, truth in enumerate(truths):
      key = jax.random.key(place)
      seen = attacks.client_view(client, params, batches, key=key)(truth)
      gradient = attacks.as_gradient(seen["delta"], learning_rate=1.0)
      labels = attacks.infer_labels(gradient, batch_size=1)
      right += int(labels[0] == truth.y[0])
      made = attack(seen, labels, key=key)
      found.append(made.x[0])
      error = reconstructions.mse(truth.x, made.x)[0]
      tell(f"sigma {sigma:g}, image {place}: MSE {error:.2e}, {made.objective:.2e}")
    x, found = np.concatenate([truth.x for truth in truths]), np.stack(found)
    rows = attacks.success(attacks.fidelity(x, found))
    results[sigma] = right, rows, x, found
    tell(f"sigma {sigma:g}: labels {right}, {'; '.join(row.verdict for row in rows)}")
  return results


@pytest.mark.long
def test_dlg_recovers_images_of_clients_until_noise_stops_it():
  try:
    results = run()
  except UserError as error:
    if "launch.prepare" not in str(error):
      raise
    pytest.skip(str(error))
  rates = [rows[0].recovered.rate for _, rows, _, _ in results.values()]
  assert results[0.0][0] == 8 and results[0.0][1][0].recovered.count >= 7
  assert rates == sorted(rates, reverse=True) and rates[-1] == 0
