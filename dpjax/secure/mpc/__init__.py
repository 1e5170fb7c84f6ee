"""Products, training and prediction on shares."""

from dpjax.secure.mpc.spu_jit import Secret as Secret
from dpjax.secure.mpc.spu_jit import reveal as reveal
from dpjax.secure.mpc.spu_jit import secure_jit as secure_jit
from dpjax.secure.mpc.spu_jit import share as share
