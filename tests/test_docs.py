"""README, the guide and WORKSPACE: their links, commands, examples and names are true.

Without network, and without the tools that make the site of them.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import inspect
import json
import os
import re
import shlex
import textwrap

import numpy as np
import pytest

from benchmarks.__main__ import SUITES
from dpjax.experiments.config import fields
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.sweeps import sweep
from dpjax.validate import UserError
from launch import config_flag
from tests import commands
from tests.pages import site

_ROOT = commands.ROOT
_GUIDE = ["README.md", *sorted(f"docs/{p.name}" for p in (_ROOT / "docs").glob("*.md"))]
_GUIDE.append("docs/reference/index.md")
_DESIGN = sorted(f"docs/design/{p.name}" for p in (_ROOT / "docs/design").glob("*.md"))
_LINKED = [
  *_GUIDE,
  *_DESIGN,
  "WORKSPACE.md",
  "CONTRIBUTING.md",
  "SECURITY.md",
  "THREATS.md",
  "results/README.md",
  "examples/README.md",
]
# launch.check reads the configs of launch.train.
_KINDS = kinds.KINDS | {"check": kinds.KINDS["train"]}
_COMMAND = r"(?m)^ *((?:python -m launch|\.\.\. --).*)"  # of a docstring
_OVERRIDE = r"--config\.[\w.]+=\S*[^\s.,;:)]"  # in a sentence
_PLACEHOLDER = re.compile(r"\b(X|NAME)\.py$")


@functools.cache
def _text(page: str) -> str:
  return (_ROOT / page).read_text(encoding="utf-8")


def _fenced(page: str, language: str) -> list[str]:
  return re.findall(rf"^```{language}\n(.*?)^```$", _text(page), re.DOTALL | re.MULTILINE)


def _without_blocks(page: str) -> str:
  return re.sub(r"^```.*?^```$", "", _text(page), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: str) -> set[str]:
  """Of the headings, as GitHub makes them."""
  heads = re.findall(r"^#+ (.+)$", _without_blocks(page), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", _LINKED)
def test_every_link_leads_somewhere(page):
  folder = os.path.dirname(page)
  for target, file in site().linked(_text(page), folder).items():
    assert (_ROOT / file).exists(), target
  for match in re.finditer(r"\]\(([^)\s#:]*)#([^)\s]+)\)", _text(page)):
    file = os.path.normpath(os.path.join(folder, match[1])) if match[1] else page
    assert match[2] in _anchors(file), match[0]


def test_every_page_of_the_guide_is_linked_from_its_home_and_in_the_menu():
  pages = {page for page in _GUIDE if page.startswith("docs/")} - {"docs/index.md"}
  assert "docs/index.md" in site().linked(_text("README.md"), "").values()
  assert pages <= set(site().linked(_text("docs/index.md"), "docs").values())
  menu = {"reference/index.md", *re.findall(r"(?m): (\S+\.md)$", _text("mkdocs.yml"))}
  assert {page.removeprefix("docs/") for page in pages} <= menu
  notebooks = {f"repo/notebooks/{p.stem}.md" for p in _ROOT.glob("notebooks/*.ipynb")}
  assert notebooks == {page for page in menu if page.startswith("repo/notebooks/")}


def test_no_line_breaks_within_a_flag():
  html = "<td>x-y <code>a_name_of_more_than_24_letters --b.c=1</code></td>"
  block = "<pre><code><span>--a</span></code></pre>"
  marked = html.replace("--b.c=1", '<span class="whole">--b.c=1</span>')
  numbers = "<td>.948 ± .014</td>"
  whole = numbers.replace(".948 ± .014", '<span class="whole">.948 ± .014</span>')
  assert site().unbroken(html + block + numbers) == marked + block + whole
  assert ".whole { display: inline; white-space: nowrap; }" in _text("docs/extra.css")


def test_every_design_note_is_listed_and_in_the_site():
  index = site().linked(_text("docs/design/README.md"), "docs/design").values()
  assert set(_DESIGN) - {"docs/design/README.md"} <= set(index)
  assert all(page.removeprefix("docs/") in _text("mkdocs.yml") for page in _DESIGN)


@pytest.mark.parametrize("page", [*_DESIGN, "WORKSPACE.md"])
def test_tests_that_a_design_note_names_exist(page):
  tests = set(re.findall(r"`(tests/[\w/]+\.py)`", _text(page)))
  assert all((_ROOT / path).is_file() for path in tests), tests


_HOMES = ("", "dpjax", "dpjax/federated", "dpjax/secure")  # what a page leaves out


@pytest.mark.parametrize("page", [*_DESIGN, "WORKSPACE.md", "docs/papers.md"])
def test_files_that_the_map_names_exist(page):
  for path in re.findall(r"`([\w/]+/\w+\.py)`", _text(page)):
    known = any((_ROOT / home / path).is_file() for home in _HOMES)
    assert known or path == "configs/NAME.py", path


# ---- commands


def _commands() -> list[tuple[str, str]]:
  """(page, command) of every launcher that a page calls, in a block or in a line."""
  found = []
  for page in _LINKED:
    blocks = "\n".join(_fenced(page, "bash")).replace("\\\n", " ")
    prose = _without_blocks(page)
    spans = re.findall(r"`([^`]*python\s+-m\s+launch[^`]*)`", prose)
    spans += [
      f"python -m {span}" for span in re.findall(r"`(launch\.\w+\s--[^`]*)`", prose)
    ]
    for line in (*blocks.splitlines(), *(" ".join(span.split()) for span in spans)):
      found += [(page, part) for part in line.split("&&") if "python -m launch" in part]
  return found


def _commands_of_docstrings() -> list[tuple[str, str]]:
  """(file, command) of every config and launcher: its commands, a line each, and of a config the
  one that runs it with the flags of lines that begin with dots, or that a sentence names."""
  found = []
  for path in sorted([*_ROOT.glob("configs/**/*.py"), *_ROOT.glob("launch/*.py")]):
    name = path.relative_to(_ROOT).as_posix()
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = re.sub(r"\\\n *", "", docstring)
    lines = [match[1].split("  #")[0] for match in re.finditer(_COMMAND, text)]
    run = [line for line in lines if f"--config={name}" in line][:1]
    if run:
      prose = re.sub(r"(?m)^ +.*", "", text)
      chained = re.findall(rf"{_OVERRIDE}(?:\s+{_OVERRIDE})*", prose)
      lines += [f"... {flags}" for flags in chained]
    found += [(name, line.replace("...", *run, 1) if run else line) for line in lines]
  return found


@functools.cache
def _flags(launcher: str) -> frozenset[str]:
  """Every name that stands in the launcher's code: its flags are among them."""
  modules = [launcher, "main", "app", "peers"]
  trees = [ast.parse((_ROOT / "launch" / f"{name}.py").read_text()) for name in modules]
  nodes = [node for tree in trees for node in ast.walk(tree)]
  texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
  return frozenset(text for text in texts if isinstance(text, str) and text.isidentifier())


def _check(command: str) -> None:
  words = shlex.split(command)
  launcher = words[words.index("-m") + 1].removeprefix("launch.")
  assert (_ROOT / "launch" / f"{launcher}.py").is_file(), launcher
  parts = [word[2:].partition("=") for word in words if word.startswith("--")]
  flags = {name: value for name, _, value in parts}
  overrides = {n: v for n, v in flags.items() if n.startswith("config.")}
  if "audit" in flags:  # short for it
    overrides["config.audit"] = "canaries"
  for name in flags.keys() - overrides.keys() - {"config"}:
    known = _flags(launcher)
    assert name in known or name.removeprefix("no") in known, name
  path = flags.get("config", "").removeprefix("../")
  if _PLACEHOLDER.search(path):
    assert list((_ROOT / path).parent.glob("*.py")), path
  elif path or overrides:
    _check_config(launcher, path, tuple(overrides.items()))


@functools.cache  # many pages name the same run
def _check_config(launcher: str, path: str, given: tuple[tuple[str, str], ...]) -> None:
  overrides = dict(given)
  kind = _KINDS.get(launcher)  # None: launch.run takes configs of every kind
  wanted = None if kind is None else kind.config_class
  # The runs of get_configs() may be asked for, too.
  load = functools.partial(config_flag._load, name="--config", several=True)
  config = load(str(_ROOT / path), wanted)[0] if path else kind.config_class()
  kind = kinds.of(config)
  # a file to start from is made by another command
  here = [name for name in overrides if not name.endswith(".pretrained")]
  texts = {name.removeprefix("config."): overrides[name] for name in here}
  config = fields.override_all(config, texts)
  if getattr(config, "mesh", None) is not None:  # of devices that are not here
    config = fields.replace(config, "mesh", None)
  if kind.experiment is not None:
    return kinds.check(config)
  module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
  sweep.Runs(module.get_configs(config), config)


@pytest.mark.slow
def test_every_command_names_a_launcher_its_flags_and_a_config(monkeypatch):
  """And its runs are not refused, as far as can be told without data."""
  monkeypatch.syspath_prepend(_ROOT / "notebooks")  # of mine.py
  found = [*_commands(), *_commands_of_docstrings()]
  assert len(found) > 200
  for page, command in found:
    try:
      _check(command)
    except Exception as error:
      raise AssertionError(f"{page}: {command}: {error}") from error


@pytest.mark.parametrize("page", _LINKED)
def test_every_command_of_a_page_is_read(page):
  """Whichever fence or indent it stands in: else nothing would check it."""
  called = re.findall(r"python[\d.]*\s+-m\s+launch\b", _text(page))
  read = [c for place, c in _commands() if place == page]
  spans = re.findall(
    r"`(launch\.\w+\s--[^`]*)`", _without_blocks(page)
  )  # without python -m
  assert len(called) == len(read) - len(spans)


@pytest.mark.parametrize("page", [*_LINKED, "CHANGELOG.md"])
def test_results_that_a_page_names_are_there(page):
  for name in re.findall(r"`(results/[\w./*-]+)`", _text(page)):
    assert list(_ROOT.glob(name.rstrip("/"))), name


_NUMBER = r"(?<![\w.])\d*\.\d+(?:e-?\d+)?"


def test_numbers_of_the_texts_stand_in_the_results_beside_them():
  """Each number with a point, rounded as it is printed; percent and claimed epsilons, too."""
  checked = 0
  for line in _text("docs/from_the_texts.md").splitlines():
    files = re.findall(r"`(results/[\w./*-]+)`", line)
    if not line.startswith("|") or not files:
      continue
    cell = next(cell for cell in line.split(" | ") if "`results/" in cell)
    held = [path.read_text("utf-8") for file in files for path in _ROOT.glob(file)]
    numbers = {float(number) for text in held for number in re.findall(_NUMBER, text)}
    for shown in re.findall(_NUMBER, re.sub(r"`[^`]*`", "", cell)):
      mantissa, _, power = shown.partition("e")
      unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
      near = [n for n in numbers if abs(n - float(shown)) <= 0.5001 * unit]
      assert near, (shown, cell)
      checked += 1
  assert checked > 50


@pytest.mark.parametrize("page", _LINKED)
def test_programs_of_the_tests_that_are_named_exist(page):
  for name in re.findall(r"python -m (tests\.[\w.]+\w)", " ".join(_text(page).split())):
    path = _ROOT / f"{name.replace('.', '/')}.py"
    assert "__main__" in path.read_text(encoding="utf-8"), name


def test_a_wrong_command_is_seen():
  _check("python -m launch.train --config=configs/quickstart.py --config.num_steps=3")
  for wrong in (
    "python -m launch.trane --config=configs/quickstart.py",
    "python -m launch.train --config=configs/quickstarts.py",
    "python -m launch.train --config=configs/quickstart.py --workdirs=x",
    "python -m launch.train --config=configs/quickstart.py --config.num_stepps=3",
    "python -m launch.train --config=configs/fed/quickstart.py",
    "python -m launch.train --config=configs/quickstart.py --config.privacy.delta=2",
  ):
    with pytest.raises((AssertionError, ValueError)):
      _check(wrong)


def _refused(launcher: str, given: list[list[str]]) -> str:
  """What the launcher's own flags say of these words, in a process of its own: flags are global."""
  done = commands.run("tests.parsed_flags", launcher, json.dumps(given))
  assert done.returncode == 0, done.stderr
  return done.stdout


def _flags_of(launcher: str) -> list[list[str]]:
  """Of every command that calls it, without the fields of its config."""
  found = []
  for _, command in (*_commands(), *_commands_of_docstrings()):
    words = shlex.split(command)
    if f"launch.{launcher}" in words:
      given = [word for word in words if word.startswith("--")]
      found.append([word for word in given if not word.startswith("--config.")])
  return found


@pytest.mark.cases(
  quick=["distill", "pate", "plot", "prepare", "serve", "synthesize"], long=...
)
@pytest.mark.parametrize(
  "launcher",
  sorted({c.split("-m launch.")[1].split()[0] for _, c in _commands()} | {"sweep"}),
)
def test_values_of_flags_are_taken_by_their_launcher(launcher):
  assert not _refused(launcher, _flags_of(launcher))


def _measurements() -> dict[str, list[list[str]]]:
  """Flags of every command that runs a benchmark, by what it measures."""
  found = {}
  for path in (
    *_ROOT.glob("docs/*.md"),
    *_ROOT.glob("results/**/*.md"),
    *_ROOT.glob("benchmarks/*.py"),
  ):
    text = re.sub(r"\\{1,2}\n *", "", path.read_text(encoding="utf-8"))
    for suite, given in re.findall(
      r"python -m benchmarks (\w+)((?: --[^\s`;,|]+(?:,[^\s`;,|]+)*)*)", text
    ):
      flags = [flag for flag in given.split() if flag != "--help"]
      found.setdefault(suite, []).append(flags)
  return found


@pytest.mark.cases(quick=["sum_messages"], long=...)
@pytest.mark.parametrize("suite", sorted(_measurements()))
def test_flags_of_a_benchmark_are_taken_by_it(suite):
  assert not _refused(f"benchmarks {suite}", _measurements()[suite])


def test_every_benchmark_is_called_on_a_page():
  assert {*_measurements()} == {*SUITES}


@pytest.mark.long
def test_a_wrong_value_of_a_flag_is_seen():
  messages = _refused("audit", [["--initial=nonsense"], ["--all"], ["--models=x"]])
  assert len(messages.splitlines()) == 2 and "nonsense" in messages and "models" in messages


def _is_field(name: str) -> bool:
  """Of a config of any launcher, alone or as a sweep's base; of a dict or a chosen value whatever
  it may hold."""
  name = name.removeprefix("base.")
  for kind in _KINDS.values():
    with contextlib.suppress(UserError):
      fields.get(kind.config_class(), name)
      return True
  return False


@pytest.mark.parametrize("page", _GUIDE)
def test_fields_that_are_named_exist(page):
  """Beside the wrong ones that an error answers (test_errors_of_the_command_line)."""
  text = re.sub(r"^```text\n(?=\.\.\. ).*?^```$", "", _text(page), flags=re.DOTALL | re.M)
  for name in re.findall(r"--config\.([a-z0-9_]+(?:\.[a-z0-9_]+)*)", text):
    assert _is_field(name), name


def test_a_wrong_field_is_seen():
  assert _is_field("privacy.strategy.bands") and _is_field("target.compression")
  assert not _is_field("privacy.no_such") and not _is_field("privacy.strategy.no_such")


_ERRORS = [block.splitlines() for block in _fenced("docs/errors.md", "text")]


@pytest.mark.cases(quick=[0, 1, 2, 3], long=...)
@pytest.mark.parametrize(("flags", "line"), _ERRORS, ids=range(len(_ERRORS)))
def test_errors_of_the_command_line(flags, line, tmp_path):
  """Word for word, as a reader searches for them."""
  run = ["launch.train", f"--config={_ROOT}/configs/quickstart.py"]
  if "workdir=" in line:  # of a run that is there
    few = ["--config.num_steps=2", "--config.privacy.accountant=rdp"]
    assert commands.run(*run, *few, cwd=tmp_path).returncode == 0
    run += few[1:]
  x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 1, 0])
  of = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
  np.savez(tmp_path / "mine.npz", **of, num_classes=2)
  done = commands.run(*run, *shlex.split(flags.removeprefix("... ")), cwd=tmp_path)
  assert (done.returncode, done.stderr.splitlines()[-1]) == (2, line)


# ---- examples


@pytest.mark.cases(slow=["docs/promises.md"], long=["docs/accounting.md", "docs/errors.md"])
@pytest.mark.parametrize("page", _GUIDE)
def test_examples_run(page):
  done = doctest.testfile(
    str(_ROOT / page), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8"
  )
  assert done.failed == 0
  for block in _fenced(page, "python"):
    if ">>>" not in block:
      compile(textwrap.dedent(block), page, "exec")


_SLOW_PAGES = (
  *("attacks", "curves", "federated", "finetune", "pate", "sampling"),
  *("synthesis", "your_data"),
)


def _blocks(page: str) -> str:
  """A page's Python as one program; doctests are run by themselves."""
  blocks = [block for block in _fenced(page, "python") if ">>>" not in block]
  return "\n".join(textwrap.dedent(block) for block in blocks)


@pytest.mark.cases(
  slow=["README.md", *(f"docs/{name}.md" for name in _SLOW_PAGES)], long=["docs/compose.md"]
)
@pytest.mark.parametrize("page", [page for page in _GUIDE if _blocks(page)])
def test_python_blocks_of_a_page_run_in_their_order(page, tmp_path):
  """In a process of their own, on the embedded digits, in an empty folder."""
  script = tmp_path / "page.py"
  script.write_text(_blocks(page), encoding="utf-8")
  env = os.environ | {"TFDS_DATA_DIR": str(tmp_path), "PYTHONPATH": str(_ROOT)}
  done = commands.run(str(script), cwd=tmp_path, env=env)
  assert done.returncode == 0, done.stderr[-2000:]


# ---- the reference


def _public():
  for package in site().packages():
    for name, home in site().public_names(package):
      yield package, name, home


def test_every_public_name_exists_and_says_what_it_is():
  mute = []
  assert len(list(_public())) > 300
  for package, name, home in _public():
    found = getattr(importlib.import_module(f"dpjax.{package}"), name)
    if inspect.isclass(found) or inspect.isfunction(found) or inspect.ismodule(found):
      docstring = inspect.getdoc(found) or ""
      if not docstring or docstring.startswith(
        f"{name}("
      ):  # what dataclasses say of themselves
        mute.append(home)
  assert not mute


def test_the_reference_has_every_package_and_the_main_names():
  page = _text("docs/reference/index.md")
  for package in site().packages():
    assert f"[{package}](../../dpjax/{package.replace('.', '/')}" in page
  named = set(re.findall(r"`dpjax\.([\w.]+)`", page))
  exported = {name for name, _ in site()._exports(_ROOT / "dpjax" / "__init__.py")}
  assert exported - set(site().packages()) <= named


def test_a_page_of_one_file_begins_with_its_namesake_and_holds_no_import():
  names = site().defined_names(_ROOT / "dpjax" / "plan.py")
  assert names[0] == "Plan" and "SpentBudget" in names
  assert not {"Batch", "UserError", "_FAR_OFF"} & set(names)


def test_the_menu_has_every_page_of_the_reference_once():
  pages = [f"reference/{package}.md" for package in site().packages()]
  groups = site().grouped()
  placed = [page for group in groups for part in group.values() for page in part]
  assert sorted(placed) == sorted(pages)


@pytest.mark.parametrize("page", _GUIDE)
def test_names_of_dpjax_exist(page):
  for dotted in set(re.findall(r"`(dpjax\.[\w.]+)(?:\([^`]*\))?`", _text(page))):
    found = importlib.import_module("dpjax")
    for part in dotted.split(".")[1:]:
      below = f"{found.__name__}.{part}" if inspect.ismodule(found) else ""
      if not hasattr(found, part) and below:
        importlib.import_module(below)
      found = getattr(found, part)


# ---- getting started

_SMALL = {
  "launch.train": ["--config.num_steps=2", "--config.privacy.accountant=rdp"],
  "launch.sweep": [
    "--config.base.num_steps=2",
    "--config.base.privacy.accountant=rdp",
    "--config.seeds=[0]",
    "--config.epsilons=[1.0]",
  ],
}


def _step(number: int) -> list[str]:
  """The commands of one step of the page."""
  text = _text("docs/getting_started.md").split("\n## ")[number]
  return "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.M)).splitlines()


@pytest.mark.cases(long=[2, 3], slow=...)
@pytest.mark.parametrize(
  ("number", "left"),
  [
    (1, "runs/quickstart/report.png"),
    (2, "runs/own_data/params.npz"),
    (3, "runs/mine/params.npz"),
    (4, "runs/own_sweep/curve.png"),
  ],
)
def test_the_path_of_a_stranger(number, left, tmp_path):
  """Its commands at a smaller size, in a folder of their own; for the last, data of step 2."""
  for folder in ("notebooks", "configs"):
    (tmp_path / folder).symlink_to(_ROOT / folder)
  for line in [*(_step(2)[:1] if number == 4 else []), *_step(number)]:
    cwd = tmp_path
    for part in line.split(" && "):
      words = shlex.split(part)
      if words[0] == "cd":
        cwd = tmp_path / words[1]
      elif "-c" in words:
        exec(words[-1].replace("'mine.npz'", f"'{tmp_path}/mine.npz'"), {})
      elif "launch." in part:
        module, *flags = words[words.index("-m") + 1 :]
        flags = [flag.replace("=../runs", f"={tmp_path}/runs") for flag in flags]
        done = commands.run(module, *flags, *_SMALL[module], cwd=cwd)
        assert done.returncode == 0, done.stderr
  assert (tmp_path / left).exists()
