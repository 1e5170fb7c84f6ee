"""Two runs share no key; other data under a run are noticed; what follows from the data without
noise stands in checkpoints alone."""

import dataclasses
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import ModelConfig, Sgd, TrainConfig
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated.config import FedConfig, NoPrivacy
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig
from dpjax.experiments.run import checkpoint, loop, run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import sweep
from dpjax.noise import source
from dpjax.noise.gaussian import key_id
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs.stops import die, stop_after

_ROWS = 120


def _central(**overrides):
  small = {
    "grad_method": "vmap", "num_steps": 4, "eval_every": 2, "checkpoint_every": 2,
    "model.name": "linear", "model.options": {}, "privacy.epsilon": None,
    "privacy.noise_multiplier": 2.0, "privacy.sampling_prob": 0.2,
    "data.name": "mine.npz", "data.num_examples": _ROWS,
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(quickstart.get_config(), small), overrides)


def _federated(**overrides):
  small = {
    "num_rounds": 4, "eval_every": 2, "checkpoint_every": 2, "data.name": "mine.npz",
    "partition.num_clients": 12, "clients_per_round": 4.0, "local.epochs": 1,
    "privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "model.name": "linear",
    "model.options": {},
  }  # fmt: skip
  return fields.replace_all(
    fields.replace_all(fed_quickstart.get_config(), small), overrides
  )


def _relevance(**overrides):
  base = RelevanceConfig(
    data=ExamplesConfig(name="mine.npz", num_examples=_ROWS), model=NetworkConfig(name="linear"),
    method="dpsgd", num_epochs=1, batch_size=40, epsilon=4.0,
  )  # fmt: skip
  return fields.replace_all(base, overrides)


_KINDS = {
  "central": (_central, loop.train, build),
  "federated": (_federated, loop.train, federate_build),
  "relevance": (_relevance, loop.train, relevance_build),
}


def _arrays(seed=0):
  rng = np.random.default_rng(seed)
  x, y = rng.random((_ROWS, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, _ROWS)
  return dict(
    x_train=x,
    y_train=y,
    x_test=x[:20].copy(),
    y_test=y[:20].copy(),
    num_classes=np.int64(3),
  )


def _write(folder, **changes):
  arrays = {**_arrays(), **changes}
  np.savez(folder / "mine.npz", **arrays)
  return arrays


def _changes():
  """Relatives of one record changed: every name is a way in which data can differ."""
  arrays = _arrays()
  x, y = arrays["x_train"], arrays["y_train"]
  touched = x.copy()
  touched[17, 2, 1, 0] = np.nextafter(touched[17, 2, 1, 0], np.float32(2))
  labelled = y.copy()
  labelled[3] = (labelled[3] + 1) % 3
  order = np.r_[1, 0, 2:_ROWS]
  return {
    "one bit of one pixel": dict(x_train=touched),
    "one label": dict(y_train=labelled),
    "one record fewer": dict(x_train=x[1:], y_train=y[1:]),
    "one record more": dict(x_train=np.r_[x, x[:1]], y_train=np.r_[y, y[:1]]),
    "two records swapped": dict(x_train=x[order], y_train=y[order]),
    "another shape": dict(
      x_train=x.reshape(-1, 2, 8, 1), x_test=x[:20].reshape(-1, 2, 8, 1)
    ),
    "one class more": dict(num_classes=np.int64(4)),
  }


def _digest_of(kind, config, folder):
  config = fields.replace_all(config, {"data.data_dir": str(folder)})
  if kind == "relevance":
    return relevance_build.data_digest(config, {})
  return data.digest(_KINDS[kind][2].load_data(config, features=False)[0])


def _secret(random):
  return {key_id(random.noise), key_id(random.local), random.sampler}


def _public(random):
  return key_id(random.init), random.order


# --- the digest


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("changes", [{}, {"release": True}])
def test_p46_two_runs_of_one_config_share_neither_noise_nor_batches(kind, changes):
  if kind == "relevance" and changes:
    changes = {"method": "radp_rigorous"}
  run = experiment_of(_KINDS[kind][0](**changes))
  one, other = run.new_keys(), run.new_keys()
  assert len(_secret(one)) == 3 and _secret(one).isdisjoint(_secret(other))
  assert _public(one) == _public(other)  # of the seed alone
  assert key_id(one.init) not in _secret(one)
  assert all(map(source.is_release, (one.noise, one.local))) == bool(changes)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_noise_seed_repeats_noise_and_sampling(kind):
  keys = lambda **changes: experiment_of(_KINDS[kind][0](**changes)).new_keys()
  assert keys(noise_seed=3) == keys(noise_seed=3)
  one = keys(noise_seed=3)
  for changes in ({"noise_seed": 4}, {"noise_seed": 3, "seed": 1}):
    other = keys(**changes)
    assert _secret(one).isdisjoint(_secret(other)), changes
    assert (_public(one) == _public(other)) == ("seed" not in changes)


def test_without_privacy_every_algorithm_meets_the_same_cohorts():
  """All follows from the seed. With privacy, the cohorts are secret."""

  def keys(**changes):
    private = _federated(**{k: v for k, v in changes.items() if k != "privacy"})
    return experiment_of(fields.replace_all(private, changes)).new_keys()

  plain = {"privacy": NoPrivacy()}
  averaging = keys(**plain)
  assert averaging == keys(**plain, algorithm="fed_prox")
  assert averaging.sampler != keys(**plain, seed=1).sampler
  assert keys().sampler != keys().sampler
  config = _central(**{"data.num_examples": None})
  config = dataclasses.replace(config, privacy=Sgd())
  assert experiment_of(config).new_keys() == experiment_of(config).new_keys()


@pytest.mark.parametrize("kind", _KINDS)
def test_every_change_of_the_data_is_noticed(kind, tmp_path):
  config = _KINDS[kind][0]()
  _write(tmp_path)
  first = _digest_of(kind, config, tmp_path)
  assert first == _digest_of(kind, config, tmp_path)
  for name, change in _changes().items():
    _write(tmp_path, **change)
    assert _digest_of(kind, config, tmp_path) != first, name


def test_the_test_set_and_names_are_no_part_of_the_data(tmp_path):
  arrays = _write(tmp_path)
  before = _digest_of("central", _central(), tmp_path)
  _write(tmp_path, y_test=(arrays["y_test"] + 1) % 3)
  assert _digest_of("central", _central(), tmp_path) == before


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_two_federations_have_one_digest_only_where_they_are_equal(draw):
  """Rows, owners, their order and their names; the bounds between clients too."""
  base = data.from_arrays(np.arange(5.0)[:, None], [0, 1, 1, 0, 1], num_classes=2)

  def drawn():
    rows = draw.draw(st.permutations(range(5)))
    cut = draw.draw(st.integers(0, 5))
    names = draw.draw(st.sampled_from([("a", "b"), ("b", "a"), ("0", "1")]))
    return data.Federation(base, [rows[:cut], rows[cut:]], names)

  one, other = drawn(), drawn()
  what = lambda f: ([rows.tolist() for rows in f.indices], f.client_ids)
  assert (data.digest(one) == data.digest(other)) == (what(one) == what(other))


_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-4, 4)
  | st.floats(-4, 4)
  | st.sampled_from("01x"),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(["0", "1", "a", "mapping", "number"]), inner, max_size=3
    )
  ),
  max_leaves=6,
)


@hypothesis.given(_VALUES, _VALUES)
@hypothesis.settings(max_examples=300)
def test_configs_differ_exactly_where_they_are_not_equal(one, other):
  """As a folder's config is compared: dicts have no order; a number is one number in a field,
  which has a type, and True, 1 and 1.0 are three among a model's options."""
  differ = lambda *values: any(owner.differences(*values))
  assert differ({"field": one}, {"field": other}) == (one != other)
  assert not differ({"field": one}, {"field": json.loads(json.dumps(one))})
  options = lambda value: {"model": {"options": {"a": value}}}
  typed = lambda value: json.dumps(value, sort_keys=True)
  assert differ(options(one), options(other)) == (typed(one) != typed(other))


@hypothesis.given(_VALUES, _VALUES)
@hypothesis.settings(max_examples=300)
def test_data_have_one_digest_before_and_after_a_file_holds_them(one, other):
  typed = lambda value: json.dumps(value, sort_keys=True)
  assert writers.digest(one) == writers.digest(json.loads(json.dumps(one)))
  assert (writers.digest(one) == writers.digest(other)) == (typed(one) == typed(other))


def test_features_are_known_by_what_they_were_computed_from(tmp_path):
  _write(tmp_path, x_train=np.zeros((9, 8, 8), np.uint8), y_train=np.zeros(9, int),
         x_test=np.zeros((2, 8, 8), np.uint8), y_test=np.zeros(2, int))  # fmt: skip
  config = _central(**{"model.name": "scatter_linear", "data.data_dir": str(tmp_path)})
  features, arrays = (build.load_data(config, features=f)[0] for f in (True, False))
  assert features.x.shape != arrays.x.shape
  assert data.digest(features) == data.digest(arrays)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["central", "federated"])
@pytest.mark.parametrize("model", ["linear", "scatter_linear"])
def test_a_run_reads_its_data_once(kind, model, tmp_path, monkeypatch):
  make, train, kind_module = _KINDS[kind]
  draw = np.random.default_rng(0)
  arrays = lambda n: (draw.random((n, 8, 8, 1), np.float32), draw.integers(0, 3, n))
  (x, y), (x_test, y_test) = arrays(60), arrays(20)
  _write(tmp_path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
  place = {"model.name": model, "data.data_dir": str(tmp_path)}
  config = fields.replace_all(make(), place)
  reads, load = [], data.load
  monkeypatch.setattr(data, "load", lambda *a, **k: reads.append(a) or load(*a, **k))
  config = dataclasses.replace(config, noise_seed=0)
  own = train(config, tmp_path / "own")
  assert len(reads) == 1
  given = train(config, tmp_path / "given", data=kind_module.load_data(config))
  assert own["params_sha256"] == given["params_sha256"]


# --- runs


def _run(kind, config, workdir, folder):
  return _KINDS[kind][1](
    fields.replace_all(config, {"data.data_dir": str(folder)}), workdir
  )


def _secrets_of(digest):
  return digest, digest.hex().encode()


@pytest.mark.long
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("ends", ["finished", "cut off"])
def test_a_run_does_not_go_on_with_other_data(kind, ends, tmp_path, monkeypatch):
  make, *_ = _KINDS[kind]
  _write(tmp_path)
  digest, workdir = _digest_of(kind, make(), tmp_path), tmp_path / "run"
  if ends == "cut off":
    _cut_off(kind, make(), workdir, tmp_path, monkeypatch)
  else:
    _run(kind, make(), workdir, tmp_path)
  for change in list(_changes().values())[:2]:
    _write(tmp_path, **change)
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    with refuses("data.name", value="mine.npz") as caught:
      _run(kind, make(), workdir, tmp_path)
    assert str(workdir) in str(caught.value) and "\n" not in str(caught.value)
    assert not any(s.hex()[:12] in str(caught.value) for s in (digest,))
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
  _write(tmp_path)
  _run(kind, make(), workdir, tmp_path)  # nothing was lost
  held = [p for p in workdir.rglob("*") if p.is_file() and "checkpoints" not in p.parts]
  assert len(held) > 3
  for path in held:
    content = path.read_bytes()
    assert not any(secret in content for secret in _secrets_of(digest)), path


def test_an_unfinished_save_is_no_checkpoint(tmp_path):
  for name in ("2.npz", "phase/3.npz", "phase/.7.npz.1.tmp"):
    path = tmp_path / checkpoint.FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  assert checkpoint.newest(tmp_path) == 3


def _cut_off(kind, config, workdir, folder, monkeypatch):
  stop_after(monkeypatch, 1, die, subfolder="model_2" if kind == "relevance" else "")
  with pytest.raises(KeyboardInterrupt):
    _run(kind, config, workdir, folder)
  assert checkpoint.newest(workdir) == 0  # the data are remembered before the first step


@pytest.mark.long
@pytest.mark.parametrize("kind", ["central", "federated"])
def test_a_release_does_not_go_on_with_other_data(kind, tmp_path, monkeypatch):
  make, *_ = _KINDS[kind]
  config, workdir = make(release=True), tmp_path / "run"
  _write(tmp_path)
  _cut_off(kind, config, workdir, tmp_path, monkeypatch)
  held = owner.recall(workdir)
  _write(tmp_path, **_changes()["one label"])
  with refuses("data.name"):
    _run(kind, config, workdir, tmp_path)
  _write(tmp_path)
  result = _run(kind, config, workdir, tmp_path)
  kept = run_keys.from_meta(config.seed, held)
  assert result["ledger"]["charges"][0]["noise_key_id"] == key_id(kept.noise)


@pytest.mark.cases(long=["federated"], slow=...)
@pytest.mark.parametrize("kind", ["central", "federated"])
def test_nothing_but_noisy_parameters_tells_two_data_sets_apart(kind, tmp_path):
  """What is written of two runs on other data with one noise: no name, no id that differs."""
  make, *_ = _KINDS[kind]
  results = []
  for name, shift in (("a", 0), ("b", 1)):
    _write(tmp_path, y_train=(_arrays()["y_train"] + shift) % 3)
    config = make(diagnostics=False, noise_seed=0)
    results.append(_run(kind, config, tmp_path / name, tmp_path))
  assert results[0]["params_sha256"] != results[1]["params_sha256"]
  noisy = {"params_sha256", "wall_seconds", "test_accuracy", "test_loss"}
  noisy |= {"run_sha256"}  # of the config and of the other keys
  noisy |= {"files_sha256"}  # of parameters and scores
  left = [{k: v for k, v in result.items() if k not in noisy} for result in results]
  assert left[0] == left[1]
  assert "noise_key_id" in json.dumps(left[0])


@pytest.mark.cases(slow=["federated"])
@pytest.mark.parametrize("kind", ["central", "federated"])
def test_a_run_whose_keys_are_gone_is_not_gone_on_with(kind, tmp_path, monkeypatch):
  make, *_ = _KINDS[kind]
  _write(tmp_path)
  _cut_off(kind, make(), tmp_path / "run", tmp_path, monkeypatch)
  (tmp_path / "run" / checkpoint.FOLDER / "run.json").unlink()
  with pytest.raises(UserError, match="are gone.*nothing was changed") as caught:
    _run(kind, make(), tmp_path / "run", tmp_path)
  assert "\n" not in str(caught.value)


_VARIED = {
  "central": ("privacy.noise_multiplier", (2.0, 3.0), {"privacy.noise_multiplier": None}),
  "relevance": ("epsilon", (4.0, 5.0), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", _VARIED)
def test_a_sweep_on_changed_data_does_not_keep_what_it_had(kind, tmp_path):
  """Else one curve would be of two data sets, and say so nowhere."""
  _write(tmp_path)
  name, values, changes = _VARIED[kind]
  base = _KINDS[kind][0](**{"data.data_dir": str(tmp_path), **changes})
  named = [(str(value), fields.replace(base, name, value)) for value in values]
  config = sweep.Sweep(x=name) if kind == "central" else None
  rows = sweep.run(named, tmp_path / "sweep", config)
  assert [row["status"] for row in rows] == ["done", "done"]
  again = sweep.run(named, tmp_path / "sweep", config)
  assert [r["params_sha256"] for r in again] == [r["params_sha256"] for r in rows]
  _write(tmp_path, **_changes()["one label"])
  rows = sweep.run(named, tmp_path / "sweep", config)
  assert [row["status"] for row in rows] == ["failed", "failed"]
  assert "are not the data of the run" in rows[0]["error"]


def test_a_number_beyond_every_float_has_its_own_name():
  """One of a result.json that somebody edited."""
  assert writers.digest(10**400) != writers.digest(10**400 + 1)


@pytest.mark.parametrize(
  ("config", "section"),
  [
    (TrainConfig(), "data."),
    (FedConfig(), "data."),
    (PateConfig(), "data."),
    (SynthesisConfig(), "data."),
    (RelevanceConfig(), "data."),
    (SecureConfig(task="infer"), "task.train.data."),
    (AttackConfig(), "target.data."),
  ],
)
def test_where_data_lie_is_no_part_of_a_runs_name(config, section, tmp_path):
  digest = owner.config_digest
  places = {f"{section}{name}": "/elsewhere" for name in owner.PLACES}
  moved = fields.replace_all(config, places)
  assert moved != config and digest(moved) == digest(config)
  owner.claim(tmp_path, config)
  owner.recall_for(tmp_path, moved)  # their digest says whether they are the same data
  assert digest(fields.replace(config, f"{section}name", "mnist")) != digest(config)


def test_a_field_of_that_name_elsewhere_is_part_of_a_runs_name():
  config = TrainConfig(model=ModelConfig("mlp", {"data_dir": 1}))
  assert owner.config_digest(config) != owner.config_digest(TrainConfig())
