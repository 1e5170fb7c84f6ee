"""Private set intersection: exactly the shared ids, and rows that name the same entity."""

import builtins
import importlib.util

import numpy as np
import pytest

from dpjax.secure import vertical
from dpjax.secure.vertical import alignment, disclosure, encrypted_vectors
from dpjax.types import Example
from dpjax.validate import UserError
from tests.refuses import refuses


@pytest.fixture
def library():
  if importlib.util.find_spec("private_set_intersection") is None:
    pytest.skip("needs openmined-psi: pip install -e '.[vertical]'")


@pytest.mark.parametrize(
  ("ids_a", "ids_b"),
  [
    (["c", "a", "b"], ["b", "z", "c", "q"]),
    (["x"], ["y"]),
    ([], ["y"]),
    (["x"], []),
    (["é", "", "a" * 500], ["", "é", "a" * 499]),
    ([f"id{i}" for i in range(200)], [f"id{i}" for i in range(150, 300)][::-1]),
  ],
)
def test_the_shared_ids_and_where_they_are(library, ids_a, ids_b):
  found = alignment.align(ids_a, ids_b)
  assert found.ids == tuple(sorted(set(ids_a) & set(ids_b)))
  assert [ids_a[row] for row in found.rows_a] == list(found.ids)
  assert [ids_b[row] for row in found.rows_b] == list(found.ids)
  assert found.rows_a.dtype == found.rows_b.dtype == np.int64
  assert found.bytes_a > 0 and found.bytes_b > 0


def test_what_crosses_holds_no_id_in_the_clear(library, monkeypatch):
  """Every message is captured: only the shared ids are ever told, by a to b at the end."""
  seen = []
  parsed = alignment._parse
  monkeypatch.setattr(
    alignment, "_parse", lambda kind, sent: seen.append(sent) or parsed(kind, sent)
  )
  alignment.align(["alice-secret", "shared-one"], ["bob-secret", "shared-one"])
  assert len(seen) == 3
  for name in (b"alice-secret", b"bob-secret", b"shared-one"):
    assert not any(name in message for message in seen)


def test_aligned_parties_learn_as_the_pooled_rows_would(library):
  """Two shuffled parties, each with rows that the other lacks: the join, and no more."""
  random = np.random.default_rng(0)
  features, y = random.normal(size=(120, 4)), random.integers(0, 2, 120)
  rows_a, rows_b = random.permutation(120)[:100], random.permutation(120)[:100]
  found = alignment.align([f"id{i}" for i in rows_a], [f"id{i}" for i in rows_b])
  both = [int(name[2:]) for name in found.ids]
  assert sorted(both) == sorted(set(rows_a) & set(rows_b))
  x_a, x_b = features[rows_a, :2][found.rows_a], features[rows_b, 2:][found.rows_b]
  seen = disclosure.Disclosure(secret_labels=False)  # the same rows in two orders
  init, step = vertical.two_party_logistic(
    encrypted_vectors.plaintext(), learning_rate=0.5, disclosure=seen
  )
  joined = Example((features[both, :2], features[both, 2:]), y[both])
  aligned, _ = step(init((2, 2)), Example((x_a, x_b), y[rows_b][found.rows_b]))
  pooled, _ = step(init((2, 2)), joined)
  np.testing.assert_allclose(aligned.weights_a, pooled.weights_a, atol=1e-7)
  np.testing.assert_allclose(aligned.weights_b, pooled.weights_b, atol=1e-7)


def test_keys_are_fresh(library, monkeypatch):
  seen = []
  parsed = alignment._parse
  monkeypatch.setattr(
    alignment, "_parse", lambda kind, sent: seen.append(sent) or parsed(kind, sent)
  )
  alignment.align(["a"], ["a"])
  alignment.align(["a"], ["a"])
  assert len(set(seen)) == 6  # no message repeats


@pytest.mark.parametrize(
  ("ids_a", "ids_b", "says"),
  [
    (["a", "a"], ["b"], "ids_a: 'a' comes twice"),
    (["a"], ["b", "b"], "ids_b: 'b' comes twice"),
    ([1], ["b"], "ids_a: must hold strings, got 1"),
    (["\ud800"], ["b"], "ids_a: '\\ud800' has no UTF-8"),
    ([["a"], ["b", "c"]], ["b"], "ids_a: must hold strings, got ['a']"),
    (np.array([["a"]]), ["b"], "ids_a: must have one axis, not 2"),
    ("ab", ["b"], "ids_a: must be a list of strings, not str"),
    (["a"], None, "ids_b: must be a list of strings, not NoneType"),
    (["a"], {"b": 1}, "ids_b: must be a list of strings, not dict"),
  ],
)
def test_ids_must_name_rows(ids_a, ids_b, says):
  with refuses(says.partition(":")[0]) as caught:
    alignment.align(ids_a, ids_b)
  assert str(caught.value).startswith(says)


def test_without_the_library_one_line_names_the_extra(monkeypatch):
  real = builtins.__import__

  def refuse(name, *args, **kwargs):
    if name.startswith("private_set_intersection"):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", refuse)
  with pytest.raises(UserError, match=r"pip install -e '\.\[vertical\]'") as caught:
    alignment.align(["a"], ["a"])
  assert "\n" not in str(caught.value)
