"""Extraction of training text as a run: what is planted, what is found, what is refused."""

import collections
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from configs.attack import text_extraction as published
from dpjax import data
from dpjax.attacks import allowed
from dpjax.data import text
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import table, written_text
from dpjax.experiments.kinds.attack.config import Attack
from dpjax.experiments.run import loop, run_keys
from tests.refuses import refuses
from tests.runs.stops import stop_after


def load_tiny():
  """(train, test): short lines of bytes, without line ends."""
  lines = [f"line {i} of a text" for i in range(60)]
  x = text.encode_text(lines, max_length=24)
  parts = [
    data.from_arrays(
      part, np.zeros(len(part), np.int32), num_classes=1, vocab_size=256,
      nominal_size=nominal, split=split,
    )
    for part, nominal, split in ((x[:50], 50, "train"), (x[50:], None, "test"))
  ]  # fmt: skip
  return parts[0], parts[1]


def _config(**changes):
  small = {"target.data.name": "tests.runs.test_attack_text:load_tiny"}
  small |= {"target.model.options.features": 16, "target.model.options.max_length": 24}
  small |= {"attack.template": "{name}: {number}", "attack.records_each": 1}
  small |= {"attack.copies": (0, 20), "attack.digits": 3, "attack.num_lines": 60}
  small |= {"attack.first": (5, 20), "target.num_steps": 3}
  return fields.replace_all(fields.replace_all(published.get_config(), small), changes)


def _ran(config, folder):
  return loop.train(config, folder) | {"attack": "a", "defence": "b"}


@pytest.mark.slow
def test_records_take_the_place_of_lines_alike_under_every_defence():
  private = {"target.privacy": "dp_sgd", "target.privacy.epsilon": None}
  private |= {"target.privacy.noise_multiplier": 1.0}
  seen = []
  for changes in ({}, private):
    config = _config(**changes, **{"attack.copies": (0, 1, 3)})
    loaded = Attack(config).data()
    planted = config.attack.prepare(config, loaded, run_keys.draw(0, noise_seed=0))
    x = np.asarray(planted.run.train.x)
    texts = collections.Counter(written_text.texts_of(x))
    assert len(x) == len(loaded[0]) == 50
    assert [texts[record.text] for record in planted.records] == [0, 1, 3]
    assert sum(line.startswith(b"line") for line in texts.elements()) == 46
    for row in x:
      length = int(np.flatnonzero(np.append(row, 0) == 0)[0])
      assert row[0] == row[length - 1] == ord("\n")
    seen.append(x)
  np.testing.assert_array_equal(*seen)


@pytest.mark.long
def test_what_is_memorised_is_read_out_after_a_stop_too(tmp_path, monkeypatch):
  """A record in 20 of 50 lines, and one that is never there."""
  config = _config(**{"target.num_steps": 150, "target.privacy.sampling_prob": 0.5})
  whole = _ran(config, tmp_path / "whole")
  best = {row["ranking"]: row for row in whole["extracted"] if row["first"] == 20}
  assert best["zlib"]["count"] == 1 and best["zlib"]["by_copies"] == {"20": 1}
  assert best["zlib"]["controls"] == 0 and best["zlib"]["allowed"] is None
  assert best["zlib"]["verdict"] == "FAILS: secrets of the text are read out"
  stop_after(monkeypatch, 70)
  with pytest.raises(loop.Interrupted, match="step 70"):
    _ran(config, tmp_path / "run")
  assert _ran(config, tmp_path / "run")["extracted"] == whole["extracted"]
  table.write(tmp_path, [whole])
  assert (tmp_path / "attacks.png").exists()
  text = (tmp_path / "attacks.md").read_text()
  assert "1 of 1 records (1 with 20 copies)" in text and "zlib, first 20" in text


def test_a_model_that_diverged_is_one_line():
  nothing = lambda params, tokens: jnp.full((*tokens.shape, 256), jnp.nan)
  run = types.SimpleNamespace(
    apply=nothing, train=load_tiny()[0], random=run_keys.draw(0, private=False)
  )
  config = _config()
  attacked = written_text.Planted(run, [], np.full((2, 1), ord("\n")))
  with refuses("target"):
    config.attack.measure(
      config, attacked, types.SimpleNamespace(ema=None, opt_state=(), params={})
    )


def test_other_braces_of_a_template_are_text():
  settings = written_text.WrittenText(template="{} {0} {name}{number}", digits=3)
  records = written_text.invent(settings, np.random.default_rng(0))
  known = {
    re.fullmatch(rb"\{\} \{0\} [A-Z][a-z]+ [A-Z][a-z]+\d{3}", r.text) for r in records
  }
  assert None not in known


def test_a_table_says_what_a_guarantee_of_lines_allows_for_groups():
  """A record in 200 lines of 1-Gaussian DP is 200-Gaussian, which allows everything."""
  line = allowed.by_mu(1.0)
  planted = [written_text.Record(b"a", 200), written_text.Record(b"b", 1)]
  most = written_text.allowed_by_copies(line, planted, 10, digits=3)
  assert [*most] == ["1", "200"] and most["200"] == 1.0
  assert most["1"] == pytest.approx(stats.norm.cdf(stats.norm.ppf(0.01) + 1))
  words = written_text.words_on_groups(planted, {"first": 10, "allowed_by_copies": most})
  assert words.endswith("0.09237 of 1 in 1 line, 1 of 1 in 200 lines")
  assert words in table.remarks([{"attack": "a", "defence": "b", "of_groups": words}])


def test_a_verdict_has_any_number_of_records():
  verdicts = [written_text.verdict(found, 1000, 10**6, None) for found in (1, 171, 1000)]
  assert verdicts == ["FAILS: secrets of the text are read out"] * 3


@pytest.mark.long
def test_an_untrained_model_tells_nothing_and_its_line_bounds_the_copies(tmp_path):
  private = {"target.privacy": "dp_sgd", "target.privacy.epsilon": None}
  private |= {"target.privacy.noise_multiplier": 9.0, "attack.copies": (0, 1, 3)}
  result = _ran(_config(**private, **{"target.num_steps": 1}), tmp_path)
  for row in result["extracted"]:
    assert row["count"] == row["controls"] == 0 and row["verdict"] == "not shown to fail"
    # Without the guarantee's factor: two records, `first` guesses of 1,000 numbers each.
    assert 2 * row["first"] / 1000 < row["allowed"] < 0.1


@pytest.mark.cases(quick=[0, 1, 2, 4, 8], long=...)
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"attack.template": "{name} only"}, "config.attack.template"),
    ({"target.data.center": True}, "target.data.center"),
    ({"attack.template": "{name}\n{number}"}, "config.attack.template"),
    ({"attack.template": "{name}\0{number}"}, "config.attack.template"),
    ({"attack.copies": (10**12,)}, "attack.copies"),
    ({"attack.copies": (0,)}, "config.attack.copies"),
    ({"attack.copies": (4, 1)}, "config.attack.copies"),
    ({"attack.first": (0, 5)}, "config.attack.first"),
    ({"attack.digits": 8}, "config.attack.digits"),
    ({"attack.temperature": 0.0}, "config.attack.temperature"),
    ({"attack.copies": (30,)}, "attack.copies"),
    ({"attack.template": "{name}: {number} is far too long"}, "attack.template"),
    ({"attack.prompt_length": 30}, "attack.prompt_length"),
    ({"target.model.name": "mlp", "target.model.options": {}}, "target.model.name"),
    ({"attack": "membership"}, "target.model.name"),
  ],
)
def test_a_mistake_is_one_line_that_names_its_field(changes, field, tmp_path):
  with refuses(field):
    _ran(_config(**changes), tmp_path / "run")
