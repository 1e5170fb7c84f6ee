"""Noise that is drawn again: the same noise as if it were kept, at no memory, at a proved cost."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import dpjax
from dpjax import accounting, sampling, transforms
from dpjax.accounting.matrix import participation_costs
from dpjax.accounting.monte_carlo import min_sep_epsilon
from dpjax.auditing.games import plans, registry
from dpjax.auditing.games.game import play
from dpjax.noise import NoiseShape, correlated, source
from dpjax.noise.correlated import inverse, series
from dpjax.noise.correlated.draw import add_correlated, init
from dpjax.noise.correlated.registry import STRATEGIES
from dpjax.noise.correlated.toeplitz import BandState
from dpjax.noise.source import gaussian
from dpjax.parallel import targets
from tests.refuses import refuses

_COEFFICIENTS = (1.0, -0.5, -0.25, -0.125)
_REDRAWN = correlated.InverseBanded(_COEFFICIENTS, redraw=True)
_KEPT = correlated.InverseBanded(_COEFFICIENTS, redraw=False)
_TREE = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(4)}
_FACTORS = (1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0, 0.25)
_STEPS = len(_FACTORS)


@functools.lru_cache(maxsize=16)
def _step(strategy, factors=(), std=1.5):
  """One compiled step of a strategy, shared by the tests."""

  def step(state, tree):
    return add_correlated(
      state, tree, std, correlation=strategy, num_steps=_STEPS, factors=factors
    )

  return jax.jit(step)


def _rows(strategy, key=None, **options):
  """[steps, 10]: what is added to a tree of zeros."""
  key = jax.random.key(3) if key is None else key
  state = init(key, strategy, _TREE)
  rows = []
  for _ in range(_STEPS):
    noisy, state = _step(strategy, **options)(state, _TREE)
    rows.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(noisy)]))
  return np.array(rows)


@functools.cache
def _white():
  """[steps, 10] in float64: the draws that white noise makes at each step."""
  draws = [
    gaussian(jax.random.fold_in(jax.random.key(3), step), _TREE, 1.5)
    for step in range(_STEPS)
  ]
  flat = [[np.ravel(leaf) for leaf in jax.tree.leaves(draw)] for draw in draws]
  return np.array([np.concatenate(leaves) for leaves in flat], np.float64)


# --- the same noise


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("step", [0, 2, 7])
def test_noise_drawn_again_is_the_banded_sum_on_every_platform(platform, step, monkeypatch):
  """y_t = sum over the last 4 steps of their coefficient times z; before step 0 there is none."""
  monkeypatch.setattr(inverse.made_for, "platform", lambda: platform)
  strategy = correlated.InverseBanded.square_root(4, redraw=True)
  held = jnp.array([10.0, 20.0])
  white = lambda at: jnp.array([1.0, -2.0]) * (at + 1)
  found = strategy.redrawn(white, jnp.int32(step), strategy.init(held), held)
  last = range(min(4, step + 1))
  total = sum(strategy.coefficients[age] * (step - age + 1) for age in last)
  np.testing.assert_allclose(found, held + total * np.array([1.0, -2.0]), rtol=1e-6)


@pytest.mark.cases(slow=["kept-constant"], long=["redrawn-constant"])
@pytest.mark.parametrize("factors", [(), _FACTORS], ids=["constant", "scheduled"])
@pytest.mark.parametrize("strategy", [_REDRAWN, _KEPT], ids=["redrawn", "kept"])
def test_the_noise_is_the_dense_inverse_of_the_white_draws(strategy, factors):
  white = _white() * np.array(factors or np.ones(_STEPS))[:, None]
  expected = np.linalg.solve(correlated.matrix(strategy, _STEPS), white)
  np.testing.assert_allclose(_rows(strategy, factors=factors), expected, atol=3e-6)


@pytest.mark.slow
def test_one_coefficient_is_white_noise_bit_for_bit():
  only = correlated.InverseBanded((1.0,), redraw=True)
  np.testing.assert_array_equal(_rows(only), _rows(correlated.Independent()))
  assert only.bands == 1


@pytest.mark.slow
def test_each_model_under_vmap_has_the_noise_of_its_own_key():
  keys = jax.random.split(jax.random.key(5), 3)
  start = jax.vmap(lambda key: init(key, _REDRAWN, _TREE))(keys)
  step = jax.vmap(lambda state: _step(_REDRAWN)(state, _TREE))
  _, rows = jax.lax.scan(lambda state, _: step(state)[::-1], start, None, length=_STEPS)
  together = np.concatenate(
    [np.reshape(leaf, (_STEPS, 3, -1)) for leaf in jax.tree.leaves(rows)], axis=2
  )
  for place, key in enumerate(keys):
    np.testing.assert_allclose(together[:, place], _rows(_REDRAWN, key), atol=1e-6)


@pytest.mark.slow
def test_a_step_in_slices_has_the_noise_of_a_whole_one():
  private = transforms.clip_and_correlated_noise(
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=2.0, key=jax.random.key(0),
    noise_shape=NoiseShape(correlation=_REDRAWN), num_steps=4,
  )  # fmt: skip
  sliced = transforms.accumulate(private, every=2, l2_clip_norm=1.0)
  grads = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
  whole_update = jax.jit(private.update)
  slice_update = jax.jit(sliced.update)
  params = jnp.zeros(2)
  state = private.init(params)
  other = sliced.init(params)
  for batch in grads:
    expected, state = whole_update(
      dpjax.wrap_grads(jnp.asarray(batch)), state, params, mask=jnp.ones(4, bool)
    )
    for half in (batch[:2], batch[2:]):
      update, other = slice_update(
        dpjax.wrap_grads(jnp.asarray(half)), other, params, mask=jnp.ones(2, bool)
      )
    np.testing.assert_allclose(update, expected, atol=1e-6)


# --- memory


def test_copies_are_kept_where_they_are_small_and_redrawn_where_they_are_large():
  choosing = correlated.InverseBanded(_COEFFICIENTS)
  # Three copies of float32 numbers: 64 MiB are 5.6e6 of each.
  small = jax.eval_shape(choosing.init, jax.ShapeDtypeStruct((5_000_000,), jnp.float32))
  large = jax.eval_shape(choosing.init, jax.ShapeDtypeStruct((6_000_000,), jnp.float32))
  assert isinstance(small, BandState) and small.rows.shape == (3, 5_000_000)
  assert isinstance(large, correlated.Redrawn)
  assert jax.tree.leaves(large)[0].shape == ()


@pytest.fixture(scope="module")
def compiled():
  """Memory analyses of a step of 1e7 numbers, by the strategy's name."""
  size = 10_000_000
  strategies = {
    "white": correlated.Independent(),
    "redrawn": correlated.InverseBanded.square_root(32, redraw=True),
    "kept": correlated.InverseBanded.square_root(32, redraw=False),
  }
  like = jax.ShapeDtypeStruct((size,), jnp.float32)

  def analysis(strategy):
    start = functools.partial(init, correlation=strategy, like=like)
    if strategy.buffers:
      state = jax.eval_shape(start, jax.random.key(0))
    else:
      state = start(jax.random.key(0))
    step = functools.partial(add_correlated, std=1.5, correlation=strategy, num_steps=100)
    program = jax.jit(lambda state, tree: step(state, tree), donate_argnums=0)
    found = program.lower(state, like).compile().memory_analysis()
    return (
      found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
      - found.alias_size_in_bytes
    ) / size  # fmt: skip

  return {name: analysis(strategy) for name, strategy in strategies.items()}


@pytest.mark.slow
def test_thirty_two_draws_take_the_memory_of_one(compiled):
  assert compiled["redrawn"] <= 1.05 * compiled["white"]
  # What is kept shows: 31 copies of 4 bytes.
  assert compiled["kept"] >= compiled["white"] + 31 * 4


# --- states that something else changed


def test_a_state_of_other_coefficients_or_shapes_is_refused_or_nan():
  other = correlated.InverseBanded((1.0, -0.5, -0.25), redraw=True)
  longer = {"w": jnp.zeros((3, 3)), "b": jnp.zeros(4)}
  for strategy, like in ((other, _TREE), (_REDRAWN, longer)):
    state = init(jax.random.key(0), strategy, like)
    with refuses("state.memory"):
      add_correlated(state, _TREE, 1.0, correlation=_REDRAWN, num_steps=8)
    noisy, _ = _step(_REDRAWN)(state, _TREE)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(noisy))
  state = init(jax.random.key(0), _REDRAWN, _TREE)
  noisy, _ = _step(_REDRAWN)(state, _TREE)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(noisy))


def test_earlier_noise_belongs_to_the_key_of_the_state():
  """After three steps a state with another key would redraw noise that was never added."""
  tx = transforms.clip_and_correlated_noise(
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=2.0, key=jax.random.key(3),
    noise_shape=NoiseShape(correlation=_REDRAWN), num_steps=8,
  )  # fmt: skip
  grads = dpjax.wrap_grads(jax.tree.map(lambda leaf: leaf[None], _TREE), mask=True)
  update = jax.jit(lambda state: tx.update(grads, state, _TREE))
  state = tx.init(_TREE)
  for _ in range(3):
    _, state = update(state)
  words = source.to_words(jax.random.key(4))
  swapped = state._replace(inner=state.inner._replace(key=words))
  noisy, _ = update(swapped)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(noisy))


# --- what it costs


def test_the_square_root_has_the_binomial_coefficients():
  found = correlated.InverseBanded.square_root(20).coefficients
  places = np.arange(20)
  expected = special.binom(0.5, places) * (-1.0) ** places
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  # Both together are the whole square root: C C = A.
  column = correlated.matrix(correlated.InverseBanded.square_root(20), 20)[:, 0]
  np.testing.assert_allclose(column, series.square_root(20), rtol=1e-6)


@settings(max_examples=5)
@given(
  num_steps=st.integers(1, 60),
  bands=st.integers(1, 6),
  steps_apart=st.integers(1, 70),
  objective=st.sampled_from(series.OBJECTIVES),
)
def test_the_best_coefficients_fall_and_beat_the_square_root(
  num_steps, bands, steps_apart, objective
):
  best = correlated.InverseBanded.optimized(
    num_steps=num_steps, bands=bands, steps_apart=steps_apart, objective=objective
  )
  # Longer than the run: the sensitivity theorem needs every entry of the column.
  column = best.multiply(np.eye(200, 1))[:, 0]
  assert (np.diff(column) <= 1e-14).all() and column.min() >= 0
  run = inverse._Run(num_steps, steps_apart, -(-num_steps // steps_apart), objective)
  loss = lambda one: inverse.inverse_loss(-np.array(one.coefficients[1:]), run)[0]
  root = correlated.InverseBanded.square_root(len(best.coefficients))
  assert loss(best) <= min(loss(root), loss(correlated.InverseBanded((1.0,)))) + 1e-6


def _brute_loss(tail, num_steps, steps_apart, reduce):
  """Error times squared sensitivity by dense matrices and every pattern of participation."""
  dense = correlated.matrix(correlated.InverseBanded((1.0, *(-tail))), num_steps)
  prefix = np.tril(np.ones((num_steps, num_steps))) @ np.linalg.inv(dense)
  patterns = [
    list(steps)
    for size in range(1, num_steps + 1)
    for steps in itertools.combinations(range(num_steps), size)
    if all(b - a >= steps_apart for a, b in itertools.pairwise(steps))
  ]
  worst = max(np.linalg.norm(dense[:, steps].sum(1)) for steps in patterns)
  return reduce((prefix**2).sum(1)) * worst**2


@pytest.mark.parametrize("objective", series.OBJECTIVES)
def test_the_loss_and_the_best_pair_are_those_of_dense_matrices(objective):
  num_steps = 8
  run = inverse._Run(num_steps, 3, 3, objective)
  reduce = np.mean if objective == "mean" else np.max
  brute = functools.partial(_brute_loss, num_steps=num_steps, steps_apart=3, reduce=reduce)
  tail = np.array([0.5, 0.125])
  loss, _ = inverse.inverse_loss(tail, run)
  assert np.exp(loss) == pytest.approx(brute(tail), rel=1e-6)
  found = brute(-inverse.optimized_inverse(run, 3)[1:])
  # c_1 = p_1 and c_2 = p_1^2 + p_2 fall: the patterns' worst is the comb for these alone.
  grid = np.linspace(0, 1, 41)
  tried = [
    brute(np.array([first, second]))
    for first in grid
    for second in grid
    if first**2 + second <= first and first + second <= 1
  ]
  assert found <= min(tried) * (1 + 1e-6)
  assert found >= min(tried) * 0.99


def test_the_gradient_is_that_of_the_loss():
  run = inverse._Run(20, 4, 5, "mean")
  tail = np.array([0.5, 0.2, 0.1])
  _, gradient = inverse.inverse_loss(tail, run)
  step = 1e-6
  ends = [
    [inverse.inverse_loss(tail + sign * step * unit, run)[0] for sign in (1, -1)]
    for unit in np.eye(3)
  ]
  expected = [(after - before) / (2 * step) for after, before in ends]
  np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize(
  "strategy",
  [correlated.Bisr, correlated.Bifr, correlated.BandInvMf, correlated.LambdaCgd],
)
def test_sensitivities_agree_with_jax_privacys(strategy):
  toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
  chosen = strategy().make(num_steps=60, steps_apart=7)
  column = chosen.multiply(np.eye(60, 1))[:, 0]
  expected = float(toeplitz.minsep_sensitivity_squared(column, 7, None, n=60))
  for cyclic in (True, False):
    costs = participation_costs(chosen, num_steps=60, steps_apart=7, cyclic=cyclic)
    assert costs[-1] == pytest.approx(expected, rel=1e-5)


def test_four_optimised_draws_beat_sixteen_of_the_square_root_and_two_beat_white_noise():
  def error(strategy):
    costs = participation_costs(strategy, num_steps=300, steps_apart=15, cyclic=True)
    column = strategy.multiply(np.eye(300, 1))[:, 0]
    return np.sqrt(series.prefix_error(column, 300) * costs[-1])

  white = error(correlated.Independent())
  four = error(correlated.BandInvMf(bands=4).make(300, 15))
  two = error(correlated.LambdaCgd().make(300, 15))
  root = error(correlated.Bisr().make(300, 15))
  assert four < two < root < 0.36 * white
  # Where C has as many bands as a pass has steps, columns do not meet: nothing here is better.
  assert error(correlated.BandedToeplitz.optimized(num_steps=300, bands=15)) < four


@pytest.mark.cases(slow=["128"], long=...)
@pytest.mark.parametrize("unrolled", [0, 128])
def test_an_accelerators_program_draws_the_same_noise(monkeypatch, unrolled):
  """Neither a branch nor, for few draws, a loop: a GPU's program would wait for the host."""
  monkeypatch.setattr(inverse, "_UNROLLED", unrolled)
  strategy = correlated.InverseBanded.square_root(4, redraw=True)
  zeros = {"w": jnp.zeros((3, 5)), "b": jnp.zeros(2)}

  def steps(key):
    state = init(key, strategy, zeros)
    rows = []
    for _ in range(6):
      row, state = add_correlated(state, zeros, 2.0, correlation=strategy, num_steps=6)
      rows.append(row)
    return rows

  key = jax.random.key(3)
  here = jax.jit(steps)(key)
  with targets.compiling_for(targets.parse("gpu:h100:1")):
    there = jax.jit(lambda key: steps(key))(key)
    text = str(jax.make_jaxpr(lambda key: steps(key))(key))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), here, there)
  assert float(jnp.abs(here[5]["w"]).max()) > 0.1
  assert ("cond[" in text) is False
  assert ("while[" in text or "scan[" in text) == (not unrolled)


def test_fractional_roots_hold_both_families_that_they_generalise():
  half = correlated.InverseBanded.fractional_root(9, 0.5)
  root = correlated.InverseBanded.square_root(9)
  np.testing.assert_allclose(half.coefficients, root.coefficients, rtol=1e-6)
  two = correlated.Bifr(bands=2, gamma=0.7).make(100, 10)
  assert two == correlated.LambdaCgd(decay=0.7).make(100, 10)
  # Two fractional roots are a whole one: (1 - x)^.3 (1 - x)^.7 = 1 - x.
  powers = [correlated.InverseBanded.fractional_root(6, g).coefficients for g in (0.3, 0.7)]
  np.testing.assert_allclose(np.convolve(*powers)[:6], [1, -1, 0, 0, 0, 0], atol=1e-6)
  assert not any(correlated.InverseBanded.fractional_root(5, 0.0).coefficients[1:])


@pytest.mark.parametrize("run", [(300, 15), (800, 800)])
def test_a_fractional_root_lies_between_the_square_root_and_the_best_coefficients(run):
  numbers = inverse._Run(*run, inverse._participations(*run), "mean")

  def loss(strategy):
    tail = -np.array(strategy.make(*run).coefficients[1:])
    return inverse.inverse_loss(tail, numbers)[0]

  best = loss(correlated.BandInvMf(bands=4))
  assert best <= loss(correlated.Bifr(bands=4)) < loss(correlated.Bisr(bands=4))
  for gamma in np.linspace(0.05, 0.95, 19):
    assert loss(correlated.Bifr(bands=4)) <= loss(correlated.Bifr(bands=4, gamma=gamma))


# --- what nobody has proved


def _plan(sampler, strategy=_REDRAWN, **more):
  return dpjax.Plan(
    sampler=sampler, noise_multiplier=2.0, l2_clip_norm=1.0, normalize_by=4.0, num_steps=8,
    delta=1e-5, noise_shape=NoiseShape(correlation=strategy), **more,
  )  # fmt: skip


def test_amplification_by_sampling_is_refused():
  cyclic_poisson = sampling.CyclicPoissonSampler(turn_prob=0.3, num_groups=4, capacity=20)
  with refuses("correlation"):
    _plan(cyclic_poisson)
  with refuses("sampler"):
    _plan(sampling.PoissonSampler(sampling_prob=0.3, capacity=20))
  with refuses("correlation"):
    min_sep_epsilon(
      _REDRAWN, noise_multiplier=1.0, num_steps=8, turn_prob=0.5, steps_apart=4, delta=1e-2,
      num_samples=10**4,
    )  # fmt: skip


def test_a_column_that_rises_is_accounted_in_turns_and_refused_between_them():
  rising = correlated.InverseBanded((1.0, 0.0, -0.9))
  dense = correlated.matrix(rising, 8)
  assert (np.diff(dense[:, 0]) > 0).any()
  plan = _plan(sampling.CyclicSampler(steps_per_pass=4, num_examples=8), rising)
  worst = max(np.linalg.norm(dense[:, [turn, turn + 4]].sum(1)) for turn in range(4))
  expected = accounting.epsilon(accounting.gaussian_event(2.0 / worst), delta=1e-5)
  assert plan.epsilon() == pytest.approx(expected, rel=1e-3)
  with refuses("correlation"):
    _plan(sampling.MinSepSampler(0.5, 4, 8, 20), rising)


@pytest.mark.slow
def test_balls_in_bins_are_proved_without_a_band():
  """The proof needs entries that are not negative, and sees what white noise would cost."""
  options = dict(noise_multiplier=2.0, num_steps=8, num_bins=4, delta=1e-5)
  proved = accounting.balls_in_bins_proved(_REDRAWN, **options)
  costs = participation_costs(_REDRAWN, num_steps=8, steps_apart=4, cyclic=True)
  without = accounting.epsilon(
    accounting.gaussian_event(2.0 / np.sqrt(costs[-1])), delta=1e-5
  )
  assert proved <= without * (1 + 1e-3)


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: correlated.InverseBanded(()), "number_of_coefficients"),
    (lambda: correlated.InverseBanded((0.5,)), "coefficients"),
    (lambda: correlated.InverseBanded((1.0, 0.5)), "coefficients[1]"),
    (lambda: correlated.InverseBanded((1.0, float("nan"))), "coefficients[1]"),
    (lambda: correlated.InverseBanded((1.0, "a")), "coefficients[1]"),
    (lambda: correlated.InverseBanded((1.0, -0.6, -0.6)), "coefficients"),
    (lambda: correlated.InverseBanded((1.0,), redraw="no"), "redraw"),
    (lambda: correlated.Bisr(bands=0), "bands"),
    (lambda: correlated.BandInvMf(bands=10**6), "bands"),
    (lambda: correlated.LambdaCgd(decay=1.0), "decay"),
    (lambda: correlated.Bifr(gamma=1.0), "gamma"),
    (lambda: correlated.InverseBanded.fractional_root(3, -0.1), "gamma"),
    (lambda: correlated.LambdaCgd(objective="avg"), "objective"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field) as caught:
    make()
  assert "\n" not in str(caught.value)


# --- a game of its row


@dataclasses.dataclass(frozen=True)
class _OneDraw(correlated.InverseBanded):
  """A fault of redrawing alone: earlier steps' noise comes from the present step's key."""

  def redrawn(self, white, draws, memory, onto):
    return super().redrawn(lambda step: white(draws), draws, memory, onto)


def _games(kind):
  def make_plan(**numbers):
    coefficients = numbers["noise_shape"].correlation.coefficients
    shape = NoiseShape(correlation=kind(coefficients, redraw=True))
    return dpjax.Plan(**(numbers | {"noise_shape": shape}))

  return plans.GAMES["correlation:InverseBanded"](make_plan)


@pytest.mark.long
def test_earlier_noise_under_the_present_key_is_refuted_and_the_honest_one_stands():
  outcomes = {
    kind: any(result.refuted for result in play(_games(kind)[-1], num_draws=10_000))
    for kind in (_OneDraw, correlated.InverseBanded)
  }
  assert outcomes == {_OneDraw: True, correlated.InverseBanded: False}


def test_every_strategy_of_the_registry_has_a_row(monkeypatch):
  assert "strategy:bifr" in plans.GAMES
  monkeypatch.setitem(STRATEGIES, "newer", correlated.Bifr)
  assert registry.without_game("plans") == ["strategy:newer"]


@pytest.mark.slow
def test_a_release_adds_the_whole_row_to_the_data_at_once(monkeypatch):
  """Data that are rounded with a part of the noise would be no function of the exact sum."""
  onto = []
  original = inverse.InverseBanded.redrawn

  def watched(self, white, draws, memory, tree):
    onto.append(tree)
    return original(self, white, draws, memory, tree)

  monkeypatch.setattr(inverse.InverseBanded, "redrawn", watched)
  data = jax.tree.map(lambda leaf: leaf + 1e3, _TREE)
  secure = source.key_from_bytes(bytes(range(32)))
  for key, whole in ((secure, True), (jax.random.key(0), False)):
    state = init(key, _REDRAWN, _TREE)
    add_correlated(state, data, 1.5, correlation=_REDRAWN, num_steps=_STEPS)
    start = 0 if whole else 1e3
    assert all(np.all(leaf == start) for leaf in jax.tree.leaves(onto.pop()))


def test_a_state_of_float64_is_refused_where_jax_has_none():
  strategy = correlated.InverseBanded((1.0, -0.5, -0.25), redraw=False)
  with jax.enable_x64(True):
    state = init(jax.random.key(0), strategy, jnp.zeros(3, jnp.float64))
  with refuses("state.memory"):
    add_correlated(state, jnp.zeros(3), 1.0, correlation=strategy, num_steps=8)
