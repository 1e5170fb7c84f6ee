"""The table of attacks: complete, true, and the page that is made of it fresh."""

import dataclasses
import pathlib

import pytest

import dpjax.attacks
from dpjax.attacks import registry
from dpjax.experiments.config.choices import choice_at
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import AttackSettings
from tests.refuses import refuses

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Files of dpjax/attacks/ that hold no attack, but what attacks are made of or measured by.
_HELPERS = {
  "__init__",
  "allowed",
  "fitting",
  "line_search",
  "reconstructions",
  "registry",
  "roc",
  "shadows",
  "signals",
}


@pytest.mark.parametrize("attack", registry.ATTACKS, ids=lambda attack: attack.name)
def test_what_a_row_names_is_there(attack):
  if attack.simulated:
    found = attack.find()
    assert callable(found) and found.__doc__, attack.code


def test_every_file_that_attacks_has_a_row():
  folder = pathlib.Path(dpjax.attacks.__file__).parent
  files = {path.stem for path in folder.glob("*.py")} - _HELPERS
  found = (attack.find() for attack in registry.ATTACKS if attack.simulated)
  named = {one.__module__.rpartition(".")[2] for one in found}
  assert files <= named, f"no row of registry.ATTACKS for {sorted(files - named)}"


def test_every_kind_of_membership_attack_has_a_row():
  codes = {attack.code.rpartition(".")[2] for attack in registry.ATTACKS}
  for function in dpjax.attacks.MEMBERSHIP_ATTACKS.values():
    assert getattr(function, "func", function).__name__ in codes


def test_names_differ_and_access_is_used():
  names = [attack.name for attack in registry.ATTACKS]
  assert len(set(names)) == len(names)
  assert {attack.access for attack in registry.ATTACKS} <= set(registry.ACCESS)


def test_the_page_is_what_the_command_writes():
  assert (_ROOT / registry.PAGE).read_text() == registry.page(), f"run {registry.COMMAND}"


def test_both_kinds_stand_in_the_page():
  page = registry.page()
  for attack in registry.ATTACKS:
    assert (f"| {attack.name} (described only) |" in page) == (not attack.simulated)
  assert all(f"| {name} |" in page for name in registry.ACCESS)


def test_what_secure_computation_changes_is_told_for_each_way():
  widths = {len(row) for row in (registry._WAYS, *registry._CHANGES)}
  cells = [cell for row in registry._CHANGES for cell in row]
  assert widths == {len(registry._WAYS)} and not any("|" in cell for cell in cells)
  assert "described here, and not simulated" in registry.page()


@pytest.mark.parametrize(
  "change", [{"access": "telepathy"}, {"defends": ""}, {"target": "a | b"}]
)
def test_a_row_that_would_break_the_table_is_refused(change):
  names = [field.name for field in dataclasses.fields(registry.Attack)]
  row = dict(zip(names, "abcdefg"))
  ((field, value),) = change.items()
  with refuses(field, value=value) as caught:
    registry.Attack(**{**row, "access": "answers", **change})
  assert "\n" not in str(caught.value)


def test_code_that_does_not_exist_is_refused():
  row = registry.Attack("a", "b", "answers", "c", "d", "dpjax.attacks.no_such", "e")
  with refuses("code"):
    row.find()


def test_what_the_launcher_runs_has_settings_with_defaults():
  kinds = choice_at(AttackConfig, "attack").kinds()
  assert len({*kinds.values()}) == len(kinds)
  for kind in kinds.values():
    assert issubclass(kind, AttackSettings) and kind().section in ("train", "federate")
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
