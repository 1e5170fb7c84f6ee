"""Flags that several benchmarks share, and their values."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from absl import flags

from dpjax import validate
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.validate import UserError, Verbatim

# The flags are no key flags of this module, so that --help lists them with their benchmark.
flags.disclaim_key_flags()


def define_names(
  flag: str, known: Iterable[str], default: Iterable[str] | None = None
) -> None:
  """Defines a flag that lists some of the known names, by default all."""
  known = list(known)
  chosen = known if default is None else list(default)
  flags.DEFINE_list(flag, chosen, f"Some of {', '.join(known)}.")


def names(flag: str, known: Iterable[str]) -> list[str]:
  """Returns the names that a flag lists. Raises UserError for one that is unknown."""
  listed = [*getattr(flags.FLAGS, flag)]
  for name in listed:
    validate.one_of(list(known), **{flag: name})
  return listed


def define_repeats() -> None:
  """Defines --repeats."""
  flags.DEFINE_integer(
    "repeats",
    5,
    "Timed rounds; medians are reported.",
    lower_bound=1,
    upper_bound=10**6,
  )


def define_peak_rss() -> None:
  """Defines --peak_rss."""
  flags.DEFINE_bool("peak_rss", True, "Also run each entry alone, for its peak memory.")


def define_configs() -> None:
  """Defines --configs."""
  flags.DEFINE_list(
    "configs", ["configs/mnist_cnn.py"], "Config files of launch.train, each one run."
  )


def configs() -> dict[str, TrainConfig]:
  """Returns the configs of --configs by the names of their files."""
  # Imported here: a benchmark in a process of its own needs no launcher.
  from launch import config_flag

  return {
    pathlib.Path(path).stem: config_flag.load(path, TrainConfig, name="--configs")
    for path in flags.FLAGS.configs
  }


def define_cpu_devices() -> None:
  """Defines --cpu_devices."""
  flags.DEFINE_integer(
    "cpu_devices",
    None,
    "Devices to make of one CPU (default: one).",
    lower_bound=1,
    upper_bound=1024,
  )


def counts(flag: str) -> list[int]:
  """Returns the numbers that a flag lists. Raises UserError for what is none of 1 to 99999999."""
  texts = getattr(flags.FLAGS, flag)
  for text in texts:
    if not (text.isascii() and text.isdigit() and len(text) < 9) or int(text) < 1:
      raise UserError("must be integers in [1, 99999999]", field=flag, value=text[:40])
  return [int(text) for text in texts]


def some_counts(flag: str) -> list[int]:
  """Returns `counts` of a flag that must list at least one."""
  numbers = counts(flag)
  if not numbers:
    raise UserError("must name at least one number", field=flag, value=Verbatim(""))
  return numbers
