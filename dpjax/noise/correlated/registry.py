"""Strategies that a config may name.

Each class holds the numbers that a user sets. Its `make` returns the strategy of a run, from the
number of steps and the least distance between two participations of an example.
"""

from __future__ import annotations

from dpjax.noise.correlated.inverse import BandInvMf, Bifr, Bisr, LambdaCgd
from dpjax.noise.correlated.strategies import Trees, White
from dpjax.noise.correlated.toeplitz import Banded, Buffered

Strategy = White | Banded | Buffered | Trees | Bisr | Bifr | BandInvMf | LambdaCgd
STRATEGIES: dict[str, type[Strategy]] = {
  "banded": Banded,
  "blt": Buffered,
  "tree": Trees,
  "identity": White,
  "bisr": Bisr,
  "bifr": Bifr,
  "band_inv_mf": BandInvMf,
  "lambda_cgd": LambdaCgd,
}
