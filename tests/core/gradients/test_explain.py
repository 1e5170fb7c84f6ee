"""The table names every parameter once, with its rule and the reason of a fallback."""

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import gradients
from tests.refuses import refuses


def _params():
  return {
    "conv": jnp.ones((3, 3, 2, 4)),
    "bias": jnp.ones(4),
    "w": jnp.ones((4, 5)),
    "low": {"a": jnp.ones((5, 2)), "b": jnp.ones((2, 3))},
    "gate": jnp.ones(3),
    "spare": jnp.ones(7),
  }


def _loss(p, x):
  x = lax.conv_general_dilated(
    x[None], p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  x = jnp.tanh(x + p["bias"].reshape(1, 1, 1, 4)).mean((0, 1, 2))
  x = x @ p["w"] @ (p["low"]["a"] @ p["low"]["b"])
  return lax.cond(x[0] > 0, lambda x: jnp.sum(x * p["gate"]), jnp.sum, x)


def _rows(**options):
  table = gradients.explain(_loss, _params(), jnp.ones((6, 6, 2)), **options)
  return {path: row for row in table.rows for path in row.params}, table


def test_every_parameter_has_exactly_one_row():
  rows, table = _rows()
  paths = [
    jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(_params())
  ]
  assert sorted(rows) == sorted(paths)
  assert sum(len(row.params) for row in table.rows) == len(paths)


def test_rules_sites_and_reasons():
  rows, _ = _rows()
  assert (rows["['w']"].rule, rows["['w']"].sites) == ("outer", "dot_general")
  assert rows["['conv']"].sites == "conv_general_dilated"
  assert rows["['conv']"].rule in ("gram", "product") and not rows["['conv']"].reason
  assert rows["['low']['a']"] is rows["['low']['b']"]
  assert "combined" in rows["['low']['a']"].reason
  assert rows["['bias']"].rule == "gradient" and not rows["['bias']"].reason
  assert rows["['gate']"].rule == "gradient" and "cond" in rows["['gate']"].reason
  assert rows["['spare']"].rule == "unused" and rows["['spare']"].flops == 0


def test_the_text_is_an_aligned_table_that_names_everything():
  _, table = _rows()
  lines = str(table).splitlines()
  assert lines[0].split()[:3] == ["parameter", "shape", "site"]
  assert len(lines) == len(table.rows) + 2
  for word in ("['low']['a']", "3x3x2x4", "conv_general_dilated", "no row form for cond"):
    assert word in str(table)


def test_platforms_have_their_own_constants():
  _, gpu = _rows(platform="gpu")
  assert all(row.chunk is None or row.chunk > 1000 for row in gpu.rows)
  assert str(gpu).splitlines()[-1].startswith("gpu")
  with refuses("platform", value="cuda"):
    _rows(platform="cuda")


def test_shapes_suffice_and_nothing_is_computed():
  shapes = jax.eval_shape(lambda: _params())
  example = jax.ShapeDtypeStruct((6, 6, 2), jnp.float32)
  rows = gradients.explain(_loss, shapes, example).rows
  assert [row.rule for row in rows] == [row.rule for row in _rows()[1].rows]


def test_it_says_where_auto_takes_the_vmap_route():
  small = gradients.explain(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
  assert small.uses_vmap and "vmap route" in str(small)
  assert not _rows()[1].uses_vmap
