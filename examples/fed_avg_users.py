"""FedAvg that is private for users: forty lines of it, and the library's beside them.

  python examples/fed_avg_users.py

Each user trains locally and sends a difference of parameters. The server clips each message,
adds them up, adds noise once and divides by a public number.
Guarantee: epsilon 4 at delta 1e-3 for each USER with all of their images, add-or-remove-one.
Source: McMahan et al. 2018, arXiv:1710.06963. Time: 15 s on two CPU cores.
"""

import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import federated
from dpjax.data import Federation, partition

train, test = dpjax.data.load("digits")
users = partition.iid(train.y, num_clients=100, seed=0)
federation = Federation(train, users, nominal_users=100)
model = dpjax.models.Linear(num_classes=10)
start = model.init(jax.random.key(0), train.x[:1])
loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

# A plan over USERS: each of them joins a round with probability .5.
plan = dpjax.Plan.calibrated(
  epsilon=4.0,
  delta=1e-3,
  num_steps=20,
  l2_clip_norm=0.15,
  normalize_by=50,
  sampler=dpjax.PoissonSampler(sampling_prob=0.5, capacity=101),
  unit="user",
)

# --- By hand.

# All users have the same padded number of images, so that one program serves them all.
most = max(len(rows) for rows in users)


def padded(rows):
  """Returns images [most, ...], labels [most] and a mask [most] of one user."""
  missing = most - len(rows)
  x = jnp.pad(train.x[rows], [(0, missing), (0, 0), (0, 0), (0, 0)])
  y = jnp.pad(train.y[rows], (0, missing))
  return dpjax.Example(x, y), jnp.arange(most) < len(rows)


shards = [padded(rows) for rows in users]
examples = jax.tree.map(lambda *parts: jnp.stack(parts), *(shard[0] for shard in shards))
present = jnp.stack([shard[1] for shard in shards])  # [users, most]


def local_change(params, examples, present):
  """Returns what five local passes over ONE user's images change."""

  def mean_loss(params):
    losses = jax.vmap(loss_fn, in_axes=(None, 0))(params, examples)  # [most]
    return jnp.sum(losses * present) / jnp.maximum(present.sum(), 1)

  def one_pass(_, local):
    gradient = jax.grad(mean_loss)(local)
    return jax.tree.map(lambda p, g: p - 0.5 * g, local, gradient)

  end = jax.lax.fori_loop(0, 5, one_pass, params)
  # The server's optimizer descends, so a message is start minus end.
  return jax.tree.map(jnp.subtract, params, end)


tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(1.0, momentum=0.9))
opt_state = tx.init(start)


@jax.jit
def fed_round(params, opt_state, batch):
  taken = jax.tree.map(lambda rows: rows[batch.examples], (examples, present))
  changes = jax.vmap(local_change, in_axes=(None, 0, 0))(params, *taken)
  # Row i is the message of user i alone; nothing but this call says so.
  messages = dpjax.wrap_grads(changes, batch)
  updates, opt_state = tx.update(messages, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


params = start
# The rows of this "data set" are users, so a batch holds the numbers of those who join.
for batch in plan.batches(jnp.arange(len(users))):
  params, opt_state = fed_round(params, opt_state, batch)
by_hand = dpjax.accuracy(model.apply, params, test)
spent = plan.spent(opt_state)

# --- By the library, which adds resume, several devices and ragged users.

algorithm = federated.fed_avg(
  loss_fn,
  optax.sgd(0.5),
  optax.sgd(1.0, momentum=0.9),
  federated.central(plan, dpjax.new_key()),
  key=dpjax.new_key(),
)
state = algorithm.init(start)
work = federated.LocalWork(batch_size=None, epochs=5)
for cohort in algorithm.cohorts(federation, work):
  state, info = algorithm.round(state, cohort)
by_library = dpjax.accuracy(model.apply, state.params, test)

print(f"accuracy {by_hand:.3f} by hand, {by_library:.3f} by the library")
print(f"epsilon {spent.epsilon:.3f} per user")
