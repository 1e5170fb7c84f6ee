"""The report on a run for an ethics board: what it holds, and that no name can change it."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest

from dpjax import auditing
from dpjax.attacks.roc import exact_interval
from dpjax.auditing import lower_bounds
from dpjax.auditing.scores import Scores
from dpjax.experiments.board import attacker, document, report
from dpjax.experiments.kinds.attack.config import ATTACKED, AttackConfig
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig, TrainConfig
from dpjax.experiments.kinds.federated.config import (
  FED_PRIVACY,
  NATURAL,
  PARTITIONS,
  Central,
  FedConfig,
  Records,
)
from dpjax.experiments.run import guarantee, kind, model_inputs, workdir, writers
from dpjax.relevance import rigorous
from tests.refuses import refuses


@dataclasses.dataclass(frozen=True)
class Rounds:
  """The config of a kind of run of a user's own."""

  num_rounds: int
  of_mine: int = 0
  seed: int = 0


BOUNDS = {guarantee.ADVANTAGE: 0.2737, "tpr_at_fpr_0.001": 0.00868} | {
  "tpr_at_fpr_0.01": 0.05282,
  "tpr_at_fpr_0.1": 0.28179,
}
PROVED = {
  "epsilon_kind": "proved",
  "epsilon": 2.9998,
  "delta": 1e-5,
  "neighboring_relation": "add_or_remove_one",
  "unit": "example",
  **BOUNDS,
}
NONE = dict.fromkeys(PROVED) | {"epsilon_kind": "none"}
CLAIMED = PROVED | {"epsilon_kind": "claimed", "failed_assumptions": ["noise: it is known"]}
SIMULATED = PROVED | {"epsilon_kind": "simulated", "epsilon_of_this_run": 9.0}
SCORES = {
  "test_accuracy": 0.9,
  "test_confusion": [[4, 1], [0, 5]],
  "test_largest_class": 0.5,
}
DECLARED = {
  "columns": {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}},
  "target": {"column": "ill", "values": ["no", "yes"]},
  "split": {"test_share": 0.2},
}
QUESTIONS = ["protected", "against", "attacker", "not_covered", "accuracy"]
SECTIONS = [*QUESTIONS, "checks", "data", "statement", "versions"]


def _run(folder, result, *, config=None, declared=DECLARED, name="people.csv"):
  """Writes a folder as a finished run leaves it."""
  config = (
    TrainConfig(data=DataConfig(name=name), model=ModelConfig("linear"))
    if config is None
    else config
  )
  folder.mkdir(parents=True)
  workdir.claim(folder, config)
  (folder / "params.npz").write_bytes(folder.name.encode())
  facts = model_inputs.ModelInputs(
    shape=(3,), dtype="float32", num_classes=2, vocab_size=None, target=None,
    labels=tuple(declared["target"]["values"]), unit_range=True, declaration=declared,
  )  # fmt: skip
  model_inputs.write(folder, facts)
  held = dict.fromkeys(writers.RESULT_KEYS, 0) | {"dataset": name, "method": "dp_sgd"}
  held |= {"task": "classification", "versions": {"dpjax": "0.1.0"}, "params_sha256": "f6"}
  held |= {
    "privacy_statement": "Privacy statement\n\nEpsilon 3.",
    "not_private/left_out": 0,
  }
  held |= {**SCORES, **result, workdir.FILES: workdir.digests(folder)}
  workdir.write_result(folder, config, held)
  return folder


def _attack(folder, run):
  model = workdir.digests(run)["params.npz"]
  method = {"method": "rmia", "tpr": 0.028}
  result = PROVED | {"attack": "membership", ATTACKED: model, "strongest": method}
  result |= {
    "attacks": {"rmia": {"verdict": "not shown to fail"}},
    "epsilon_lower_indicative": 0.1,
  }
  return _run(folder, result, config=AttackConfig())


def _section(told, key):
  return next(section for section in told.sections if section.key == key)


def _kinds(section):
  return [type(block).__name__ for block in section.blocks]


def _cells(section):
  tables = [block for block in section.blocks if isinstance(block, document.Table)]
  return [[*row] for table in tables for row in table.rows]


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
  return _run(tmp_path_factory.mktemp("runs") / "own", PROVED)


def test_a_report_has_each_section_with_its_parts(proved):
  told = report.of(proved)
  assert [section.key for section in told.sections] == SECTIONS
  assert {section.key: _kinds(section) for section in told.sections} == {
    "protected": ["Paragraph"] * 4,
    "against": ["Paragraph"] * 2,
    "attacker": ["Icons", "Paragraph", "Table", "Paragraph", "Paragraph"],
    "not_covered": [
      "Paragraph",
      "Bullets",
      "Paragraph",
      "Table",
      "Paragraph",
      "Bullets",
      "Paragraph",
    ],
    "accuracy": ["Paragraph", "Table", "Paragraph", "Table", "Paragraph", "Paragraph"],
    "checks": ["Paragraph"],
    "data": ["Paragraph", "Table"],
    "statement": ["Paragraph", "Verbatim"],
    "versions": ["Paragraph", "Table"],
  }
  assert _cells(_section(told, "attacker")) == [
    ["1", "9", "90"], ["10", "53", "85"], ["100", "282", "74"],
  ]  # fmt: skip
  assert ["left_out"] in [
    block.items
    for block in _section(told, "not_covered").blocks
    if isinstance(block, document.Bullets)
  ]
  assert _cells(_section(told, "accuracy"))[-2:] == [["no", "5", "4"], ["yes", "5", "5"]]
  assert _cells(_section(told, "data"))[:2] == [["age", "0 to 120"], ["sex", "f, m"]]
  assert "Epsilon 3." in _section(told, "statement").blocks[1].text


@pytest.mark.parametrize(
  "result", [CLAIMED, SIMULATED, NONE], ids=lambda result: result["epsilon_kind"]
)
def test_what_is_not_proved_says_so_first(tmp_path, result):
  told = report.of(_run(tmp_path / "run", result))
  assert [section.key for section in told.sections] == SECTIONS
  assert told.lead[0] != report.of(_run(tmp_path / "other", PROVED)).lead[0]
  attacked = _section(told, "attacker")
  if result is NONE:
    assert _kinds(attacked) == ["Paragraph"] and "epsilon" not in dict(_cells(_lead(told)))
  else:
    # The condition stands before the numbers.
    assert _kinds(attacked)[:2] == ["Paragraph", "Icons"]
  if result is CLAIMED:
    assert told.lead[1].items == ["noise: it is known"]
    # Also a claim may be about a larger deployment.
    more = _run(tmp_path / "more", CLAIMED | {"epsilon_of_this_run": 9.0})
    assert "epsilon is 9." in report.of(more).lead[2].text


def test_scores_stand_in_their_interval_beside_what_no_model_has(tmp_path):
  worse = {
    "test_loss": 0.7,
    "test_class_shares_loss": 0.5,
    "test_auroc": 0.91,
    "test_auroc_interval": [0.82, 0.96],
  }
  for name, scores, is_warned in (
    ("worse", worse, True),
    ("better", worse | {"test_loss": 0.4}, False),
  ):
    section = _section(report.of(_run(tmp_path / name, PROVED | scores)), "accuracy")
    assert "0.91 (0.82 to 0.96 with 95 % confidence)" in [row[1] for row in _cells(section)]
    warned = [
      block
      for block in section.blocks
      if isinstance(block, document.Paragraph) and "WARNING" in block.text
    ]
    assert len(warned) == is_warned


def _lead(told):
  return document.Section(
    "lead", "", [b for b in told.lead if isinstance(b, document.Table)]
  )


def test_every_number_is_rounded_to_the_side_of_the_attacker():
  found = attacker.of(PROVED)
  assert found.right == 64  # of 63.685
  for row, (name, fpr) in zip(found.accused, guarantee.RATES.items()):
    assert row.found - 1 < 1000 * BOUNDS[name] <= row.found
    assert row.right - 1 < 100 * BOUNDS[name] / (BOUNDS[name] + fpr) <= row.right
  # What follows from epsilon and delta alone is never less.
  bare = {name: value for name, value in PROVED.items() if name not in BOUNDS}
  worst = attacker.of(bare)
  assert worst.right >= found.right
  assert all(one.found >= other.found for one, other in zip(worst.accused, found.accused))
  certain = attacker.of(bare | {"epsilon": 0.0, "delta": 0.0})
  assert certain.right == 50 and [row.found for row in certain.accused] == [1, 10, 100]
  assert [row.right for row in certain.accused] == [50] * 3


class _Tags(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.seen = set()
    self.data = []

  def handle_starttag(self, tag, attrs):
    self.seen |= {tag} | {name for name, _ in attrs}

  def handle_data(self, data):
    self.data.append(data)


HOSTILE = '"><script>alert(1)</script><img src=x onerror=y>|`*[a](http://b)&lt;\u202e\n# x'


def test_no_name_in_a_file_becomes_markup(tmp_path):
  plain = report.of(_run(tmp_path / "plain", PROVED))
  declared = DECLARED | {"columns": {HOSTILE: {"values": [HOSTILE.strip(), "m"]}}}
  changes = {
    "dataset": HOSTILE,
    "model": HOSTILE,
    f"not_private/{HOSTILE}": 1,
    "device": HOSTILE,
  }
  changes |= {
    "privacy_statement": HOSTILE,
    "test_" + HOSTILE: 0.5,
    "versions": {HOSTILE: HOSTILE},
  }
  told = report.of(_run(tmp_path / "<b>*x*", PROVED | changes, declared=declared))
  tags = {}
  for name, each in (("plain", plain), ("hostile", told)):
    parsed = _Tags()
    parsed.feed(each.html())
    tags[name] = parsed.seen
  assert tags["hostile"] == tags["plain"] and not tags["plain"] & {
    "script",
    "img",
    "onerror",
    "href",
  }
  assert document.plain(HOSTILE) in "".join(parsed.data)
  lines = told.markdown().split("\n")
  assert len([line for line in lines if line.startswith("#")]) == 1 + len(SECTIONS)
  for line in lines:
    assert "\u202e" not in line
    if not line.startswith("    "):  # which is shown as it is
      assert "<" not in line and "](" not in re.sub(r"\\.", "", line) and "://" not in line
    if line.startswith("| "):
      width = len(re.findall(r"(?<!\\)\|", line)) - 1
      assert width in (2, 3)


def test_the_files_are_the_same_each_time(proved, tmp_path):
  first = [path.read_bytes() for path in report.write(proved, workdir=tmp_path / "a")]
  second = [path.read_bytes() for path in report.write(proved, workdir=tmp_path / "b")]
  assert first == second and len(first) == 2
  assert "\\n" not in first[0].decode() and b"default-src 'none'" in first[1]


def test_attacks_beside_a_run_are_listed_and_those_on_others_are_not(tmp_path):
  run = _run(tmp_path / "runs" / "own", PROVED)
  other = _run(tmp_path / "runs" / "other", PROVED)
  _attack(tmp_path / "runs" / "attack_own", run)
  far = _attack(tmp_path / "far", run)
  foreign = _attack(tmp_path / "foreign", other)
  listed = lambda **more: [
    row[0] for row in _cells(_section(report.of(run, **more), "checks"))
  ]
  assert listed() == ["attack_own"]
  assert listed(attacks=[far]) == ["far", "attack_own"]
  assert _cells(_section(report.of(other), "checks")) == []
  for folder in (foreign, tmp_path / "none"):
    with refuses("attacks", value=str(folder)):
      report.of(run, attacks=[folder])


AUDIT = {
  "epsilon_audited_lower": 0.5, "confidence": 0.95, "refuted": False, "num_canaries": 200,
  "ceiling": {"epsilon_lower": 3.27}, "note": "Canaries are part of the data.",
  "method": "one_run", "verdict": "not refuted: so and so",
}  # fmt: skip


def test_an_audit_is_told(tmp_path):
  told = report.of(_run(tmp_path / "run", PROVED | {"audit": AUDIT}))
  assert _kinds(_section(told, "checks")) == ["Paragraph"] * 3
  assert AUDIT["note"] in [
    getattr(b, "text", "") for b in _section(told, "accuracy").blocks
  ]


@pytest.mark.parametrize("method", lower_bounds.METHODS)
@pytest.mark.parametrize("verdict", ["not refuted", "ALARM", "REFUTED"])
def test_an_audit_is_as_sure_as_its_method(tmp_path, method, verdict):
  audit = AUDIT | {"method": method, "verdict": f"{verdict}: so and so"}
  audit |= {"refuted": verdict != "not refuted"}
  told = report.of(_run(tmp_path / "run", PROVED | {"audit": audit}))
  first, second, _ = (block.text for block in _section(told, "checks").blocks)
  # An indicative bound exceeded a true epsilon in more than 1 of 20 runs: it has no confidence.
  assert ("95% confidence" in second) != lower_bounds.METHODS[method].indicative
  assert ("REFUTES" in first, "ALARM" in first) == (
    verdict == "REFUTED",
    verdict == "ALARM",
  )


def test_an_audit_of_another_claim_names_that_claim(tmp_path):
  audit = AUDIT | {"epsilon_claimed": 7.25, "adversary_sees": "every message"}
  told = report.of(_run(tmp_path / "run", PROVED | {"audit": audit}))
  first = _section(told, "checks").blocks[0].text
  assert "7.25" in first and "made-up clients" in first
  nobody = report.of(_run(tmp_path / "none", NONE | {"audit": AUDIT}))
  assert "stated" not in _section(nobody, "checks").blocks[0].text


def test_attacks_with_a_bound_each_are_told(tmp_path):
  bounds = {"U1": {"epsilon_lower": 0.7, "target": "features, local", "what": "a ratio"}}
  audit = {"confidence": 0.95, "refuted": True, "refuted_locally": ["U1"], "bounds": bounds}
  result = PROVED | {"audit": audit, "epsilon_audited_lower": 0.0}
  checks = _section(report.of(_run(tmp_path / "run", result)), "checks")
  assert _cells(checks) == [["a ratio", "features, local", "0.7 or more"]]
  assert "REFUTE" in checks.blocks[0].text


def test_a_guarantee_of_features_says_nothing_of_labels(tmp_path):
  stated = {"neighboring_relation": rigorous.FEATURES_ONLY, "unit": rigorous.FEATURES_UNIT}
  told = report.of(_run(tmp_path / "run", PROVED | stated))
  text = told.markdown()
  assert "Labels are not protected." in text
  # A diagnosis is a label, and nobody's membership is hidden.
  for words in ("diagnosis", "whether this person took part"):
    assert words not in text
    assert words in report.of(_run(tmp_path / words[:4], PROVED)).markdown()


def test_what_is_no_finished_run_is_one_line(tmp_path):
  with refuses("run", value=str(tmp_path / "none")):
    report.of(tmp_path / "none")
  (tmp_path / "sweep" / "points").mkdir(parents=True)
  with refuses("run", value=str(tmp_path / "sweep")):
    report.of(tmp_path / "sweep")
  run = _run(tmp_path / "run", PROVED)
  with refuses("run"):
    report.of(_attack(tmp_path / "attack", run))
  (run / "params.npz").write_bytes(b"other")
  with refuses("workdir"):
    report.of(run)
  for folder in (str(run / "params.npz"), ""):
    with refuses("workdir", value=folder):
      report.write(run, workdir=folder)
  edited = _run(tmp_path / "edited", PROVED)
  file = edited / "result.json"
  file.write_text(file.read_text().replace("2.9998", "0.5"))
  with refuses("run", value=str(edited)):
    report.of(edited)
  strange = _run(tmp_path / "strange", PROVED | {"versions": "much"})
  with refuses("run", value=str(strange)):
    report.of(strange)


@pytest.mark.parametrize(
  "privacy, trusted",
  [
    (Central(), "It does not hold against the server."),
    (Records(), "nobody but one's own silo must be trusted. "),
  ],
  ids=["central", "records"],
)
def test_a_federated_run_says_whom_one_need_not_trust(tmp_path, privacy, trusted):
  config = FedConfig(partition=PARTITIONS["silos"](), privacy=privacy)
  of_silos = isinstance(privacy, Records)
  unit = "record of one silo" if of_silos else "user"
  result = PROVED | {"unit": unit, "test_silo_accuracy/a_b": 0.8}
  told = report.of(_run(tmp_path / "run", result, config=config))
  assert ["the same, of silo a_b", "0.8"] in _cells(_section(told, "accuracy"))
  assert trusted in str(_section(told, "against").blocks[-1])
  text = told.markdown()
  # Clients of one guarantee are silos, of the other users, and never both.
  assert ("silos that send false messages" in text) == of_silos
  assert ("The users are simulated" in text) != of_silos
  assert "per-record losses" in text if of_silos else "per-user losses" in text


def test_scores_of_samples_say_that_classes_are_equal(tmp_path):
  told = report.of(_run(tmp_path / "run", PROVED | {"samples_by_class": [5, 5]}))
  assert "every class equally often" in str(_section(told, "accuracy").blocks)


def test_users_that_a_column_names_are_not_called_people(tmp_path):
  config = FedConfig(partition=NATURAL["natural"](client_id="hospital"), privacy=Central())
  run = _run(tmp_path / "run", PROVED | {"unit": "user"}, config=config)
  asked = _section(report.of(run), "attacker").blocks
  protected = [str(block) for block in _section(report.of(run), "protected").blocks]
  text = str([*asked, *protected])
  assert "people" not in text and "person" not in text and "clinic" not in text
  assert "each value of the column 'hospital' is one" in str(asked[0])
  assert report._TOGETHER_BY_COLUMN in protected[-2]


def test_a_kind_of_a_users_own_with_rounds_is_not_called_federated(tmp_path, monkeypatch):
  config = Rounds(num_rounds=3)
  monkeypatch.setitem(kind.KINDS, "Rounds", kind.Kind(Rounds, None))
  text = report.of(_run(tmp_path / "run", PROVED, config=config)).markdown()
  assert "false messages" not in text and report._ASK not in text


def test_each_private_method_of_federated_runs_says_whom_to_trust():
  assert report._TRUSTED_BY.keys() == FED_PRIVACY.keys() - {"none"}


@pytest.mark.parametrize(("confidence", "shown"), [(0.995, "99.5%"), (0.99999, "99.99%")])
def test_no_confidence_is_rounded_up(tmp_path, confidence, shown):
  audit = auditing.audit(
    Scores(np.arange(20.0), np.arange(20.0)), delta=1e-5, epsilon_claimed=3.0,
    confidence=confidence,
  ).to_json()  # fmt: skip
  told = audit | {"num_canaries": 40}
  text = report.of(_run(tmp_path / "run", PROVED | {"audit": told})).markdown()
  assert f"With {shown} confidence" in text


def test_the_interval_of_the_accuracy_is_rounded_outwards(tmp_path):
  low, high = exact_interval(9, 10, 0.95)
  text = report.of(_run(tmp_path / "run", PROVED | SCORES)).markdown()
  ends = re.search(r"lies between (\S+) and (\S+), with 95 %", text)
  assert ends is not None
  shown = [float(end) for end in ends.groups()]
  assert low - 1e-3 < shown[0] <= low and high <= shown[1] < high + 1e-3
