"""Ways to code, values and data that no source names: another state of them is another run."""

import importlib
import json
import os
import pathlib
import py_compile
import sqlite3
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest

import dpjax
from dpjax import names, run_code
from dpjax.experiments.run import run_keys
from dpjax.run_code import loaded
from dpjax.validate import UserError
from tests import own_folder

fresh = own_folder.fresh
_HELP = "SCALE = {}\n\ndef scale(x):\n  return SCALE * x\n"
_HERE = "import os\nhere = os.path.dirname(os.path.abspath(__file__))\n"
_PART = "\ndef part(*args, **named):\n  return SCALE\n"


def _zipped(folder, scale):
  with zipfile.ZipFile(folder / "own_zip.zip", "w") as archive:
    # One time for all, as the archive is compared by its bytes.
    archive.writestr(zipfile.ZipInfo("own_help.py"), _HELP.format(scale))


def _compiled(folder, scale):
  source = folder / "own_help.src"
  source.write_text(_HELP.format(scale))
  mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
  py_compile.compile(
    str(source), str(folder / "own_help.pyc"), dfile="own_help.py", invalidation_mode=mode
  )
  source.unlink()


def _database(folder, scale):
  base = sqlite3.connect(folder / "own.db")
  base.execute("create table t (x real)")
  base.execute("insert into t values (?)", (scale,))
  base.commit()
  base.close()


def _shadowed(folder, scale):
  """`late/own_help.py`, and another one before it on the path where it is edited."""
  for place in ("late", *(["early"] if scale != 1.0 else [])):
    (folder / place).mkdir()
    (folder / place / "own_help.py").write_text(
      _HELP.format(scale if place == "early" else 1.0)
    )


def _helper(at):
  def write(folder, scale):
    path = folder / at
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HELP.format(scale))

  return write


def _environment(folder, scale):
  os.environ.update(OWN_SCALE=str(scale))


def _text(at, form):
  def write(folder, scale):
    (folder / at).parent.mkdir(parents=True, exist_ok=True)
    (folder / at).write_text(form.format(scale))

  return write


_help = _helper("own_help.py")

# way -> (source of own_main.py, what writes the edited part of a folder)
_WAYS = {
  "an alias of import_module": (
    "from importlib import import_module as load\nSCALE = load('own_' + 'help').SCALE\n",
    _help,
  ),
  "an alias and a constant": (
    "from importlib import import_module as load\nSCALE = load('own_help').SCALE\n",
    _help,
  ),
  "a name that is computed": (
    "import importlib\nSCALE = importlib.import_module('pleh_nwo'[::-1]).SCALE\n",
    _help,
  ),
  "__import__ by another name": (
    "import builtins\nget = getattr(builtins, '__imp' + 'ort__')\n"
    "SCALE = get('own_' + 'help').SCALE\n",
    _help,
  ),
  "spec_from_file_location": (
    _HERE + "from importlib import util\n"
    "spec = util.spec_from_file_location('loaded', here + '/own_' + 'help.py')\n"
    "h = util.module_from_spec(spec)\nspec.loader.exec_module(h)\nSCALE = h.SCALE\ndel h, spec\n",
    _help,
  ),
  "SourceFileLoader": (
    _HERE + "from importlib import machinery, util\n"
    "loader = machinery.SourceFileLoader('loaded', here + '/own_' + 'help.py')\n"
    "h = util.module_from_spec(util.spec_from_loader('loaded', loader))\n"
    "loader.exec_module(h)\nSCALE = h.SCALE\ndel h, loader\n",
    _help,
  ),
  "a file without .py": (
    _HERE + "from importlib import machinery, util\n"
    "loader = machinery.SourceFileLoader('loaded', here + '/own_help.' + 'plugin')\n"
    "h = util.module_from_spec(util.spec_from_loader('loaded', loader))\n"
    "loader.exec_module(h)\nSCALE = h.SCALE\ndel h, loader\n",
    _helper("own_help.plugin"),
  ),
  "pkgutil.resolve_name": (
    "import pkgutil\nSCALE = pkgutil.resolve_name('own_' + 'help:SCALE')\n",
    _help,
  ),
  "run_path": (
    _HERE + "import runpy\nSCALE = runpy.run_path(here + '/own_' + 'help.py')['SCALE']\n",
    _help,
  ),
  "run_module": (
    "import runpy\nSCALE = runpy.run_module('own_' + 'help')['SCALE']\n",
    _help,
  ),
  "a folder of plugins": (
    _HERE + "import importlib, pkgutil, sys\nsys.path.append(here + '/plug' + 'ins')\n"
    "for each in pkgutil.iter_modules([here + '/plug' + 'ins']):\n"
    "  SCALE = importlib.import_module(each.name).SCALE\n",
    _helper("plugins/own_plugin.py"),
  ),
  "plugins by their finder": (
    _HERE + "import pkgutil, types\n"
    "for each in pkgutil.iter_modules([here + '/plug' + 'ins']):\n"
    "  m = types.ModuleType(each.name)\n"
    "  each.module_finder.find_spec(each.name).loader.exec_module(m)\n"
    "  SCALE = m.SCALE\n  del m, each\n",
    _helper("plugins/own_plugin.py"),
  ),
  "exec of a text": (
    _HERE + "import pathlib\nspace = {}\n"
    "exec(pathlib.Path(here + '/own_' + 'help.py').read_text(), space)\n"
    "SCALE = space.pop('SCALE')\ndel space\n",
    _help,
  ),
  "exec of compiled code": (
    _HERE + "import pathlib\nspace = {}\nat = here + '/own_' + 'help.txt'\n"
    "exec(compile(pathlib.Path(at).read_text(), at, 'exec'), space)\n"
    "SCALE = space.pop('SCALE')\ndel space\n",
    _helper("own_help.txt"),
  ),
  "a thread": (
    "import importlib, threading\nfound = []\n"
    "def load():\n  found.append(importlib.import_module('own_' + 'help').SCALE)\n"
    "t = threading.Thread(target=load)\nt.start()\nt.join()\nSCALE = found.pop()\ndel t\n",
    _help,
  ),
  "a thread without a function of the user": (
    "import importlib, sys, threading\n"
    "t = threading.Thread(target=importlib.import_module, args=('own_' + 'help',))\n"
    "t.start()\nt.join()\nSCALE = str(sys.modules['own_' + 'help'].SCALE)\ndel t\n",
    _help,
  ),
  "a pool of threads": (
    "import importlib\nfrom concurrent import futures\n"
    "with futures.ThreadPoolExecutor(1) as pool:\n"
    "  SCALE = str(pool.submit(importlib.import_module, 'own_' + 'help').result().SCALE)\n"
    "del pool\n",
    _help,
  ),
  "an archive": (
    _HERE + "import importlib, sys\nsys.path.append(here + '/own_' + 'zip.zip')\n"
    "SCALE = importlib.import_module('own_' + 'help').SCALE\n",
    _zipped,
  ),
  "compiled code alone": (
    "import importlib\nSCALE = importlib.import_module('own_' + 'help').SCALE\n",
    _compiled,
  ),
  "a namespace package": (
    "import importlib\nSCALE = importlib.import_module('own_space.' + 'inside').SCALE\n",
    _helper("own_space/inside.py"),
  ),
  "a shadow on the path": (
    _HERE + "import sys\nsys.path[:0] = [here + '/early', here + '/late']\n"
    "import importlib\nSCALE = str(importlib.import_module('own_' + 'help').SCALE)\n",
    _shadowed,
  ),
  "a helper's own way": (
    "import importlib\nSCALE = importlib.import_module('own_' + 'between').SCALE\n",
    lambda folder, scale: (
      _text("own_between.py", "import importlib\nload = importlib.import_module\n"
            "SCALE = str(load('own_' + 'help').SCALE)\n")(folder, scale),
      _help(folder, scale),
    ),
  ),
  "JSON": (
    _HERE + "import json\nwith open(here + '/own.json') as file:\n  TABLE = json.load(file)\n"
    "SCALE = None\n",
    _text("own.json", '{{"scale": {}}}'),
  ),
  "a text": (
    _HERE + "import pathlib\nTABLE = [pathlib.Path(here, 'own.txt').read_text()]\nSCALE = None\n",
    _text("own.txt", "{}"),
  ),
  "a file of NumPy": (
    _HERE + "import numpy as np\nTABLE = [np.load(here + '/own.npy')]\nSCALE = None\n",
    lambda folder, scale: np.save(folder / "own.npy", np.full(3, scale)),
  ),
  "a file of NumPy by JAX": (
    _HERE + "import jax.numpy as jnp\nTABLE = [jnp.load(here + '/own.npy')]\nSCALE = None\n",
    lambda folder, scale: np.save(folder / "own.npy", np.full(3, scale)),
  ),
  "a mapped file": (
    _HERE
    + "import numpy as np\nTABLE = [np.memmap(here + '/own.raw', float, 'r')]\nSCALE = None\n",
    lambda folder, scale: np.full(3, scale).tofile(folder / "own.raw"),
  ),
  "a descriptor": (
    _HERE + "import os\nat = os.open(here + '/own.txt', os.O_RDONLY)\n"
    "TABLE = [os.read(at, 9)]\nos.close(at)\nSCALE = None\n",
    _text("own.txt", "{}"),
  ),
  "a resource of a package": (
    "import importlib.resources\n"
    "TABLE = [importlib.resources.files('own_pack').joinpath('own.txt').read_text()]\n"
    "SCALE = None\n",
    lambda folder, scale: (
      _text("own_pack/__init__.py", "")(folder, scale),
      _text("own_pack/own.txt", "{}")(folder, scale),
    ),
  ),
  "a database": (
    _HERE + "import sqlite3\nwith sqlite3.connect(here + '/own.db') as base:\n"
    "  TABLE = [*base.execute('select * from t')]\nbase.close()\nSCALE = None\n",
    _database,
  ),
  "a data file read in a thread": (
    _HERE + "from concurrent import futures\nimport pathlib\n"
    "with futures.ThreadPoolExecutor(1) as pool:\n"
    "  TABLE = [pool.submit(pathlib.Path(here, 'own.txt').read_text).result()]\n"
    "del pool\nSCALE = None\n",
    _text("own.txt", "{}"),
  ),
  "an environment variable": (
    "import os\nSCALE = float(os.environ['OWN_SCALE'])\n",
    _environment,
  ),
  "a table of a computation": (
    "import os\nSCALE = {'a': float(os.environ['OWN_SCALE'])}\n",
    _environment,
  ),
  "a list of a computation": (
    "import os\nSCALE = [float(x) for x in os.environ['OWN_SCALE'].split()]\n",
    _environment,
  ),
  "settings in an object": (
    "import os, types\nSCALE = types.SimpleNamespace(a=float(os.environ['OWN_SCALE']))\n",
    _environment,
  ),
  "settings in a dataclass": (
    "import dataclasses, os\n@dataclasses.dataclass\nclass A:\n  a: float\n"
    "SCALE = A(float(os.environ['OWN_SCALE']))\n",
    _environment,
  ),
  "an array of a computation": (
    "import os, numpy as np\nSCALE = np.ones(3) * float(os.environ['OWN_SCALE'])\n",
    _environment,
  ),
}  # fmt: skip


def _code():
  return names.code({"loss": "own_main:part"})


def _state(code):
  return code.digest(), code.secret_digest()


def _write(folder, way, scale):
  source, edit = _WAYS[way]
  folder.mkdir(exist_ok=True)
  (folder / "own_main.py").write_text(source + _PART)
  edit(folder, scale)


def _memory(code):
  return run_keys.to_meta(bytes(32), code=code)


def _goes_on(code, other):
  """Whether a run of `code` goes on with `other`."""
  try:
    run_keys.check_code(json.loads(json.dumps(_memory(code))), {}, other, workdir="w")
  except UserError as error:
    assert "\n" not in str(error) and len(str(error)) < 300
    return False
  return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  monkeypatch.setenv("OWN_SCALE", "")
  before = loaded.config_files()
  yield
  loaded._CONFIG_FILES[:] = before


# How a source reads a variable of the environment -> what is left of it is no number of a module.
_READS = {
  "in a function": "import os\ndef part():\n  return float(os.environ['OWN_SCALE'])\n",
  "get": "import os\ndef part():\n  return os.environ.get('OWN_SCALE', '1')\n",
  "getenv": "from os import getenv as g\ndef part():\n  return g('OWN_SCALE')\n",
  "another name": "from os import environ as e\nN = 'OWN_SCALE'\ndef part():\n  return e[N]\n",
  "text": "import os\nKIND = os.environ['OWN_SCALE']\ndef part():\n  return KIND\n",
  "a choice": (
    "import os\nimport jax.numpy as jnp\n"
    "ACT = jnp.tanh if os.environ['OWN_SCALE'] == '1.0' else jnp.sin\n"
    "def part(x):\n  return ACT(x)\n"
  ),
  "a closure": (
    "import os\ndef make(scale):\n  return lambda x: scale * x\n"
    "part = make(float(os.environ['OWN_SCALE']))\n"
  ),
  "an object": (
    "import os\nclass Scale:\n  def __init__(self):\n"
    "    self._of = {'a': [float(os.environ['OWN_SCALE'])]}\n"
    "SCALE = Scale()\ndef part(x):\n  return SCALE\n"
  ),
}


@pytest.mark.parametrize("read", _READS)
def test_a_variable_of_the_environment_that_a_source_names_is_part(
  read, tmp_path, fresh, monkeypatch
):
  (tmp_path / "own_main.py").write_text(_READS[read])
  found = []
  for value in ("1.0", "1.0", "2.0", ""):
    monkeypatch.setenv("OWN_SCALE", value or "0")
    if not value and "environ[" not in _READS[read] and "[N]" not in _READS[read]:
      monkeypatch.delenv("OWN_SCALE")
    fresh(tmp_path)
    found.append(_code())
  assert _state(found[0]) == _state(found[1])
  assert len({*map(_state, found)}) == 3
  assert _goes_on(found[0], found[1]) and not _goes_on(found[0], found[2])
  assert "OWN_SCALE" not in json.dumps(found[0].to_json())


def test_a_variable_that_names_a_machine_a_job_or_a_folder_is_no_part(
  tmp_path, fresh, monkeypatch
):
  names_of_machines = ("HOME", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "OWN_DIR", "RANK")
  reads = [f"os.environ.get({name!r})" for name in (*names_of_machines, "OWN_SCALE")]
  source = f"import os\ndef part():\n  return {', '.join(reads)}\n"
  (tmp_path / "own_main.py").write_text(source)
  found = []
  for value in ("1", "2"):
    for name in names_of_machines:
      monkeypatch.setenv(name, value)
    monkeypatch.setenv("OWN_SCALE", f"/folder/{value}")
    fresh(tmp_path)
    found.append(_state(_code()))
  assert found[0] == found[1]


@pytest.mark.parametrize("way", _WAYS)
def test_another_state_of_what_is_loaded_is_another_run(way, tmp_path, fresh):
  """And the same state in another folder is the same run."""
  found = []
  for place, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
    _write(tmp_path / place, way, scale)
    fresh(tmp_path / place)
    found.append(_code())
    assert _state(_code()) == _state(found[-1])  # a second look
  same, again, edited = found
  assert _state(same) == _state(again) != _state(edited)
  assert _goes_on(same, again) and not _goes_on(same, edited)
  public = json.dumps(same.to_json())
  assert str(tmp_path) not in public
  assert not {*same.inputs.values()} & {*same.modules.values()}


_LAZY = {
  "own_main": """import importlib.util, sys
def put():
  spec = importlib.util.find_spec("own_" + "lazy")
  spec.loader = importlib.util.LazyLoader(spec.loader)
  sys.modules[spec.name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(sys.modules[spec.name])
put()
def part():
  import own_first
""",
  "own_first": "import own_rate\nimport own_second\n",
  "own_second": "import own_lazy\n",
  "own_lazy": "from own_rate import RATE\n",
  "own_rate": "RATE = float('2.5')\n",
}


def test_a_module_that_the_walk_itself_imports_is_part(tmp_path, fresh):
  """A name may be of no imported module at first, and of one when it is named again."""
  for name, source in _LAZY.items():
    (tmp_path / f"{name}.py").write_text(source)
  fresh(tmp_path)
  found = [_code(), _code()]
  assert "value 'own_rate.RATE'" in found[0].inputs
  assert _state(found[0]) == _state(found[1])


# --- what is loaded by chance, shown, or read as a data set


def test_order_of_imports_and_chance_change_nothing(tmp_path, fresh):
  """Nor does a test, a notebook or a traceback that loads more, or reads the sources."""
  found = []
  for place in ("a", "b"):
    _write(tmp_path / place, "spec_from_file_location", 1.0)
    _text("own.json", "{}")(tmp_path / place, 0)
    (tmp_path / place / "own_chance.py").write_text(
      "import own_help, own_main, pathlib\n"
      "pathlib.Path(own_main.here, 'own.json').read_text()\n"
      "import inspect\ninspect.getsource(own_main)\n"
    )
    fresh(tmp_path / place)
    if place == "b":
      importlib.import_module("own_chance")
    found.append(_state(_code()))
  assert found[0] == found[1]


def test_caches_of_bytecode_change_nothing(tmp_path, fresh, monkeypatch):
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  _write(tmp_path, "a helper's own way", 1.0)
  found = []
  for _ in range(2):
    fresh(tmp_path)
    found.append(_state(_code()))
  assert (tmp_path / "__pycache__").exists()
  assert found[0] == found[1]


def test_what_changes_with_each_process_is_no_part(tmp_path, fresh):
  text = (
    "import os, time, random\nSTART = time.time()\nWHERE = os.path.abspath(__file__)\n"
    "CORES = os.cpu_count()\nCALLS = 0\n_CACHE = {}\n"
    "def part():\n  global CALLS\n  CALLS += 1\n  _CACHE[CALLS] = 1\n"
  )
  found = []
  for place in ("a", "b"):
    (tmp_path / place).mkdir()
    (tmp_path / place / "own_main.py").write_text(text)
    fresh(tmp_path / place)
    found.append(_state(_code()))
    sys.modules["own_main"].part()
    found.append(_state(_code()))
  assert len({*found}) == 1


def test_what_a_data_set_is_read_from_counts_for_its_function_alone(tmp_path, fresh):
  """A file beside the data may decide more than the data. Another function of the same module may
  have read another data set before, in the same process."""
  found = []
  for place, scale, both in (("a", 1.0, False), ("b", 1.0, True), ("c", 2.0, False)):
    folder = tmp_path / place
    folder.mkdir()
    (folder / "own_main.py").write_text(
      _HERE + "import numpy as np\n"
      "def part():\n  return np.load(here + '/own.npy')\n"
      "def other():\n  return np.load(here + '/more.npy')\n"
    )
    np.save(folder / "own.npy", np.full(3, scale))
    np.save(folder / "more.npy", np.full(3, scale))
    fresh(folder)
    if both:
      names.call("own_main:other", "data.name")
    names.call("own_main:part", "data.name")
    found.append(names.code({"data": {"name": "own_main:part"}}))
    assert _code().inputs == {}
  assert _state(found[0]) == _state(found[1]) != _state(found[2])
  assert found[0].digest() == found[2].digest()
  assert not _goes_on(found[0], found[2])


# --- what is loaded after the noise was chosen

_LATE = {
  "code": ("  import importlib\n  importlib.import_module('own_' + 'help')\n", "own_help.py"),
  "an alias": ("  from importlib import import_module as load\n  load('own_' + 'help')\n",
               "own_help.py"),
  "run_path": ("  import runpy\n  runpy.run_path(here + '/own_' + 'help.py')\n", "own_help.py"),
  "data": ("  import pathlib\n  pathlib.Path(here, 'own.json').read_text()\n", "own.json"),
  "another thread": (
    "  import threading, runpy\n  at = here + '/own_' + 'help.py'\n"
    "  t = threading.Thread(target=lambda: runpy.run_path(at))\n  t.start()\n  t.join()\n",
    "own_help.py",
  ),
}  # fmt: skip


@pytest.mark.parametrize("way", _LATE)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_loaded_after_the_noise_was_chosen_is_refused(way, first, tmp_path, fresh):
  body, name = _LATE[way]
  (tmp_path / "own_main.py").write_text(_HERE + "def part():\n" + body)
  _help(tmp_path, 1.0)
  _text("own.json", "{}")(tmp_path, 0)
  fresh(tmp_path)
  code, before = _code(), run_code.number_of_changes()
  with pytest.raises(UserError, match=f"^{name}: ") as refused:
    if first:
      with run_code.watched(code, _code):
        sys.modules["own_main"].part()
    else:
      sys.modules["own_main"].part()
      assert run_code.number_of_changes() > before
      run_code.check_still(code, _code)
  assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_function_called_in_another_thread_is_refused(tmp_path, fresh):
  """Of a file that something else has imported before."""
  (tmp_path / "own_main.py").write_text(
    "import sys, threading\ndef part():\n"
    "  t = threading.Thread(target=sys.modules['own_' + 'help'].scale, args=(1,))\n"
    "  t.start()\n  t.join()\n"
  )
  _help(tmp_path, 1.0)
  fresh(tmp_path)
  importlib.import_module("own_help")
  code = _code()
  refused = pytest.raises(UserError, match="own_help.py: the run calls a function")
  with refused, run_code.watched(code, _code):
    sys.modules["own_main"].part()


def test_a_file_that_was_edited_after_it_was_read_is_refused(tmp_path, fresh):
  _write(tmp_path, "a text", 1.0)
  fresh(tmp_path)
  importlib.import_module("own_main")
  (tmp_path / "own.txt").write_text("another length")
  os.utime(tmp_path / "own.txt", ns=(1, 1))
  loaded._WRITTEN.discard(str(tmp_path / "own.txt"))  # as if another program had written it
  with pytest.raises(UserError, match="'own.txt': was edited after"):
    _code()


def test_a_data_file_that_was_edited_between_two_steps_is_refused(tmp_path, fresh):
  _text("own.txt", "{}")(tmp_path, 1.0)
  (tmp_path / "own_main.py").write_text(
    _HERE
    + "import pathlib\ndef part():\n  return pathlib.Path(here, 'own.txt').read_text()\n"
    "SCALE = [part()]\n"
  )
  fresh(tmp_path)
  code = _code()
  sys.modules["own_main"].part()
  run_code.check_still(code, _code)
  _text("own.txt", "{} and more")(tmp_path, 2.0)
  loaded._WRITTEN.discard(str(tmp_path / "own.txt"))  # as if another program had written it
  sys.modules["own_main"].part()
  with pytest.raises(UserError, match="^own.txt: own_main.py reads"):
    run_code.check_still(code, _code)


# --- what a config file changes

_HELD = (
  "TABLE = {'a': 1}\nROWS = [1, 2]\nSCALE = 1\nclass A:\n  rate = 1.0\n"
  "def part(x=1, *, y='tanh'):\n  return x\n"
)
_CHANGES = {
  "a number": "own_main.SCALE = 2",
  "an entry": "own_main.TABLE['a'] = 2",
  "a call": "own_main.TABLE.update(b=2)",
  "a list": "own_main.ROWS.append(3)",
  "an attribute of a class": "own_main.A.rate = 2.0",
  "a default": "own_main.part.__defaults__ = (2,)",
  "a default by name": "own_main.part.__kwdefaults__['y'] = 'relu'",
  "setattr": "setattr(own_main, 'SCALE', 2)",
  "a library": "import optax\noptax.own_mark = 2",
  "an option of JAX": "import jax\njax.config.update('jax_numpy_rank_promotion', 'raise')",
  "by another file": "import own_patch",
  "by a function of another file": "from own_patch import act\nact()",
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_a_config_file_changes_is_another_run(change, tmp_path, fresh):
  """A config file that only makes values has no part, whatever its words."""
  found = []
  for place in ("plain", "other words", "acts"):
    folder = tmp_path / place
    folder.mkdir()
    (folder / "own_main.py").write_text(_HELD)
    (folder / "own_patch.py").write_text("import optax\ndef act():\n  optax.own_mark = 2\n")
    line = {"plain": "X = 1", "other words": "# word\nX = 2"}.get(place, _CHANGES[change])
    (folder / "own_config.py").write_text(f"import own_main\n{line}\n")
    fresh(folder)
    importlib.import_module("own_config")
    run_code.begin_at(str(folder / "own_config.py"))
    found.append(_code())
  sys.modules.get("optax").__dict__.pop("own_mark", None)
  assert _state(found[0]) == _state(found[1]) != _state(found[2])
  assert not _goes_on(found[0], found[2])


_SCRIPT = """
import sys
from dpjax import names
sys.path.insert(0, {folder!r})
code = names.code({{"loss": "own_main:part"}})
print(code._replace(versions={{}}).digest().hex(), code.secret_digest().hex())
"""


def test_two_processes_agree(tmp_path, fresh):
  _write(tmp_path, "a helper's own way", 1.0)
  _text("own.json", "{}")(tmp_path, 0)
  with (tmp_path / "own_main.py").open("a") as file:
    file.write(
      f"{_HERE}import pathlib\nTEXT = pathlib.Path(here, 'own.json').read_text()\n"
    )
    file.write(
      "import numpy as np\nROWS = np.arange(3) * 2\nclass A:\n  rate = {'a', 'b'}\n"
    )
  fresh(tmp_path)
  code = _code()
  states = {f"{code._replace(versions={}).digest().hex()} {code.secret_digest().hex()}"}
  root = str(pathlib.Path(dpjax.__file__).parents[1])
  path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(_SCRIPT.format(folder=str(tmp_path)))],
    capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True,
  )  # fmt: skip
  assert {done.stdout.strip()} == states
