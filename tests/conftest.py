"""Strictness for every test: rank promotion raises; compilations are cached on disk."""

import contextlib
import gc
import importlib.util
import os
import pathlib
import tempfile

_CACHE = os.environ.get(
  "DPJAX_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "dpjax-xla"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # these five hold for commands of tests too
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.008")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads them
# Compiling takes longer than running here: half of all processor time. Rooms whose guarantee is a
# rounding are compiled as users' programs are; so are slow cases of those that train or attack.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
_OPTIMIZED = ("gradients", "noise")
_OPTIMIZED_IF_SLOW = ("attacks", "models", "zoo")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from dpjax import files, pictures  # noqa: E402
from dpjax.parallel import allocator  # noqa: E402
from tests import pinned, quick_compile  # noqa: E402

pinned.pin()
jax.config.update("jax_numpy_rank_promotion", "raise")
# A first example compiles, and other work may share the cores: no test fails by its time.
hypothesis.settings.register_profile(
  "any time", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any time")

_QUICK = jax.config.read("jax_disable_most_optimizations")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Bytes that a worker may hold between two tests: a compiled program holds more than a megabyte.
_MOST_MEMORY = min(max(1.3e9, allocator.machine_memory() / 4 / _WORKERS), 3e9)
_MORE_MEMORY = (
  0.2e9  # or so many more than it could not give back: libraries, their threads
)
_kept = 0
_REPORT = "report.png"  # written at the end of each run
_report = b""
# Whose examples need a library that comes with an extra: README's command installs `dev` alone.
_OF_EXTRAS = {
  "dpjax.secure.homomorphic.": "tenseal",
  "dpjax.secure.sums.homomorphic_sums.": "tenseal",
  "dpjax.secure.sums.": "Crypto",
  "dpjax.secure.mpc.": "Crypto",
  "dpjax.secure.vertical_models": "Crypto",
}


def pytest_configure(config):
  """Collects no garbage until all cases are there: it would walk them again and again."""
  collects = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
  if collects:
    gc.disable()


def pytest_fixture_setup(fixturedef):
  """A fixture's runs have the same keys, whichever test asks for it first."""
  pinned.restart(f"{fixturedef.baseid} {fixturedef.argname}")


def pytest_runtest_call(item):
  """A test's runs have the same keys whenever it runs."""
  pinned.restart(item.nodeid)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
  """Gives cases their lane, and skips examples whose library is not installed."""
  absent = [
    package for package, name in _OF_EXTRAS.items() if not importlib.util.find_spec(name)
  ]
  # Tests that name quick cases, and whether one was found.
  quick = {}
  for item in items:
    mark = item.get_closest_marker("cases")
    if mark:
      lane = _lane(mark.kwargs, item.callspec)
      if lane != "quick":
        item.add_marker(lane)
      if "quick" in mark.kwargs:
        # A case may have a mark of its own, too.
        is_quick = not any(item.get_closest_marker(slower) for slower in ("slow", "long"))
        quick[item.function] = quick.get(item.function, False) or is_quick
    if item.name.startswith(tuple(absent)):
      item.add_marker(pytest.mark.skip(reason="needs an extra: see pyproject.toml"))
  # A run may have been asked for one case alone; `--collect-only` sees all of them.
  gone = [function.__name__ for function, found in quick.items() if not found]
  if gone and config.option.collectonly and "[" not in "".join(config.args):
    raise pytest.UsageError(f"no case of {', '.join(gone)} is named as in quick=[...]")


def _lane(lanes, case) -> str:
  """Returns the lane of one case of a test with `@pytest.mark.cases(...)`.

  Args:
    lanes: lane -> the ids of its cases, or their positions in the one `parametrize`; `...` for all
      cases that no lane names. Those are quick if no lane has it.
    case: the case's `callspec`.
  """
  positions = {*case.indices.values()}
  names = {case.id, *(positions if len(positions) == 1 else ())}
  for lane, cases in lanes.items():
    if cases is not ... and names & {*cases}:
      return lane
  return next((lane for lane, cases in lanes.items() if cases is ...), "quick")


@pytest.fixture(autouse=True, scope="session")
def _one_report_is_drawn():
  """Hundreds of runs end with a picture, which takes a quarter of a second to draw.

  Each figure is made, but only the first is drawn; the files of the others are copies of its.
  """
  save = pictures.save

  def saved(figure, path, *, also=()):
    global _report
    path = pathlib.Path(path)
    if path.name != _REPORT or not _report:
      save(figure, path, also=also)
      _report = path.read_bytes() if path.name == _REPORT else _report
    else:
      files.replace_file(path, _report)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pictures, "save", saved)
    yield save


@pytest.fixture
def every_report_is_drawn(_one_report_is_drawn, monkeypatch):
  """For tests of the picture."""
  monkeypatch.setattr(pictures, "save", _one_report_is_drawn)


@pytest.fixture
def x64():
  """Float64 for the oracles of one test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def quick_x64(x64):
  """The same for a test whose tolerance is far above a rounding: compiled in half the time."""
  with quick_compile.quickly() if _QUICK else contextlib.nullcontext():
    yield


def pytest_collection_finish():
  """Collects garbage once for 12,000 cases, and never walks what is left of them again.

  They, their modules and the libraries are there to the end. Each collection walked them for .7
  seconds of processor time, and there is one at the end of each file.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 10, 10)  # walking what JAX traces costs more than what is found
  gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _compiled_as_for_users(request):
  """JAX does not tell programs of the two ways apart, so none outlives a change of the way."""
  only_quick = "not slow" in request.config.option.markexpr
  users = _OPTIMIZED if only_quick else _OPTIMIZED + _OPTIMIZED_IF_SLOW
  quick = _QUICK and request.path.parent.name not in users
  if quick != jax.config.read("jax_disable_most_optimizations"):
    _let_go()
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(autouse=True)
def _memory_is_given_back():
  """A worker that kept the programs of every file would grow to many gigabytes."""
  global _kept
  yield
  if _memory() > max(_MOST_MEMORY, _kept + _MORE_MEMORY):
    _let_go()
    _kept = _memory()


def _memory() -> int:
  """Bytes of this process; 0 where the system does not say."""
  statm = pathlib.Path("/proc/self/statm")
  if not statm.exists():
    return 0
  return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _let_go() -> None:
  jax.clear_caches()
  gc.collect()
  allocator.give_back()  # freed memory stays with the process until it is asked for
