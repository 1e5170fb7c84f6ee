"""A document of headings, paragraphs, lists and tables, as Markdown and as one HTML file.

Names of columns and runs come from files of others. So every text is escaped, in both forms, and
the HTML forbids itself scripts and anything from elsewhere.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence

from dpjax import markdown

# Characters with a meaning in Markdown, anywhere in a line.
_MARKS = re.compile(r"[\\`*_\[\]|~$]")
# What begins a heading, a list, a quotation or a line at the start of a block.
_BEGINNING = re.compile(r"^([#>+=-]|\d+[.)](?= |$))")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0 }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; text-align: left; vertical-align: top;
  overflow-wrap: break-word }
th { background: #f3f3f3 } pre { white-space: pre-wrap; background: #f6f6f6; padding: 1rem;
  font-size: .85rem } figure { margin: 1rem 0 } figcaption { color: #555; font-size: .9rem }
svg { max-width: 100%; height: auto }
"""
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""


@dataclasses.dataclass(frozen=True)
class Paragraph:
  """A paragraph of text."""

  text: str


@dataclasses.dataclass(frozen=True)
class Bullets:
  """A list of texts."""

  items: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of texts, with a head."""

  head: Sequence[str]
  rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Verbatim:
  """Lines that are shown as they are."""

  text: str


@dataclasses.dataclass(frozen=True)
class Icons:
  """A picture of 100 dots, of which `marked` are filled. Markdown has its caption alone."""

  marked: int
  caption: str


Block = Paragraph | Bullets | Table | Verbatim | Icons


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and what stands below it. `key` names the section for programs."""

  key: str
  title: str
  blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True)
class Document:
  """A title, blocks that come first, and sections."""

  title: str
  lead: Sequence[Block]
  sections: Sequence[Section]

  def markdown(self) -> str:
    """Returns the document as Markdown."""
    parts = [f"# {_escape(self.title)}", *map(_markdown, self.lead)]
    for section in self.sections:
      parts += [f"## {_escape(section.title)}", *map(_markdown, section.blocks)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

  def html(self) -> str:
    """Returns the document as one HTML file, which needs no other file and runs no script."""
    title = _html(self.title)
    body = [f"<h1>{title}</h1>", *map(_element, self.lead)]
    for section in self.sections:
      body.append(f'<h2 id="{_html(section.key)}">{_html(section.title)}</h2>')
      body += map(_element, section.blocks)
    head = _HEAD.format(title=title, style=_STYLE)
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def plain(text: str, *, lines: bool = False) -> str:
  r"""Returns a text without characters that are invisible, or that turn the direction of writing.

  Args:
    lines: whether ends of lines stay; otherwise they become spaces.

  >>> plain("a\u202eb\nc") == "a\ufffdb c"
  True
  """
  text = text if lines else " ".join(text.split())
  return "".join(
    letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}"
    for letter in text
  )


def _escape(text: str) -> str:
  """Returns one line of Markdown that shows the text and nothing else.

  >>> print(_escape("a|b <script> [x](http://y)"))
  a\\|b &lt;script> \\[x\\](http:&#8203;//y)
  """
  line = _MARKS.sub(r"\\\g<0>", plain(text))
  # Of HTML, `<` and `&` alone begin something. A zero-width space keeps an address from being a
  # link.
  line = line.replace("&", "&amp;").replace("<", "&lt;").replace("://", ":&#8203;//")
  line = re.sub(r"(?i)\bwww\.", lambda found: f"{found[0][:-1]}&#46;", line)
  return _BEGINNING.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", line)


def _markdown(block: Block) -> str:
  match block:
    case Paragraph(text) | Icons(_, text):
      return _escape(text)
    case Bullets(items):
      return "\n".join(f"- {_escape(item)}" for item in items)
    case Table(head, rows):
      return markdown.table(map(_escape, head), (map(_escape, row) for row in rows))
    case Verbatim(text):
      # Four spaces, so that no line of the text can end the block.
      return "\n".join(f"    {line}" for line in plain(text, lines=True).split("\n"))


def _html(text: str) -> str:
  return html.escape(plain(text), quote=True)


def _element(block: Block) -> str:
  match block:
    case Paragraph(text):
      return f"<p>{_html(text)}</p>"
    case Bullets(items):
      return "<ul>" + "".join(f"<li>{_html(item)}</li>" for item in items) + "</ul>"
    case Table(head, rows):
      cells = "".join(f"<th>{_html(name)}</th>" for name in head)
      body = "".join(
        "<tr>" + "".join(f"<td>{_html(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
      )
      return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    case Verbatim(text):
      return f"<pre>{html.escape(plain(text, lines=True))}</pre>"
    case Icons(marked, caption):
      words = _html(caption)
      return f"<figure>{_dots(marked, words)}<figcaption>{words}</figcaption></figure>"


def _dots(marked: int, label: str) -> str:
  """Returns 100 dots in rows of 20 as SVG, the first `marked` of them filled."""
  dots = []
  for place in range(100):
    fill = "#0072B2" if place < marked else "#fff"
    x, y = 14 + 22 * (place % 20), 14 + 22 * (place // 20)
    dots.append(f'<circle cx="{x}" cy="{y}" r="8" fill="{fill}" stroke="#0072B2"/>')
  size = 'viewBox="0 0 446 116" width="446" height="116"'
  return f'<svg {size} role="img" aria-label="{label}">{"".join(dots)}</svg>'
