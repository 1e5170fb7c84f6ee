"""Models by name: every mistake is one line that names it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from dpjax.zoo import networks
from dpjax.zoo.networks import registry
from tests.refuses import refuses


@pytest.mark.parametrize("name", registry.MODELS)
def test_every_name_builds_a_module(name):
  assert isinstance(networks.build(name, num_classes=10), nn.Module)


def test_only_the_heads_of_features_want_features():
  wanting = {name for name in registry.MODELS if registry.entry(name).features}
  scattering = {"scatter_linear", "scatter_cnn", "scatter_cnn_cifar10"}
  public = {"vgg16_linear", "vgg16_96_linear", "alexnet_linear", "minilm_linear"}
  assert wanting == scattering | public | {"patches_linear"}
  assert registry.entry("scatter_linear").features == "scattering"
  assert registry.entry("alexnet_linear").features == "alexnet"


def test_a_head_starts_from_zeros_where_it_is_said():
  def head(name, **options):
    model = networks.build(name, num_classes=3, **options)
    return model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]["head"]["kernel"]

  on_features = ("patches_linear", "vgg16_linear", "alexnet_linear", "minilm_linear")
  assert not any(head(name).any() for name in on_features)
  assert not head("linear", zero_head=True).any()
  assert head("linear").all() and head("patches_linear", zero_head=False).all()


def test_unknown_name_is_refused_with_the_nearest():
  with refuses("model", value="wrn_16_5"):
    networks.build("wrn_16_5", num_classes=10)
  with refuses("model", value="batchnorm"):
    registry.entry("batchnorm")


def test_unknown_option_is_refused_with_the_nearest():
  with refuses("activaton") as error:
    networks.build("cnn", num_classes=10, activaton="relu")
  assert "\n" not in str(error.value)


class Bare(nn.Module):
  """A model without options."""

  num_classes: int


def test_an_option_of_a_model_without_any_is_refused():
  with refuses("features"):
    registry.check_options(f"{__name__}:Bare", {"features": (64,)})


@pytest.mark.parametrize(
  ("name", "option"),
  [("wrn_16_4", "depth"), ("wrn_40_4", "width"), ("transformer", "vocab_size")],
)
def test_what_the_name_decides_is_not_an_option(name, option):
  with refuses(option):
    networks.build(name, num_classes=10, **{option: 4})


def test_options_of_a_preset_override_it():
  model = networks.build("radp_mnist", num_classes=3, filters=(2,), pool_after=(1,))
  assert (model.filters, model.dense_sizes, model.num_classes) == ((2,), (32,), 3)


def test_transformer_takes_the_classes_as_vocabulary():
  assert networks.build("transformer", num_classes=17).vocab_size == 17


def test_wide_resnets_have_the_depth_of_their_name():
  depths = [networks.build(name, num_classes=2).depth for name in ("wrn_16_4", "wrn_40_4")]
  assert depths == [16, 40]


@pytest.mark.cases(long=["2.5", "True"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_num_classes_is_checked(value):
  with refuses("num_classes"):
    networks.build("cnn", num_classes=value)
