"""Secure computation: sums, products and models over hidden data.

| package           | what is computed                         | what hides it                     |
| ----------------- | ---------------------------------------- | --------------------------------- |
| `sums`            | the sum of clients' integer vectors      | shares, masks, homomorphism       |
| `summation`       | the mean of a federated round            | any of `sums`; or nothing, in a   |
|                   |                                          | simulation that says so           |
| `homomorphic`     | regression and inference on ciphertexts  | CKKS                              |
| `mpc`             | products, training, prediction on shares | shares; parties must not collude  |
| `vertical`        | regression, split networks, alignment    | ciphertexts and masks; a split    |
|                   | over parties with different columns      | network sends plain activations   |
| `vertical_models` | models over two parties' columns         | shares, as in `mpc`               |

Hiding is not differential privacy: the RESULT still tells about the data, unless noise is
added inside (`distributed_noise`), or to the one sum that is released (`linear_regression`).
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure import homomorphic as homomorphic
  from dpjax.secure import mpc as mpc
  from dpjax.secure import sums as sums
  from dpjax.secure import vertical as vertical
  from dpjax.secure.distributed_noise import skellam_mean as skellam_mean
  from dpjax.secure.summation import Dropout as Dropout
  from dpjax.secure.summation import forgiving as forgiving
  from dpjax.secure.summation import secure_mean as secure_mean
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
