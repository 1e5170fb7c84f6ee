"""Functions of a layer whose gradients have a rule of their own, beside the general rules.

A layer names its jitted function here, with the module that holds the rule. The fast route of
`gradients` meets the function in the trace of a loss, and only then imports the module.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_RULES: dict[str, str] = {}


def register(function: str, module: str) -> None:
  """Names the module with the rule for a jitted function, by the name it has in a trace.

  The module has a function `find(eqn, values)`: it returns the layer, or None if the equation is
  another function of that name (`gradients.ghost.standardized` is an example).
  """
  _RULES[function] = module


def module_of(function: str | None) -> ModuleType | None:
  """Returns the module with the rule for a function; None if it has no rule of its own."""
  module = _RULES.get(function or "")
  return importlib.import_module(module) if module else None
