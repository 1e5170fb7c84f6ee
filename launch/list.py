"""Lists everything available: data sets, models, methods, samplers, attacks, configs; one
line each.

  python -m launch.list                     # everything
  python -m launch.list models samplers     # of these topics
  python -m launch.list mine:Net            # a part of your own, by its import path

Names are values of flags. Square brackets show what can be set besides, with its default, as
in --config.aggregator=trimmed_mean --config.aggregator.trim=0.2. Where a config takes a part of
your own, name the part by its import path, package.module:name.
"""

from __future__ import annotations

import ast
import pathlib
import re

from dpjax import names, validate
from dpjax.experiments import catalogue
from dpjax.experiments.catalogue import Rows, Section, sentence
from launch import app

_COMMAND = re.compile(r"python -m (launch\.\w+)")


def _docstrings(folder: str, marks: str) -> dict[str, str]:
  """Returns file -> docstring for a folder's files whose code contains `marks`."""
  docstrings = {}
  for path in sorted((app.ROOT / folder).rglob("*.py")):
    text = path.read_text(encoding="utf-8")
    if marks in text:
      docstrings[path.relative_to(app.ROOT).as_posix()] = (
        ast.get_docstring(ast.parse(text)) or ""
      )
  return docstrings


def configs() -> Rows:
  """Returns every file of configs/, with the first sentence of its docstring, and the launcher that
  the docstring names."""

  def summary(text: str) -> str:
    return f"{sentence(text)} [{', '.join(_COMMAND.findall(text)[:1])}]"

  docstrings = _docstrings("configs", "def get_config(")
  return {path: summary(text) for path, text in docstrings.items()}


def launchers() -> Rows:
  """Returns every command, with the first sentence of its docstring."""
  docstrings = _docstrings("launch", "\n  app.run(main")
  return {
    f"python -m launch.{pathlib.Path(path).stem}": sentence(text)
    for path, text in docstrings.items()
  }


TOPICS = {
  **catalogue.TOPICS,
  "configs": (Section("--config of the launcher in brackets", configs),),
  "commands": (Section("each with --help", launchers),),
}


def page(topics: tuple[str, ...] = ()) -> str:
  """Returns the lines of these topics, or of all topics if none is given.

  Args:
    topics: names of `TOPICS`, or import paths of parts that a user defined.

  Raises:
    UserError: an unknown topic, or a path at which there is nothing.
  """
  user_defined = {
    path: catalogue.user_defined([path]) for path in topics if names.is_path(path)
  }
  for topic in topics:
    if topic not in user_defined:
      validate.one_of(TOPICS, topic=topic)
  lines = []
  for topic in topics or TOPICS:
    for where, rows in (user_defined[topic],) if topic in user_defined else TOPICS[topic]:
      entries = rows()
      width = max(map(len, entries))
      lines.append(f"{topic}: {where}")
      lines += [
        f"  {name.ljust(width)}  {words}".rstrip() for name, words in entries.items()
      ]
      lines.append("")
  return "\n".join(lines)


def main(*topics: str) -> None:
  """Prints the lines of these topics, or of all topics if none is given."""
  print(page(topics), end="")


if __name__ == "__main__":
  app.run(main, words=True)
