"""The page of threats names every attack, and code that is there."""

import pathlib
import pkgutil
import re

import pytest

import dpjax.attacks
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
  "roc",
  "shadows",
  "signals",
}


_PAGE = (_ROOT / "THREATS.md").read_text()
_CODES = sorted(set(re.findall(r"`(dpjax\.[\w.]+)`", _PAGE)))
# Cells of each row of a table, but for rules.
_ROWS = [
  [cell.strip() for cell in line.strip("|").split(" | ")]
  for line in _PAGE.splitlines()
  if line.startswith("|") and "---" not in line
]


@pytest.mark.parametrize("code", _CODES)
def test_what_a_row_names_is_there(code):
  found = pkgutil.resolve_name(code)
  assert callable(found) and found.__doc__


def test_every_file_that_attacks_has_a_row():
  folder = pathlib.Path(dpjax.attacks.__file__).parent
  files = {path.stem for path in folder.glob("*.py")} - _HELPERS
  named = {pkgutil.resolve_name(code).__module__.rpartition(".")[2] for code in _CODES}
  assert files <= named, f"no row of THREATS.md for {sorted(files - named)}"


def test_every_kind_of_membership_attack_has_a_row():
  codes = {code.rpartition(".")[2] for code in _CODES}
  for function in dpjax.attacks.MEMBERSHIP_ATTACKS.values():
    assert getattr(function, "func", function).__name__ in codes


def test_each_attack_has_one_row_with_its_code():
  attacks = [row for row in _ROWS if any("`dpjax." in cell for cell in row)]
  names = [row[0] for row in attacks]
  assert len(attacks) >= 40 and len(set(names)) == len(names)


def test_what_the_launcher_runs_has_settings_with_defaults():
  kinds = choice_at(AttackConfig, "attack").kinds()
  assert len({*kinds.values()}) == len(kinds)
  for kind in kinds.values():
    assert issubclass(kind, AttackSettings) and kind().section in ("train", "federate")
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
