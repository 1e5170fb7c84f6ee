"""The fast route equals the vmap route for every kind of site, in float64."""

import functools
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients, losses, models, trees
from dpjax.gradients.ghost.units import Rule
from dpjax.types import Example
from dpjax.zoo import networks
from dpjax.zoo.networks.wide_resnet import WsConv
from tests import quick_compile
from tests.core.gradients import ghost_oracle as oracle

SIZE = 4
pytestmark = pytest.mark.usefixtures("quick_x64")


def _normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def _tokens(*shape, below):
  return jnp.asarray(np.random.default_rng(1).integers(0, below, shape), jnp.int32)


def _energy(y):
  """A scalar whose cotangent differs at every output."""
  return jnp.sum(jnp.sin(y + 0.1 * jnp.arange(y.size).reshape(y.shape)))


def _rules(loss_fn, params, batch):
  planned = oracle.plan(loss_fn, params, oracle.first_of(batch))
  return {unit.rule for unit in planned.units}


# --- dense -------------------------------------------------------------------------------

_DENSE = {
  "vector": ("k,kp->p", (5,), (5, 3)),
  "tokens": ("tk,kp->tp", (6, 5), (5, 3)),
  "parameter first": ("pk,tk->pt", (6, 5), (3, 5)),
  "two contracted": ("thk,hkp->tp", (6, 2, 5), (2, 5, 3)),
  "two outputs": ("tk,khp->thp", (6, 5), (5, 2, 3)),
  "batched parameter": ("htk,hkp->htp", (2, 6, 5), (2, 5, 3)),
  "batched, other order": ("thk,khp->pht", (6, 2, 5), (5, 2, 3)),
  "everything contracted": ("tk,tk->", (6, 5), (6, 5)),
  "outer product": ("t,p->tp", (6,), (3,)),
}


@pytest.mark.cases(slow=[5], long=...)
@pytest.mark.parametrize("name", sorted(_DENSE))
def test_dense(name):
  spec, data, shape = _DENSE[name]
  swap = name == "parameter first"

  def loss(w, x):
    return _energy(jnp.einsum(spec, *((w, x) if swap else (x, w))))

  oracle.check(loss, _normal(*shape), _normal(SIZE, *data))


@pytest.mark.cases(slow=["99"], long=...)
@pytest.mark.parametrize("rows", [1, 2, 99])
def test_every_norm_rule_of_a_dense_layer_is_taken_and_exact(rows):
  loss = lambda w, x: _energy(x @ w)
  params, batch = _normal(64, 48), _normal(SIZE, rows, 64)
  expected = {1: Rule.OUTER, 2: Rule.GRAM, 99: Rule.PRODUCT}[rows]
  assert _rules(loss, params, batch) == {expected}
  oracle.check(loss, params, batch)


# --- convolution -------------------------------------------------------------------------

_CONV = {
  "plain": dict(),
  "valid": dict(padding="VALID"),
  "stride": dict(window_strides=(2, 3)),
  "explicit padding": dict(padding=((2, 0), (1, 3))),
  "negative padding": dict(padding=((-1, 1), (0, -1)), size=(8, 7)),
  "dilated kernel": dict(rhs_dilation=(2, 1)),
  "transposed": dict(lhs_dilation=(2, 3), padding=((1, 2), (2, 2))),
  "groups": dict(feature_group_count=2, channels=4),
  "depthwise": dict(feature_group_count=3, channels=3, features=6),
  "1x1": dict(kernel=(1, 1)),
  "1-D": dict(size=(9,), kernel=(3,), window_strides=(2,), layout=("NHC", "HIO", "NHC")),
  "3-D": dict(size=(4, 3, 5), kernel=(2, 3, 2), layout=("NHWDC", "HWDIO", "NHWDC")),
  "NCHW": dict(layout=("NCHW", "OIHW", "NCHW")),
  "mixed layout": dict(layout=("HWNC", "OHWI", "NCWH")),
  "several images": dict(images=3),
  "batch groups": dict(batch_group_count=2, images=4),
}


def _conv_case(
  size=(7, 6),
  kernel=(3, 2),
  channels=2,
  features=4,
  images=1,
  layout=("NHWC", "HWIO", "NHWC"),
  **options,
):
  options = dict(window_strides=(1,) * len(size), padding="SAME") | options
  inputs = channels // options.get("feature_group_count", 1)
  sizes = dict(zip("HWD", size)) | {"N": images, "C": channels}
  kernels = dict(zip("HWD", kernel)) | {"I": inputs, "O": features}
  params = _normal(*(kernels[c] for c in layout[1]))
  batch = _normal(SIZE, *(sizes[c] for c in layout[0]))
  conv = functools.partial(lax.conv_general_dilated, dimension_numbers=layout, **options)
  return lambda w, x: _energy(conv(x, w)), params, batch


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("name", sorted(_CONV))
def test_convolution(name):
  loss, params, batch = _conv_case(**_CONV[name])
  oracle.check(loss, params, batch)
  general = name == "batch groups"
  assert (_rules(loss, params, batch) == {Rule.GRADIENT}) == general


def _inside_branches_and_loops(jaxpr, inside=False):
  """Names of the primitives that a compiled program runs in a branch or a loop."""
  for eqn in jaxpr.eqns:
    deeper = inside or eqn.primitive.name in ("cond", "scan", "while")
    if inside:
      yield eqn.primitive.name
    for sub in jax.tree.leaves(list(eqn.params.values())):
      sub = getattr(sub, "jaxpr", sub)
      if hasattr(sub, "eqns"):
        yield from _inside_branches_and_loops(sub, deeper)


@pytest.mark.long
@pytest.mark.parametrize("build", [models.Cnn, models.CifarCnn, networks.ScatterCnn])
def test_no_convolution_runs_in_a_branch_or_a_loop(build):
  """There XLA's CPU backend takes 3 to 20 times as long for one."""
  channels = 27 if build is networks.ScatterCnn else 3
  model, x = build(num_classes=10), np.zeros((4, 32, 32, channels), np.float32)
  params = model.init(jax.random.key(0), x[:1])
  grad_fn = gradients.clipped_grad(
    losses.softmax_cross_entropy(model.apply), l2_clip_norm=1.0, method="ghost"
  )
  batch = Example(x, np.zeros(4, np.int32))
  jaxpr = jax.make_jaxpr(lambda p: grad_fn(p, batch, True).total)(params).jaxpr
  names = set(_inside_branches_and_loops(jaxpr))
  assert "dot_general" in names and "conv_general_dilated" not in names


def _beside_loops(jaxpr):
  """For each while loop in a jaxpr, how many equations stand beside it."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "while":
      yield len(jaxpr.eqns) - 1
    for sub in jax.tree.leaves(list(eqn.params.values())):
      sub = getattr(sub, "jaxpr", sub)
      if hasattr(sub, "eqns"):
        yield from _beside_loops(sub)


def test_the_loop_over_rare_rows_stands_alone_in_a_branch():
  """Elsewhere XLA copies the whole batch for a loop of no steps: four times the time."""
  params = {"w": _normal(300, 10), "b": _normal(10)}
  batch = _normal(6, 300)
  grad_fn = gradients.clipped_grad(
    lambda p, x: _energy(x @ p["w"] + p["b"]), l2_clip_norm=1.0, method="ghost"
  )
  jaxpr = jax.make_jaxpr(lambda p: grad_fn(p, batch, True).total)(params).jaxpr
  # One for norms that squares cannot tell and for terms that underflow.
  (beside,) = _beside_loops(jaxpr)
  # Each sum begins with nothing left out, and ends rounded.
  assert beside <= 4 * len(params)


@pytest.mark.long
def test_flax_transposed_convolution():
  model = nn.ConvTranspose(3, (3, 3), strides=(2, 2))
  x = _normal(SIZE, 1, 5, 4, 2)
  params = oracle.as_float64(model.init(jax.random.key(0), x[0]))
  oracle.check(lambda p, x: _energy(model.apply(p, x)), params, x)


# --- whole models ------------------------------------------------------------------------


class _Standardised(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.GroupNorm(2)(jnp.tanh(WsConv(4, stride=2)(x)))
    return WsConv(3)(x).mean(axis=(1, 2))


_MODELS = {
  "mlp": (models.Mlp(num_classes=3, features=(16,)), (8, 8, 1)),
  "cnn": (models.Cnn(num_classes=3), (20, 20, 1)),
  "weight standardisation": (_Standardised(), (5, 5, 2)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_MODELS))
def test_models(name):
  model, shape = _MODELS[name]
  x = _normal(SIZE, *shape)
  params = oracle.as_float64(model.init(jax.random.key(0), x[:1]))
  loss = losses.softmax_cross_entropy(model.apply)
  oracle.check(loss, params, Example(x, jnp.arange(SIZE) % 3), clip_norm=2.0)


def test_p30_a_table_of_tokens_that_is_a_matrix_too():
  """A tied embedding by itself: one site reads its rows, the other its transpose."""

  def loss_fn(table, tokens):
    return jnp.sum(jnp.sin(jnp.tanh(table[tokens]) @ table.T))

  oracle.check(
    loss_fn, _normal(7, 3), jnp.array([[0, 1, 6, 0], [2, 2, 2, 2], [5, 0, 3, 1]])
  )


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_p30_transformers_with_and_without_tied_embeddings(tied):
  sizes = dict(num_layers=1, num_heads=2, features=8, max_length=6)
  model = networks.Transformer(vocab_size=11, tie_embeddings=tied, **sizes)
  tokens = _tokens(SIZE, 6, below=5)  # repeated
  params = oracle.as_float64(model.init(jax.random.key(0), tokens[:1]))
  oracle.check(losses.next_token(model.apply), params, Example(tokens, jnp.zeros(SIZE)))


@pytest.mark.cases(slow=["60"], long=...)
@pytest.mark.parametrize("rows", [3, 60])
def test_p30_tied_embedding_by_gram_and_by_product(rows):
  def loss(table, tokens):
    x = jnp.tanh(jnp.take(table, tokens, axis=0))
    return _energy(x @ table.T) + _energy(table[tokens[::-1]])

  params, batch = _normal(70, 12), _tokens(SIZE, rows, below=70)
  assert _rules(loss, params, batch) == {Rule.GRAM if rows == 3 else Rule.PRODUCT}
  oracle.check(loss, params, batch)


_NORMS = [nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm(), nn.InstanceNorm()]


@pytest.mark.cases(slow=["RMSNorm"], long=...)
@pytest.mark.parametrize("norm", _NORMS, ids=lambda norm: type(norm).__name__)
def test_normalisation_layers(norm):
  x = _normal(SIZE, 1, 3, 3, 4)
  params = oracle.as_float64(norm.init(jax.random.key(0), x[0]))
  params = jax.tree.map(lambda leaf: leaf + _normal(*leaf.shape), params)
  oracle.check(lambda p, x: _energy(norm.apply(p, x)), params, x)


@pytest.mark.cases(slow=["clip"], long=...)
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_embedding_with_repeated_and_outside_tokens(mode):
  tokens = _tokens(SIZE, 9, below=5 if mode == "promise_in_bounds" else 9) - 1
  tokens = jnp.maximum(tokens, 0) if mode == "promise_in_bounds" else tokens
  loss = lambda table, ids: jnp.nansum(jnp.sin(table.at[ids].get(mode=mode)) * 1.3)
  oracle.check(loss, _normal(5, 3), tokens)


@pytest.mark.cases(slow=["clip-uint32"], long=...)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_tokens_of_any_integer_type(dtype, mode):
  top = jnp.iinfo(dtype).max
  tokens = jnp.asarray([[0, 2, 2, top], [1, 1, top, 1], [3, 2, 1, 0]], dtype)
  numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))

  def loss(table, ids):
    rows = lax.gather(table, ids[:, None], numbers, (1, 3), mode=mode, fill_value=0.0)
    return _energy(rows)

  oracle.check(loss, _normal(5, 3), tokens)


@pytest.mark.slow
def test_other_ways_to_look_up():
  def loss(p, ids):
    one = p["grid"][ids[0], ids[1]]  # two indices
    row = lax.dynamic_slice(p["table"], (ids[2], jnp.int32(1)), (1, 2))
    last = jnp.take(p["columns"], ids, axis=1)
    return _energy(one) + _energy(row) + _energy(last)

  params = {"grid": _normal(4, 4, 3), "table": _normal(5, 3), "columns": _normal(2, 4)}
  oracle.check(loss, params, _tokens(SIZE, 5, below=4))


_TAKE = {
  "index": lambda w, i: w[i],
  "from the end": lambda w, i: w[i - len(w)],
  "take": lambda w, i: jnp.take(w, i, axis=0),
  "clipped": lambda w, i: w.at[i + 1].get(mode="clip"),
  "middle": lambda w, i: jnp.moveaxis(w, 0, 1)[:, i],
  "one of one": lambda w, i: w[None, i, None][0, 0],
}


def _experts(counts, take=_TAKE):
  """A loss of rows [.., 3] that each choose one of so many matrices, and the parameters."""

  def one(p, x):
    seen = jnp.int32(jnp.abs(10 * x[0]))
    return sum(jnp.tanh(x @ take[k](w, seen % len(w))) for (k, _), w in p.items())

  def loss(p, x):
    return _energy(jax.vmap(lambda row: one(p, row))(x) if x.ndim > 1 else one(p, x))

  keys = [(name, count) for name in take for count in counts]
  return loss, {(k, n): _normal(n, 3, 4, seed=i) for i, (k, n) in enumerate(keys)}


@pytest.mark.long
@pytest.mark.parametrize("rows", [None, 2])
def test_experts_that_an_index_chooses(rows):
  """Their rows are those of the product, however many there are."""
  counts = (3 * (rows or 1), 3 * (rows or 1) + 1)
  loss, params = _experts(counts)
  batch = _normal(SIZE, *(() if rows is None else (rows,)), 3)
  planned = oracle.plan(loss, params, oracle.first_of(batch))
  rule = Rule.OUTER if rows is None else Rule.GRAM
  assert {(unit.rule, unit.hold) for unit in planned.units} == {(rule, False)}
  oracle.check(loss, params, batch)


@pytest.mark.long
def test_experts_in_a_scan():
  def loss(p, x):
    def step(carry, row):
      chosen = jnp.int32(jnp.abs(10 * row[0]))
      turn = lambda w: jnp.tanh(carry + row @ w[chosen % len(w)])
      return turn(p["few"]) + turn(p["many"]), None

    return _energy(lax.scan(step, p["start"], x)[0])

  params = {"few": _normal(2, 3, 4), "many": _normal(9, 3, 4), "start": _normal(4)}
  clip_norm = {"few": 0.2, "many": 0.3, "start": 0.1}
  oracle.check(loss, params, _normal(SIZE, 2, 3), clip_norm=clip_norm)


def test_no_gradient_of_all_experts_is_formed_where_one_is_chosen():
  loss, params = _experts((3, 9), {"index": _TAKE["index"]})
  stacked = {}
  for method in ("vmap", "auto"):
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    total = lambda p, x, grad_fn=grad_fn: grad_fn(p, x, True).total
    text = str(jax.make_jaxpr(total)(params, _normal(SIZE, 3)))
    stacked[method] = [f"[{SIZE},{count},3,4]" in text for count in (3, 9)]
  assert stacked == {"vmap": [True, True], "auto": [False, False]}


@pytest.mark.long
def test_multi_head_attention_and_dense_general():
  model = nn.MultiHeadDotProductAttention(2, qkv_features=6)
  x = _normal(SIZE, 5, 4)
  params = oracle.as_float64(model.init(jax.random.key(0), x[0]))
  oracle.check(lambda p, x: _energy(model.apply(p, x)), params, x)


# --- how parameters are used ---------------------------------------------------------------


def _mlp_loss(p, x):
  return _energy(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


_USES = {
  "scalar": (lambda p, x: _energy(p * x) + p**2 * x[0], lambda: _normal()),
  "unused": (lambda p, x: _energy(x @ p["w"]), lambda: dict(w=_normal(4, 3), u=_normal(2))),
  "in the loss alone": (
    lambda p, x: _energy(x @ p["w"]) + jnp.sum(p["w"] ** 2),
    lambda: dict(w=_normal(4, 3)),
  ),
  "independent of data": (lambda p, x: jnp.sum(p**2), lambda: _normal(3)),
  "twice in different ways": (
    lambda p, x: _energy(p * x) + _energy(x @ p[:, None]),
    lambda: _normal(4),
  ),
  "two layers shared": (lambda p, x: _energy(jnp.tanh(x @ p) @ p), lambda: _normal(4, 4)),
  "transposed twin": (lambda p, x: _energy(jnp.tanh(x @ p) @ p.T), lambda: _normal(4, 3)),
  "one operand twice": (
    lambda p, x: _energy(jnp.concatenate([p, x, p])),
    lambda: _normal(2),
  ),
  "two in one": (
    lambda p, x: _energy(jnp.where(x > 0, p["a"], p["b"])),
    lambda: dict(a=_normal(4), b=_normal(4)),
  ),
  "reshaped": (lambda p, x: _energy(x @ p.reshape(4, 3)), lambda: _normal(2, 6)),
  "stacked": (lambda p, x: _energy(x @ p[0]) + _energy(x @ p[1]), lambda: _normal(2, 4, 3)),
  "division": (
    lambda p, x: _energy(x / p) + _energy(p / (1 + x**2)) + _energy(p - x),
    lambda: 2 + _normal(4) ** 2,
  ),
  "maximum": (lambda p, x: _energy(jnp.maximum(p, x)), lambda: _normal(4)),
  "low rank": (
    lambda p, x: _energy(x @ (_normal(4, 3, seed=7) + p["a"] @ p["b"])),
    lambda: dict(a=_normal(4, 2), b=_normal(2, 3)),
  ),
  "standardised": (
    lambda p, x: _energy(x @ ((p - p.mean(0, keepdims=True)) / p.std(0, keepdims=True))),
    lambda: _normal(4, 3),
  ),
  "class token": (
    lambda p, x: _energy(jnp.concatenate([p, x.reshape(2, 2)])),
    lambda: _normal(1, 2),
  ),
  "frozen part": (
    lambda p, x: _energy(x @ lax.stop_gradient(p["w"]) @ p["v"]),
    lambda: dict(w=_normal(4, 3), v=_normal(3, 2)),
  ),
  "shared sum": (
    lambda p, x: _energy((x @ p["w"] + p["b"]) + (p["c"] + jnp.cos(x) @ p["w"])),
    lambda: dict(w=_normal(4, 3), b=_normal(3), c=_normal(3)),
  ),
  "integers made of it": (lambda p, x: _energy(p[jnp.argmax(p)] * x), lambda: _normal(4)),
}


@pytest.mark.cases(slow=[7], long=...)
@pytest.mark.parametrize("name", sorted(_USES))
def test_uses(name):
  loss, params = _USES[name]
  oracle.check(loss, params(), _normal(SIZE, 4))


@pytest.mark.long
@pytest.mark.parametrize(
  "clip_norm", [dict(w=0.2, b=0.3, v=0.1), dict(w=1e3, b=0.3, v=0.1)]
)
def test_p10_per_layer_clip_norms(clip_norm):
  params = dict(w=_normal(4, 3), b=_normal(3), v=_normal(3, 2))
  for unit in (False, True):
    options = dict(clip_norm=clip_norm, rescale_to_unit_norm=unit)
    oracle.check(_mlp_loss, params, _normal(SIZE, 4), **options)


@pytest.mark.slow
def test_per_layer_clip_norms_of_parameters_that_meet_in_one_site():
  loss = lambda p, x: _energy(x @ (p["a"] @ p["b"])) + _energy(x * p["c"])
  params = dict(a=_normal(4, 2), b=_normal(2, 3), c=_normal(4))
  oracle.check(loss, params, _normal(SIZE, 4), clip_norm=dict(a=0.1, b=0.2, c=0.3))


@pytest.mark.cases(slow=["4"], long=...)
@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
def test_p11_microbatches_and_masks(microbatch_size):
  params = dict(w=_normal(4, 3), b=_normal(3), v=_normal(3, 2))
  mask = jnp.array([True, True, False, True])
  options = dict(mask=mask, microbatch_size=microbatch_size)
  oracle.check(_mlp_loss, params, _normal(SIZE, 4), **options)


# --- control flow --------------------------------------------------------------------------


def _rnn(p, x, h):
  def cell(h, xt):
    h = jnp.tanh(xt @ p["w"] + h @ p["u"] + p["b"])
    return h, h @ p["o"]

  return lax.scan(cell, h, x, reverse=True)


def _recurrent_params():
  return dict(w=_normal(3, 4), u=_normal(4, 4), b=_normal(4), o=_normal(4, 2))


@pytest.mark.slow
def test_p31_recurrence_under_scan():
  loss = lambda p, x: _energy(_rnn(p, x, jnp.zeros(4))[1])
  params, batch = _recurrent_params(), _normal(SIZE, 5, 3)
  assert Rule.PRODUCT in _rules(loss, params, batch) or Rule.GRAM in _rules(
    loss, params, batch
  )
  oracle.check(loss, params, batch)


@pytest.mark.long
def test_p31_learnt_initial_state_and_emitted_parameters():
  def loss(p, x):
    h, ys = _rnn(p, x, p["h"])
    _, emitted = lax.scan(lambda c, xt: (c + jnp.sum(xt), p["h"] * 2), 0.0, x)
    return _energy(h) + _energy(ys) + _energy(emitted)

  oracle.check(loss, _recurrent_params() | dict(h=_normal(4)), _normal(SIZE, 5, 3))


@pytest.mark.long
def test_p31_scan_over_stacked_layers_and_nested_scans():
  def layer(x, w):
    def inner(x, s):
      return jnp.tanh(x @ w["k"] * s[None]), None

    x, _ = lax.scan(inner, x, w["s"])
    return x + w["b"][None], jnp.sum(x @ (w["k"] + 0.1 * w["k"].T))

  def loss(p, x):
    x, ys = lax.scan(layer, x, p)
    return _energy(x) + _energy(ys)

  params = dict(k=_normal(3, 4, 4), b=_normal(3, 4), s=_normal(3, 2, 4))
  oracle.check(loss, params, _normal(SIZE, 2, 4))


@pytest.mark.slow
def test_a_table_that_a_scan_steps_through_and_an_index_chooses_from():
  """Its rows are those of no matrix that all sites see: the general rule."""

  def loss(table, example):
    step = lambda carry, row: (carry + row[example["k"]], None)
    total, _ = lax.scan(step, 0.0, table)
    return total**2 + _energy(table[example["k"]])

  batch = {"k": _tokens(SIZE, below=4)}
  oracle.check(loss, _normal(6, 4), batch)


@pytest.mark.cases(slow=["uint8"], long=...)
@pytest.mark.parametrize("kind", [jnp.int64, jnp.uint8])
def test_indices_far_outside_meet_no_row(kind):
  """Cut to 32 bits, -2^32 + 3 would be row 3: its part would cancel in the norm alone."""
  far = -(2**32) + 3 if kind is jnp.int64 else 255
  rows = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
  )

  def loss(table, example):
    taken = lax.gather(
      table, example["k"][:, None], rows, (1, 4), mode="fill", fill_value=0.0
    )
    return 10 * jnp.sum(taken * example["sign"][:, None])

  index = jnp.array(np.array([[far, 3], [1, 2]]).astype(kind))
  batch = {"k": index, "sign": jnp.array([[1.0, -1.0], [1.0, 1.0]])}
  oracle.check(loss, _normal(6, 4), batch)


@pytest.mark.long
def test_p31_convolution_and_embedding_in_a_scan():
  def loss(p, x):
    def body(h, token):
      kernel = p["kernel"].reshape(3, 2, 2)
      h = lax.conv_general_dilated(
        h, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
      )
      return jnp.tanh(h) + p["table"][token][None], jnp.sum(h)

    h, ys = lax.scan(body, jnp.ones((1, 5, 2)), x)
    return _energy(h) + _energy(ys)

  oracle.check(
    loss, dict(kernel=_normal(12), table=_normal(6, 1, 2)), _tokens(SIZE, 4, below=6)
  )


@pytest.mark.long
@pytest.mark.parametrize("cell", [nn.OptimizedLSTMCell, nn.GRUCell])
def test_p31_flax_rnn(cell):
  model = nn.RNN(cell(4, param_dtype=jnp.float64))
  x = _normal(SIZE, 1, 5, 3)
  params = oracle.as_float64(model.init(jax.random.key(0), x[0]))
  oracle.check(lambda p, x: _energy(model.apply(p, x)), params, x)


class _Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.Dense(4)(jnp.tanh(nn.LayerNorm()(x))), None


@pytest.mark.long
@pytest.mark.parametrize("remat", [False, True])
def test_p31_layers_under_nn_scan_and_remat(remat):
  layer = nn.remat(_Layer) if remat else _Layer
  model = nn.scan(
    layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
  )()
  x = _normal(SIZE, 2, 4)
  params = oracle.as_float64(model.init(jax.random.key(0), x[0], None))
  oracle.check(lambda p, x: _energy(model.apply(p, x, None)[0]), params, x)


@pytest.mark.slow
def test_remat_keeps_its_policy_and_is_exact():
  policy = jax.checkpoint_policies.nothing_saveable
  block = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), policy=policy)
  loss = lambda p, x: _energy(block(p, block(p, x)))
  oracle.check(loss, dict(w=_normal(4, 4), b=_normal(4)), _normal(SIZE, 4))


@jax.custom_vjp
def _straight_through(w, x):
  return jnp.round(w) * x


_straight_through.defvjp(
  lambda w, x: (_straight_through(w, x), (w, x)),
  lambda res, g: (g * res[1], g * res[0] * 2),
)


@jax.custom_jvp
def _steep(x):
  return jnp.tanh(x)


_steep.defjvp(lambda primals, tangents: (_steep(*primals), 7.0 * tangents[0]))


@pytest.mark.slow
def test_custom_derivatives_are_kept():
  def loss(p, x):
    hidden = _steep(x @ p["w"]) + _steep(p["w"][0])
    return _energy(_straight_through(p["s"], hidden))

  oracle.check(loss, dict(w=_normal(4, 3), s=_normal(3)), _normal(SIZE, 4))


@pytest.mark.slow
def test_cond_switch_and_while_with_parameters_inside():
  def loss(p, x):
    y = lax.cond(x[0] > 0, lambda y: y @ p["w"], lambda y: jnp.tanh(y) @ p["v"], x)
    y = lax.switch(jnp.int32(x[1] > 0), [lambda y: y * p["s"], lambda y: y + p["s"]], y)
    steps = lax.fori_loop(0, 3, lambda i, y: jnp.sin(y @ p["u"]), y)
    count = lax.while_loop(lambda c: c < 5.0, lambda c: c + jnp.exp(p["c"]), 0.0)
    return _energy(y) + _energy(steps) * lax.stop_gradient(count)

  params = dict(
    w=_normal(4, 3), v=_normal(4, 3), s=_normal(3), u=_normal(3, 3), c=_normal()
  )
  oracle.check(loss, params, _normal(SIZE, 4))


@pytest.mark.slow
def test_what_no_gradient_reaches_need_not_be_differentiable():
  def loss(p, x):
    doubled = lambda y: lax.while_loop(lambda v: jnp.sum(v) < 9.0, lambda v: 2 * v, y)
    far = doubled(jnp.abs(x * p["w"]) + 1.0)
    return _energy(x * p["w"]) * lax.stop_gradient(jnp.sum(far)) + jnp.argmax(far * p["v"])

  oracle.check(loss, dict(w=_normal(4), v=_normal(4)), _normal(SIZE, 4))


@pytest.mark.slow
def test_nested_jit_vmap_and_closed_over_constants():
  table = _normal(4, 4, seed=3)

  @jax.jit
  def inner(w, x):
    return jnp.tanh(jax.jit(jnp.dot)(x, w) @ table)

  loss = lambda p, xs: _energy(jax.vmap(inner, (None, 0))(p["w"], xs) + p["b"][None])
  oracle.check(loss, dict(w=_normal(4, 4), b=_normal(4)), _normal(SIZE, 3, 4))


@pytest.mark.long
def test_an_example_may_be_a_whole_user():
  model = models.ConvNet(num_classes=3, filters=(2,))
  one = losses.softmax_cross_entropy(model.apply)
  x, y = _normal(SIZE, 3, 5, 5, 1), _tokens(SIZE, 3, below=3)
  params = oracle.as_float64(model.init(jax.random.key(0), x[0, :1]))
  loss = lambda p, user: jnp.mean(jax.vmap(one, (None, 0))(p, user))
  oracle.check(loss, params, Example(x, y))


class _Unhashable:
  __hash__ = None  # as a dataclass that holds arrays

  def __init__(self, scale):
    self.scale = scale

  def __call__(self, params, x):
    return _energy(jnp.tanh(x @ params) * self.scale)


@pytest.mark.slow
def test_a_loss_may_be_unhashable_and_change_its_mind():
  loss, params, batch = _Unhashable(1.0), _normal(4, 3), _normal(SIZE, 4)
  before, _ = oracle.both(loss, params, batch)
  oracle.check(loss, params, batch)
  loss.scale = 2.0
  oracle.check(loss, params, batch)
  assert (
    oracle.relative_error(before.norms, oracle.both(loss, params, batch)[1].norms) > 0.1
  )


@pytest.mark.long
def test_dropout_with_a_key_per_example():
  def loss(p, example):
    kept = jax.random.bernoulli(example.key, 0.5, (6,))
    return _energy(
      jnp.where(kept, example.x @ p, 0.0) + jax.random.normal(example.key) * p[0]
    )

  keys = jax.random.split(jax.random.key(0), SIZE)
  oracle.check(loss, _normal(4, 6), Example(_normal(SIZE, 4), jnp.zeros(SIZE), keys))


@pytest.mark.slow
def test_works_inside_a_scan():
  params, batch = dict(w=_normal(4, 3), b=_normal(3), v=_normal(3, 2)), _normal(SIZE, 4)
  expected, _ = oracle.both(_mlp_loss, params, batch)
  grad_fn = gradients.clipped_grad(_mlp_loss, l2_clip_norm=0.5, method="ghost")
  body = lambda total, x: (trees.add(total, grad_fn(params, x[None], True).total), None)
  zero = jax.tree.map(jnp.zeros_like, params)
  total, _ = jax.jit(lambda xs: lax.scan(body, zero, xs))(batch)
  assert oracle.relative_error(expected.total, total) < 1e-10


_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from dpjax import gradients
from dpjax.zoo import networks
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
equal = lambda a, b: jax.tree.map(
  lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), a, b)

def dense(p, x):
  return jnp.sum(jnp.sin(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]))

def looped(p, x):  # its patches hold 7 * 7 * 9 * 8 numbers an example
  numbers = ("NHWC", "HWIO", "NHWC")
  maps = lax.conv_general_dilated(x[None], p["k"], (1, 1), "SAME", dimension_numbers=numbers)
  return jnp.sum(jnp.sin(jnp.tanh(maps).reshape(-1) @ p["v"]))

cases = [
  (dense, dict(w=normal(4, 3), b=normal(3), v=normal(3, 2)), normal(4, 4)),
  (lambda p, x: jnp.sum(jnp.sin(x @ p)), normal(1500, 2), normal(4, 1500)),  # a wide operand
  (looped, dict(k=normal(3, 3, 8, 4), v=normal(196, 2)), normal(4, 7, 7, 8)),
]
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec
for loss, params, batch in cases:
  vmapped = gradients.clipped_grad(loss, l2_clip_norm=0.5, method="vmap")
  expected = vmapped(params, batch, True).total
  rows = lambda p, x: gradients.per_example_grads(loss)(p, x)[1].arrays
  by_device = jax.shard_map(rows, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
  equal(jax.jit(by_device)(params, batch), rows(params, batch))
  for method in ("vmap", "ghost"):
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    equal(grad_fn(params, batch, True).total, expected)
    total = lambda p, x: jax.tree.map(
      lambda t: lax.psum(t, "d"), grad_fn(p, x, True).total)
    for check in (True, False):
      sharded = jax.shard_map(
        total, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check)
      equal(jax.jit(sharded)(params, batch), expected)
    halves = batch.reshape(2, 2, *batch.shape[1:])
    mapped = jax.pmap(total, axis_name="d", in_axes=(None, 0))(params, halves)
    equal(jax.tree.map(lambda a: a[0], mapped), expected)
    both = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    many = jax.jit(jax.vmap(lambda p: grad_fn(p, batch, True).total))(both)
    twice = vmapped(jax.tree.map(lambda a: 2 * a, params), batch, True).total
    equal(many, jax.tree.map(lambda a, b: jnp.stack([a, b]), expected, twice))
ghost = gradients.clipped_grad(looped, l2_clip_norm=0.5, method="ghost")
print("equal", "scan" in str(jax.make_jaxpr(lambda p: ghost(p, batch, True).total)(params)))
"""


@pytest.mark.slow
def test_examples_are_clipped_before_devices_are_added_up():
  """Also those that are taken in a loop, and under a vmap over parameters."""
  flags = dict(XLA_FLAGS=quick_compile.xla_flags(2), JAX_PLATFORMS="cpu")
  done = subprocess.run(
    [sys.executable, "-c", _TWO_DEVICES],
    env=os.environ | flags,
    capture_output=True,
    text=True,
  )
  assert done.stdout.strip() == "equal True", done.stderr[-2000:]
