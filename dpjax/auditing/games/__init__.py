"""Distinguishing games: every guarantee of the library, attacked on its worst neighbours.

`registry` finds what can be attacked, and the games that attack it; `game.play` plays one game. The
tests play all of them in a minute. `python -m launch.audit --all` plays them for as long as you
like.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.auditing.games.game import CONFIDENCE as CONFIDENCE
  from dpjax.auditing.games.game import Claim as Claim
  from dpjax.auditing.games.game import Game as Game
  from dpjax.auditing.games.game import Result as Result
  from dpjax.auditing.games.game import ceiling as ceiling
  from dpjax.auditing.games.game import held_out_bound as held_out_bound
  from dpjax.auditing.games.game import play as play
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
