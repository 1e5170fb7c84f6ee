"""Builds the objects of a run from a typed config. No training happens here."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dpjax import (
  closed_over,
  data,
  names,
  training,
  trees,
)
from dpjax.data import ahead, cache, resident
from dpjax.data.resident import resident_bytes
from dpjax.experiments.config import common, optimizers, sections
from dpjax.experiments.config.choices import name_of, to_dict
from dpjax.experiments.config.optimizers import SCHEDULE_FREE, Noise
from dpjax.experiments.config.sections import AnyDataConfig, ModelConfig, NetworkConfig
from dpjax.experiments.kinds.central import (
  facts,
  normalization,
  privacy,
  starting_point,
)
from dpjax.experiments.kinds.central import features as features_lib
from dpjax.experiments.kinds.central.config import (
  CONTRASTIVE,
  HeadFirst,
  LeastSquares,
  TrainConfig,
)
from dpjax.experiments.kinds.central.features import add_features as add_features
from dpjax.experiments.kinds.central.tasks import (
  Task,
  check_weights,
  keyed_loss,
  make_task,
)
from dpjax.experiments.run import guarantee, left_out, saved, writers
from dpjax.experiments.run.experiment import Experiment, Phase, Story, every, single
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.gradients.device_mesh import (
  DATA,
  leaf_sharding,
  mesh_of,
  on_all,
  on_one,
  row_sharding,
  split_rows,
  whole_rows,
)
from dpjax.models.libraries import linen_modules
from dpjax.parallel import allocator
from dpjax.parallel.spanning import own_copy
from dpjax.plan import Plan
from dpjax.training.augment import AUGMENTATIONS
from dpjax.training.dp_sgd import join
from dpjax.types import Algorithm, ArrayLike, LossFn, Params
from dpjax.validate import UserError, first_line
from dpjax.zoo import networks, recipes
from dpjax.zoo.networks import registry

if TYPE_CHECKING:
  from dpjax.auditing.canaries import Canaries
  from dpjax.parallel.step_program import StepProgram


class Run(NamedTuple):
  """Holds every object of a training run."""

  plan: Plan
  guarantee: Guarantee
  algorithm: Algorithm
  # Function (key of the noise, key of examples' draws) -> the same algorithm with other keys. The
  # second key is None if the examples bring their own keys.
  with_keys: Callable[[jax.Array, jax.Array | None], Algorithm]
  params: Any  # at step 0
  apply: Any  # (params, x [B, ...]) -> logits
  schedule: optax.Schedule
  random: RunKeys
  train: Any
  test: Any
  task: Task
  # Loss of ONE example, augmentation included. Its gradient is clipped. A contrastive loss is no
  # loss of one example, so this function then refuses every call.
  loss_fn: LossFn
  canaries: Canaries | None = None  # rows of `train` when the run is audited
  noise: Noise | None = None  # for an optimizer that must know it
  # Algorithm of the first steps if they train fewer parameters. It uses the same states as
  # `algorithm`. None: all steps are alike.
  first_steps: Algorithm | None = None
  # Names of the data that the first parameters were trained on, the most recent first. Names of the
  # data behind the model's features follow.
  pretrained_on: Sequence[str] = ()
  # Private statistics that normalise `train` and `test`; None: there are none.
  statistics: normalization.Released | None = None
  mesh: Mesh | None = None  # devices that share a batch; None: one device
  keyed: bool = False  # whether every example gets a key of its own, `example.key`
  optimizer: Any = None  # the Optax transformation behind the private gradient
  # Function (folder, last state) that writes files beside params.npz.
  save: Callable[[pathlib.Path, Any], None] = lambda folder, state: None


# Fields that only a loss of one example reads.
_OF_ONE_EXAMPLE = ("grad_method", "microbatch_size", "memory_budget_gb", "mesh", "slices")
_OF_ONE_EXAMPLE += ("augmult",)


def _check_read(config: TrainConfig) -> None:
  """Raises UserError for a field that is set although this run would not read it."""
  read = functools.partial(common.read_if, config)
  # Private statistics may replace the model's own groups, which then have no use.
  grouped = normalization.per_example(config)
  read(grouped, "privacy.normalization='per_example'", "model.options.num_groups")
  read(config.loss != CONTRASTIVE, "a loss of one example", *_OF_ONE_EXAMPLE)


def _check_schedule_free(config: TrainConfig) -> None:
  rule = name_of(config.optimizer, "rule")
  if rule not in SCHEDULE_FREE:
    return
  told = f" with optimizer.rule={rule!r}, "
  weighs = "whose average weighs all steps by the largest rate"
  common.only(config, "optimizer.schedule", ["constant"], f"{told}{weighs}")
  common.only(config, "ema_decay", [None], f"{told}which averages the parameters itself")
  if isinstance(config.trainable, HeadFirst):
    raise UserError(
      f"must be another{told}which averages all steps of every weight",
      field="trainable",
      value="head_first",
    )


def load_data(config: TrainConfig, *, features: bool = True) -> tuple[Any, Any]:
  """Loads (train, test), preprocessed by public constants only.

  Args:
    features: whether to compute the features of the model; they do not change `data.digest`.
  """
  run = Central(config)
  return run.with_features(run.data()) if features else run.data()


def make_model(config: ModelConfig, width: int, **fixed: Any) -> Any:
  """Builds the model of a config with `width` outputs; `fixed` overrides its options."""
  with config.naming():
    return networks.build(config.name, num_classes=width, **{**config.options, **fixed})


def init_params(
  config: NetworkConfig, model: Any, key: jax.Array, first: ArrayLike
) -> Params:
  """Returns the parameters `model.init(key, first)`.

  Raises:
    UserError: `model.init` raises any error (modules check their options only when they are first
      applied), or the parameters exceed the memory of this machine.
  """
  try:
    # One program, where `model.init` alone would compile one for each of its operations.
    init = jax.jit(lambda key, first: model.init(key, first))
    with config.naming():
      # Shapes are computed first. So a model that is too large is refused before it takes memory.
      shapes = init.eval_shape(key, first)
    # Models of dpjax hold parameters alone, so only a user's model is checked.
    if names.is_path(config.name):
      from dpjax.models.libraries import user_models

      user_models.check_collections(shapes, config.name)
    size = trees.size(shapes)
    memory = allocator.machine_memory()
    # A float32 takes four bytes.
    if 4 * size > memory:
      raise UserError(
        f"has {size} parameters with model.options={config.options!r}, more than the "
        f"{memory / 1e9:.0f} GB of this machine hold; width, classes or the size of an example "
        "must be smaller",
        field="model.name",
        value=config.name,
      )
    return init(key, first)
  except UserError:
    raise
  except Exception as error:
    reason = first_line(error, with_type=True)
    raise UserError(
      f"model.name={config.name!r} cannot be built with them on examples of shape "
      f"{jnp.shape(first)[1:]} ({reason})",
      field="model.options",
      value=config.options,
    ) from error


def learning_rate_schedule(config: Any, num_steps: int, rate: Any = None) -> optax.Schedule:
  """Returns the function step -> learning rate. It is fixed in advance, so it costs no privacy.

  Args:
    config: an `OptimizerConfig`, or that of a server.
    rate: the config's learning rate as an array, which a compiled step takes as an argument.
  """
  rate = config.learning_rate if rate is None else rate
  if config.schedule == "cosine":
    return optax.cosine_decay_schedule(rate, num_steps)
  if config.schedule == "linear":
    return optax.linear_schedule(rate, 0.0, num_steps)
  return optax.constant_schedule(rate)


def memory_budget(config: TrainConfig) -> float | None:
  """Returns the bytes that a microbatch may take; None if no budget is set."""
  return None if config.memory_budget_gb is None else config.memory_budget_gb * 1e9


def start(
  config: TrainConfig, dataset: data.Dataset, random: RunKeys
) -> tuple[Task, Any, Params]:
  """Returns (the task on a data set, the model, its first parameters)."""
  task = make_task(config, dataset)
  name = config.model.name
  # `load_data` has already normalised scattering features, so the model must not do it again.
  fixed = {"num_groups": None} if registry.entry(name).features == "scattering" else {}
  # Parameters are initialised on zeros, since they must not depend on any record.
  first = jax.tree.map(jnp.zeros_like, dataset.x[:1])
  wanted = (1, task.width(dataset))
  first = first[:, 0] if dataset.unit == "user" else first

  def make() -> tuple[Task, Any, Params]:
    model = linen_modules.modes(make_model(config.model, task.width(dataset), **fixed))
    if dataset.vocab_size is not None:
      _check_vocabulary(model, dataset, name)
    params = init_params(config.model, model, random.init, first)
    if config.pretrained is not None:
      params = starting_point.load(config, model, params, dataset.tokenizer)
    if names.is_path(name):
      from dpjax.models.libraries import user_models

      drawing = user_models.draws(model, params, first, name)
      # Language models are those of dpjax, so a user's model must give one vector per example.
      logits = jax.eval_shape(model.apply, params, first)
      user_models.check_outputs(logits, wanted, trees.shapes(first), name)
    else:
      drawing = linen_modules.draws(model, params, first, name)
    # With dropout, each example needs its own key in training.
    whole = task._replace(loss=keyed_loss(task.loss), keyed=True) if drawing else task
    return whole, model, params

  return (names.guard(name, "model.name", make) if names.is_path(name) else make)()


def _check_vocabulary(model: Any, dataset: data.Dataset, name: str) -> None:
  """Raises UserError for data with more tokens than the model of this name has embeddings.

  JAX would silently read the embedding of another token.
  """
  known = getattr(model, "vocab_size", None)
  tokens = dataset.vocab_size if dataset.x.dtype == np.int32 else None
  if isinstance(known, int) and tokens is not None and tokens > known:
    raise UserError(
      f"must be at least {tokens}, the tokens of the data, for model.name={name!r}",
      field="model.options.vocab_size",
      value=known,
    )


def assemble(
  config: TrainConfig,
  loaded: tuple[Any, Any] | None = None,
  random: RunKeys | None = None,
) -> Run:
  """Builds every object of a run, deterministically from its arguments.

  Args:
    loaded: result of `load_data`; None: the data that the config names are loaded.
    random: keys; None: those of a new run.
  """
  run = Central(config)
  run.check()
  loaded = load_data(config) if loaded is None else loaded
  return assemble_loaded(config, loaded, run.new_keys() if random is None else random)


def assemble_loaded(config: TrainConfig, loaded: tuple[Any, Any], random: RunKeys) -> Run:
  """Builds every object of a run whose config is checked; see `assemble`."""
  if isinstance(config.privacy, LeastSquares):
    reason = "has no steps, which are needed here; 'dp_sgd' has"
    raise UserError(reason, field="privacy", value=name_of(config, "privacy"))
  train, test = loaded
  write_inputs = inputs_writer(config.data, config.model, test)
  augmented = config.augmentation != "none"
  if augmented:
    features_lib.check_images(train, "augmentation", config.augmentation)
  known = saved.pretrained_on(config.pretrained, config.data.name, train)
  behind = features_lib.trained_on(config.model.name, config.data.name)
  task, model, params = start(config, train, random)
  keyed = augmented or task.keyed
  trained = starting_point.trainable_part(config, task, model, params, random.init)
  params, apply, audited = trained.params, trained.apply, None
  if config.audit is not None:
    from dpjax.experiments.kinds import audits  # few runs are audited
    from dpjax.experiments.kinds.central import audit

    audited = audit
    params, apply = audits.beside(config, params, apply)
  # The number of examples is taken now, since inserting canaries removes or replaces rows.
  num_examples = privacy.public_size(config, train)
  # Batches check their capacity against the number that `train` declares.
  train = train.declared(num_examples)
  plan = privacy.make_plan(config, num_examples, params, unit=train.unit)
  loss_fn, canaries = trained.loss(trained.apply), None
  if audited is not None:
    loss_fn = audited.loss(config, loss_fn, num_classes=train.num_classes, plan=plan)
    train, canaries = audited.insert(config, train, plan)
  # The statistics also cover the canaries, since the model trains on them, too.
  statistics = normalization.release(plan, random, train)
  if statistics is not None:
    train, test = (normalization.normalize(part, statistics) for part in (train, test))
    canaries = normalization.of_canaries(canaries, statistics)
  if augmented:
    augment = AUGMENTATIONS[config.augmentation]
    loss_fn = training.augment(loss_fn, augment, augmult=config.augmult)
  # One schedule: of Python's number in reports, of an array where a compiled step takes it.
  schedule = functools.partial(learning_rate_schedule, config.optimizer, config.num_steps)
  mesh = None if config.mesh is None else mesh_of(config.mesh)
  aware = name_of(config.optimizer, "rule") in privacy.NOISE_AWARE
  noise = Noise(plan.mean_noise_std, num_examples) if aware else None
  # Rules that know the noise compute with Python's numbers, so their steps hold them as constants.
  rate = None if aware else closed_over.argument(config.optimizer.learning_rate)
  tx = optimizers.make(config.optimizer, schedule(rate), noise)
  if audited is not None:
    tx = audited.watch(config, tx)

  def save(folder: pathlib.Path, state: Any) -> None:
    whole = trained.whole(training.eval_params(state))
    starting_point.write(config, model, whole, folder, train.tokenizer)
    write_inputs(folder)

  def with_keys(
    noise_key: jax.Array, example_key: jax.Array | None, *, first: bool = False
  ) -> Algorithm:
    if config.loss == CONTRASTIVE:
      views: Any = AUGMENTATIONS[config.augmentation]
      assert example_key is not None
      return recipes.contrastive(
        apply, views, tx, view_key=example_key, ema_decay=config.ema_decay
      )
    moved = training.of_part(loss_fn, tx, saved.in_head) if first else (loss_fn, tx)
    return training.dp_sgd(
      moved[0],
      plan,
      moved[1],
      noise_key=noise_key,
      example_key=example_key if keyed else None,
      ema_decay=config.ema_decay,
      method=config.grad_method,
      microbatch_size=config.microbatch_size,
      memory_budget=memory_budget(config),
      mesh=mesh,
    )

  promised = guarantee.of_plan(
    plan,
    num_examples,
    budget=getattr(config.privacy, "epsilon_budget", None),
    release=config.release,
  )
  asked = guarantee.describe_attack_bound(common.attack_of(config.privacy), plan.delta)
  promised = guarantee.add_note(promised, asked)
  note = saved.statement(config.pretrained, known)
  promised = guarantee.add_note(promised, note, saved.assumption(config.pretrained, known))
  promised = features_lib.add_note(config, promised, train)
  promised = guarantee.as_repeatable(promised, config.noise_seed)
  return Run(
    plan=plan,
    guarantee=promised,
    pretrained_on=list(dict.fromkeys([*known, *behind])),
    algorithm=with_keys(random.noise, random.local),
    with_keys=with_keys,
    first_steps=with_keys(random.noise, random.local, first=True)
    if starting_point.first_steps(config)
    else None,
    params=params,
    apply=apply,
    schedule=schedule(),
    random=random,
    train=train,
    test=test,
    task=task,
    loss_fn=loss_fn,
    canaries=canaries,
    noise=noise,
    statistics=statistics,
    mesh=mesh,
    keyed=keyed,
    optimizer=tx,
    save=save,
  )


def inputs_writer(
  config: AnyDataConfig, model: ModelConfig, dataset: data.Dataset
) -> Callable[[pathlib.Path], None]:
  """Returns a function that writes the public facts of a model's inputs into the run's folder."""
  # Imported here, to keep the launcher's start fast.
  from dpjax.experiments.run import model_inputs

  unit_range = registry.entry(model.name).in_unit_range
  facts = model_inputs.of(config, dataset, unit_range=unit_range)
  return functools.partial(model_inputs.write, facts=facts)


class Central(Experiment[TrainConfig]):
  """One run of a `TrainConfig`: one model, its data in one place."""

  over_processes = True
  plans = True

  def check(self) -> None:
    config = self.config
    common.check_types(config)
    sections.check_range(config.data, config.model)
    if config.mesh is not None:
      mesh_of(config.mesh)
    if config.augmentation == "none":
      common.only(config, "augmult", [1], " unless augmentation is set")
    if config.audit is not None:
      from dpjax.experiments.kinds.central import audit  # few runs are audited

      audit.check(config.audit, release=config.release)
    if config.loss == CONTRASTIVE:
      # Imported here, since few runs need this module.
      from dpjax.experiments.kinds.central import embeddings

      embeddings.check(config)
    privacy.check(config)
    normalization.check(config)
    if isinstance(config.privacy, LeastSquares):
      from dpjax.experiments.kinds.central import one_release  # no other method needs it

      one_release.check(config)
    starting_point.check(config)
    _check_schedule_free(config)
    if config.writer is not None:
      from dpjax.experiments.run import row_hooks  # few runs have a hook

      row_hooks.check(config.writer, release=config.release)
    check_weights(config)
    _check_read(config)

  def data(self) -> Any:
    return self.config.data.load(resident=self.config.resident)

  def with_features(self, data: Any) -> Any:
    config = self.config
    if not registry.entry(config.model.name).features:
      return data
    options: Any = normalization.per_example(config), cache.folder(), config.resident
    return tuple(add_features(config.model, part, *options) for part in data)

  @property
  def keeps_memory(self) -> bool:
    # Training on features, such as those of scattering, gets faster so.
    return bool(registry.entry(self.config.model.name).features)

  def data_key(self) -> Any:
    config = self.config
    # It decides whether the features of each example are standardised, or stay unscaled for
    # statistics over all examples.
    normalized = getattr(config.privacy, "normalization", None)
    return [*map(to_dict, (config.data, config.model)), type(normalized).__name__]

  @property
  def num_steps(self) -> int:
    return self.config.num_steps

  def weights(self) -> dict[str, str]:
    path = self.config.pretrained
    return {} if path is None else {"pretrained": names.weights_sha256(path, "pretrained")}

  def same(self) -> dict[str, str]:
    return super().same() | {"mesh": str(self.config.mesh)}

  def train(self, data: Any, keys: RunKeys) -> Story:
    if isinstance(self.config.privacy, LeastSquares):
      from dpjax.experiments.kinds.central import one_release  # no other method needs it

      return single(one_release.phase(self.config, data, keys))
    return single(phase(self.config, assemble_loaded(self.config, data, keys)))

  def line(self, result: dict[str, Any]) -> str:
    return (
      f"{result['dataset']} {result['model']}: {writers.headline(result)}, "
      f"{guarantee.summary(result)}, {result['num_steps']} steps{writers.took(result)}"
    )


def batches(run: Run, start: int = 0) -> Generator[Any]:
  """Yields the batches of the steps from `start` on, placed on the devices.

  A thread reads data in files while the previous batch is trained on. Closing the generator ends
  the thread.
  """
  split = None
  placed = {}
  if run.mesh is not None:
    split = functools.partial(split_rows, run.mesh)
    placed = {"everywhere": on_all(run.mesh), "split": split}
  train = resident.resident(run.train, **placed)
  first = start * run.plan.slices  # of whole steps
  drawn = run.plan.batches(train, rng=run.random.sampler, start=first)
  if run.train.in_memory:
    yield from drawn if split is None else map(split, drawn)
    return
  read = ahead.ahead(map(jax.device_put, drawn) if split is None else drawn)
  # A run that stops early must also end the thread that reads ahead.
  with contextlib.closing(read):
    yield from read if split is None else map(split, read)


def _program(run: Run, step: Any) -> StepProgram:
  """Returns a jitted step, lowered on a batch of the run for the devices of `parallel.made_for`."""
  from dpjax.parallel import step_program  # few runs are planned for another machine

  state = jax.eval_shape(run.algorithm.init, run.params)
  batch = next(iter(run.plan.batches(run.train, rng=run.random.sampler)))
  mesh = run.mesh
  rows = len(batch.mask)
  if mesh is None:
    state, batch = step_program.on_device((state, batch))
  else:
    # State and batch are placed as `dp_sgd` and `batches` place them.
    apart = row_sharding(mesh)
    rows = whole_rows(rows, mesh) // mesh.shape[DATA]
    batch = jax.eval_shape(functools.partial(split_rows, mesh), batch)
    batch = step_program.place_shapes(batch, lambda leaf: apart)
    state = step_program.place_shapes(state, functools.partial(leaf_sharding, mesh))
  return step_program.StepProgram(
    step.lower(state, batch),
    calls=run.plan.slices,
    num_parameters=trees.size(normalization.beside(run.params, run.statistics)),
    rows=rows,
    data_bytes=resident_bytes(run.train),
  )


def phase(config: TrainConfig, run: Run) -> Phase:
  """Returns the phase that trains, evaluates and reports, step by step."""
  # The old state is no longer needed, so its memory is reused for the new state.
  later = first = closed_over.jitted(run.algorithm.step, donate_argnums=0)
  if run.first_steps is not None:
    first = closed_over.jitted(run.first_steps.step, donate_argnums=0)
  # In one program, and without the key of the noise in it. Over several devices `init` places its
  # arrays itself.
  init = run.algorithm.init if run.mesh else closed_over.jitted(run.algorithm.init)
  num_first = starting_point.first_steps(config)

  def step(state: Any, slices: Iterator[Any]) -> tuple[Any, Any]:
    info = None
    # A batch comes in slices, and the step is complete after the last slice.
    for batch in slices:
      # JAX runs ahead of the device, and batches of steps to come would fill the memory.
      if not run.train.in_memory:
        jax.block_until_ready(state)
      # Reading `state.step` waits for the device, so only runs with special first steps read it.
      early = num_first and int(state.step) < num_first
      state, of_slice = (first if early else later)(state, batch)
      info = of_slice if info is None else join(info, of_slice)
    return state, info

  def draws(start: int) -> Iterator[Iterator[Any]]:
    with contextlib.closing(batches(run, start)) as held:
      for _ in range(start, config.num_steps):
        yield itertools.islice(held, run.plan.slices)

  def scores(state: Any) -> dict[str, float]:
    params = training.eval_params(state)
    if run.mesh is not None:
      params = on_one(run.mesh, params)
    return run.task.evaluate(run.apply, params, run.test)

  # Process 0 evaluates and writes alone, so it needs its own copy of whole arrays.
  def released(state: Any) -> Params:
    return normalization.beside(own_copy(training.eval_params(state)), run.statistics)

  return Phase(
    num_steps=config.num_steps,
    init=functools.partial(init, run.params),
    step=step,
    draws=draws,
    released=released,
    evaluate=scores,
    write=run.save,
    guarantee=run.guarantee,
    row_at=functools.partial(every, config.eval_every, config.num_steps),
    observe=functools.partial(facts.observe, config, run),
    arrivals=left_out.of_step if facts.shows_data(config) else None,
    save_every=config.checkpoint_every,
    before_steps=None if run.statistics is None else run.statistics._asdict(),
    program=functools.partial(_program, run, later),
    planned=functools.partial(facts.planned_facts, config, run),
    describe=functools.partial(facts.of, config, run),
  )
