"""Own parts that lie: a guarantee either holds without their word, or says that it rests on it."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import accounting, federated, gradients, noise, sampling, transforms
from dpjax.experiments.config import user_code
from dpjax.experiments.kinds.federated import user_code as fed_parts
from dpjax.experiments.run import guarantee
from dpjax.federated import client as client_lib
from dpjax.federated.execution import context as context_lib
from dpjax.gradients.clipping import clip_and_sum
from dpjax.sampling import batches, samplers
from dpjax.sampling.registry import Sizing
from dpjax.transforms.together import features
from dpjax.validate import UserError, Verbatim
from tests.refuses import refuses

_POISSON = dpjax.PoissonSampler(sampling_prob=0.1, capacity=64)


def _plan(**changed):
  numbers = dict(noise_multiplier=1.0, l2_clip_norm=1.0, normalize_by=10, num_steps=3)
  return dpjax.Plan(**{"sampler": _POISSON, "delta": 1e-5, **numbers, **changed})


class _Constant(gradients.ClipRule):
  def factors(self, lengths, top, most):
    return jnp.full_like(lengths, 5.0) * most


class _NaN(gradients.ClipRule):
  def factors(self, lengths, top, most):
    return lengths * jnp.nan


class _Negative(gradients.ClipRule):
  def factors(self, lengths, top, most):
    return jnp.full_like(lengths, -5.0)


class _OfTheBatch(gradients.ClipRule):
  """Would let one example decide how all others are shortened."""

  def factors(self, lengths, top, most):
    return most * jnp.where(lengths.sum() > 100, 0.0, top / (lengths + 1))


class _Top(gradients.ClipRule):
  """Would have factors for another length than what the sum is multiplied for."""

  asked: ClassVar[list[float]] = []

  def top(self, bound):
    self.asked.append(bound)
    return bound if len(self.asked) % 2 else bound / 1000

  def factors(self, lengths, top, most):
    return jnp.full_like(lengths, most)


class _Visible(gradients.ClipRule):
  """Would have norms of tiny entries lost to underflow."""

  def visible(self, bound):
    return 1e30

  def factors(self, lengths, top, most):
    return jnp.minimum(most, top / lengths)


@pytest.mark.cases(long=["_Top-1.0-entries0"])
@pytest.mark.parametrize(
  ("rule", "norm", "entries"),
  [(_Top, 1.0, [[3.0, 4.0]]), (_Visible, 1e-22, [[1e-20] * 10**4])],
)
def test_what_a_rule_says_of_lengths_does_not_lengthen_the_sum(rule, norm, entries):
  clip = gradients.Clip(norm, rule())
  found = clip_and_sum(jnp.array(entries), jnp.zeros(1), True, clip).total
  assert np.linalg.norm(np.asarray(found, np.float64)) <= norm * (1 + 1e-6)


@pytest.mark.cases(long=["0.0", "-1.0"])
@pytest.mark.parametrize("top", [0.0, -1.0, None, float("nan")])
def test_a_rule_without_a_longest_gradient_is_one_line(top):
  rule = type("Rule", (_Constant,), {"top": lambda self, bound: top})()
  with pytest.raises(UserError, match=r"Rule.top\(1.0\)=.*: must be a number > 0"):
    clip_and_sum(jnp.ones((2, 3)), jnp.zeros(2), True, gradients.Clip(1.0, rule))


@pytest.mark.cases(quick=["_Negative-auto", "_Negative-vmap", "_OfTheBatch-vmap"], long=...)
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("rule", [_Constant, _NaN, _Negative, _OfTheBatch])
def test_a_rule_that_breaks_its_word_moves_the_sum_by_no_more_than_the_bound(rule, method):
  clip = gradients.Clip(1.0, rule())
  grad = gradients.clipped_grad(
    lambda w, x: jnp.sum(w * x), l2_clip_norm=clip, method=method
  )
  batch = jnp.ones((5, 3)).at[4].set(1e6)
  summed = lambda mask: grad(jnp.ones(3), batch, mask).total
  moved = summed(jnp.ones(5, bool)) - summed(jnp.arange(5) < 4)
  assert jnp.linalg.norm(moved) <= 1 + 1e-6


def _mixing():
  @jax.custom_batching.custom_vmap
  def mixed(x):
    return x

  @mixed.def_vmap
  def rule(size, batched, x):
    return jnp.broadcast_to(x.sum(0), x.shape), True

  return mixed


def _in_a_derivative(mixed):
  @jax.custom_vjp
  def product(w, x):
    return jnp.sum(w * x)

  product.defvjp(
    lambda w, x: (jnp.sum(w * x), x), lambda x, ct: (ct * mixed(x), jnp.zeros_like(x))
  )
  return product


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("inside", ["loss", "derivative"])
def test_a_batching_rule_of_ones_own_would_see_all_examples(method, inside):
  mixed = _mixing()
  losses = {
    "loss": lambda w, x: jnp.sum(w * mixed(x)),
    "derivative": _in_a_derivative(mixed),
  }
  grad = gradients.clipped_grad(losses[inside], l2_clip_norm=1.0, method=method)
  with refuses("loss_fn"):
    grad(jnp.ones(2), jnp.ones((3, 2)), True)


def test_a_callback_that_is_handed_the_batch_is_refused():
  def loss(w, x):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    seen = jax.pure_callback(np.asarray, shape, x, vmap_method="broadcast_all")
    return jnp.sum(w * jax.lax.stop_gradient(seen))

  with refuses("loss_fn"):
    gradients.clipped_grad(loss, l2_clip_norm=1.0)(jnp.ones(2), jnp.ones((3, 2)), True)


@dataclasses.dataclass(frozen=True)
class _Everybody(dpjax.PoissonSampler):
  def draw(self, num_examples, *, seed, step):
    return np.arange(num_examples)


def test_a_sampler_that_takes_the_name_of_our_module_is_still_its_authors(monkeypatch):
  assert not samplers.assumption(_POISSON)
  monkeypatch.setattr(_Everybody, "__module__", "dpjax.sampling.samplers")
  assert samplers.assumption(_Everybody(sampling_prob=0.1, capacity=64))
  patched = dpjax.PoissonSampler(sampling_prob=0.1, capacity=64)
  object.__setattr__(patched, "draw", lambda n, *, seed, step: np.arange(n))
  assert samplers.assumption(patched)


def test_the_statement_of_a_claim_says_so():
  told = lambda **parts: " ".join(_plan(**parts).statement(100).split())
  assert "kind: proved" in told()
  assert "kind: claimed" in told(sampler=_Everybody(sampling_prob=0.1, capacity=64))


@dataclasses.dataclass(frozen=True)
class _Adapts(transforms.AdaptiveClipping):
  """Says that its count costs next to nothing."""

  def combined_noise_multiplier(self, noise_multiplier, normalize_by):
    return noise_multiplier


def test_a_run_whose_clipping_rule_states_its_own_price_promises_a_claim():
  for rule, kind in ((transforms.AdaptiveClipping(), "proved"), (_Adapts(), "claimed")):
    plan = _plan(l2_clip_norm=dpjax.Clip(1.0, rule))
    made = guarantee.of_plan(plan, 100)
    assert made.kind == kind and f"kind: {kind}" in " ".join(made.statement(3).split())
    assert [text.split(":")[0] for text in made.failed_assumptions] == (
      ["_Adapts"] if kind == "claimed" else []
    )


def test_a_simulation_whose_own_cohorts_are_a_claim_says_so():
  for sampler, failed in (
    (_POISSON, []),
    (_Everybody(sampling_prob=0.1, capacity=64), ["_Everybody"]),
  ):
    made = guarantee.of_plan(_plan(), 1000, ran=_plan(sampler=sampler), deployed=100_000)
    result = made.facts(accounting.Ledger(), 1.0)
    assert result["epsilon_kind"] == "simulated" and "epsilon_of_this_run" in result
    said = [text.split(":")[0] for text in result.get("failed_assumptions", [])]
    assert said == failed
    assert ("what really ran is not proved" in guarantee.summary(result)) == bool(failed)


@pytest.mark.parametrize(
  "drawn", [[0.5, 1.0], [[0, 1]], [0, 0], [-1], [100], range(65), "ab"]
)
def test_an_own_draw_that_no_batch_can_hold_is_refused(drawn):
  made = _Drawn(sampling_prob=0.1, capacity=64, drawn=drawn)
  with pytest.raises(UserError, match="must return a vector of distinct integers"):
    batches.draw_rows(made, 100, seed=0, step=3)


@dataclasses.dataclass(frozen=True)
class _Drawn(dpjax.PoissonSampler):
  drawn: object

  def draw(self, num_examples, *, seed, step):
    return self.drawn


def test_rows_that_are_examples_are_no_users():
  with refuses("privacy.sampler"):
    user_code.sampler(f"{__name__}:_users", "privacy.sampler", Sizing(0.5, num_examples=9))


def _users(num_examples, sampling_prob):
  return sampling.BoundedContributionSampler(sampling_prob, num_examples + 1, 1)


@pytest.mark.parametrize(
  ("make", "field", "value"),
  [
    (lambda: noise.NoiseShape(schedule=3.0), "schedule", 3.0),
    (lambda: noise.NoiseShape(correlation="blt"), "correlation", "blt"),
    (lambda: gradients.Clip(1.0, schedule=3.0), "schedule", 3.0),
    (lambda: _plan(noise_shape=None), "noise_shape", None),
    (lambda: _plan(sampler="poisson"), "sampler", Verbatim("'poisson'")),
    (
      lambda: _plan(sampler=dpjax.PoissonSampler),
      "sampler",
      Verbatim(repr(dpjax.PoissonSampler)),
    ),
    (lambda: features(gradients.Clip(1.0), 2.0), "noise_shape", 2.0),
  ],
)
def test_what_is_no_value_of_its_kind_is_refused_in_a_line(make, field, value):
  with refuses(field, value=value):
    make()


def test_a_client_whose_loss_sees_other_clients_is_refused():
  mixed = _mixing()
  client = federated.local_training(lambda w, x: jnp.sum(w * mixed(x)), optax.sgd(0.1))
  received = client_lib.Received(jnp.ones(2))
  local = client.init(received, None, jnp.int32(1), jax.random.key(0))
  with refuses("loss_fn"):
    client.step(received, local, jnp.ones((1, 2)), jnp.array([True]))


@pytest.mark.parametrize("execution", ["vmap_clients", "pmap_clients", "shard_map_clients"])
@pytest.mark.parametrize("place", ["begins", "ends"])
def test_a_client_that_mixes_itself_with_others_is_refused_where_they_run_together(
  execution, place
):
  mixed, usual = _mixing(), federated.local_training(_square, optax.sgd(0.1))

  def begins(received, *rest):
    return usual.init(received._replace(params=mixed(received.params)), *rest)

  def ends(received, local):
    sent, *rest = usual.finish(received, local)
    return sent._replace(message=mixed(sent.message)), *rest

  own = {"begins": {"init": begins}, "ends": {"finish": ends}}[place]
  cohort = federated.from_batches([jnp.ones((2, 2)), jnp.ones((2, 2))], batch_size=1)
  run = getattr(federated, execution)()(usual._replace(**own), None)
  context = context_lib.Context(
    client_lib.Received(jnp.ones(2)), None, None, jax.random.key(0), ()
  )
  with refuses("client"):
    run(context, cohort)


def _square(w, x):
  return jnp.sum((w * x) ** 2)


def _optimizer_of_words(rate):
  return optax.GradientTransformation(lambda p: "none", lambda u, s, p=None: (u, s))


def _optimizer_of_two(rate):
  return optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (jnp.ones(2), s))


def _loss_of_nothing(apply):
  return lambda: 0.0


def test_ones_own_optimizer_and_loss_are_named_when_they_return_the_wrong_thing():
  named = lambda name: f"{__name__}:{name}"
  with refuses("optimizer.rule"):
    user_code.optimizer(named("_optimizer_of_words"), 0.1).init(jnp.ones(3))
  with refuses("optimizer.rule"):
    user_code.optimizer(named("_optimizer_of_two"), 0.1).update(jnp.ones(3), ())
  with refuses("loss"):
    user_code.loss(named("_loss_of_nothing"))(None)


def test_a_loss_of_words_ends_in_a_line():
  with refuses("loss_fn"):
    gradients.clipped_grad(lambda w, x: "low", l2_clip_norm=1.0)(
      jnp.ones(2), jnp.ones((3, 2)), True
    )


def _silent_client(loss_fn, client_tx, **_):
  made = federated.local_training(loss_fn, client_tx)
  return made._replace(finish=lambda received, local: ({}, None, {}))


def test_ones_own_client_is_named_when_it_sends_the_wrong_thing():
  clients = fed_parts._client(_silent_client(None, optax.sgd(0.1)), "mine:silent").finish
  with refuses("algorithm", value="mine:silent"):
    clients(client_lib.Received(jnp.ones(2)), None)
