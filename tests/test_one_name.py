"""One name, one thing: no two public classes and no two files that share a name by accident."""

import ast
import collections
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "dpjax"
_ROOMS = {path.name for path in _PACKAGE.iterdir() if path.is_dir()}

# Files of one name that ARE one thing, each for its own kind of run, data or noise.
_ALIKE = {
  "audit": "of a run, by the kind of run",
  "bounds": "of the fields of a config, by the kind of run",
  "kind": "what a launcher knows of a kind of run, and each kind's own",
  "user_code": "a user's own parts by import path, by the kind of run",
  "build": "config to objects, by the kind of run",
  "config": "of a run, by the kind of run",
  "facts": "what result.json says besides, by the kind of run",
  "privacy": "what is promised, by the kind of run",
  "unused": "fields that nothing reads, by the kind of config",
  "table": "rows for people, by what they are about",
  "registry": "what there is by name: models, data, games",
  "gaussian": "noise, and the event of a sum with it",
  "poisson": "a sampler, and its event",
  "bounded_contribution": "a sampler, and its event",
  "fixed_size": "a sampler, and its event",
  "k_out_of_t": "a sampler, and its event",
  "with_replacement": "a sampler, and its event",
  "truncated_poisson": "a sampler, and its event",
  "random_allocation": "a sampler, its event, and the proof of its price",
  "discrete": "integer noise, and what it costs",
  "tuning": "private selection, and what it costs",
  "samplers": "samplers, and their games",
  "text": "as data, and of numbers for people",
}
_CLASSES = {
  "Cost": "what it takes: a gradient route, a secure sum",
  "Interval": "two ends: of an estimate, of the numbers that are predicted",
  "Kind": "of a run, of a layer's use in a jaxpr",
  "Recipe": "how gradients are computed, how a network is trained on shares",
  "Signs": "of messages that are compressed, of values that are shared",
}


def _files():
  found = collections.defaultdict(list)
  for path in _PACKAGE.rglob("*.py"):
    if path.name != "__init__.py":
      found[path.stem].append(path.relative_to(_PACKAGE).as_posix())
  return found


def _classes():
  found = collections.defaultdict(list)
  for path in _PACKAGE.rglob("*.py"):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        found[node.name].append(path.relative_to(_PACKAGE).as_posix())
  return found


def _shared(found):
  return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def test_no_two_files_share_a_name_by_accident():
  games = {name for name, places in _files().items() if any("games/" in p for p in places)}
  assert {n: p for n, p in _shared(_files()).items() if n not in {*_ALIKE, *games}} == {}


def test_no_file_of_another_room_is_named_like_a_room():
  """The games of a room bear its name."""
  named = {name: places for name, places in _files().items() if name in _ROOMS}
  assert [p for places in named.values() for p in places if "games/" not in p] == []


def test_no_two_public_classes_share_a_name_by_accident():
  shared = _shared(_classes())
  assert {name: places for name, places in shared.items() if name not in _CLASSES} == {}


def test_nothing_is_excused_that_does_not_exist():
  assert set(_CLASSES) <= set(_classes()) and set(_ALIKE) <= set(_files())
