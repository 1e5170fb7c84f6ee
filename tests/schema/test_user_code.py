"""Runs made of a user's own parts, `notebooks/mine.py`: built, trained, and what is promised."""

import contextlib
import dataclasses
import pathlib
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import federated, sampling, training
from dpjax.checks import batches, influence
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.federated import build as federated_build
from dpjax.experiments.kinds.federated import user_code as own_parts
from dpjax.experiments.run import checkpoint, loop, run_keys
from dpjax.experiments.run import workdir as owner
from dpjax.federated import client
from dpjax.noise.gaussian import key_id
from dpjax.sampling.samplers import assumption
from dpjax.types import Batch
from dpjax.validate import UserError
from tests import own_folder, plans
from tests.refuses import refuses
from tests.runs.stops import on_save

fresh = own_folder.fresh
_NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def mine(monkeypatch):
  monkeypatch.syspath_prepend(_NOTEBOOKS)


def _with(config, **overrides):
  dotted = {path.replace("__", "."): value for path, value in overrides.items()}
  return fields.replace_all(config, dotted)


def _central(**overrides):
  small = {"num_steps": 4, "model__options": {}, "privacy__epsilon": None}
  small |= {"privacy__noise_multiplier": 1.0, "optimizer__learning_rate": 0.05}
  config = _with(quickstart.get_config(), **{"model__name": "mine:Net", **small})
  return _with(config, **overrides)


def _federated(**overrides):
  small = {"num_rounds": 2, "privacy__epsilon": None, "privacy__noise_multiplier": 1.0}
  small |= {"data__limit": 100, "partition__num_clients": 20, "clients_per_round": 5.0}
  return _with(_with(fed_quickstart.get_config(), **small), **overrides)


class MeanOfTheBatch(nn.Module):
  """What BatchNorm does: an example's logits depend on the others."""

  num_classes: int

  @nn.compact
  def __call__(self, x):
    x = x.reshape(x.shape[0], -1)
    return nn.Dense(self.num_classes)(x - x.mean(axis=0, keepdims=True))


@dataclasses.dataclass(frozen=True)
class OwnPoisson(sampling.PoissonSampler):
  """Says that it samples less than it does."""

  def event(self, inner):
    return sampling.PoissonSampler(self.sampling_prob / 2, self.capacity).event(inner)


def own_poisson(num_examples, sampling_prob):
  return OwnPoisson(sampling_prob, num_examples + 1)


@dataclasses.dataclass(frozen=True)
class NoRelations(OwnPoisson):
  relations = ()


def no_relations(num_examples, sampling_prob):
  return NoRelations(sampling_prob, num_examples + 1)


@dataclasses.dataclass(frozen=True)
class Everybody(sampling.Sampler):
  """All examples in every step, without amplification."""

  num_examples: int
  relations = ("add_or_remove_one", "replace_one", "replace_special")

  @property
  def padded_batch_size(self):
    return self.num_examples

  def event(self, inner):
    return inner

  def draw(self, num_examples, *, seed, step):
    return np.arange(num_examples)


def everybody(num_examples, sampling_prob):
  return Everybody(num_examples)


def private_median():
  return federated.median()._replace(private=True)


@pytest.mark.long
def test_a_run_of_ones_own_parts_says_which_code_it_ran(tmp_path):
  config = _central(
    loss="mine:focal_loss",
    data__name="mine:small_digits",
    optimizer__rule="mine:lion",
    privacy__sampler="mine:poisson",
  )
  result = loop.train(config, tmp_path)
  (start,) = result["starts"]
  assert len(start["modules"]["mine"]) == 64 and start["versions"]["dpjax"]
  assert result["epsilon_kind"] == "proved"  # the sampler is dpjax's own


@pytest.mark.slow
def test_own_parts_are_those_that_run():
  built = build.assemble(_central(loss="mine:focal_loss", data__name="mine:small_digits"))
  plain = build.assemble(_central(data__name="mine:small_digits"))
  assert built.train.num_classes == 5
  example = built.train[0]
  nats = plain.loss_fn(plain.params, example)
  assert float(built.loss_fn(plain.params, example)) == pytest.approx(
    float((1 - np.exp(-nats)) * nats), rel=1e-5
  )


@pytest.mark.long
def test_a_sampler_without_an_event_has_no_epsilon(tmp_path):
  result = loop.train(_central(privacy__sampler="mine:Halves"), tmp_path)
  assert result["epsilon"] is None and result["epsilon_kind"] == "none"
  with refuses("sampler"):
    config = _central(privacy__sampler="mine:Halves", privacy__noise_multiplier=None)
    build.assemble(fields.replace(config, "privacy.epsilon", 2.0))


@pytest.mark.slow
def test_an_own_event_is_claimed_and_check_finds_a_wrong_one():
  config = _central(privacy__sampler=f"{__name__}:own_poisson")
  subject = of_config.subject(config)
  assert assumption(subject.plan.sampler)
  assert batches.sampler_law(subject).passed is False


def test_a_step_that_draws_an_example_twice_is_found():
  subject = of_config.subject(_central(privacy__sampler=f"{__name__}:everybody"))
  assert batches.sampler_law(subject).passed is True
  twice = dataclasses.replace(
    subject, draw=lambda n, **at: np.repeat(subject.draw(n, **at), 2)
  )
  assert batches.sampler_law(twice).passed is False


def test_an_event_needs_relations():
  with pytest.raises(UserError, match="privacy.sampler=.*relations"):
    build.assemble(_central(privacy__sampler=f"{__name__}:no_relations"))


def test_a_capacity_that_an_own_sampler_does_not_have_is_refused():
  with refuses("privacy.sampler.capacity", value=700):
    build.assemble(_central(privacy__sampler="mine:Halves", privacy__sampler__capacity=700))


@pytest.mark.slow
def test_a_model_that_mixes_examples_is_found_by_check():
  subject = of_config.subject(_central(model__name=f"{__name__}:MeanOfTheBatch"))
  assert influence.cross_example(subject).passed is False
  honest = of_config.subject(_central())
  assert influence.cross_example(honest).passed is True


@pytest.mark.slow
def test_an_optimizer_sees_no_mask():
  seen = []

  def update(updates, state, params=None, **extra):
    seen.append(sorted(extra))
    return updates, state

  spy = optax.GradientTransformationExtraArgs(lambda params: (), update)
  plan = plans.of(4, normalize_by=2, num_steps=1)
  loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
  init, step = training.dp_sgd(loss_fn, plan, spy, noise_key=jax.random.key(0))
  step(init(jnp.zeros(1)), Batch(jnp.ones((2, 1)), jnp.array([True, False])))
  assert seen == [[]]


@pytest.mark.long
def test_an_own_client_is_clipped_and_noised_as_any_other(tmp_path):
  config = _federated(
    algorithm="mine:signs",
    server_optimizer__rule="mine:lion",
  )
  result = loop.train(config, tmp_path)
  assert result["epsilon_kind"] == "proved"


def test_an_own_client_without_examples_weighs_nothing():
  """It may send what it likes, but an emptied client must contribute nothing (replace_special)."""
  one = jnp.ones(())
  talks = federated.ClientAlgorithm(
    init=lambda received, memory, num_examples, key: received.params,
    step=lambda received, local, *batch: local,
    finish=lambda received, local: (
      client.Sent({"delta": local}, one), None, client.ClientInfo(*[one] * 5),
    ),
  )  # fmt: skip
  own = own_parts._client(talks, "mine:talks")
  received = client.Received(jnp.ones(2))
  for num_examples, weight in ((0, 0), (3, 1)):
    local = own.init(received, None, num_examples, jax.random.key(0))
    sent, _, info = own.finish(received, own.step(received, local, None, None))
    assert float(sent.weight) == float(info.weight) == weight


def test_a_whole_algorithm_is_refused_with_privacy_and_with_a_secure_sum():
  config = _federated(algorithm="mine:averaging")
  summed = _with(_without_privacy(config), secure_sum="secagg", clients_per_round=15.0)
  for guarded in (config, summed):
    with refuses("algorithm", value="mine:averaging"):
      federated_build.assemble(guarded)
  client = _with(summed, algorithm="mine:signs")
  assert federated_build.assemble(client).algorithm
  built = federated_build.assemble(_without_privacy(config))
  assert isinstance(built.algorithm, federated.FederatedAlgorithm)


def _without_privacy(config):
  return _with(config, privacy="none")


def test_an_own_aggregator_is_not_private_whatever_it_says():
  made = own_parts.aggregator(f"{__name__}:private_median")
  assert not made.private and made.plan is None
  config = _federated(aggregator=f"{__name__}:private_median")
  with refuses("aggregator"):
    federated_build.assemble(config)
  built = federated_build.assemble(_without_privacy(config))
  assert built.guarantee.kind == "none"


def test_users_may_be_sampled_by_an_own_sampler():
  built = federated_build.assemble(_federated(privacy__sampler=f"{__name__}:own_poisson"))
  assert built.guarantee.kind == "claimed"


@dataclasses.dataclass(frozen=True)
class OfUsers(sampling.CyclicSampler):
  unit = "user"


@dataclasses.dataclass(frozen=True)
class OfHouseholds(sampling.CyclicSampler):
  unit = "household"


def of_users(num_examples, sampling_prob):
  return OfUsers(round(1 / sampling_prob), num_examples)


def of_households(num_examples, sampling_prob):
  return OfHouseholds(round(1 / sampling_prob), num_examples)


def test_users_may_take_turns_by_an_own_sampler_of_users():
  ftrl = {"privacy": "dp_ftrl", "clients_per_round": 4.0}
  made = lambda name: federated_build.assemble(
    _federated(**ftrl, privacy__sampler=f"{__name__}:{name}")
  )
  guarantee = made("of_users").guarantee
  assert (guarantee.kind, guarantee.unit) == ("claimed", "user")
  statement = guarantee.statement(2)
  assert "Unit: one user" in statement and "example" not in statement.split("Noise:")[1]
  with refuses("privacy.sampler"):
    made("of_households")


@pytest.mark.cases(slow=["True", "False"])
@pytest.mark.parametrize("done", [False, True, "alone"])  # without its checkpoints
def test_a_run_goes_on_whatever_became_of_code_folder_and_user(
  tmp_path, fresh, done, monkeypatch
):
  """The keys are those of the folder. What each start ran is recorded, and refuses nothing."""
  folder, workdir = tmp_path / "code", tmp_path / "run"
  folder.mkdir()
  code = "import optax\ndef opt(rate): return optax.sgd(rate)\n"

  def enter(text):
    # A process reads a source once, so an edit is seen by the next one.
    (folder / "own_edited.py").write_text(text)
    fresh(folder)

  enter(code)
  config = _central(num_steps=2, checkpoint_every=1, optimizer__rule="own_edited:opt")

  def kill(step):
    if step == 1 and not done:
      raise KeyboardInterrupt

  with contextlib.suppress(KeyboardInterrupt), on_save(kill):
    loop.train(config, workdir)
  held = owner.recall(workdir)
  if done == "alone":
    shutil.rmtree(workdir / checkpoint.FOLDER)
  enter(code.replace("sgd(rate)", "sgd(lambda step: 2 * rate(step))"))
  monkeypatch.setenv("USER", "somebody")
  monkeypatch.chdir(tmp_path)
  result = loop.train(config, workdir)
  assert result["num_steps"] == 2
  kept = run_keys.from_meta(config.seed, held)
  assert result["ledger"]["charges"][0]["noise_key_id"] == key_id(kept.noise)
  seen = [start["modules"]["own_edited"] for start in result["starts"]]
  assert len(seen) == (1 if done else 2) and len({*seen}) == len(seen)


@pytest.mark.slow
def test_a_release_without_its_checkpoints_draws_no_other_keys(tmp_path):
  """Rows of the first ones are out."""
  small = {"num_steps": 2, "checkpoint_every": 1, "eval_every": 1, "grad_method": "vmap"}
  config = dataclasses.replace(_with(quickstart.get_config(), **small), release=True)

  def kill(step):
    if step == 1:
      raise KeyboardInterrupt

  with contextlib.suppress(KeyboardInterrupt), on_save(kill):
    loop.train(config, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / checkpoint.FOLDER)
  with pytest.raises(UserError, match="are gone"):
    loop.train(config, tmp_path / "run")
