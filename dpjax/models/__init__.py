"""Models in which every example is independent: no BatchNorm, nothing shared across a
batch.

Each model is a Flax linen module. `model.init(key, x[:1])` returns parameters. `model.apply(params,
x)` returns logits [B, num_classes] ([B, T, vocab_size] for `Transformer`) of at least float32. A
user's model may be of another library (`dpjax.models.libraries`).
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.models import gpt2 as gpt2
  from dpjax.models import libraries as libraries
  from dpjax.models.activations import ACTIVATIONS as ACTIVATIONS
  from dpjax.models.activations import activation_fn as activation_fn
  from dpjax.models.activations import tempered_sigmoid as tempered_sigmoid
  from dpjax.models.bert import Bert as Bert
  from dpjax.models.bert import load_bert as load_bert
  from dpjax.models.checkpoint_files import load_checkpoint as load_checkpoint
  from dpjax.models.convnet import CifarCnn as CifarCnn
  from dpjax.models.convnet import Cnn as Cnn
  from dpjax.models.convnet import ConvNet as ConvNet
  from dpjax.models.convnet import RadpCnn as RadpCnn
  from dpjax.models.dense import Linear as Linear
  from dpjax.models.dense import Mlp as Mlp
  from dpjax.models.equivariant import EquivariantCnn as EquivariantCnn
  from dpjax.models.equivariant import GroupConv as GroupConv
  from dpjax.models.gpt2 import load_gpt2 as load_gpt2
  from dpjax.models.gpt2 import save_gpt2 as save_gpt2
  from dpjax.models.patches import PatchNetwork as PatchNetwork
  from dpjax.models.patches import learned_patches as learned_patches
  from dpjax.models.patches import patch_features as patch_features
  from dpjax.models.pooling import max_pool as max_pool
  from dpjax.models.public_trunks import trunk_features as trunk_features
  from dpjax.models.registry import build as build
  from dpjax.models.registry import check_options as check_options
  from dpjax.models.registry import documented as documented
  from dpjax.models.registry import is_language as is_language
  from dpjax.models.registry import names as names
  from dpjax.models.registry import needs_features as needs_features
  from dpjax.models.registry import needs_unit_range as needs_unit_range
  from dpjax.models.registry import options as options
  from dpjax.models.resnet import ResNet as ResNet
  from dpjax.models.resnet import load_resnet as load_resnet
  from dpjax.models.scatter_heads import ScatterCnn as ScatterCnn
  from dpjax.models.scatter_heads import ScatterLinear as ScatterLinear
  from dpjax.models.scatter_heads import group_standardize as group_standardize
  from dpjax.models.scatter_heads import standardized_features as standardized_features
  from dpjax.models.scattering import COLOURS as COLOURS
  from dpjax.models.scattering import features_shape as features_shape
  from dpjax.models.scattering import opponent_colours as opponent_colours
  from dpjax.models.scattering import scattering as scattering
  from dpjax.models.scattering import scattering_chunks as scattering_chunks
  from dpjax.models.scattering import scattering_features as scattering_features
  from dpjax.models.scattering import typical_scales as typical_scales
  from dpjax.models.sentence_encoder import sentence_features as sentence_features
  from dpjax.models.transformer import Transformer as Transformer
  from dpjax.models.vision_transformer import VisionTransformer as VisionTransformer
  from dpjax.models.vision_transformer import load_vit as load_vit
  from dpjax.models.wide_resnet import WideResNet as WideResNet
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
