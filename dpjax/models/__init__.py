"""Models in which every example is independent: no BatchNorm, nothing shared across a
batch.

Each model is a Flax linen module. `model.init(key, x[:1])` returns parameters. `model.apply(params,
x)` returns logits [B, num_classes] ([B, T, vocab_size] for `Transformer`) of at least float32. A
user's model may be of another library (`dpjax.models.libraries`).
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.models.activations import tempered_sigmoid as tempered_sigmoid
  from dpjax.models.convnet import CifarCnn as CifarCnn
  from dpjax.models.convnet import Cnn as Cnn
  from dpjax.models.convnet import ConvNet as ConvNet
  from dpjax.models.convnet import RadpCnn as RadpCnn
  from dpjax.models.dense import Linear as Linear
  from dpjax.models.dense import Mlp as Mlp
  from dpjax.models.pooling import max_pool as max_pool
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
