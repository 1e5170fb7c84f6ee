"""Import paths in place of registered names: what is found, and what each mistake says."""

import sys

import pytest

from dpjax import data, names
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.zoo import networks
from dpjax.zoo.networks import registry
from dpjax.zoo.networks.registry import check_options
from tests.refuses import refuses

_MODULES = {
  "own_parts": "import flax.linen as nn\nnumber = 3\n"
  "class Net(nn.Module):\n  num_classes: int\n  width: int = 4\n"
  "  def __call__(self, x):\n    return x\n"
  "def net(num_classes, **options):\n  return Net(num_classes, **options)\n"
  "def no_net(num_classes):\n  return 7\n",
  "own_typo": "def net(:\n",
  "own_failure": "\nraise ValueError('too\\nmany')\n",
  "own_exit": "raise SystemExit\n",
  "own_need": "import no_such_package\n",
}


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
  for name, text in _MODULES.items():
    (tmp_path / f"{name}.py").write_text(text)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  yield
  for name in (*_MODULES, "own_front"):
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
  ("path", "field"),
  [
    ("own_part:Net", "model.name"),
    ("own_parts:Nett", "model.name"),
    ("own_parts:number", "model.name"),
    ("own_typo:net", "model.name"),
    ("own_failure:net", "model.name"),
    ("own_exit:net", "model.name"),
    ("own_need:net", "model.name"),
  ],
)
def test_a_path_that_leads_nowhere_is_one_line_with_its_field(path, field):
  with refuses(field) as error:
    names.one_of(("mlp",), **{"model.name": path})
  assert str(error.value).startswith(f"model.name={path!r}: ")


def test_a_name_that_is_neither_registered_nor_a_path_says_both_forms():
  with refuses("model.name"):
    names.one_of(("mlp",), **{"model.name": "mpl"})


def test_a_model_is_a_class_or_a_function():
  assert networks.build("own_parts:Net", num_classes=2, width=5).width == 5
  assert networks.build("own_parts:net", num_classes=2, width=5).width == 5
  assert registry.options("own_parts:Net") == ("width",)
  assert registry.entry("own_parts:Net").features is None


def test_an_option_that_a_model_does_not_have_is_refused():
  with refuses("widht", value=5):
    check_options("own_parts:Net", {"widht": 5})
  check_options("own_parts:net", {"widht": 5})  # takes any


def test_what_a_path_returns_is_checked():
  with refuses("model.name"):
    networks.build("own_parts:no_net", num_classes=2)
  with refuses("data.name"):
    data.load("own_parts:dict".replace("own_parts", "builtins"))


def test_code_that_a_module_only_imports_is_part_of_the_blame(tmp_path):
  (tmp_path / "own_front.py").write_text("from own_parts import Net, net\n")
  with pytest.raises(TypeError) as caught:
    names.find("own_front:net", "model.name")(num_classes=2, nothing=1)
  blamed = names.blame(caught.value)
  assert blamed is not None and blamed.is_about("model.name", "own_front:net")
  assert str(blamed).endswith("(line 9)") and names.blame(ValueError("ours")) is None


def test_a_dict_field_takes_json_and_python():
  for text in ('{"width": 48, "bias": true}', "{'width': 48, 'bias': True}"):
    config = fields.override(TrainConfig(), "model.options", text)
    assert config.model.options == {"width": 48, "bias": True}
  with refuses("config.model.options"):
    fields.override(TrainConfig(), "model.options", '{"width": NaN')
