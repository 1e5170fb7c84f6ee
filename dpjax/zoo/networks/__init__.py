"""Networks of papers, weights of others and public features."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo.networks.bert import Bert as Bert
  from dpjax.zoo.networks.bert import load_bert as load_bert
  from dpjax.zoo.networks.checkpoint_files import load_checkpoint as load_checkpoint
  from dpjax.zoo.networks.equivariant import EquivariantCnn as EquivariantCnn
  from dpjax.zoo.networks.gpt2 import load_gpt2 as load_gpt2
  from dpjax.zoo.networks.patches import PatchNetwork as PatchNetwork
  from dpjax.zoo.networks.patches import learned_patches as learned_patches
  from dpjax.zoo.networks.patches import patch_features as patch_features
  from dpjax.zoo.networks.public_trunks import trunk_features as trunk_features
  from dpjax.zoo.networks.registry import build as build
  from dpjax.zoo.networks.resnet import ResNet as ResNet
  from dpjax.zoo.networks.resnet import load_resnet as load_resnet
  from dpjax.zoo.networks.scatter_heads import ScatterCnn as ScatterCnn
  from dpjax.zoo.networks.scatter_heads import ScatterLinear as ScatterLinear
  from dpjax.zoo.networks.scattering import scattering_features as scattering_features
  from dpjax.zoo.networks.sentence_encoder import sentence_features as sentence_features
  from dpjax.zoo.networks.transformer import Transformer as Transformer
  from dpjax.zoo.networks.vision_transformer import VisionTransformer as VisionTransformer
  from dpjax.zoo.networks.vision_transformer import load_vit as load_vit
  from dpjax.zoo.networks.wide_resnet import WideResNet as WideResNet
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
