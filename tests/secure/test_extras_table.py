"""The extras that the table of docs/secure.md names: each row runs with these, and without them the
error names them."""

import functools
import pathlib
import re
import sys

import numpy as np
import pytest

from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.table import SecureTable
from dpjax.secure import sums
from dpjax.secure.mpc import garbled, private_values, secureml, session
from dpjax.secure.sums import primitives
from dpjax.validate import UserError

# Modules that an extra brings.
_MODULES = {
  "secure": ("cryptography", "Crypto"),
  "vertical": ("private_set_intersection.python", "tenseal"),
  "he": ("tenseal",),
}


def _secagg():
  vectors = {who: np.array([who], np.uint32) for who in range(3)}
  return sums.SecAgg(min_survivors=2).sum(vectors)


def _shares():
  x = np.array([[-2.0], [2.0]])
  y = np.array([[0.0], [1.0]])
  parts = private_values.split((secureml.initial((1, 1), seed=0), x, y), seed=0)
  program = lambda party, network, x, y: secureml.predict(
    party, network, x, secureml.Recipe(), to=0
  )
  return session.run(program, *parts, seed=0).outputs


def _task(task):
  line = SecureTable().missing(SecureConfig(task=task))
  if line:
    raise UserError(line)


_CALLS = {  # what a row names -> how it begins
  "--config.secure_sum=secagg": _secagg,
  "--config.privacy=distributed": _secagg,
  "dpjax.secure.mpc": _shares,
  "mpc.secure_jit": None,  # its engine is no extra
  "--config.task=noisy_model": lambda: _task("noisy_model"),
  "--config.task=columns": lambda: _task("columns"),
  "--config.task=transfer": lambda: _task("transfer"),
  "mpc.garbled": lambda: garbled.less(1, 2, bits=4),
  "dpjax.secure.homomorphic": lambda: _task("regress"),
}


@functools.cache
def _rows():
  """Returns {start of a row's second cell: the extras that its third cell names}."""
  page = pathlib.Path(__file__).parents[2] / "docs" / "secure.md"
  lines = page.read_text(encoding="utf-8").splitlines()
  first = lines.index("| you want | use | extra |") + 2
  rows = {}
  for line in lines[first : lines.index("", first)]:
    _, use, extra = (cell.strip() for cell in line.strip("|").split("|"))
    names = [name for name in re.findall("`([^`]*)`", extra) if name in _MODULES]
    rows[re.match(r"`([\w.=-]+)", use).group(1)] = names
  return rows


def _hide(monkeypatch, but):
  kept = {module for name in but for module in _MODULES[name]}
  for module in {module for each in _MODULES.values() for module in each} - kept:
    monkeypatch.setitem(sys.modules, module, None)
    # Parts that another test has loaded would be found without their package.
    for part in [name for name in sys.modules if name.startswith(f"{module}.")]:
      monkeypatch.setitem(sys.modules, part, None)
  primitives.library.cache_clear()


def test_every_row_of_the_table_is_tested():
  assert set(_rows()) == set(_CALLS)


@pytest.mark.parametrize("use", [name for name, call in _CALLS.items() if call])
def test_a_row_names_all_that_it_needs(use, monkeypatch):
  wanted = _rows()[use]
  try:
    with monkeypatch.context() as patch:
      _hide(patch, but=())
      if wanted:
        with pytest.raises(UserError, match="|".join(wanted)):
          _CALLS[use]()
      else:
        _CALLS[use]()
    for name in {module for each in wanted for module in _MODULES[each]}:
      pytest.importorskip(name)
    with monkeypatch.context() as patch:
      _hide(patch, but=wanted)
      _CALLS[use]()
  finally:
    primitives.library.cache_clear()
