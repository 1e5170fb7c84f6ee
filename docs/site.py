"""What turns docs/ and the docstrings into a site: hooks of mkdocs, an extension of griffe.

  pip install -e '.[docs]' && mkdocs build --strict      # writes build/site

The reference is made anew at every build, from what the `__init__` of each package exports;
there is no list of names to keep. Links from docs/ to other files of the repository, which
mkdocs does not know, are copied below `repo/`.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import pathlib
import posixpath
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
# [text](target) and ![text](target), whose target is a file here
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_PACKAGE = re.compile(r"dpjax/([\w/]+?)(?:/__init__)?\.py")
_REPO = "repo"
_PAGE = """# dpjax.{package}

{parts}
"""


def _tables():
  """docs/tables.py, which stands in no package."""
  spec = importlib.util.spec_from_file_location("dpjax_tables", ROOT / "docs" / "tables.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


tables = _tables()


def _exports(path: pathlib.Path) -> Iterator[tuple[str, str]]:
  """(name, where it comes from) of every `from X import Y as Y`."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        if alias.asname == alias.name:
          yield alias.name, f"{node.module}.{alias.name}"


def public_names(package: str) -> list[tuple[str, str]]:
  """(name, where it comes from) of what a package exports; of a single file: none."""
  path = ROOT / "dpjax" / package.replace(".", "/") / "__init__.py"
  return sorted(_exports(path)) if path.is_file() else []


# The reference's pages, in the groups of its menu.
_GROUPS = {
  "The private step": (
    "plan", "joint", "gradients", "noise", "noise.correlated", "sampling", "accounting",
    "transforms", "mechanisms", "training", "solve",
  ),
  "Across parties": (
    "federated", "federated.algorithms", "federated.aggregators", "secure", "secure.sums",
    "secure.mpc", "secure.homomorphic", "secure.vertical",
  ),
  "Attacks and audits": ("attacks", "auditing", "relevance"),
  "Data and models": (
    "data", "models", "losses", "metrics", "zoo.datasets", "zoo.networks", "zoo.recipes", "serving",
  ),
  "Basics": ("types", "sealed", "validate", "trees", "names", "parallel"),
}  # fmt: skip


def packages() -> list[str]:
  """Packages and files of dpjax that have a page: `zoo.datasets` is dpjax/zoo/datasets."""
  return [package for group in _GROUPS.values() for package in group]


def defined_names(path: pathlib.Path) -> list[str]:
  """Public names that a file defines itself: its namesake, classes, functions, constants.

  Imports are left out, because each name is documented where it is defined.
  """
  classes: list[str] = []
  functions: list[str] = []
  constants: list[str] = []
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.ClassDef):
      classes.append(node.name)
    elif isinstance(node, ast.FunctionDef):
      functions.append(node.name)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      constants += [target.id for target in targets if isinstance(target, ast.Name)]
  # A reader of dpjax.plan looks for Plan.
  classes.sort(key=lambda name: name.lower() != path.stem)
  names = [*classes, *functions, *constants]
  return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def grouped() -> list[dict[str, list[str]]]:
  """The reference's pages by what they are for, as the menu takes them."""
  return [
    {title: [f"reference/{name}.md" for name in names]} for title, names in _GROUPS.items()
  ]


def _documented(package: str) -> str:
  """The page of a package: its docstring, then every name."""
  names = [home for _, home in public_names(package)]
  members_here = (
    [] if public_names(package) else defined_names(ROOT / "dpjax" / f"{package}.py")
  )
  members = json.dumps(members_here) if members_here else "false"
  parts = [f"::: dpjax.{package}\n    options:\n      members: {members}\n"]
  for home in names:
    parts.append(f"::: {home}\n    options:\n      show_root_heading: true\n")
  return _PAGE.format(package=package, parts="\n".join(parts))


def package_of(file: str) -> str:
  """The package that has a page and whose code this file is: "" where there is none."""
  match = _PACKAGE.fullmatch(file)
  name = match.group(1).replace("/", ".") if match else ""
  return name if name in packages() else ""


def linked(text: str, folder: str) -> dict[str, str]:
  """Target of a link as it is written -> the file, relative to the root of the repository."""
  targets = (match.group(1) for match in LINK.finditer(text))
  return {target: posixpath.normpath(posixpath.join(folder, target)) for target in targets}


def _beyond_docs() -> Iterator[str]:
  """Every file outside docs/ that a page of the site links to, or a page linked to does."""
  pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
  seen: set[str] = set()
  while pages:
    page = pages.pop()
    text = (ROOT / page).read_text(encoding="utf-8")
    for file in linked(text, posixpath.dirname(page)).values():
      if not (file.startswith("docs/") or file in seen or package_of(file)):
        seen.add(file)
        pages += [file] if file.endswith(".md") else []
        yield file


def on_config(config):
  """Puts the packages below the reference."""
  config.nav.append({"Reference": ["reference/index.md", *grouped()]})
  return config


def on_files(files, config):
  """Adds the reference and what lies outside docs/."""
  from mkdocs.structure.files import File

  for package in packages():
    page = File.generated(config, f"reference/{package}.md", content=_documented(package))
    files.append(page)
  for file in _beyond_docs():
    copied = {file: (ROOT / file).read_bytes()}
    made = notebook(file) if file.endswith(".ipynb") else copied
    for name, content in made.items():
      files.append(File.generated(config, f"{_REPO}/{name}", content=content))
  return files


def notebook(file: str) -> dict[str, str | bytes]:
  """A notebook as a page, with what it shows, and its pictures: name -> content."""
  page, stem = [], file.removesuffix(".ipynb")
  made: dict[str, str | bytes] = {}
  for cell in json.loads((ROOT / file).read_text(encoding="utf-8"))["cells"]:
    source = "".join(cell["source"])
    page.append(source if cell["cell_type"] == "markdown" else _block("python", source))
    for shown in cell.get("outputs", []):
      data = shown.get("data", {})
      if "image/png" in data:
        name = f"{stem}-{len(made)}.png"
        made[name] = base64.b64decode(data["image/png"])
        page.append(f"![what it shows]({posixpath.basename(name)})")
      else:
        page.append(_block("text", "".join(shown.get("text", data.get("text/plain", "")))))
  return made | {f"{stem}.md": "\n\n".join(page)}


def _block(language: str, text: str) -> str:
  return f"```{language}\n{text.rstrip()}\n```"


def on_page_markdown(markdown, page, config, files):
  """Makes measured tables anew from results/, and turns links to the repository into links to its
  copies, or to a package's page."""
  del config, files
  here = posixpath.dirname(page.file.src_uri)
  within = here.removeprefix(_REPO).lstrip("/")
  copied = page.file.src_uri.startswith(_REPO + "/")
  at = within if copied else posixpath.join("docs", here)
  source = posixpath.join(at, posixpath.basename(page.file.src_uri))
  markdown = tables.written(markdown, source)

  def moved(match):
    file = posixpath.normpath(posixpath.join(at, match.group(1)))
    target = file.removeprefix("docs/") if file.startswith("docs/") else f"{_REPO}/{file}"
    package = package_of(file)
    target = f"reference/{package}.md" if package else target
    target = re.sub(r"\.ipynb$", ".md", target)
    return posixpath.relpath(target, here or ".") + (match.group(2) or "")

  return LINK.sub(moved, markdown)


# inline code; that of a highlighted block begins with a tag
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
# a word with a hyphen, behind which browsers break lines, or a short name
_WHOLE = re.compile(r"\S*-\S*|(?<!\S)\S{1,24}(?!\S)")
# a cell such as .948 ± .014, [.908, .988] or 2026-11-29
_NUMBERS = re.compile(r"(?<=<td>)[-+.\d±\[\], ]{1,24}(?=</td>)")


def unbroken(html: str) -> str:
  """Marks flags and short names in code, and cells of numbers alone, which extra.css keeps on one
  line each.

  CSS alone can forbid a break in a whole cell only, whatever is in it.

  >>> unbroken("<td><code>a --config.seed=1</code></td>")
  '<td><code><span class="whole">a</span> <span class="whole">--config.seed=1</span></code></td>'
  >>> unbroken("<td>[.908, .988]</td><td>3 to 4 runs</td>")
  '<td><span class="whole">[.908, .988]</span></td><td>3 to 4 runs</td>'
  """
  word = lambda match: f'<span class="whole">{match.group()}</span>'
  html = _CODE.sub(lambda code: _WHOLE.sub(word, code.group()), html)
  return _NUMBERS.sub(word, html)


def on_page_content(html, page, config, files):
  """Keeps flags and short names whole."""
  del page, config, files
  return unbroken(html)


try:
  import griffe
except ImportError:  # the tests read what is above
  griffe = None
else:

  class Docstrings(griffe.Extension):
    """Doctests become blocks of code, and so does what stands two spaces in."""

    def on_instance(self, *, obj, **kwargs):
      if obj.docstring is not None and not obj.is_alias:
        paragraphs = obj.docstring.value.split("\n\n")
        obj.docstring.value = "\n\n".join(map(_as_markdown, paragraphs))


def _as_markdown(paragraph: str) -> str:
  lines = paragraph.splitlines()
  if lines and lines[0].lstrip().startswith(">>>"):
    shown = [re.sub(r"  # doctest: \+\w+$", "", line) for line in lines]
    return "\n".join(["```pycon", *shown, "```"])
  if lines and all(line.startswith("  ") for line in lines):
    return "\n".join("  " + line for line in lines)
  return paragraph
