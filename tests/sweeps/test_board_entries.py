"""Entries for the leaderboard: numbers of curve.csv, the board's keys, and what it refuses."""

import csv
import dataclasses
import decimal
import json
import pathlib
import shutil

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from dpjax.experiments.run import loop
from dpjax.experiments.sweeps import leaderboard
from dpjax.validate import UserError
from tests.runs import small_run

_SWEEP = "results/cifar10_patches"
_PUBLIC = "results/cifar10_vgg_96"
_SOURCE = leaderboard.BoardMethod(name="Patches", authors="A. Researcher")
# As the board has it: a tab after a key, numbers as words, a claim without private data.
_BOARD = """# -
#   name: an entry that was taken back
-
  name: Scattering
  authors: Tramèr and Boneh
  venue: \tICLR 2021
  claims:
    - model: ScatterNet + Linear
      epsilon: 1
      delta:  1e-5
      private_accuracy: 71.0%
      analyses:
    - model: zero shot
      epsilon: 0
      private_accuracy: 99.75%
    - model: by area
      epsilon: .1
      private_accuracy: 98.0% AUC
    - model: pure bits
      epsilon: $$\\ell_0 (\\epsilon = 112)$$
      private_accuracy: 98.0%
"""


def test_claims_are_the_means_of_the_curve():
  entry = leaderboard.read([_SWEEP])
  with open(f"{_SWEEP}/curve.csv", newline="") as file:
    rows = list(csv.DictReader(file))
  assert entry.file == "_data/_CIFAR-10/CIFAR10_no.yml"
  assert [claim.seeds for claim in entry.claims] == [int(row["seeds"]) for row in rows]
  for claim, row in zip(entry.claims, rows, strict=True):
    # What stands on the board holds: no smaller epsilon and no larger accuracy than measured.
    assert float(row["epsilon"]) <= claim.epsilon == float(row["privacy.epsilon"])
    shown = float(claim.accuracy.removesuffix("%")) / 100
    assert 0 <= float(row["test_accuracy_mean"]) - shown < 1e-4
    assert claim.meaning == (row["epsilon_kind"], row["neighboring_relation"])
    assert claim.delta == float(row["delta"])


def test_an_entry_stands_behind_those_of_the_board(tmp_path):
  path = tmp_path / "CIFAR10_no.yml"
  path.write_text(_BOARD, encoding="utf-8")
  before, entries = leaderboard.parsed(path)
  entry = leaderboard.read([_SWEEP])
  text = leaderboard.text(entry, dataclasses.replace(_SOURCE, venue_date="2026-05-31"))
  path.write_text(before + text, encoding="utf-8")
  _, after = leaderboard.parsed(path)
  assert after[:-1] == entries and len(entries) == 1
  assert set(after[-1]) == {
    "name",
    "authors",
    "url",
    "code",
    "venue",
    "venue_date",
    "claims",
  }
  assert str(after[-1]["venue_date"]) == "2026-05-31"
  claim = after[-1]["claims"][2]
  assert claim == {
    "model": "patches + linear", "epsilon": 1.0, "delta": 1e-5, "private_accuracy": "70.37%",
    "dp_accountant": "dp_accounting PLD",
  }  # fmt: skip
  assert "# proved, add_or_remove_one, one example; 3 runs from 70.31 to 70.43%" in text


def test_as_good_needs_no_larger_epsilon_and_the_same_measure():
  entries = yaml.safe_load(_BOARD.replace("\t", " "))
  claims = {claim.epsilon: claim for claim in leaderboard.read([_SWEEP]).claims}
  words = "ScatterNet + Linear (Tramèr and Boneh): 71.0% at 1"
  assert leaderboard.better(claims[0.5], entries) == []
  assert leaderboard.better(claims[1.0], entries) == [words]
  # 72.7 % at 2 is better than 71 % at 1.
  assert leaderboard.better(claims[2.0], entries) == []
  by_area = dataclasses.replace(claims[0.5], is_auc=True)
  assert leaderboard.better(by_area, entries) == [
    "by area (Tramèr and Boneh): 98.0% at 0.1"
  ]


def test_public_data_must_be_named_and_choose_the_file():
  with pytest.raises(
    UserError, match="known to vgg16_96, which was trained on ImageNet"
  ) as info:
    leaderboard.read([_PUBLIC])
  assert str(info.value).startswith("public_data='': must name the public data")
  files = {
    words: leaderboard.read([_PUBLIC], public_data=words).file
    for words in ("ImageNet-1K", "imagenet", "DataComp-1B", "LAION-2B")
  }
  assert [file.split("_")[-1] for file in files.values()] == [
    "IN1K.yml", "IN1K.yml", "DC1B.yml", "any.yml",
  ]  # fmt: skip
  entry = leaderboard.read(
    [_PUBLIC], public_data="LAION-2B", series="VGG16 at 96x96 + linear"
  )
  rows = yaml.safe_load(leaderboard.text(entry, _SOURCE))[0]["claims"]
  assert {row["public_data"] for row in rows} == {"LAION-2B"} and len(rows) == 6


@hypothesis.given(
  *[st.text(st.characters(codec="utf-8"), min_size=1, max_size=30) for _ in range(4)]
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_words_come_back_or_are_refused(name, authors, code, model):
  try:
    source = leaderboard.BoardMethod(name=name, authors=authors, code=code)
    entry = leaderboard.read([_SWEEP], model=model)
  except UserError as error:
    assert "\n" not in str(error)
    return
  read = yaml.safe_load(leaderboard.text(entry, source))
  assert [read[0][key] for key in ("name", "authors", "code")] == [name, authors, code]
  assert {claim["model"] for claim in read[0]["claims"]} == {model}


def _changed(folder: pathlib.Path, **changes) -> str:
  content = json.loads(pathlib.Path(_SWEEP, "sweep.json").read_text())
  content["rows"][0].update(changes)
  folder.mkdir()
  (folder / "sweep.json").write_text(json.dumps(content))
  return str(folder)


@pytest.mark.parametrize(
  ("changes", "start"),
  [
    ({"epsilon_kind": "none"}, "epsilon_kind='none': must be proved or claimed"),
    ({"epsilon_kind": "simulated"}, "epsilon_kind='simulated': must be proved or claimed"),
    ({"epsilon_kind": "claimed"}, "public_data='': must name the public data"),
    ({"failed_assumptions": ["no"]}, "public_data='': must name the public data"),
    ({"unit": "user"}, "unit='user': must be example"),
    ({"accountant": "clt"}, ""),  # the config says which accountant it was
    ({"neighboring_relation": "one\n"}, "neighboring_relation='one"),
    (
      {"neighboring_relation": None},
      "neighboring_relation=None: must be add_or_remove_one",
    ),
    (
      {"epsilon_audited_lower": 0.2},
      "epsilon_audited_lower=0.2: must be in [0, 0.09999",
    ),
    ({"epsilon_audited_lower": None}, "epsilon_audited_lower=None: must be a number"),
    ({"epsilon_audited_lower": "3"}, "epsilon_audited_lower='3': must be a number"),
    ({"epsilon_audited_lower": float("nan")}, "epsilon_audited_lower=nan: must be in"),
    ({"status": "failed"}, "status='failed': must be done: every run of a claim must have"),
    ({"failed_assumptions": True}, "failed_assumptions=True: must be a list of words"),
    ({"dataset": ["cifar10"]}, "dataset=['cifar10']: must be a name"),
    ({"epsilon": 10**400}, "epsilon="),
    ({"epsilon": 1e308}, "epsilon=1e+308: must be in [0, 10000]"),
    ({"delta": 1e-4}, "delta=0.0001: must be in [0, 1e-05]"),
    ({"epsilon": -1.0}, "epsilon=-1.0: must be in"),
    ({"epsilon": None}, "epsilon=None: must be a number"),
    ({"epsilon": float("nan")}, "epsilon=nan: must be in"),
    ({"epsilon": float("inf")}, "epsilon=inf: must be in"),
    ({"test_accuracy": 93.0}, "test_accuracy=93.0: must be in [0, 1]"),
    ({"test_accuracy": True}, "test_accuracy=True: must be a number"),
    ({"dataset": "mnist"}, "dataset=['cifar10', 'mnist']: must be one data set"),
    ({"seed": 1}, "seed=[1, 1, 2]: must differ"),
    ({"seed": 1.0}, "seed=[1.0, 1, 2]: must differ"),
  ],
)
def test_what_the_board_does_not_take_is_refused(tmp_path, changes, start):
  folder = _changed(tmp_path / "sweep", **changes)
  if not start:
    assert len(leaderboard.read([folder]).claims) == 6
    return
  with pytest.raises(UserError) as info:
    leaderboard.read([folder])
  assert str(info.value).startswith(start) and "\n" not in str(info.value)


@pytest.mark.parametrize(
  ("arguments", "start"),
  [
    ({"folders": []}, "folders=[]: must name folders"),
    ({"folders": [_SWEEP, f"{_SWEEP}/."]}, "folders="),
    ({"folders": ["results"]}, "folders='results': must be folders with result.json"),
    ({"folders": ["results/attacks"]}, "folders="),
    (
      {"folders": ["results/mnist_whitened"]},
      "data_set='mnist': must be a data set of the board",
    ),
    ({"data_set": "EyePACS"}, "data_set='EyePACS': must be CIFAR-10"),
    (
      {"folders": ["results/mnist_whitened"], "data_set": "CIFAR-10"},
      "data_set='CIFAR-10': must be mnist, as the data of the runs",
    ),
    ({"folders": [_PUBLIC], "public_data": " -"}, "public_data=' -': must name the data"),
    ({"metric": "delta"}, "metric='delta': must be a score on test data"),
    ({"metric": "test_auc"}, "test_auc=None: must be a number"),
    ({"series": "CNN"}, "series='CNN': must be one of patches + linear"),
    ({"model": "a\nb"}, "model="),
    ({"public_data": "a\tb"}, "public_data="),
  ],
)
def test_a_wrong_argument_is_one_line(arguments, start):
  with pytest.raises(UserError) as info:
    leaderboard.read(**{"folders": [_SWEEP], **arguments})
  assert str(info.value).startswith(start)
  assert "\n" not in str(info.value)


@pytest.mark.parametrize(
  "changes",
  [{"name": " "}, {"authors": ""}, {"venue_date": "May 2026"}, {"url": "a\nclaims: []"}],
)
def test_a_source_is_words_of_one_line(changes):
  (field,) = changes
  with pytest.raises(UserError, match=f"^{field}="):
    dataclasses.replace(_SOURCE, **changes)


@pytest.mark.parametrize(
  "text",
  [
    "{",
    "a: b",
    "- 1",
    "- name: a",
    "- claims: 3",
    "\x80",
    "- venue_date: 2026-02-30",
    "- !!int abc",
    "[" * 5000,
  ],
)
def test_a_file_that_is_not_of_the_board_is_refused(tmp_path, text):
  path = tmp_path / "a.yml"
  path.write_bytes(text.encode("latin1"))
  with pytest.raises(UserError, match="^board="):
    leaderboard.parsed(path)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "[]", "null", "{}"])
def test_a_board_without_entries_gets_its_first(tmp_path, text):
  path = tmp_path / "a.yml"
  path.write_text(text)
  content, entries = leaderboard.extended(path, "- name: a\n  claims: []\n")
  assert entries == [] and yaml.safe_load(content) == [{"name": "a", "claims": []}]


@pytest.mark.parametrize(
  "text",
  ["[{name: b, claims: []}]", "  - name: b\n    claims: []\n", "- claims: []\n...\n"],
)
def test_a_board_that_takes_no_entry_behind_its_last_is_refused(tmp_path, text):
  path = tmp_path / "a.yml"
  path.write_text(text)
  with pytest.raises(UserError, match="^board=.*must be a list without indentation"):
    leaderboard.extended(path, "- name: a\n  claims: []\n")


@pytest.mark.parametrize("place", ["base", "grid", "variant"])
def test_a_limited_sweep_is_refused(tmp_path, place):
  content = json.loads(pathlib.Path(_SWEEP, "sweep.json").read_text())
  config = content["config"]
  if place == "base":
    config["base"]["data"]["limit"] = 5000
  elif place == "grid":
    config["grid"]["data.limit"] = [5000]
    for row in content["rows"]:
      row["data.limit"] = 5000
  else:
    config["variants"]["patches + linear @ 0.1"]["data.limit"] = 5000
  (tmp_path / "sweep.json").write_text(json.dumps(content))
  with pytest.raises(UserError, match="^limit=5000: must be None: the board takes runs on"):
    leaderboard.read([str(tmp_path)])


def test_sweeps_of_equal_labels_and_other_bases_are_other_claims(tmp_path):
  content = json.loads(pathlib.Path(_SWEEP, "sweep.json").read_text())
  content["config"]["base"]["optimizer"]["learning_rate"] = 7.0
  for row in content["rows"]:
    row["seed"] += 10
  (tmp_path / "sweep.json").write_text(json.dumps(content))
  entry = leaderboard.read([_SWEEP, str(tmp_path)])
  assert [claim.seeds for claim in entry.claims] == [3] * 12


@hypothesis.given(st.floats(1e-9, 1e4), st.floats(0, 1))
@hypothesis.settings(max_examples=300, deadline=None)
def test_rounded_numbers_hold(epsilon, score):
  claimed = leaderboard._rounded_up(epsilon)
  assert epsilon <= claimed <= epsilon + 1.1e-3
  shown = decimal.Decimal(leaderboard._percent(score)) / 100
  assert 0 <= decimal.Decimal(repr(score)) - shown < decimal.Decimal("0.0001")


def test_runs_of_other_settings_are_other_claims(tmp_path):
  """A run with more steps is no further seed of the first."""
  content = json.loads(pathlib.Path(_SWEEP, "sweep.json").read_text())
  first = content["rows"][0]
  content["rows"] = [first, {**first, "variant": "patches + linear @ 0.1, longer"}]
  (tmp_path / "sweep.json").write_text(json.dumps(content))
  assert [claim.seeds for claim in leaderboard.read([str(tmp_path)]).claims] == [1, 1]


def test_an_edited_run_is_refused(tmp_path):
  """Its result.json no longer fits its seal."""
  loop.train(small_run.config(num_steps=2), tmp_path / "part")
  with pytest.raises(UserError, match="^limit=400: must be None: the board takes runs on"):
    leaderboard.read([str(tmp_path / "part")], data_set="EyePACS")
  whole = small_run.config(num_steps=2, **{"data.limit": None})
  loop.train(whole, tmp_path / "run")
  shutil.copytree(tmp_path / "run", tmp_path / "edited")
  # Digits are data of dpjax, and no others.
  with pytest.raises(UserError, match="^data_set='EyePACS': must be digits, as the data"):
    leaderboard.read([str(tmp_path / "run")], data_set="EyePACS", model="MLP")
  path = tmp_path / "edited" / "result.json"
  result = json.loads(path.read_text())
  path.write_text(json.dumps({**result, "epsilon": result["epsilon"] / 2}))
  with pytest.raises(UserError, match="edited"):
    leaderboard.read([str(tmp_path / "edited")], data_set="EyePACS")
