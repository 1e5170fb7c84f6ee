"""Arrays of strangers inside dpjax's own containers, and checkpoints that are made to break."""

import msgpack
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax import random

from dpjax import training
from dpjax.sampling import PoissonSampler
from dpjax.sampling.users import group_by_user
from dpjax.validate import UserError
from dpjax.zoo import networks
from tests import plans
from tests.refuses import refuses

ROWS = 40


class Sorting:
  """An array of a user's own whose rows come sorted."""

  shape = (ROWS,)
  dtype = np.dtype(np.float32)
  nbytes = 4 * ROWS

  def __len__(self):
    return ROWS

  def __getitem__(self, indices):
    return np.sort(np.arange(ROWS, dtype=np.float32)[indices])


class Centred(Sorting):
  """Rows less the mean of those that are read with them."""

  def __getitem__(self, indices):
    rows = np.arange(ROWS, dtype=np.float32)[indices]
    return rows - rows.mean()


class SortingArray(np.ndarray):
  """A subclass of NumPy's array that sorts what it selects."""

  def __getitem__(self, indices):
    return np.sort(np.asarray(self)[indices], axis=0)


def make_plan(sampler, **fields):
  return plans.of(sampler=sampler, normalize_by=8, num_steps=2, **fields)


@pytest.mark.parametrize(
  "array", [Sorting(), Centred(), np.arange(ROWS, dtype=np.float32).view(SortingArray)]
)
def test_order_is_checked_inside_a_dict_and_inside_blocks(array):
  examples = make_plan(PoissonSampler(sampling_prob=0.2, capacity=ROWS))
  with refuses("data"):
    examples.batches({"x": array}, 1)
  users = make_plan(PoissonSampler(sampling_prob=0.2, capacity=16), unit="user")
  blocks = group_by_user(array, np.arange(ROWS) // 4, max_examples_per_user=4)
  with refuses("data"):
    users.batches(blocks, 1)


def test_users_of_a_dict_are_counted_by_rows():
  users = {"x": np.arange(4.0), "y": np.arange(4)}
  blocks = group_by_user(users, [7, 8, 7, 8], max_examples_per_user=2)
  assert blocks[np.array([1])].examples["x"].tolist() == [[1.0, 3.0]]


def test_names_that_cannot_stand_beside_the_key_are_refused():
  plan = make_plan(PoissonSampler(sampling_prob=0.2, capacity=ROWS))
  init, step = training.dp_sgd(
    lambda w, example: w * example[0],
    plan,
    optax.sgd(0.1),
    noise_key=random.key(0),
    example_key=random.key(1),
  )
  batch = next(plan.batches({0: np.ones(ROWS, np.float32)}, 1))
  with refuses("example_key"):
    step(init(jnp.float32(1)), batch)


def test_long_doubles_are_refused_in_one_line():
  plan = make_plan(PoissonSampler(sampling_prob=0.2, capacity=ROWS))
  with refuses("data"):
    plan.batches({"x": np.ones(ROWS, np.longdouble)}, 1)


# Content that is no bytes; tables deeper than Python's frames; codes for a terminal in a name.
@pytest.mark.parametrize("attack", ["numbers", "deep", "terminal"])
def test_a_hostile_checkpoint_is_one_printable_line(tmp_path, attack):
  def array(content):
    return msgpack.ExtType(1, msgpack.packb(((2,), "float32", content)))

  sound = array(np.ones(2, np.float32).tobytes())
  content = {
    "numbers": msgpack.packb({"params": {"d": array(list(range(8)))}}),
    "deep": b"\x81\xa1a" * 1020 + msgpack.packb(sound),
    "terminal": msgpack.packb({"params": {"d": sound, "\x1b[2J": sound}}),
  }[attack]
  path = tmp_path / "best.msgpack"
  path.write_bytes(content)
  params = {"params": {"d": np.ones(2, np.float32)}}
  with pytest.raises(UserError) as caught:
    networks.load_checkpoint(path, params)
  assert str(caught.value).isprintable()
