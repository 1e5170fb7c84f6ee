"""Trains with a sampler of your own, whose epsilon is then your claim.

  python examples/own_sampler.py

dpjax cannot prove the event that a foreign sampler states. So it computes the epsilon of that
event, and says "claimed" and whose word it is.
Guarantee: claimed. It holds if `draw` really takes each example independently with `sampling_prob`.
Time: 5 s on two CPU cores.
"""

import dataclasses

import jax
import numpy as np
import optax

import dpjax


@dataclasses.dataclass(frozen=True)
class PhiloxPoisson(dpjax.PoissonSampler):
  """Poisson sampling with one Philox stream for each step."""

  def draw(self, num_examples, *, seed, step):
    # A draw is a function of (seed, step) alone, so that a resumed run repeats its batches.
    words = np.random.SeedSequence([seed, step]).generate_state(2, np.uint64)
    generator = np.random.Generator(np.random.Philox(key=words))
    chosen = np.flatnonzero(generator.random(num_examples) < self.sampling_prob)
    # A batch is never cut: a cut batch is no Poisson sample. The plan has set a share of
    # delta aside for the chance of this error.
    if len(chosen) > self.capacity:
      raise dpjax.UserError(
        "must be at least the number drawn", field="capacity", value=self.capacity
      )
    return chosen


train, test = dpjax.data.load("digits")
model = dpjax.models.Mlp(num_classes=10)
params = model.init(jax.random.key(0), train.x[:1])
loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

plan = dpjax.Plan.calibrated(
  epsilon=3.0,
  delta=1e-5,
  num_steps=60,
  l2_clip_norm=1.0,
  normalize_by=200,
  sampler=PhiloxPoisson(sampling_prob=200 / 1437, capacity=320),
)
grad_fn = plan.clipped_grad(loss_fn)
tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(0.5, momentum=0.9))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, batch):
  updates, opt_state = tx.update(grad_fn(params, batch), opt_state, params)
  return optax.apply_updates(params, updates), opt_state


sizes = []
for batch in plan.batches(train):
  sizes.append(int(batch.mask.sum()))
  params, opt_state = step(params, opt_state, batch)

# A check of the claim that anybody can repeat: the mean size of a batch.
mean_size = np.mean(sizes)
accuracy = dpjax.accuracy(model.apply, params, test)
epsilon = plan.spent(opt_state).epsilon
print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.3f}, which is claimed:")
print(plan.assumptions[0])
