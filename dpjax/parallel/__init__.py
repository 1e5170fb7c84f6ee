"""Runs of several processes: how they meet, exchange arrays and detect a lost process.

`client_states` stores the states of clients between rounds. `targets` compiles programs for
machines that are absent.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.parallel import targets as targets
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
