"""Runs of several processes: how they meet, exchange arrays and detect a lost process.

`client_states` stores the states of clients between rounds. `targets` compiles programs for
machines that are absent.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.parallel import client_states as client_states
  from dpjax.parallel import made_for as made_for
  from dpjax.parallel import row_journal as row_journal
  from dpjax.parallel import runtime as runtime
  from dpjax.parallel import targets as targets
  from dpjax.parallel.exchanges import PeerLost as PeerLost
  from dpjax.parallel.exchanges import arrays_from_first as arrays_from_first
  from dpjax.parallel.exchanges import exchange as exchange
  from dpjax.parallel.exchanges import is_first as is_first
  from dpjax.parallel.exchanges import largest as largest
  from dpjax.parallel.exchanges import on_first as on_first
  from dpjax.parallel.exchanges import same as same
  from dpjax.parallel.spanning import own_copy as own_copy
  from dpjax.parallel.spanning import placed as placed
  from dpjax.parallel.spanning import placed_like as placed_like
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
