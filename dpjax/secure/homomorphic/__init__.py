"""Regression and inference on CKKS ciphertexts; only the data's owner decrypts.

Paillier is not offered. The library phe is GPL-3 and has had no release since 2022. The library
lightphe draws its primes and its blinding numbers with Python's `random`, which is no cryptographic
generator.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure.homomorphic.regression import regress as regress
  from dpjax.secure.homomorphic.regression_plan import RegressionPlan as RegressionPlan
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
