"""Fine-tunes a public model privately: first its last layer, then low-rank adapters.

  python examples/finetune.py

The public weights come from the digits 0 to 4; the private data are the digits 5 to 9.
Guarantee: epsilon 2 at delta 1e-5 for each PRIVATE example. Nothing is promised to the
records that the public weights know: public and private records must be disjoint.
Source: Hu et al. 2022, arXiv:2106.09685 (LoRA). Time: 8 s on two CPU cores.
"""

import jax
import optax

import dpjax
from dpjax import data, training

train, test = data.load("digits")
public = train.subset(train.y < 5)
# `num_classes` stays 10: it is declared, never counted from private labels. So is the size.
rows = train.y >= 5
private = data.from_arrays(train.x[rows], train.y[rows], num_classes=10, nominal_size=720)
test = test.subset(test.y >= 5)

model = dpjax.models.Mlp(num_classes=10, features=(64,))
loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

# --- Public training needs no privacy, so it is plain Optax.

params = model.init(jax.random.key(0), public.x[:1])
public_tx = optax.adam(1e-2)
public_state = public_tx.init(params)


@jax.jit
def public_step(params, state):
  def mean_loss(params):
    logits = model.apply(params, public.x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, public.y)
    return losses.mean()

  updates, state = public_tx.update(jax.grad(mean_loss)(params), state, params)
  return optax.apply_updates(params, updates), state


for _ in range(100):
  params, public_state = public_step(params, public_state)
before = dpjax.accuracy(model.apply, params, test)


def train_privately(loss_fn, start, tx):
  """Returns parameters and the budget spent by one private training."""
  plan = dpjax.Plan.for_data(
    private, batch_size=140, epochs=10, epsilon=2.0, delta=1e-5, l2_clip_norm=1.0
  )
  init, step = training.dp_sgd(loss_fn, plan, tx, noise_key=dpjax.new_key())
  jitted = jax.jit(step)
  state = init(start)
  for batch in plan.batches(private):
    state, _ = jitted(state, batch)
  return state.params, plan.spent(state)


# --- The last layer alone. The rest has no gradient, so only the head is clipped.

names = list(dpjax.trees.named_leaves(params))
head = names[-1].rsplit("/", 1)[0]
head_loss, head_tx = training.of_part(
  loss_fn, optax.sgd(0.5, momentum=0.9), lambda name: name.startswith(head)
)
tuned, head_spent = train_privately(head_loss, params, head_tx)
with_head = dpjax.accuracy(model.apply, tuned, test)

# --- Low-rank adapters of every matrix. No gradient of a frozen matrix is ever formed.

lora = training.lora(params, "*/kernel", rank=4, alpha=8.0, key=jax.random.key(1))
adapters, lora_spent = train_privately(
  lora.apply(loss_fn), lora.trainable, optax.adam(0.05)
)
with_lora = dpjax.accuracy(model.apply, lora.merge(adapters), test)

print(
  f"accuracy {before:.3f} before, {with_head:.3f} with a new head, {with_lora:.3f} LoRA"
)
# Two models from the same data: their epsilons add up.
total = head_spent.epsilon + lora_spent.epsilon
print(f"epsilon {head_spent.epsilon:.3f} and {lora_spent.epsilon:.3f}; {total:.3f} in all")
