"""A plan from two numbers, and the data that a plan takes its batches from."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import sampling
from dpjax.accounting import overflow
from dpjax.plan import Plan
from dpjax.validate import UserError
from tests.refuses import refuses

_N = 60
_ROWS = np.arange(2.0 * _N).reshape(_N, 2)
_NUMBERS = {"epsilon": 2.0, "delta": 1e-5, "l2_clip_norm": 1.0}


_KEYS = jax.random.split(jax.random.key(0), _N)


class _Declared:
  """Data whose holder has declared a size, which is not the number of rows."""

  nominal_size = 1000

  def __init__(self, rows):
    self.rows = rows

  def __len__(self):
    return self.rows

  def __getitem__(self, indices):
    return np.zeros((len(indices), 2))


def _made(data, **changes):
  return Plan.for_data(data, **({"batch_size": 100, "epochs": 3} | _NUMBERS | changes))


@pytest.mark.long
@settings(max_examples=12)
@given(
  size=st.integers(50, 5000),
  share=st.floats(0.01, 1.0),
  epochs=st.floats(0.5, 10.0),
  epsilon=st.floats(0.5, 8.0),
)
def test_all_numbers_follow_from_two(size, share, epochs, epsilon):
  batch_size = max(1, round(share * size))
  numbers = {"batch_size": batch_size, "epochs": epochs, "epsilon": epsilon}
  plan = _made(None, num_examples=size, **numbers)
  assert plan.sampler.sampling_prob == batch_size / size and plan.normalize_by == batch_size
  assert plan.num_steps == max(1, round(epochs * size / batch_size))
  assert 0.98 * epsilon <= plan.epsilon() <= epsilon
  plan.check_capacity(size)  # it fits, and one of 8 fewer slots does not
  tight = dataclasses.replace(plan.sampler, capacity=max(1, plan.sampler.capacity - 8))
  if tight.capacity < size + 1 and plan.sampler.capacity > 8:
    with refuses("capacity"):
      dataclasses.replace(plan, sampler=tight).check_capacity(size)


@pytest.mark.slow
def test_under_add_or_remove_no_number_follows_from_the_rows():
  plans = [_made(_Declared(n)) for n in (999, 1000, 1001)]
  assert plans[0] == plans[1] == plans[2] == _made(None, num_examples=1000)
  with refuses("num_examples", value=None) as caught:
    _made(_ROWS)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
  assert _made(_Declared(5), num_examples=2000).sampler.sampling_prob == 0.05


@pytest.mark.cases(slow=["None"])
@pytest.mark.parametrize("declared", [None, 1000, 900])
def test_a_capacity_is_refused_without_telling_how_many_rows_there_are(declared):
  plan = _made(None, num_examples=1000)
  small = dataclasses.replace(plan.sampler, capacity=80)
  plan = dataclasses.replace(plan, sampler=small)
  messages = set()
  for size in (993, 994):
    with refuses("capacity", value=80) as caught:
      plan.check_capacity(size, declared)
    messages.add(str(caught.value))
  (message,) = messages
  assert "99" not in message and ("1000" in message) == (declared != 900)
  # Where the number is public, it is named.
  public = dataclasses.replace(plan, neighboring_relation="replace_special")
  with refuses("capacity"):
    public.check_capacity(993)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["replace_special"])
def test_where_both_neighbours_have_one_size_it_is_that_of_the_data(relation):
  plan = _made(_ROWS, batch_size=20, neighboring_relation=relation)
  assert plan.sampler.sampling_prob == 20 / _N and plan.num_steps == 9
  assert next(plan.batches(_ROWS)).examples.shape == (plan.sampler.capacity, 2)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 1001}, "batch_size"),
    ({"batch_size": 10.5}, "batch_size"),
    ({"epochs": 0}, "epochs"),
    ({"epochs": math.inf}, "epochs"),
    ({"epsilon": -1.0}, "epsilon"),
    ({"delta": 2.0}, "delta"),
    ({"num_examples": 0}, "num_examples"),
    ({"neighboring_relation": "replace_one"}, "neighboring_relation"),
    ({"neighboring_relation": "nonsense"}, "neighboring_relation"),
    ({"normalize_by": 3}, "for_data"),
    ({"sampler": None}, "for_data"),
    ({"epochs": 1e300}, "epochs"),
    ({"num_examples": 10**15}, "epochs"),
    ({"num_examples": 10**30}, "num_examples"),
    ({"num_examples": 10**400}, "num_examples"),
    ({"noise_multiplier": 1.0}, "noise_multiplier"),
    ({"noise_multiplier": 1.0, "epsilon": None}, "noise_multiplier"),
    ({"clip": 1.0}, "clip"),
  ],
)
def test_wrong_numbers_are_named(changes, field):
  with refuses(field):
    _made(_Declared(1000), **changes)


@pytest.mark.slow
def test_a_delta_that_gives_a_record_away_is_warned_of():
  with pytest.warns(UserWarning, match="^delta=0.001 is not below 1/num_examples=0.001"):
    _made(_Declared(1000), delta=1e-3)


# --- what batches are taken from


class _Indexed:
  """Data that answer by a function of the indices."""

  def __init__(self, answer):
    self.answer = answer

  def __len__(self):
    return _N

  def __getitem__(self, indices):
    return self.answer(indices)


class _Sized:
  def __len__(self):
    return _N


def _missing(indices):
  raise KeyError(f"None of {indices.tolist()} are in the [columns]")


class _Labelled(np.ndarray):
  """What selects by label, as a pandas Series does."""

  iloc = None


def _late(failure):
  """Answers the question that is asked beforehand, and fails at the first step."""
  return lambda indices: np.zeros((1, 2)) if len(indices) == 1 else failure(indices)


_HUGGING_FACE = lambda indices: {
  "x": [[0.5] * 4 for _ in indices],
  "y": [1 for _ in indices],
}
_UNREADABLE = {
  "a tuple": (_ROWS, _ROWS[:, 0]),
  "a list": _ROWS.tolist(),
  "a list of arrays": list(_ROWS),
  "text": "rows",
  "None": None,
  "a number": 3.0,
  "an iterator": iter(_ROWS),
  "a set": {1.0, 2.0},
  "a loader, which has no place": _Sized(),
  "an array of no axis": np.float32(1),
  "a frame, which looks for columns": _Indexed(_missing),
  "a series": _Indexed(lambda i: _ROWS[i, 0].view(_Labelled)),
  "lists of numbers": _Indexed(_HUGGING_FACE),
  "no array": _Indexed(lambda i: ()),
  "text in arrays": _Indexed(lambda i: np.array(["a"] * len(i))),
  "objects in arrays": _Indexed(lambda i: np.array([{}] * len(i))),
  "another number of rows": _Indexed(lambda i: np.zeros((len(i) + 1, 2))),
  "no leading axis": _Indexed(lambda i: np.float32(1)),
  "rows second": _Indexed(lambda i: np.zeros((2, 3, len(i)))),
  "a file that is gone": _Indexed(lambda i: np.load(f"/no/such/{i[0]}.npy")),
  "columns, later": _Indexed(_late(_missing)),
  "lists, later": _Indexed(_late(_HUGGING_FACE)),
}


def _causes(error):
  while error is not None:
    yield str(error)
    error = error.__cause__ or error.__context__


@pytest.mark.parametrize("kind", sorted(_UNREADABLE))
def test_what_cannot_be_read_by_place_is_one_line_without_who_was_drawn(kind):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.5, capacity=61), 1.0, 1.0, 30, 3, delta=1e-5
  )
  with refuses("data") as caught:
    for _ in plan.batches(_UNREADABLE[kind], rng=0):
      pass
  causes = list(_causes(caught.value))
  assert len(causes) == 1, causes  # no other error hangs on it
  assert "\n" not in causes[0] and len(causes[0]) < 300
  drawn = plan.sampler.draw(_N, seed=0, step=0)
  assert f"{drawn[0]}, {drawn[1]}" not in causes[0]
  if "lists" in kind:
    assert ".with_format('numpy')" in causes[0]


def test_errors_of_data_that_are_dpjaxs_own_keep_their_words():
  def refuse(indices):
    raise UserError("every value must be finite", field="x")

  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.5, capacity=61), 1.0, 1.0, 30, 3, delta=1e-5
  )
  with refuses("x"):
    plan.batches(_Indexed(refuse), rng=0)


@pytest.mark.parametrize("rows", [np.zeros((0, 2)), jnp.zeros((0, 2)), jnp.zeros(0)])
def test_data_without_rows_are_one_line(rows):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.5, capacity=61), 1.0, 1.0, 30, 3, delta=1e-5
  )
  with refuses("data"):
    plan.batches(rows, rng=0)


@pytest.mark.parametrize(
  "data",
  [
    _ROWS,
    jnp.asarray(_ROWS),
    {"x": _ROWS},
    _Indexed(lambda i: (_ROWS[i], {"y": _ROWS[i, 0], "none": None})),
    _Indexed(lambda i: dpjax.Example(_ROWS[i], _ROWS[i, 0], _KEYS[i])),
  ],
  ids=["numpy", "jax", "a dict", "trees", "keys"],
)  # fmt: skip
def test_what_is_read_by_place_is_taken(data):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.5, capacity=61), 1.0, 1.0, 30, 3, delta=1e-5
  )
  assert len(list(plan.batches(data, rng=0))) == 3


def test_without_a_seed_every_run_has_batches_of_its_own():
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.5, capacity=61), 1.0, 1.0, 30, 3, delta=1e-5
  )
  masks = [np.asarray([b.mask for b in plan.batches(_ROWS)]) for _ in range(2)]
  rows = [np.asarray([b.examples for b in plan.batches(_ROWS)]) for _ in range(2)]
  assert not np.array_equal(masks[0], masks[1]) or not np.array_equal(rows[0], rows[1])
  assert inspect.signature(plan.batches).parameters["rng"].default is None
  with refuses("start", value=1):
    plan.batches(_ROWS, start=1)


@pytest.mark.parametrize(("normalize_by", "word"), [(3000, "small"), (0.3, "large")])
def test_a_divisor_that_is_far_off_is_told(normalize_by, word):
  sampler = sampling.PoissonSampler(sampling_prob=0.5, capacity=61)
  plan = Plan(
    sampler, 1.0, 1.0, normalize_by, 3, delta=1e-5, neighboring_relation="replace_special"
  )
  shuffled = dataclasses.replace(plan, sampler=sampling.ShuffledSampler(batch_size=30))
  for each in (plan, shuffled):
    with pytest.warns(UserWarning, match=f"normalize_by={normalize_by}: .* too {word}"):
      each.batches(_ROWS, rng=0)
  # Where the number of rows is secret, a declared number or the capacity is compared.
  plan = dataclasses.replace(plan, neighboring_relation="add_or_remove_one")
  declared = dpjax.data.from_arrays(
    _ROWS, np.zeros(len(_ROWS), int), num_classes=2, nominal_size=len(_ROWS)
  )
  with pytest.warns(UserWarning, match=f"normalize_by={normalize_by}: .* too {word}"):
    plan.batches(declared, rng=0)
  if word == "small":
    with pytest.warns(UserWarning, match="too small"):
      plan.batches(_ROWS, rng=0)


@pytest.mark.cases(long=["yes"])
@pytest.mark.parametrize(
  "present", [np.ones(4, bool), np.ones((10, 1), bool), np.full(10, 2), [True] * 10, "yes"]
)
def test_an_odd_presence_is_one_line_and_tells_of_no_draw(present):
  class Rows:
    def __len__(self):
      return 10

    def __getitem__(self, indices):
      return np.zeros((len(indices), 2), np.float32)

  data = Rows()
  data.present = present
  plan = Plan(
    sampler=sampling.PoissonSampler(sampling_prob=0.5, capacity=11),
    noise_multiplier=1.0,
    l2_clip_norm=1.0,
    normalize_by=5,
    num_steps=2,
    delta=1e-5,
  )
  with pytest.raises(UserError, match=r"^data.present: must be a bool array \[n\]"):
    list(plan.batches(data, rng=0))


def test_a_size_that_the_plan_was_told_serves_one_row_less_and_more_alike():
  """Plain arrays declare no size; whether a run starts must not tell n from n + 1 either."""
  flipping = []
  for size in range(1466, 1470):
    sampler = sampling.PoissonSampler(sampling_prob=100 / size, capacity=size)
    plan = Plan(sampler, 3.0, 1.0, 100, 50, delta=1e-5)
    fitted = plan.fitted(size)
    if plan.fitted(size + 1).sampler.capacity > fitted.sampler.capacity:
      flipping.append((size, fitted))
  assert flipping
  for size, plan in flipping:
    for rows in (size - 1, size, size + 1):
      next(plan.batches(np.zeros((rows, 1), np.float32), rng=0))
    with refuses("num_examples"):
      plan.batches(np.zeros((2 * size, 1), np.float32), rng=0)


_X = np.arange(80, dtype=np.float32).reshape(40, 2)


class _Own:
  """Rows of a class of somebody's own."""

  def __init__(self, read):
    self.read = read

  def __len__(self):
    return len(_X)

  def __getitem__(self, indices):
    return self.read(indices)


_SORTED = {
  "sorted": lambda i: _X[np.sort(i)],
  "sorted, in a tree": lambda i: {"y": np.zeros(len(i)), "x": _X[np.sort(i)]},
  "grouped": lambda i: _X[np.repeat(*np.unique(i, return_counts=True))],
  "the last first": lambda i: _X[np.r_[i[:1], np.sort(i[1:])][::-1]],
  "through h5py, unique": lambda i: _X[np.unique(i)],
}


@pytest.mark.parametrize("how", _SORTED)
def test_rows_in_another_order_are_refused(how):
  """The padding, which is row 0, would stand in slots that count: 23 times in one batch."""
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.1, capacity=41), 1.0, 1.0, 4, 3, delta=1e-5
  )
  with refuses("data") as refused:
    plan.batches(_Own(_SORTED[how]), rng=0)
  assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


_MIXED = {
  "centered by the batch": lambda i: _X[i] - _X[i].mean(0),
  "scaled by the batch": lambda i: {"x": _X[i] / _X[i].max(), "y": np.zeros(len(i))},
  "shuffled by a sum": lambda i: np.roll(_X[i], int(i.sum()), axis=1),
}


@pytest.mark.parametrize("how", _MIXED)
def test_rows_that_hold_something_of_others_are_refused(how):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.1, capacity=41), 1.0, 1.0, 4, 3, delta=1e-5
  )
  with refuses("data") as refused:
    plan.batches(_Own(_MIXED[how]), rng=0)
  assert len(str(refused.value)) < 300


def _to_the_longest(texts):
  """Texts whose batches are as long as their longest, as collators of texts make them."""

  def read(indices):
    rows = [texts[index] for index in indices]
    longest = max(map(len, rows))
    return np.array([row + [0.0] * (longest - len(row)) for row in rows], np.float32)

  return read


def test_one_long_text_would_shorten_the_gradients_of_all_others():
  """With a mean over the padded length it moves the sum by 26 C, where C is charged."""
  short = [[1.0] * 4] * 39
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.7, capacity=41), 1.0, 1.0, 28, 4, delta=1e-5
  )
  grad_fn = plan.clipped_grad(lambda w, text: w * jnp.mean(text))
  sums = []
  for last in ([], [1.0] * 400):
    rows = _to_the_longest([*short, last])([*range(27), 39])
    sums.append(float(grad_fn(jnp.float32(0), rows, True).total))
  assert abs(sums[0] - sums[1]) > 20
  for texts in ([*short, [1.0] * 400], [*short[:20], [1.0] * 400, *short[20:]]):
    with refuses("data"):
      list(plan.batches(_Own(_to_the_longest(texts)), rng=0))


def _reused():
  held = np.zeros((64, 2), np.float32)

  def read(indices):
    held[: len(indices)] = _X[indices]
    return held[: len(indices)]

  return read


def _undone(indices):
  places, back = np.unique(indices, return_inverse=True)
  return _X[places][back]


@pytest.mark.parametrize("read", [_reused(), _undone], ids=["one memory", "a sort undone"])
def test_batches_of_an_own_class_are_those_of_an_array(read):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.2, capacity=41), 1.0, 1.0, 8, 4, delta=1e-5
  )
  held = list(plan.batches(_Own(read), rng=0))  # all of them, so that none is written over
  for batch, other in zip(held, plan.batches(_X, rng=0), strict=True):
    np.testing.assert_array_equal(batch.examples, other.examples)
    np.testing.assert_array_equal(batch.mask, other.mask)


def test_data_that_are_drawn_anew_at_each_look_are_refused():
  """One row more moves the draws of all that are read after it: by 7 C where the seed is known."""
  draws = np.random.default_rng(0).choice([-1.0, 1.0], size=41).astype(np.float32)
  rows = np.resize(np.float32([1, -1]), 40)
  mirrored = lambda rows: float(np.sum(rows * draws[: len(rows)]))
  assert abs(mirrored(rows) - mirrored(np.insert(rows, 0, 1))) == 7
  generator = np.random.default_rng(0)
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.2, capacity=41), 1.0, 1.0, 8, 4, delta=1e-5
  )
  with refuses("data"):
    plan.batches(_Own(lambda i: _X[i] + generator.normal(size=(len(i), 2))), rng=0)


@pytest.mark.parametrize(
  "data",
  [
    np.ma.masked_array(_X, _X > 70),
    np.zeros(40, [("x", "f4"), ("y", "i4")]),
    np.zeros(40, "datetime64[s]"),
  ],
  ids=["masked", "structured", "times"],
)
def test_arrays_that_jax_would_misread_are_refused(data):
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.2, capacity=41), 1.0, 1.0, 8, 4, delta=1e-5
  )
  with refuses("data"):
    plan.batches(data, rng=0)


class _Tensor:
  """An array of another library, as of torch: `jax.jit` does not take it."""

  dtype = "torch.float32"

  def __init__(self, rows):
    self.rows = rows
    self.shape = rows.shape

  def __array__(self, *args, **kwargs):
    return self.rows


class _OnDevice(_Tensor):
  def __array__(self, *args, **kwargs):
    raise TypeError(f"can't convert cuda:0 device type tensor {self.rows} to numpy")


def test_arrays_of_another_library_become_numpys():
  plan = Plan(
    sampling.PoissonSampler(sampling_prob=0.2, capacity=41), 1.0, 1.0, 8, 4, delta=1e-5
  )
  batches = plan.batches(_Own(lambda i: (_Tensor(_X[i]), _X[i, 0])), rng=0)
  for batch, other in zip(batches, plan.batches(_X, rng=0), strict=True):
    total = jax.jit(lambda batch: batch.examples[0].sum())(batch)
    assert float(total) == other.examples.sum()
  with refuses("data"):
    plan.batches(_Own(lambda i: _OnDevice(_X[i])), rng=0)


def test_a_number_of_steps_whose_noise_takes_minutes_is_told_before(monkeypatch):
  class Told(Exception):
    pass

  def calibrated(**numbers):
    raise Told

  monkeypatch.setattr(Plan, "calibrated", calibrated)
  with (
    pytest.warns(UserWarning, match=r"^epochs=1000000.0: are 1e\+07 steps"),
    pytest.raises(Told),
  ):
    _made(np.zeros((1000, 1)), epochs=1e6, num_examples=1000)


def test_batches_account_nothing_and_a_search_checks_one_plan(monkeypatch):
  made = []
  check = Plan.__post_init__
  monkeypatch.setattr(Plan, "__post_init__", lambda plan: made.append(check(plan)))
  plan = _made(None, num_examples=1000)
  assert len(made) == 1

  def accounts(*args, **named):
    raise AssertionError("accounted again")

  monkeypatch.setattr(overflow, "epsilon_of", accounts)
  with pytest.raises(AssertionError, match="again"):
    plan.epsilon(steps=1)
  # The capacity was chosen for it.
  assert 0 < plan.epsilon() <= 2
  drawn = next(plan.batches(np.zeros((1000, 2)), rng=1))
  assert drawn.mask.shape == (plan.sampler.capacity,)
