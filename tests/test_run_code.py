"""The code of a run: whatever of a user's files takes part is in its name, in every way in which
Python can reach it; what a process imported by chance is not."""

import importlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax import names, run_code
from dpjax.experiments.run import run_keys
from dpjax.run_code import packages
from dpjax.validate import UserError
from tests import own_folder

fresh = own_folder.fresh
_HELP = "SCALE = 1.0\n\ndef scale(x):\n  return SCALE * x\n\nclass Base:\n  pass\n"
_EDITED = _HELP.replace("1.0", "2.0")
_USES = "def part(*args, **named):\n  return scale(1)\n"

# way in which own_main.py reaches the code of a helper -> (files, the file that is edited)
_WAYS = {
  "import": {
    "own_main": ("import own_help\ndef part():\n  return own_help.scale(1)\n"),
  },
  "import as": {
    "own_main": ("import own_help as h\ndef part():\n  return h.scale(1)\n"),
  },
  "from import": {
    "own_main": ("from own_help import scale\n") + _USES,
  },
  "from import as": {
    "own_main": ("from own_help import scale as s\ndef part(): return s(1)\n"),
  },
  "star": {
    "own_main": ("from own_help import *\n") + _USES,
  },
  "inside a function": {
    "own_main": ("def part():\n  from own_help import scale\n  return scale(1)\n"),
  },
  "inside a method": {
    "own_main": (
      "class part:\n  def f(self):\n    import own_help\n    return own_help.scale(1)\n"
    ),
  },
  "in a branch": {
    "own_main": (
      "try:\n"
      "  import no_such\n"
      "except ImportError:\n"
      "  import own_help\n"
      "def part():\n"
      "  return own_help.scale(1)\n"
    ),
  },
  "two steps": {
    "own_main": ("from own_between import scale\n") + _USES,
    "own_between": ("from own_help import scale\n"),
  },
  "lazily in two steps": {
    "own_main": ("def part():\n  import own_between\n"),
    "own_between": ("def f():\n  import own_help\n"),
  },
  "in a circle": {
    "own_main": ("import own_between\ndef part():\n  return own_between.f()\n"),
    "own_between": ("import own_main, own_help\ndef f(): return own_help.scale(1)\n"),
  },
  "import_module": {
    "own_main": (
      "import importlib\n"
      "h = importlib.import_module('own_help')\n"
      "def part():\n"
      "  return h.scale(1)\n"
    ),
  },
  "import_module later": {
    "own_main": (
      "from importlib import import_module as load_module\n"
      "def part():\n"
      "  return load_module('own_help').scale(1)\n"
    ),
  },
  "__import__": {
    "own_main": ("def part():\n  return __import__('own_help').scale(1)\n"),
  },
  "a computed name": {
    "own_main": (
      "import importlib\n"
      "name = 'own_' + 'help'\n"
      "h = importlib.import_module(name)\n"
      "def part():\n"
      "  return h.scale(1)\n"
    ),
  },
  "a computed name, one function kept": {
    "own_main": (
      "import importlib\nscale = importlib.import_module('pleh_nwo'[::-1]).scale\n"
    )
    + _USES,
  },
  "spec_from_file_location": {
    "own_main": (
      "import importlib.util, os\n"
      "at = os.path.join(os.path.dirname(__file__), 'own_' + 'help.py')\n"
      "spec = importlib.util.spec_from_file_location('loaded', at)\n"
      "h = importlib.util.module_from_spec(spec)\n"
      "spec.loader.exec_module(h)\n"
      "def part():\n"
      "  return h.scale(1)\n"
    ),
  },
  "run_path": {
    "own_main": (
      "import runpy, os\n"
      "at = os.path.join(os.path.dirname(__file__), 'own_help' + '.py')\n"
      "scale = runpy.run_path(at)['scale']\n"
    )
    + _USES,
  },
  "run_path later": {
    "own_main": (
      "import runpy\ndef part():\n  return runpy.run_path('own_help.py')['scale'](1)\n"
    ),
  },
  "exec of a file": {
    "own_main": (
      "import os, pathlib\n"
      "at = os.path.join(os.path.dirname(__file__), 'own_help' + '.py')\n"
      "space = {}\n"
      "exec(pathlib.Path(at).read_text(), space)\n"
      "def part():\n"
      "  return space['scale'](1)\n"
    ),
  },
  "exec here": {
    "own_main": (
      "import os, pathlib\n"
      "at = os.path.join(os.path.dirname(__file__), 'own_help' + '.py')\n"
      "exec(pathlib.Path(at).read_text())\n"
    )
    + _USES,
  },
  "exec, compiled": {
    "own_main": (
      "import os, pathlib\n"
      "at = os.path.join(os.path.dirname(__file__), 'own_help' + '.py')\n"
      "exec(compile(pathlib.Path(at).read_text(), at, 'exec'))\n"
    )
    + _USES,
  },
  "sys.path": {
    "own_main": (
      "import os, sys\n"
      "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'library'))\n"
      "import own_help\n"
      "def part():\n"
      "  return own_help.scale(1)\n"
    ),
    "edited": "library/own_help.py",
  },
  "a base class": {
    "own_main": ("from own_help import Base\nclass part(Base):\n  pass\n"),
  },
  "a decorator": {
    "own_main": ("from own_between import around\n@around\ndef part():\n  return 1\n"),
    "own_between": (
      "import functools, own_help\n"
      "def around(f):\n"
      "  @functools.wraps(f)\n"
      "  def g(): return own_help.scale(f())\n"
      "  return g\n"
    ),
  },
  "a default": {
    "own_main": (
      "import importlib\n"
      "def part(f=getattr(importlib.import_module('own_' + 'help'), 'scale')):\n"
      "  return f(1)\n"
    ),
  },
  "a partial": {
    "own_main": (
      "import functools, importlib\n"
      "part = functools.partial(importlib.import_module('own_' + 'help').scale, 1)\n"
    ),
  },
  "a closure": {
    "own_main": (
      "import importlib\n"
      "def _made():\n"
      "  f = importlib.import_module('own_' + 'help').scale\n"
      "  return lambda: f(1)\n"
      "part = _made()\n"
    ),
  },
  "a method of an instance": {
    "own_main": (
      "import importlib\n"
      "class A:\n"
      "  def __init__(self):\n"
      "    self.f = importlib.import_module('own_' + 'help').scale\n"
      "  def part(self):\n"
      "    return self.f(1)\n"
      "part = A().part\n"
    ),
  },
  "a dict": {
    "own_main": (
      "import importlib\n"
      "_ALL = {'a': [importlib.import_module('own_' + 'help').scale]}\n"
      "def part():\n"
      "  return _ALL['a'][0](1)\n"
    ),
  },
  "a jitted function": {
    "own_main": (
      "import importlib, jax\n"
      "part = jax.jit(importlib.import_module('own_' + 'help').scale)\n"
    ),
  },
  "a derivative of one's own": {
    "own_main": (
      "import importlib, jax\n"
      "scale = importlib.import_module('own_' + 'help').scale\n"
      "part = jax.custom_vjp(scale)\n"
      "part.defvjp(lambda x: (x, None), lambda r, g: (g,))\n"
    ),
  },
  "a field of a linen module": {
    "own_main": (
      "import importlib, flax.linen as nn\n"
      "_NET = nn.Sequential([importlib.import_module('own_' + 'help').scale])\n"
      "def part(**_):\n"
      "  return _NET\n"
    ),
  },
  "a package's __init__": {
    "own_main": ("import own_pack.inside\ndef part():\n  return own_pack.inside.f()\n"),
    "own_pack/inside": ("def f():\n  return 1\n"),
    "edited": "own_pack/__init__.py",
  },
  "a submodule": {
    "own_main": (
      "import own_pack.inside\ndef part():\n  return own_pack.inside.scale(1)\n"
    ),
    "own_pack/__init__": "",
    "edited": "own_pack/inside.py",
  },
  "a submodule from": {
    "own_main": ("from own_pack import inside\ndef part():\n  return inside.scale(1)\n"),
    "own_pack/__init__": "",
    "edited": "own_pack/inside.py",
  },
  "a relative import": {
    "own_main": ("import own_pack\ndef part():\n  return own_pack.scale(1)\n"),
    "own_pack/__init__": ("from .inside import scale\n"),
    "edited": "own_pack/inside.py",
  },
  "a relative import upwards": {
    "own_main": (
      "import own_pack.low.deep\ndef part():\n  return own_pack.low.deep.scale(1)\n"
    ),
    "own_pack/__init__": "",
    "own_pack/low/__init__": "",
    "own_pack/low/deep": ("from ..inside import scale\n"),
    "edited": "own_pack/inside.py",
  },
  "a package by attribute": {
    "own_main": ("import own_pack\ndef part():\n  return own_pack.inside.scale(1)\n"),
    "own_pack/__init__": (
      "import importlib\n"
      "def __getattr__(name):\n"
      "  return importlib.import_module('.' + name, __name__)\n"
    ),
    "edited": "own_pack/inside.py",
  },
  "a star of a package": {
    "own_main": ("from own_pack import *\ndef part():\n  return inside.scale(1)\n"),
    "own_pack/__init__": ("__all__ = ['inside']\n"),
    "edited": "own_pack/inside.py",
  },
  "all of a package": {
    "own_main": ("import own_pack\ndef part():\n  return own_pack.ALL['inside'](1)\n"),
    "own_pack/__init__": (
      "import importlib, pkgutil\n"
      "ALL = {}\n"
      "for each in pkgutil.iter_modules(__path__):\n"
      "  ALL[each.name] = importlib.import_module(f'{__name__}.{each.name}').scale\n"
    ),
    "edited": "own_pack/inside.py",
  },
  "one of a package, later": {
    "own_main": (
      "import importlib\n"
      "def part(which='inside'):\n"
      "  return importlib.import_module(f'own_pack.{which}').scale(1)\n"
    ),
    "own_pack/__init__": "",
    "edited": "own_pack/inside.py",
  },
  "one by a table, later": {
    "own_main": (
      "import importlib\n"
      "_WHERE = {'a': 'own_pack.inside'}\n"
      "def part(which='a'):\n"
      "  return importlib.import_module(_WHERE[which]).scale(1)\n"
    ),
    "own_pack/__init__": "",
    "edited": "own_pack/inside.py",
  },
  "a namespace package": {
    "own_main": ("from own_space.inside import scale\n") + _USES,
    "edited": "own_space/inside.py",
  },
}


def _write(folder, way, helper):
  """own_main.py and what it reaches, in a folder."""
  files = {**_WAYS[way]}
  edited = files.pop("edited", "own_help.py")
  for name, text in {**files, edited.removesuffix(".py"): helper}.items():
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _code(path="own_main:part"):
  return names.code({"loss": path})


@pytest.mark.parametrize("way", _WAYS)
def test_an_edit_of_what_a_run_reaches_is_another_code(way, tmp_path, fresh):
  """And the same code in another folder is the same code."""
  found = []
  for place, helper in (("a", _HELP), ("b", _HELP), ("c", _EDITED)):
    _write(tmp_path / place, way, helper)
    fresh(tmp_path / place)
    found.append(_code())
  assert found[0].modules == found[1].modules != found[2].modules
  assert found[0].digest() == found[1].digest() != found[2].digest()
  assert str(tmp_path) not in str(found[0].to_json())


@pytest.mark.parametrize("way", _WAYS)
def test_what_a_process_imported_by_chance_is_no_part_of_a_run(way, tmp_path, fresh):
  """Nor the order of imports, nor whether a later import has happened."""
  _write(tmp_path, way, _HELP)
  (tmp_path / "own_chance.py").write_text("import own_other\n")
  (tmp_path / "own_other.py").write_text("x = 1\n")
  if (tmp_path / "own_pack").exists() and way not in ("all of a package",):
    (tmp_path / "own_pack" / "nobody").mkdir()
    (tmp_path / "own_pack" / "nobody" / "alone.py").write_text("x = 1\n")
  fresh(tmp_path)
  first = _code()
  fresh(tmp_path)
  importlib.import_module("own_chance")
  if (tmp_path / "own_pack" / "nobody").exists():
    importlib.import_module("own_pack.nobody.alone")
  if (tmp_path / "own_help.py").exists():
    importlib.import_module("own_help")
  assert _code().to_json() == first.to_json()
  part = sys.modules["own_main"].part
  if way not in ("a field of a linen module",) and not isinstance(part, type):
    part() if "jit" not in way and "derivative" not in way else part(1.0)
  assert _code().to_json() == first.to_json()  # after what it imports late


def test_an_edit_of_dpjax_or_another_version_is_another_code(monkeypatch):
  before = run_code.of()
  fields = {"model": {"name": "mlp"}}
  named = run_keys.config_digest("central", fields)
  for name in before.versions:
    other = before._replace(versions={**before.versions, name: "another"})
    assert other.digest() != before.digest()
    with monkeypatch.context() as changed:
      changed.setattr(packages, "versions", lambda other=other: other.versions)
      assert run_keys.config_digest("central", fields) != named
  assert {"dpjax", "jax", "jaxlib", "flax", "optax", "scipy", "dp_accounting"} <= {
    *before.versions
  }
  assert run_keys.config_digest("central", fields) == named


def test_any_source_of_dpjax_is_part_of_its_name(tmp_path):
  package = pathlib.Path(dpjax.__file__).parent
  copy = tmp_path / "copy"
  shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
  whole = packages.sha256_of_sources(str(copy))
  assert whole == packages.sha256_of_sources(str(package))
  for name in ("losses.py", "noise/gaussian.py", "experiments/run/loop.py"):
    path = copy / name
    text = path.read_text()
    path.write_text(text + "\n")
    assert packages.sha256_of_sources(str(copy)) != whole
    path.write_text(text)
  (copy / "more.py").write_text("")
  assert packages.sha256_of_sources(str(copy)) != whole


@pytest.mark.parametrize(
  ("change", "seen"),
  [
    ("own_help.SCALE = 3.0", True),
    ("own_help.scale = lambda x: 4 * x", True),
    ("own_help.scale.__code__ = (lambda x: 5 * x).__code__", True),
    ("own_help.Base.more = lambda self: 6", True),
    ("own_help.__doc__ = 'words'", False),
  ],
)
def test_what_was_changed_in_memory_is_another_code(change, seen, tmp_path, fresh):
  _write(tmp_path, "import", _HELP)
  fresh(tmp_path)
  before = _code().modules
  exec(f"import own_help\n{change}", {})
  assert (_code().modules != before) == seen


def test_what_was_imported_is_what_is_named(tmp_path, fresh):
  """A notebook's kernel runs for days: an edit counts when it is imported."""
  _write(tmp_path, "import", _HELP)
  fresh(tmp_path)
  before = _code()
  (tmp_path / "own_help.py").write_text(_EDITED)
  assert _code().digest() == before.digest()
  importlib.reload(sys.modules["own_help"])
  after = _code()
  assert after.digest() != before.digest()
  fresh(tmp_path)
  assert _code().digest() == after.digest()


@pytest.mark.parametrize("edit", ["1.0 -> 2.0", "of the same size, at once"])
def test_a_file_that_was_edited_before_it_was_looked_at_is_refused(
  edit, tmp_path, fresh, monkeypatch
):
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  text = _HELP.replace("SCALE = 1.0", "TABLE = [1.0] * 2\nSCALE = sum(TABLE)")
  _write(tmp_path, "import", text)
  fresh(tmp_path)
  importlib.import_module("own_main")
  stat = os.stat(tmp_path / "own_help.py")
  (tmp_path / "own_help.py").write_text(text.replace("1.0", "3.0"))
  if "at once" in edit:
    os.utime(tmp_path / "own_help.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
  with pytest.raises(
    UserError, match="'own_help': its file was edited after it was"
  ) as refused:
    _code()
  assert len(str(refused.value)) < 300


def test_a_function_that_the_search_cannot_see_is_refused_when_it_runs(tmp_path, fresh):
  _write(tmp_path, "import", _HELP)
  (tmp_path / "own_hidden.py").write_text("def f():\n  return 1\n")
  late = "import importlib\ndef part():\n  return importlib.import_module('neddih_nwo'[::-1]).f()\n"
  (tmp_path / "own_main.py").write_text(late)
  fresh(tmp_path)
  code = _code()
  refused = pytest.raises(UserError, match=r"own_hidden.py: the run calls a function")
  with refused as caught, run_code.watched(code, _code):
    sys.modules["own_main"].part()
  assert len(str(caught.value)) < 300
  with run_code.watched(_code(), _code):
    pass


def test_an_edit_while_a_run_is_built_is_refused(tmp_path, fresh):
  _write(tmp_path, "inside a function", _HELP)
  fresh(tmp_path)
  code = _code()
  refused = pytest.raises(UserError, match="'own_help': was edited or exchanged")
  with refused, run_code.watched(code, _code):
    (tmp_path / "own_help.py").write_text(_EDITED)
    sys.modules["own_main"].part()


@pytest.mark.parametrize("kind", ["extension", "compiled", "installed without a version"])
def test_code_without_a_source_is_told_by_its_bytes(kind, tmp_path, fresh, monkeypatch):
  folder = tmp_path / "site-packages" if kind.startswith("installed") else tmp_path
  folder.mkdir(exist_ok=True)
  (tmp_path / "own_main.py").write_text("def part():\n  import own_bytes\n")
  suffix = {"extension": packages.EXTENSIONS[0], "compiled": ".pyc"}.get(kind, ".py")
  found = []
  for content in (b"x = 1\n", b"x = 2\n"):
    (folder / f"own_bytes{suffix}").write_bytes(content)
    fresh(tmp_path)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    found.append(_code().modules)
  assert "own_bytes" in found[0] and found[0] != found[1]


def test_a_package_that_is_installed_is_told_by_its_version(tmp_path, fresh):
  """And by the hashes of its files, where it came from a folder, whose version says little."""
  site = tmp_path / "site-packages"
  held = site / "own_tool-1.0.dist-info"
  held.mkdir(parents=True)
  (site / "own_tool.py").write_text("x = 1\n")
  (tmp_path / "own_main.py").write_text("import own_tool\ndef part():\n  pass\n")
  (held / "RECORD").write_text(
    "own_tool.py,sha256=abc,6\n../../bin/x,sha256=of-this-machine,1\n"
  )
  found = []
  for version, origin in (("1.0", False), ("1.1", False), ("1.1", True)):
    (held / "METADATA").write_text(
      f"Metadata-Version: 2.1\nName: own_tool\nVersion: {version}\n"
    )
    if origin:
      (held / "direct_url.json").write_text("{}")
    fresh(tmp_path)
    sys.path.append(str(site))
    importlib.invalidate_caches()
    packages.version.cache_clear()
    packages.brought_by.cache_clear()
    found.append(_code())
  versions = [code.versions["own_tool"] for code in found]
  assert versions[:2] == ["1.0", "1.1"] and versions[2].startswith("1.1 ")
  assert all("own_tool" not in code.modules for code in found)
  packages.version.cache_clear()
  packages.brought_by.cache_clear()


_SCRIPT = """
import sys
from dpjax import names
sys.path.insert(0, {folder!r})
code = names.code({{"loss": "own_main:part"}})
print(code._replace(versions={{}}).digest().hex())  # an editor may be at work in dpjax
"""


def test_two_processes_agree(tmp_path, fresh):
  """Also about sets of strings, whose order differs in each process."""
  _write(
    tmp_path, "exec here", _HELP + "\ndef more(x):\n  return x in {'a', 'b', 'c', 'd'}\n"
  )
  fresh(tmp_path)
  digests = {_code()._replace(versions={}).digest().hex()}
  for seed in ("1", "2"):
    script = textwrap.dedent(_SCRIPT.format(folder=str(tmp_path)))
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    path = [
      str(pathlib.Path(dpjax.__file__).parents[1]),
      os.environ.get("PYTHONPATH", ""),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
      [sys.executable, "-c", script], capture_output=True, text=True, env=environment,
      cwd=tmp_path, check=True,
    )  # fmt: skip
    digests.add(done.stdout.strip())
  assert len(digests) == 1


# What a file that no source names puts into a library -> how.
_PATCHES = {
  "a function": "jnp.tanh = mine",
  "by another name": "m = jnp\nm.tanh = mine",
  "a jitted function": "jnp.tanh = jax.jit(mine)",
  "a partial function": "import functools\njnp.tanh = functools.partial(mine)",
  "a method": "nn.Dense.__call__ = mine",
  "a class": (
    "class Dense(nn.Module):\n  def __call__(self, x):\n    return mine(x)\nnn.Dense = Dense"
  ),
  "a rule of an optimizer": "optax.sgd = mine",
  "a loss of dpjax": "dpjax.losses.softmax_cross_entropy = mine",
}


@pytest.mark.parametrize("patch", _PATCHES)
def test_what_stands_in_a_library_is_part_of_every_run(patch, tmp_path, fresh, monkeypatch):
  """A startup file does that, or a config file: nothing of the run names them."""
  for owner, name in (
    (jnp, "tanh"),
    (nn.Dense, "__call__"),
    (nn, "Dense"),
    (optax, "sgd"),
    (dpjax.losses, "softmax_cross_entropy"),
  ):
    monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
  assert not run_code.of().modules
  found = []
  for place, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
    (tmp_path / place).mkdir()
    (tmp_path / place / "own_startup.py").write_text(
      "import dpjax, jax, jax.numpy as jnp, optax, flax.linen as nn\n"
      f"def mine(*args):\n  return {scale}\n{_PATCHES[patch]}\n"
    )
    fresh(tmp_path / place)
    importlib.import_module("own_startup")
    found.append(run_code.of().digest())
  assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
  "setting",
  [
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "bfloat16"),
    ("jax_numpy_dtype_promotion", "strict"),
    ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
  ],
  ids=str,
)
def test_another_precision_is_another_code(setting, monkeypatch):
  before = run_code.of()
  name, value = setting
  if name == "XLA_FLAGS":
    # How many devices there are decides no number.
    monkeypatch.setenv(name, "--xla_force_host_platform_device_count=8")
    assert run_code.of().versions == before.versions
    monkeypatch.setenv(name, value)
    after = run_code.of()
    monkeypatch.undo()
  else:
    usual = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
      after = run_code.of()
    finally:
      jax.config.update(name, usual)
  assert after.digest() != before.digest() == run_code.of().digest()
  with pytest.raises(UserError, match=f"^{name}: the run in workdir=w was begun with"):
    run_code.check_same(before.to_json(), after, workdir="w")
