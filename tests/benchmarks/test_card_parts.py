import jax
import numpy as np

from benchmarks import card_parts
from tests import commands
from tests.refuses import refuses


def test_ways_to_a_clipped_convolution_agree():
  layer = card_parts.Layer(3, 6, 2, 3, 2, (1, 1), 4)
  assert layer.name == "3x6x6x2 by 3x3/2 to 4"
  ways = card_parts._of_layer(layer)
  assert set(ways) == {"ordinary", "grouped", "patches", "gram"}
  x = jax.random.normal(jax.random.key(0), (3, 6, 6, 2))
  cotangents = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
  total, norms = jax.jit(ways["grouped"])(x, cotangents)
  for way in ("patches", "gram"):
    others, other_norms = jax.jit(ways[way])(x, cotangents)
    np.testing.assert_allclose(other_norms, norms, rtol=1e-5)
    # All in the order of [3, 3, 2, 4].
    np.testing.assert_allclose(others.ravel(), total, atol=1e-5)


def test_what_a_machine_cannot_multiply_says_so(monkeypatch):
  monkeypatch.setattr(card_parts, "_GRAMS", ((2, 3, 4),))
  monkeypatch.setattr(card_parts, "_LEAST_SECONDS", 0.0)
  rows = {row.way: row for row in card_parts.measure("grams")}
  assert rows["highest"].status == "ok" and rows["highest"].seconds > 0
  assert rows["tf32 x3"].status.startswith("did not compile: ")
  assert "did not compile: " in card_parts.table(rows.values())


def test_a_part_that_nobody_knows():
  with refuses("workloads", value="gram"):
    card_parts.measure("gram")
  line = commands.refusal(commands.run("benchmarks", "parts", "--batches=8"))
  assert line.startswith("error: --batches: ")
