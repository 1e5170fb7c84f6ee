"""Two parties compute on shares: each learns only what is revealed to it.

A value is a fixed-point number in Z_2^64: the sum of one share in each party. Sums are local; a
product takes a Beaver triple from a trusted dealer, who sees no data. A computation is a PROGRAM,
`program(party, ...)`, that each party runs on its own shares. `run` runs both parties in this
process; `three_programs` runs two parties and the dealer as three processes, over sockets.

The guarantee holds against one party, or the dealer, that follows the protocol and looks at all it
receives (honest but curious). It does not hold if two of the three collude. Shapes, the program
and public arguments are public. What is revealed may tell about the inputs. Only what `OutputNoise`
opens is differentially private.

Also here: `secure_jit` runs a JAX function on shares by SPU (`spu_jit`, extra `mpc-spu`), and
`garbled` tells whether x < y without a dealer.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure.mpc.comparison import argmax as argmax
  from dpjax.secure.mpc.comparison import relu as relu
  from dpjax.secure.mpc.comparison import sigmoid as sigmoid
  from dpjax.secure.mpc.output_noise import OutputNoise as OutputNoise
  from dpjax.secure.mpc.private_values import reveal as reveal
  from dpjax.secure.mpc.private_values import share as share
  from dpjax.secure.mpc.products import add as add
  from dpjax.secure.mpc.products import matmul as matmul
  from dpjax.secure.mpc.products import multiply as multiply
  from dpjax.secure.mpc.session import run as run
  from dpjax.secure.mpc.spu_jit import secure_jit as secure_jit
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
