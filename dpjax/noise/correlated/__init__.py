"""Correlated noise for DP-FTRL: noise whose prefix sums nearly cancel.

A strategy is an invertible lower-triangular matrix C with a unit diagonal. Instead of white noise
z, the steps get C^{-1} z. The noisy sums x + C^{-1} z are post-processing of the Gaussian mechanism
C x + z. The cost depends on the columns of C for the steps in which ONE example takes part, namely
on their sum (`dpjax.accounting.matrix.participation_costs`).

| strategy         | C                                 | memory / size of the parameters  |
| ---------------- | --------------------------------- | -------------------------------- |
| Independent      | the identity: white noise         | 0                                |
| Tree             | binary trees, one after the other | floor(log2(steps of a tree)) + 1 |
| BandedToeplitz   | few diagonals, optimised          | bands - 1                        |
| BufferedToeplitz | sums of decaying exponentials     | buffers                          |
| InverseBanded    | a full matrix; C^{-1} is banded   | bands - 1; 0 if noise is redrawn |
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.noise.correlated.inverse import BandInvMf as BandInvMf
  from dpjax.noise.correlated.inverse import Bifr as Bifr
  from dpjax.noise.correlated.inverse import Bisr as Bisr
  from dpjax.noise.correlated.inverse import InverseBanded as InverseBanded
  from dpjax.noise.correlated.inverse import LambdaCgd as LambdaCgd
  from dpjax.noise.correlated.strategies import Correlation as Correlation
  from dpjax.noise.correlated.strategies import Independent as Independent
  from dpjax.noise.correlated.strategies import Redrawn as Redrawn
  from dpjax.noise.correlated.strategies import Tree as Tree
  from dpjax.noise.correlated.strategies import Trees as Trees
  from dpjax.noise.correlated.strategies import White as White
  from dpjax.noise.correlated.strategies import matrix as matrix
  from dpjax.noise.correlated.toeplitz import Banded as Banded
  from dpjax.noise.correlated.toeplitz import BandedToeplitz as BandedToeplitz
  from dpjax.noise.correlated.toeplitz import Buffered as Buffered
  from dpjax.noise.correlated.toeplitz import BufferedToeplitz as BufferedToeplitz
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
