"""Old names of modules that moved: the very same module, with a warning, for one release."""

import dataclasses
import importlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dpjax import _moved, relevance, sampling
from dpjax.attacks import attack_settings
from dpjax.experiments.kinds.attack import config as attack_config
from dpjax.experiments.run import loop

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("old", "new"), _moved.MOVED.items())
def test_each_new_name_exists_and_its_old_file_does_not(old, new):
  assert importlib.util.find_spec(new) is not None
  path = _ROOT / old.replace(".", "/")
  assert not path.with_suffix(".py").exists() and not list(path.glob("*.py"))


def test_an_old_name_is_the_same_module_and_warns_once_imported():
  program = (
    "import importlib, warnings\n"
    "with warnings.catch_warnings(record=True) as seen:\n"
    "  warnings.simplefilter('always')\n"
    "  import dpjax.runs.central.config as old\n"
    "  from dpjax.sweeps import grid\n"
    "  import dpjax\n"
    "  dpjax.allocator, dpjax.federated.vertical\n"
    "import dpjax.experiments.kinds.central.config as new\n"
    "assert old is new and new.__spec__.name == new.__name__\n"
    "assert grid.__name__ == 'dpjax.experiments.sweeps.grid'\n"
    "assert 'dpjax.parallel.allocator' in str(dpjax.allocator)\n"
    "importlib.reload(new)\n"
    "print(*{str(w.message) for w in seen if w.category is DeprecationWarning}, sep='\\n')\n"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert (
    "dpjax.runs.central.config is dpjax.experiments.kinds.central.config" in done.stdout
  )


@pytest.mark.parametrize(("package", "modules"), _moved.NAMES.items())
def test_names_of_a_module_that_became_a_package_are_there_and_warn(package, modules):
  for module in modules:
    new = importlib.import_module(module)
    name = next(n for n, o in vars(new).items() if getattr(o, "__module__", "") == module)
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} is {module}.{name} now"):
      old = _moved.attribute(package, name)
    assert old is getattr(new, name)


def test_what_never_was_is_no_module():
  with pytest.raises(ModuleNotFoundError):
    importlib.import_module("dpjax.runs.nothing_of_the_kind")
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    _moved.attribute("dpjax.federated", "nothing")


def test_dpjax_itself_uses_new_names_only():
  for path in (*_ROOT.glob("dpjax/**/*.py"), *_ROOT.glob("configs/**/*.py")):
    if path.name == "_moved.py":
      continue
    text = path.read_text()
    assert not [old for old in _moved.MOVED if f"from {old} import" in text], path


def test_old_names_of_a_users_sampler_still_make_one_and_warn():
  with pytest.warns(DeprecationWarning) as caught:

    @dataclasses.dataclass(frozen=True)
    class Everybody(sampling.Sampler):
      num_examples: int
      law = "none"

      @property
      def slots(self):
        return self.num_examples

      def draw(self, num_examples, *, seed, step):
        return np.arange(num_examples)

  assert [str(w.message).split(";")[0] for w in caught] == [
    "Everybody.law is Everybody.scheme now",
    "Everybody.slots is Everybody.padded_batch_size now",
  ]
  sampler = Everybody(3)
  assert (sampler.padded_batch_size, sampler.scheme) == (3, "none")
  with pytest.warns(DeprecationWarning, match=r"Everybody\.slots is"):
    assert sampler.slots == 3
  with pytest.warns(DeprecationWarning, match=r"Everybody\.law is"):
    assert Everybody.law == "none"


def test_an_attack_with_its_section_under_the_old_name_warns():
  with pytest.warns(DeprecationWarning, match=r"Old\.room is Old\.section"):

    class Old(attack_settings.AttackSettings):
      room = "train"

  assert Old.section == "train"


def test_old_names_of_functions_and_arguments_warn_and_two_at_once_are_refused():
  with pytest.warns(DeprecationWarning, match=r"dpjax\.sampling\.rows_of_slice now"):
    old = sampling.slice_slots
  with pytest.warns(DeprecationWarning, match=r"\(padded_batch_size=\) now"):
    assert old(slots=10, count=4) == sampling.rows_of_slice(10, 4) == 3
  with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="multiple values"):
    sampling.rows_of_slice(padded_batch_size=9, slots=10, count=4)


def test_inputs_of_relevance_take_their_keys_under_the_old_name():
  with pytest.warns(DeprecationWarning, match=r"Inputs\(streams=\) is Inputs\(keys=\) now"):
    inputs = relevance.Inputs(1.0, None, None, None, streams="the keys")
  assert inputs.keys == "the keys"
  with pytest.warns(DeprecationWarning, match=r"Inputs\.streams is Inputs\.keys"):
    assert inputs.streams == "the keys"
  with pytest.warns(DeprecationWarning, match=r"relevance\.Streams is .*relevance\.Keys"):
    assert relevance.Streams is relevance.Keys


def test_a_users_attack_and_kind_of_run_keep_their_old_names(monkeypatch):
  for name in ("prepare", "work", "found"):
    monkeypatch.setattr(sys.modules[__name__], name, print, raising=False)

  @dataclasses.dataclass(frozen=True)
  class Mine(attack_settings.AttackSettings):
    section = "train"
    module = __name__
    task = "mine"

  config = attack_config.AttackConfig(attack=Mine())
  monkeypatch.setattr(attack_config.fields, "name_of", lambda config, name: "mine:Mine")
  with pytest.warns(DeprecationWarning) as caught:
    parts = attack_config.parts_of(config)
  assert parts == (print, print, print)
  assert [str(w.message).split(";")[0].split(" is ")[0][-5:] for w in caught] == [
    ".work",
    "found",
  ]
  with pytest.warns(DeprecationWarning, match=r"loop\.Work is .*loop\.Phase now"):
    assert loop.Work is loop.Phase
  with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
    loop.Nothing  # noqa: B018


def test_a_phase_takes_its_guarantee_and_its_folder_under_the_old_names():
  with pytest.warns(DeprecationWarning, match=r"Phase\((promise|phase)=\)"):
    phase = loop.Phase(1, *5 * [None], promise="proved", phase="queries")
  assert (phase.guarantee, phase.subfolder) == (phase.promise, phase.phase)
  assert (phase.guarantee, phase.subfolder) == ("proved", "queries")
