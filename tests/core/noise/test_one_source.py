"""All privacy noise comes from dpjax/noise: no other file may hold a float sampler.

The source is read, names are resolved through imports, so that an alias, a partial or a
table of functions is found where the sampler is NAMED, whatever is done with it later.
"""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_SOURCE = "dpjax/noise/"  # the source itself: bits become noise there

# Of jax.random everything is a float sampler (its tails end, its uniforms are multiples of
# 2^-23; `randint` is not uniform above 2^16) unless it is named here: keys, and an order.
_JAX_ALLOWED = {
  "key", "split", "fold_in", "key_data", "wrap_key_data", "key_impl", "permutation",
}  # fmt: skip
# Of numpy.random only generators and their seeds; what they draw is judged by its name.
_NUMPY_ALLOWED = {
  "default_rng", "Generator", "RandomState", "SeedSequence", "Philox", "PCG64", "MT19937",
}  # fmt: skip
# Methods of a generator (or of a scipy law) that are noise by their name. `random`, `choice`,
# `integers`, `permutation`, `geometric` are uniform draws of 53 bits or counts, of batches
# and data, and stay allowed.
_METHODS = {
  "normal", "standard_normal", "multivariate_normal", "lognormal", "laplace", "gumbel",
  "logistic", "exponential", "standard_exponential", "standard_cauchy", "standard_t", "rvs",
  "gauss", "normalvariate", "expovariate", "poisson", "weibull", "rayleigh", "vonmises",
  "uniform", "randn", "standard_gamma", "binomial", "negative_binomial", "chisquare",
  "noncentral_chisquare", "dirichlet", "triangular", "pareto", "wald", "zipf", "logseries",
}  # fmt: skip
_CALLED = {"gamma", "beta", "power"}  # names of numbers, too: noise where they are called
_MODULES = {"random", "jax._src.random", "numpy.random.mtrand"}  # not to be imported at all
# Elsewhere in JAX: draws, and the bits below a key's methods.
_BESIDE = {
  "jax.lax.rng_uniform", "jax.lax.rng_bit_generator", "jax.extend.random.threefry_2x32",
  "jax.extend.random.threefry2x32_p", "jax.extend.random.random_bits",
}  # fmt: skip

# file -> names: every exception, beside its reason
_EXCEPTIONS = {
  # flips, crops and colours of an image: augmentation, no privacy rests on it
  "dpjax/training/augment.py": {"bernoulli", "uniform", "randint"},
  # randomised rounding and rotation of messages: compression, without a privacy claim
  "dpjax/federated/compression.py": {"uniform", "rademacher"},
  # Monte-Carlo estimate of an epsilon: simulates a mechanism, releases nothing
  "dpjax/accounting/monte_carlo.py": {"standard_normal"},
  # pixels of canaries; where a rounded number was within its cell, of a test's input
  "dpjax/auditing/canaries.py": {"uniform"},
  "dpjax/checks/noise_distributions.py": {"uniform"},
  # signs and sizes of sums that a check feeds to a transform: its input, not its noise
  "dpjax/checks/charges.py": {"bits"},
  # the random NUMBER of trials of private selection: an integer, by a 53-bit generator
  "dpjax/accounting/tuning.py": {"poisson", "logseries"},
  # deals records to clients, and makes synthetic ones differ in style: data, not protection
  "dpjax/data/partition.py": {"standard_normal", "standard_gamma", "uniform"},
  # a peer's own order of examples, beside which ours is timed
  "benchmarks/peer_worker.py": {"seed"},
  # public random frequencies, and the random numbers of generated images: no record in them
  "dpjax/zoo/recipes/synthesis.py": {"standard_normal", "normal"},
  # what the generators of keys and draws give under a fixed seed: whether a run may go on here
  "dpjax/experiments/run/run_keys.py": {"bits", "poisson", "uniform", "randint"},
  # the next token of a model that an adversary lets write
  "dpjax/attacks/text_extraction.py": {"categorical"},
  # an adversary's first guess
  "dpjax/attacks/gradient_inversion.py": {"normal"},
  "dpjax/attacks/class_inversion.py": {"truncated_normal"},
  # a direction that a rogue server measures along
  "dpjax/attacks/rogue_server.py": {"normal"},
  # an example's augmentation in a game: what is drawn is the input, not its protection
  "dpjax/auditing/games/training.py": {"uniform"},
  # a population of ranks that a p-value is computed by; false alarms of drift without a change
  "dpjax/attacks/exposure.py": {"standard_normal"},
  "dpjax/serving/drift.py": {"laplace"},
  # which public images a student learns from; latents of generated images; points between two
  # images, at which a critic's gradient is penalised
  "dpjax/experiments/kinds/distillation.py": {"randint"},
  "dpjax/experiments/kinds/synthesis/critic_run.py": {"normal"},
  "dpjax/training/gradient_penalty.py": {"uniform"},
  # public random features of a model that is fitted in one release
  "dpjax/experiments/kinds/central/one_release.py": {"normal"},
  # a start of the search for principal axes, which its end does not depend on
  "dpjax/zoo/recipes/pate.py": {"normal"},
  # draws that are timed, and requests of a load test
  "benchmarks/card_parts.py": {"normal"},
  "benchmarks/noise_draws.py": {"normal"},
  "benchmarks/serving_load.py": {"random"},
  "benchmarks/private_steps.py": {"standard_normal"},
  # which intervals of published runs are drawn again
  "benchmarks/redrawn.py": {"random"},
  # initial weights
  "dpjax/experiments/kinds/secure/shared_people.py": {"normal"},
  "dpjax/experiments/kinds/attack/inversion.py": {"uniform"},
  "dpjax/secure/mpc/secureml.py": {"normal"},
  "dpjax/relevance/adlm.py": {"jax.nn.initializers"},
  "benchmarks/workloads.py": {"jax.nn.initializers"},
  "dpjax/training/lora.py": {"jax.nn.initializers"},
}


def _dotted(node, names):
  """The full name of `a.b.c`, its root resolved through the imports; None for the rest."""
  parts = []
  while isinstance(node, ast.Attribute):
    parts.append(node.attr)
    node = node.value
  if not isinstance(node, ast.Name):
    return None
  return ".".join([names.get(node.id, f"?{node.id}"), *reversed(parts)])


def _imported(tree):
  """name here -> full name there, of every import at any depth."""
  names = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        root = alias.name.split(".")[0]
        names[alias.asname or root] = alias.name if alias.asname else root
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
  return names


def _of_a_library(name):
  """What a resolved full name draws with, or None."""
  for module, allowed in (("jax.random", _JAX_ALLOWED), ("numpy.random", _NUMPY_ALLOWED)):
    if name == module:
      return module  # the module as a value: in a table, an argument, getattr
    if name.startswith(module + "."):
      drawn = name.removeprefix(module + ".").split(".")[0]
      return None if drawn in allowed else drawn
  if name.startswith("jax.nn.initializers"):
    return "jax.nn.initializers"
  if name in _BESIDE:
    return name
  root = name.split(".")[0]
  scipy_law = root == "scipy" and name.endswith(".rvs")
  return "rvs" if scipy_law else None


def _of_an_import(node):
  modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
  yield from (module for module in modules if module in _MODULES)
  if isinstance(node, ast.ImportFrom):
    for alias in node.names:
      full = f"{node.module}.{alias.name}"
      if full not in ("jax.random", "numpy.random"):  # judged where it is used
        yield from filter(None, [_of_a_library(full)])


def _inner(tree):
  """Attributes that are the value of another: `jax.random` in `jax.random.key`."""
  return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _draws(text):
  """Every float sampler that a source text names."""
  tree = ast.parse(text)
  names, inner = _imported(tree), _inner(tree)
  called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      yield from _of_an_import(node)
    elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
      name = _dotted(node, names)
      known = name is not None and not name.startswith("?")
      found = _of_a_library(name) if known else None
      refused_names = _METHODS | (_CALLED if id(node) in called else set())
      if not known and isinstance(node, ast.Attribute) and node.attr in refused_names:
        found = node.attr
      yield from filter(None, [found])
    elif isinstance(node, ast.Constant) and node.value in ("jax.random", "numpy.random"):
      yield node.value  # importlib, sys.modules, getattr by name


def _files():
  for folder in ("dpjax", "launch", "benchmarks"):
    for path in sorted((_ROOT / folder).rglob("*.py")):
      name = path.relative_to(_ROOT).as_posix()
      if not name.startswith(_SOURCE) and not name.startswith("dpjax/models/"):
        yield name


def test_no_file_but_the_source_holds_a_float_sampler():
  found = {name: set(_draws((_ROOT / name).read_text())) for name in _files()}
  beyond = {
    name: draws - _EXCEPTIONS.get(name, set())
    for name, draws in found.items()
    if draws - _EXCEPTIONS.get(name, set())
  }
  assert not beyond, f"draw from dpjax.noise.source instead: {beyond}"
  unused = {n: e - found.get(n, set()) for n, e in _EXCEPTIONS.items() if e - found[n]}
  assert not unused, f"exceptions that nothing needs: {unused}"


def test_models_hold_initial_weights_only():
  """Their flax initialisers are no noise; everything else is refused there too."""
  for path in (_ROOT / "dpjax/models").rglob("*.py"):
    assert set(_draws(path.read_text())) <= {"jax.nn.initializers"}, path


def test_the_source_draws_bits_and_nothing_else_of_jax():
  counts = {"poisson"}  # `discrete.skellam`: integer noise
  for path in (_ROOT / _SOURCE).rglob("*.py"):
    assert set(_draws(path.read_text())) <= {"bits", *counts}, path


@pytest.mark.parametrize(
  "text",
  [
    "import jax\nx = jax.random.normal(key)",
    "import jax.random as jr\nx = jr.laplace(key)",
    "from jax import random\nx = random.gumbel(key)",
    "from jax import random as r\nf = r.exponential",
    "from jax.random import normal",
    "from jax.random import categorical as choose",
    "import jax, functools\nf = functools.partial(jax.random.gumbel, mode='high')",
    "import jax\nf = {'a': jax.random.truncated_normal, 'b': jax.random.cauchy}",
    "import jax\nf = getattr(jax.random, 'normal')",
    "import jax\nr = jax.random\nx = r.normal(key)",
    "import jax\nx = jax.random.bits(key)",
    "import jax\nx = jax.random.uniform(key) < prob",
    "import jax\nx = jax.random.t(key, 3.0)",
    "import jax as j\nx = j.random.bernoulli(key, 1e-9)",
    "import importlib\nr = importlib.import_module('jax.random')",
    "from jax._src import random\nfrom jax._src.random import normal",
    "import jax._src.random",
    "import numpy as np\nx = np.random.normal(0, 1)",
    "import numpy as np\nx = np.random.default_rng(0).normal(0, 1)",
    "def f(rng):\n  return rng.laplace(0, 1)",
    "def f(self):\n  return self.rng.standard_normal(3)",
    "from numpy.random import laplace",
    "import random\nx = random.gauss(0, 1)",
    "from scipy import stats\nx = stats.norm.rvs(3)",
    "from scipy.stats import laplace\nx = laplace(0, 1).rvs()",
    "def f():\n  from jax import random as inner\n  return inner.normal",
    "import jax\nx = jax.nn.initializers.normal(1.0)(key, (3,))",
    "import jax\nx = jax.lax.rng_uniform(0.0, 1.0, (3,))",
    "from jax import lax\nkey, x = lax.rng_bit_generator(key, (3,))",
    "from jax.extend.random import threefry_2x32",
    "import numpy as np\nx = np.random.default_rng(0).uniform()",
    "import numpy as np\nx = np.random.RandomState(0).randn(3)",
    "def f(rng):\n  return rng.gamma(2.0)",
    "def f(rng):\n  return rng.standard_gamma(2.0) + rng.binomial(9, 0.5) + rng.dirichlet([1, 1])",
  ],
)
def test_every_way_of_naming_one_is_found(text):
  assert list(_draws(text))


@pytest.mark.cases(long=[4, 5])
@pytest.mark.parametrize(
  "text",
  [
    "import jax\nk = jax.random.fold_in(jax.random.key(0), 3)",
    "from jax import random\nk = random.split(random.key(0))",
    "from dpjax.noise import source\nx = source.laplace(key, like, 1.0)",
    "from dpjax import noise\nx = noise.source.gumbel(key, like)",
    "import numpy as np\nx = np.random.default_rng(0).permutation(3)",
    "from scipy import stats\nx = stats.norm.cdf(3)",
  ],
)
def test_keys_and_the_source_itself_are_not(text):
  assert not list(_draws(text))
