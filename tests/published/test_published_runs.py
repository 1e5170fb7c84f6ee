"""The published runs reach their floors: `python -m pytest -m long tests/published`.

Needs the prepared data (TFDS_DATA_DIR); minutes per run on 2 CPU cores.
"""

import importlib

import pytest

from dpjax.experiments.run import loop
from dpjax.validate import UserError

_FLOORS = {
  "mnist_scatter_linear": (3.0, 0.985),
  "fashion_mnist_scatter_linear": (3.0, 0.895),
  "cifar10_scatter_linear": (3.0, 0.675),
  "mnist_cnn": (2.93, 0.975),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _FLOORS)
def test_a_published_run_reaches_its_floor_within_its_epsilon(name, tmp_path):
  config = importlib.import_module(f"configs.{name}").get_config()
  try:
    result = loop.train(config, tmp_path / "run")
  except UserError as error:
    if "launch.prepare" not in str(error):
      raise
    pytest.skip(str(error))
  epsilon, floor = _FLOORS[name]
  assert result["epsilon"] <= epsilon and result["epsilon_kind"] == "proved"
  assert result["test_accuracy"] >= floor
