"""launch.plot as users type it: files of three kinds, notes, and errors in one line."""

import pathlib

import pytest

from tests import commands


@pytest.mark.slow
def test_a_curve_is_drawn_for_a_paper(tmp_path):
  out = [str(tmp_path / f"curve.{kind}") for kind in ("png", "pdf", "svg")]
  done = commands.run(
    "launch.plot", "results/lm_lora/curve.csv", f"--out={','.join(out)}", "--size=single",
    "--font_size=7", "--style=grey", "--title=Perplexity",
    "--reference=the public model, untouched:0:5.996",
  )  # fmt: skip
  assert done.returncode == 0 and done.stderr == "", done.stderr
  assert done.stdout == f"wrote {', '.join(out)}\n"
  starts = [pathlib.Path(path).read_bytes()[:5] for path in out]
  assert starts == [b"\x89PNG\r", b"%PDF-", b"<?xml"]
  # Letters of an SVG are outlines; matplotlib keeps their words as comments.
  text = pathlib.Path(out[2]).read_text(encoding="utf-8")
  assert "<!-- Perplexity -->" in text and "the public model, untouched (5.996)" in text


@pytest.mark.slow
def test_what_is_not_drawn_is_said(tmp_path):
  table = tmp_path / "a.csv"
  table.write_text("x,y\n1,2\n2,nan\n3,4\n")
  out = tmp_path / "a.svg"
  done = commands.run("launch.plot", str(table), "--x=x", "--y=y", f"--out={out}")
  assert done.returncode == 0
  assert done.stderr == f"note: {table}: 1 of 3 rows hold no finite y: not drawn\n"
