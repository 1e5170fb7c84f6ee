"""Sums, products and models over data that nobody sees.

| room          | what is computed                         | what hides it                  |
| ------------- | ---------------------------------------- | ------------------------------ |
| `sums`        | the sum of clients' integer vectors      | shares, masks, homomorphism    |
| `homomorphic` | regression and inference on ciphertexts  | CKKS                           |
| `mpc`         | products, training, prediction on shares | two parties, neither alone     |

Hiding is not differential privacy: the RESULT still tells about the data, unless noise is
added inside (`distributed_noise`).
"""

from dpjax.secure import sums as sums
