"""The table of attacks: complete, true, and the page that is made of it fresh."""

import pathlib
import pkgutil

import pytest

import dpjax.attacks
from dpjax.attacks import registry
from dpjax.experiments.config.choices import choice_at
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import AttackSettings

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
  found = pkgutil.resolve_name(attack.code)
  assert callable(found) and found.__doc__, attack.code


def test_every_file_that_attacks_has_a_row():
  folder = pathlib.Path(dpjax.attacks.__file__).parent
  files = {path.stem for path in folder.glob("*.py")} - _HELPERS
  found = (pkgutil.resolve_name(attack.code) for attack in registry.ATTACKS)
  named = {one.__module__.rpartition(".")[2] for one in found}
  assert files <= named, f"no row of registry.ATTACKS for {sorted(files - named)}"


def test_every_kind_of_membership_attack_has_a_row():
  codes = {attack.code.rpartition(".")[2] for attack in registry.ATTACKS}
  for function in dpjax.attacks.MEMBERSHIP_ATTACKS.values():
    assert getattr(function, "func", function).__name__ in codes


def test_names_differ_and_access_is_used():
  names = [attack.name for attack in registry.ATTACKS]
  assert len(set(names)) == len(names)
  assert {attack.access for attack in registry.ATTACKS} == set(registry.ACCESS)
  # Every text is words on one line of a table.
  assert all(
    text and "|" not in text and "\n" not in text
    for row in registry.ATTACKS
    for text in row
  )


def test_the_page_is_what_the_command_writes():
  assert (_ROOT / registry.PAGE).read_text() == registry.page(), f"run {registry.COMMAND}"


def test_the_page_has_each_attack_and_each_access():
  page = registry.page()
  names = [attack.name for attack in registry.ATTACKS]
  assert all(f"| {name} |" in page for name in (*names, *registry.ACCESS))


def test_what_the_launcher_runs_has_settings_with_defaults():
  kinds = choice_at(AttackConfig, "attack").kinds()
  assert len({*kinds.values()}) == len(kinds)
  for kind in kinds.values():
    assert issubclass(kind, AttackSettings) and kind().section in ("train", "federate")
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
