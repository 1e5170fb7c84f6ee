"""Strategies that a config may name.

Each class holds the numbers that a user sets. Its `make` returns the strategy of a run, from the
number of steps and the least distance between two participations of an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dpjax.noise.correlated.inverse import BandInvMf, Bifr, Bisr, LambdaCgd
  from dpjax.noise.correlated.strategies import Trees, White
  from dpjax.noise.correlated.toeplitz import Banded, Buffered

  Strategy = White | Banded | Buffered | Trees | Bisr | Bifr | BandInvMf | LambdaCgd
else:
  Strategy = Any
# A run imports its own strategy alone.
STRATEGIES: dict[str, str | type[Strategy]] = {
  "banded": "dpjax.noise.correlated.toeplitz:Banded",
  "blt": "dpjax.noise.correlated.toeplitz:Buffered",
  "tree": "dpjax.noise.correlated.strategies:Trees",
  "identity": "dpjax.noise.correlated.strategies:White",
  "bisr": "dpjax.noise.correlated.inverse:Bisr",
  "bifr": "dpjax.noise.correlated.inverse:Bifr",
  "band_inv_mf": "dpjax.noise.correlated.inverse:BandInvMf",
  "lambda_cgd": "dpjax.noise.correlated.inverse:LambdaCgd",
}
