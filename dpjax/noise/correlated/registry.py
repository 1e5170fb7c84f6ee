"""Strategies that a config may name: one row each.

A row holds the numbers that a user sets. Its matrix is made when the run is known: its steps, and
the least number of steps between two participations of one example.
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
