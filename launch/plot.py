"""Draws a CSV file again, for a paper: PDF, SVG or PNG of a given size, font and style.

  python -m launch.plot results/mnist_curves --out=curve.pdf --size=single

  # draw two sweeps and a published result in one picture, and write it as three files
  python -m launch.plot results/fed_user_level/curve.csv results/fed_mcmahan/curve.csv \\
    --out=curve.png,curve.pdf,curve.svg --reference='McMahan et al. 2017:205:0.97'

  # draw any other table by its columns; rows with equal x and group are one point, at their mean
  python -m launch.plot results/radp/test1_mnist/report.csv --x=epoch --y=test_accuracy \\
    --group=curve --out=accuracy.pdf --size=3.3x2.4 --font_size=7 --style=grey --log_y

What dpjax draws has a recipe beside its CSV file, such as curve.picture.json: which columns are x,
y and lines, published results, scales and words (dpjax/experiments/plots/recipes.py). A folder
stands for its files with a recipe. Rows without a finite number are not drawn; a line on stderr
counts them. Nothing is trained or accounted for anew.
"""

from __future__ import annotations

from absl import flags

from dpjax import pictures
from dpjax.experiments.plots import redraw
from dpjax.experiments.run import writers
from dpjax.pictures import Look
from launch import app

flags.DEFINE_list("out", None, "Files to write: .png, .pdf or .svg each.", required=True)
flags.DEFINE_string(
  "size", "double", "single (3.3 inches), double (6.9), a width, or WIDTHxHEIGHT in inches."
)
flags.DEFINE_float("font_size", Look.font_size, "Of labels, in points.")
flags.DEFINE_enum(
  "style",
  Look.style,
  pictures.STYLES,
  "grid, plain (no lines behind) or grey (no colours).",
)
flags.DEFINE_string("title", None, "Above the picture; '': none. Default: its own.")
flags.DEFINE_bool("log_x", None, "A logarithmic axis of x. Default: as the picture has it.")
flags.DEFINE_bool("log_y", None, "The same of y; --nolog_y draws accuracies as they are.")
flags.DEFINE_string("x", None, "Column of x, for any table.")
flags.DEFINE_string("y", None, "Column of y.")
flags.DEFINE_string("group", None, "Column whose values become lines.")
flags.DEFINE_multi_string(
  "reference", [], "LABEL:X:Y of a published result. At an epsilon of 0 it is a line."
)


def main(*paths: str) -> None:
  """Draws the CSV files at these paths, and writes the pictures of --out."""
  values = flags.FLAGS
  look = Look(
    **redraw.size(values.size),
    font_size=values.font_size,
    style=values.style,
    title=values.title,
    log_x=values.log_x,
    log_y=values.log_y,
  )
  references = tuple(map(redraw.reference, values.reference))
  asked = redraw.Asked(x=values.x, y=values.y, group=values.group, references=references)
  for note in redraw.plot(paths, values.out, asked=asked, look=look):
    writers.note(note)
  print(f"wrote {', '.join(values.out)}")


if __name__ == "__main__":
  app.run(main, words=True)
