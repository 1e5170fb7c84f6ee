"""What a user typed wrong is one line and exit code 2 from every launcher, and leaves no folder.

Values of fields: the tests of each kind of run. All that `--config` takes: test_config_flag.py.
"""

import importlib

import pytest

from dpjax.experiments.run import kind as kinds
from dpjax.experiments.sweeps import sweep
from launch import config_flag
from tests import commands

_MISTAKES = [
  ("train", ["stray"], "stray"),
  ("train", ["--config=configs/nothing.py"], "configs/nothing.py"),
  ("train", ["--config.data.name=mnist", "--config.data.data_dir=NOWHERE"], "launch.prepare"),
  ("federate", ["--config.privacy.epsilom=1"], "did you mean 'epsilon'"),
  ("federate", ["--config.algorithm.mu=0.5"], "'fed_avg' has no such field"),
  ("federate", ["--local_devices=0"], "--local_devices=['0']: would be ignored; it needs --coord"),
  ("federate", ["--peer_timeout=3"], "--peer_timeout=3.0: would be ignored; it needs --coord"),
  ("relevance", ["--config.method=radpp"], "did you mean 'radp'"),
  ("relevance", ["--config.method.weight_decay=0.5"], "'radp' has no such field"),
  ("relevance", ["--config.epsilon=1", "--config.method=no_dp"], "epsilon=1.0: would be ignored"),
  ("secure", ["--config.task.num_clients=1"], "task.num_clients=1: must be an integer in"),
  ("secure", ["--config.task=sume"], "did you mean 'sum'?"),
  # A field of the file that a flag made wrong is no flag.
  (
    "secure", ["--config=configs/secure/transfer.py", "--config.task.num_source=90"],
    "error: task.num_shared=200",
  ),
  (
    "attack", ["--alone", "--config.attack=membership", "--config.attack.num_shadows=1"],
    "num_shadows=1: must be",
  ),
  ("attack", ["--config.target.compression=zip"], "compression='zip': must be one of"),
  ("attack", ["--alone", "--only=x"], "--only='x': would be ignored; it needs several runs"),
  ("attack", ["--only=x"], "only='x': must be a pattern of one of membership, none"),
  ("attack", ["--run=runs/x", "--only=x"], "--only='x': would be ignored"),
  ("attack", ["--run=runs/x", "--workdir="], "--workdir='': must be the name of a directory"),
  ("attack", ["--run=runs/x", "--workdir=~/x"], "--workdir='~/x': begins with ~"),
  ("relevance", ["--audit", "--config.audit=none"], "--audit=True: contradicts --config.audit"),
  ("report", ["RUN"], "error: run="),
  ("plot", ["none.csv", "--out=RUN/a.png"], "error: csv='none.csv': must be a CSV file"),
  ("plot", ["results/lm_lora/curve.csv", "--out=a.jpg"], "error: --out='a.jpg': must end in"),
  ("plot", ["none.csv"], "error: --out: must be given"),
  ("plot", ["results/lm_lora/curve.csv", "--out=~/a.png"], "--out='~': begins with ~"),
  ("audit", ["--only=Laplace", "--out=/dev/null/x"], "--out='/dev/null/x': must be a directory"),
]  # fmt: skip


@pytest.mark.parametrize(
  ("launcher", "arguments", "words"),
  [pytest.param(*case, id=f"{case[0]} {' '.join(case[1])}") for case in _MISTAKES],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, launcher, arguments, words):
  here = {"NOWHERE": f"{tmp_path}/NOWHERE", "RUN": f"{tmp_path}/run"}
  for word, path in here.items():
    arguments = [argument.replace(word, path) for argument in arguments]
  if launcher not in ("report", "plot", "audit", "benchmark"):
    arguments = [f"--workdir={tmp_path}/run", *arguments]
  assert words in commands.refusal(commands.run(f"launch.{launcher}", *arguments))
  assert not (tmp_path / "run").exists()


_PUBLISHED = {
  f"{folder} {path.stem}": path
  for folder in ("attack", "radp", "secure")
  for path in sorted((commands.ROOT / "configs" / folder).glob("*.py"))
  if path.stem not in ("__init__", "common")
}


@pytest.mark.cases(
  quick=["attack extraction_digits", "radp quickstart_proved", "secure quickstart"],
  long=...,
)
@pytest.mark.parametrize("name", _PUBLISHED)
def test_every_published_config_of_several_runs_is_ready(name):
  path = _PUBLISHED[name].relative_to(commands.ROOT)
  module = importlib.import_module(".".join(path.with_suffix("").parts))
  base = config_flag._load(str(_PUBLISHED[name]), None, name="--config", several=True)[0]
  named = module.get_configs(base) if hasattr(module, "get_configs") else None
  assert sweep.Runs(named, base).points  # checked
  assert base is None or kinds.of(base)
  assert f"--config={path.as_posix()}" in _PUBLISHED[name].read_text()
