"""Measures dpjax against an ordinary gradient, an ordinary loop, and against its peers.

  python -m launch.benchmark --suite=gradients
  python -m launch.benchmark --suite=gradients --workloads=small_cnn,mlp --methods=vmap,auto \\
    --repeats=9 --out=runs/benchmark
  python -m launch.benchmark --suite=federated --workloads=cnn,mlp --methods=loop,vmap
  python -m launch.benchmark --suite=federated --cpu_devices=8
  python -m launch.benchmark --suite=federated --workloads=mlp --methods=vmap,pmap,shard_map \\
    --cpu_devices=8 --data_mb=2,188
  python -m launch.benchmark --suite=federated --workloads=cifar10_pfl \\
    --methods=threads,loop,pfl,flower --peer_python=PATH
  python -m launch.benchmark --suite=training \\
    --configs=configs/mnist_cnn.py,configs/cifar10_cnn.py --methods=auto,vmap
  python -m launch.benchmark --suite=devices --cpu_devices=8 --configs=configs/mnist_cnn.py \\
    --mesh=data:1 --mesh=data:8 --mesh=data:4,model:2
  python -m launch.benchmark --suite=sweeps --configs=configs/mnist_cnn.py --processes=1,2
  python -m launch.benchmark --suite=population --clients=100,10000 --rounds=100
  python -m launch.benchmark --suite=secure_sums --workloads=10x1000000 --repeats=1
  python -m launch.benchmark --suite=sum_messages
  python -m launch.benchmark --suite=data --folder=made --records=10000,1000000
  python -m launch.benchmark --suite=allocator
  python -m launch.benchmark --suite=compiled --targets=tpu:v5e:1x1,gpu:h100:1 --workloads=mlp,gpt
  python -m launch.benchmark --suite=parts --workloads=products,convolutions
  python -m launch.benchmark --suite=correlated --workloads=mlp_10m --methods=bisr_32,lambda_cgd
  python -m launch.benchmark --suite=correlated --workloads=mlp_10m --notimed
  python -m launch.benchmark --suite=draws --workloads=leaf_10m --methods=fused,release
  python -m launch.benchmark --suite=serve --minutes=30 --folder=made --out=runs/serve_load

--suite=gradients times each workload in one process, all methods in turns: the ordinary gradient,
the vmap route, the fast route (ghost), auto, auto over 16 microbatches (microbatches), and the same
in a hand-written scan (plain_loop). Where they are installed (pip install -e '.[bench]') it adds
jax_privacy.clipped_grad, PyTorch's ordinary gradient of a twin (torch), and Opacus's clipped one
by hooks (opacus) and by ghost norms (opacus_ghost). Prints the median time, compile time
and memory of each with their ratio to OUR ordinary gradient. A method is skipped, and says so,
if it cannot do a workload, or if twice its per-example gradients exceed 8 GB (on an accelerator:
.9 of its memory). Writes gradients.csv and gradients.png to --out after each workload; entries
that are there already for this device are not measured again. All of it takes half an hour or more
on two idle CPU cores; name --workloads and --methods for less. --batches=256,1024 measures other
sizes of a batch. On an accelerator compiling takes most of the time: --compile_ahead=8 compiles
all programs first, in eight processes.

--suite=federated measures one round of FedAvg (40 clients x 3 local steps) against a Python
loop of jitted local steps. Then it times a round over the number of clients (--clients), by the
last of --methods (default: threads). It writes federated.csv and federated.png. "loop" is one
thread, "threads" is what launch.federate does on a CPU. "pmap" and "shard_map" run over all devices
(--cpu_devices=8 makes 8 of one CPU, which shows that the program is right, not how fast it is).
"fedjax" is FedJAX where it is installed. --data_mb also times rounds of the same 40 clients beside
data sets of these sizes, in turns. The workload cifar10_pfl is the published CIFAR-10 setup of
pfl-research (50 of 1,000 clients a round, 5 local steps). It compares ours with "pfl" and "flower"
(Flower's simulation; the same PyTorch client), each in a process of its own. --peer_python names
the Python of an environment with these packages (see benchmarks/peer_rounds.py).

--suite=training times the steps of whole configs by gradient method, in turns, and says how
many minutes their runs take by each; it writes training.csv.

--suite=devices times a step of whole configs over meshes of devices, in turns: one --mesh for each,
by default 1, 2, 4, ... and all devices. It reads from the compiled program what a device sends and
holds, and writes devices.csv. Devices made of one CPU (--cpu_devices) are called virtual.

--suite=sweeps times sweeps of four seeds of whole configs, 100 steps each, whose runs are shared by
--processes, from start to end; it writes sweeps.csv.

--suite=noise measures no time, but the error of a sum over 100 clients that each add a share of
Skellam noise, by bits and epsilon. Beside it stands Gaussian noise of a server at equal epsilon.
It writes distributed_noise.csv, .md and .png.

--suite=population measures SCAFFOLD over populations (--clients) with 1e5 parameters, their states
in memory and on disk (--methods), for --rounds rounds of 10 clients: time, checkpoints, and memory
of device and host, each in a process of its own; it writes population.csv.

--suite=secure_sums measures sums of clients' vectors by protocol (--methods: see
dpjax/secure/sums), all parties in one process, with and without drop-outs: seconds, bytes,
streams, operations and memory, for --workloads=CLIENTSxLENGTH,...; it writes sums.csv and
sums.md. The best of --repeats sums is reported.

--suite=sum_messages counts the messages and bytes that one client sends and receives in a secure
sum of --workloads=CLIENTSxLENGTH,..., by protocol. It runs nothing; it writes sum_messages.csv.

--suite=data makes records by a program in --folder, where they stay (--workloads: arrays, images,
text; --records of each; 1e6 images take .8 GB as arrays). It times steps on them in turns, from
memory and read from files as they are drawn, and measures the peak memory of a run in a fresh
process. The larger set must fit into memory. It writes data.csv.

--suite=allocator times steps on wide features and of a small CNN, in turns, in processes that give
freed memory back to the system and in others that keep it (`dpjax.parallel.allocator`). It writes
allocator.csv.

--suite=compiled compiles the gradients' workloads, at the batch sizes of accelerators, for
--targets that are not here (pip install -e '.[targets]') by --methods of ordinary, auto and vmap.
It runs nothing, and reports flops, bytes, memory, kernels, loops and a roofline. Entries that are
in compiled.csv of --out already are not compiled again.

--suite=parts times what clipped gradients are made of on the accelerator at hand: products by
precision, and the ways to a convolution's clipped gradient (--workloads: copies, products, grams,
convolutions); it writes parts.csv, from which the constants of the fast route are read.

--suite=correlated measures a step of DP-SGD under correlated noise, by strategy (--methods),
against white noise: memory of the compiled step and seconds in turns, for models of --workloads;
it writes correlated.csv.

--suite=draws measures Gaussian noise by the code that draws it (--methods), against
`jax.random.normal`, for trees of --workloads: memory, seconds, and seconds to compile; it writes
draws.csv.

--suite=serve starts launch.serve on runs that it trains in --folder, and sends requests over
loopback: latency, requests a second, what is lost while models are exchanged. With --minutes it
plays a worse release, drift and a kill -9 as well; it writes serve.json.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from dpjax import validate
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.gradients import per_example
from dpjax.gradients.device_mesh import mesh_of
from launch import app, config_flag

try:
  from benchmarks import (
    allocator_speed,
    card_parts,
    compiled,
    correlated_cost,
    data_speed,
    device_speed,
    federated_speed,
    gradient_speed,
    noise_draws,
    noise_error,
    peer_rounds,
    population_cost,
    serving_load,
    sum_messages,
    sum_overhead,
    sweep_speed,
    training_speed,
    workloads,
  )
except ModuleNotFoundError as error:
  if error.name != "benchmarks":
    raise
  # The wheel does not contain benchmarks/.
  sys.exit("launch.benchmark: must run in a checkout of dpjax, where benchmarks/ lies")

SUITES = (
  "gradients",
  "federated",
  "training",
  "devices",
  "sweeps",
  "noise",
  "population",
  "secure_sums",
  "sum_messages",
  "data",
  "allocator",
  "compiled",
  "parts",
  "correlated",
  "draws",
  "serve",
)
# Flags that only some suites read: flag -> names of these suites.
_OF_SUITES = {
  "workloads": (
    *("gradients", "federated", "secure_sums", "sum_messages", "data", "allocator"),
    *("correlated", "compiled", "draws", "parts"),
  ),
  "folder": ("data", "serve"),
  "minutes": ("serve",),
  "per_second": ("serve",),
  "records": ("data",),
  "clients": ("federated", "population"),
  "rounds": ("population",),
  "data_mb": ("federated",),
  "peer_python": ("federated",),
  "cpu_devices": ("federated", "training", "devices"),
  "configs": ("training", "devices", "sweeps"),
  "processes": ("sweeps",),
  "mesh": ("devices",),
  "timed": ("correlated",),
  "batches": ("gradients",),
  "compile_ahead": ("gradients",),
  "peak_rss": ("gradients", "secure_sums", "data"),
  "methods": (
    *("gradients", "federated", "training", "population", "secure_sums"),
    *("correlated", "compiled", "draws"),
  ),
  "targets": ("compiled", "draws"),
  "repeats": (
    *("gradients", "federated", "training", "devices", "sweeps"),
    *("secure_sums", "data", "allocator", "correlated", "draws"),
  ),
}

flags.DEFINE_enum("suite", "gradients", SUITES, "What to measure.")
flags.DEFINE_list(
  "workloads",
  None,
  f"Of gradients: {', '.join(workloads.NAMES)}; of "
  f"federated: {', '.join(federated_speed.WORKLOADS)} (default: these) and "
  f"{peer_rounds.WORKLOAD}; of secure_sums and sum_messages: CLIENTSxLENGTH; of data: "
  f"{', '.join(data_speed.KINDS)} (default: arrays); of allocator: "
  f"{', '.join(allocator_speed.WORKLOADS)} (default: these); of correlated: "
  f"{', '.join(correlated_cost.WORKLOADS)} (default: these); of parts: "
  f"{', '.join(card_parts.KINDS)} (default: these); of draws: "
  f"{', '.join(noise_draws.WORKLOADS)} (default: these).",
)
flags.DEFINE_list(
  "methods",
  None,
  "Of gradients: "
  f"{', '.join(gradient_speed.METHODS)} (default: all); of federated: "
  f"{', '.join(federated_speed.METHODS)} (default: all that are installed); of secure_sums: "
  f"{', '.join(sum_overhead.METHODS)} (default: all); of population: "
  f"{', '.join(population_cost.METHODS)} (default: both); of correlated: "
  f"{', '.join(correlated_cost.METHODS)} (default: all); of draws: "
  f"{', '.join(noise_draws.METHODS)} (default: all).",
)
flags.DEFINE_integer(
  "cpu_devices",
  None,
  "federated, for pmap and shard_map, training, for meshes, and devices: devices to make of one "
  "CPU (default: one).",
  lower_bound=1,
  upper_bound=1024,
)
flags.DEFINE_list(
  "clients",
  [],
  "federated: also time cohorts of these many clients; population: its sizes (default: "
  f"{', '.join(map(str, population_cost.SIZES))}).",
)
flags.DEFINE_integer(
  "rounds", 100, "population: rounds of 10 clients.", lower_bound=20, upper_bound=10**6
)
flags.DEFINE_list(
  "data_mb", [], "federated: also time rounds beside data sets of these many megabytes."
)
flags.DEFINE_list(
  "configs",
  ["configs/mnist_cnn.py"],
  "training, devices, sweeps: config files, each one run.",
)
flags.DEFINE_string(
  "peer_python",
  sys.executable,
  "federated: the Python that has pfl and flwr (default: this one).",
)
flags.DEFINE_multi_string("mesh", [], "devices: such as data:8, or data:4,model:2.")
flags.DEFINE_list(
  "batches", [], "gradients: examples of a batch, one measurement each (default: as it is)."
)
flags.DEFINE_integer(
  "compile_ahead",
  0,
  "gradients: processes that first compile all programs into JAX's persistent cache.",
  lower_bound=0,
  upper_bound=256,
)
flags.DEFINE_list("processes", ["1", "2"], "sweeps: how many share the runs.")
flags.DEFINE_string(
  "folder", None, "data, serve: where records or runs are made; they stay there."
)
flags.DEFINE_float(
  "minutes", None, "serve: with releases, drift and a kill, for so long.", lower_bound=1
)
flags.DEFINE_float(
  "per_second", 80.0, "serve: requests a second.", lower_bound=1, upper_bound=10_000
)
flags.DEFINE_list("records", ["10000", "1000000"], "data: sizes of the sets.")
flags.DEFINE_list(
  "targets",
  list(compiled.TARGETS),
  "compiled: machines that need not be here; draws: compile for these, run nothing.",
)
flags.DEFINE_string("out", None, "Directory for the CSV and PNG files.")
flags.DEFINE_integer(
  "repeats",
  5,
  "Timed rounds; medians are reported.",
  lower_bound=1,
  upper_bound=10**6,
)
flags.DEFINE_bool("timed", True, "correlated: time the steps, beside their memory.")
flags.DEFINE_bool("peak_rss", True, "Also run each entry alone, for its peak memory.")


def main() -> None:
  """Runs the suite that --suite names. Refuses flags that this suite does not read."""
  options = flags.FLAGS
  for name, suites in _OF_SUITES.items():
    if options.suite not in suites:
      app.refuse_given([name], f"--suite={' or '.join(suites)}, not {options.suite}")
  out = None if options.out is None else pathlib.Path(options.out)
  if options.out is not None:
    validate.folder(out=options.out)
  run = {
    "gradients": _gradients,
    "federated": _federated,
    "training": _training,
    "devices": _devices,
    "sweeps": _sweeps,
    "noise": _noise,
    "population": _population,
    "secure_sums": _secure_sums,
    "sum_messages": _sum_messages,
    "data": _data,
    "allocator": _allocator,
    "compiled": _compiled,
    "parts": _parts,
    "correlated": _correlated,
    "draws": _draws,
    "serve": _serve,
  }
  run[options.suite](options, out)


def _gradients(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  names = options.workloads or list(workloads.NAMES)
  methods = options.methods or list(gradient_speed.METHODS)
  gradient_speed.check(names, methods)
  batches = [_count("batches", text) for text in options.batches] or [None]
  known = [] if out is None else gradient_speed.read(out)
  if options.compile_ahead:
    for batch_size in batches:
      gradient_speed.compile_ahead(
        names,
        methods,
        processes=options.compile_ahead,
        cache=None if out is None else out.absolute() / "programs",
        batch_size=batch_size,
      )
  entries = []
  for name in names:
    for batch_size in batches:
      entries += gradient_speed.among(known, name, methods, batch_size) or (
        gradient_speed.measure(
          name,
          methods,
          repeats=options.repeats,
          fresh_process=options.peak_rss,
          batch_size=batch_size,
        )
      )
      print(f"measured {name}", file=sys.stderr, flush=True)
      # Results are written after each workload, so that an interrupted run keeps them.
      if out is not None:
        gradient_speed.write(entries, out)
  print(gradient_speed.table(entries))


def _beside_peers(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  app.refuse_given(("cpu_devices", "clients", "data_mb"), "another workload")
  entries = peer_rounds.measure(
    options.methods or peer_rounds.METHODS,
    repeats=options.repeats,
    peer_python=options.peer_python,
  )
  if out is not None:
    federated_speed.write(entries, out)
  print(federated_speed.table(entries))


def _federated(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  if options.workloads == [peer_rounds.WORKLOAD]:
    return _beside_peers(options, out)
  app.refuse_given(("peer_python",), f"--workloads={peer_rounds.WORKLOAD}")
  names = options.workloads or list(federated_speed.WORKLOADS)
  methods = options.methods or federated_speed.default_methods()
  over_devices = set(methods) & set(federated_speed.OVER_DEVICES)
  if options.cpu_devices is not None and not over_devices:
    raise validate.UserError(
      f"is for pmap and shard_map, of which none is in methods={','.join(methods)}",
      field="cpu_devices",
      value=options.cpu_devices,
    )
  if options.cpu_devices is not None:
    federated_speed.use_cpu_devices(options.cpu_devices)
  scaled = options.methods[-1] if options.methods else "threads"
  counts = [_count("clients", text) for text in options.clients]
  sizes = [_count("data_mb", text) for text in options.data_mb]
  mapped = [name for name in methods if name not in (federated_speed.FLOOR, "fedjax")]
  for name in names:
    validate.one_of(federated_speed.WORKLOADS, workloads=name)
  entries = []
  for name in names:
    entries += federated_speed.measure(name, methods, repeats=options.repeats)
    entries += federated_speed.scaling(name, scaled, counts)
    if sizes:
      entries += federated_speed.beside(name, mapped, sizes, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      federated_speed.write(entries, out)
  print(federated_speed.table(entries))


def _training(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  methods = options.methods or list(training_speed.METHODS)
  for method in methods:
    validate.one_of(per_example.METHODS, methods=method)
  configs = _configs(options)
  entries = []
  # launch.train prepares memory in the same way, so its steps are as fast as the timed ones.
  app.prepare_memory(configs.values())
  if options.cpu_devices is not None:
    federated_speed.use_cpu_devices(options.cpu_devices)
  for name, config in configs.items():
    entries += training_speed.measure(name, config, methods, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      training_speed.write(entries, out)
  print(training_speed.table(entries))


def _configs(options: flags.FlagValues) -> dict[str, TrainConfig]:
  return {
    pathlib.Path(path).stem: config_flag.load(path, TrainConfig, name="--configs")
    for path in options.configs
  }


def _devices(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  configs = _configs(options)
  if options.cpu_devices is not None:
    federated_speed.use_cpu_devices(options.cpu_devices)
  meshes = options.mesh or device_speed.default_meshes()
  entries = []
  # Meshes are checked before any timing, since an error in the last one would waste the minutes
  # spent on the others.
  for mesh in meshes:
    mesh_of(mesh)
  for name, config in configs.items():
    entries += device_speed.measure(name, config, meshes, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      device_speed.write(entries, out)
  print(device_speed.table(entries))


def _sweeps(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  counts = [_count("processes", text) for text in options.processes]
  entries = []
  if not counts:
    raise validate.UserError(
      "must name at least one number", field="processes", value=validate.Verbatim("")
    )
  for name, config in _configs(options).items():
    entries += sweep_speed.measure(name, config, counts, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      sweep_speed.write(entries, out)
  print(sweep_speed.table(entries))


def _noise(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  del options
  entries = noise_error.measure()
  if out is not None:
    noise_error.write(entries, out)
  print(noise_error.table(entries))


def _population(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  methods = options.methods or list(population_cost.METHODS)
  for method in methods:
    validate.one_of(population_cost.METHODS, methods=method)
  counts = [_count("clients", text) for text in options.clients]
  entries = []
  for count in counts or population_cost.SIZES:
    for method in methods:
      entries.append(population_cost.measure(count, method, rounds=options.rounds))
      print(f"measured {count} {method}", file=sys.stderr, flush=True)
      if out is not None:
        population_cost.write(entries, out)
  print(population_cost.table(entries))


def _serve(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  if options.folder is None:
    raise validate.UserError("must be given, for runs and the journal", field="folder")
  whole = options.minutes is not None
  result = serving_load.measure(
    options.folder,
    seconds=60 * options.minutes if whole else 25.0,
    per_second=options.per_second,
    whole=whole,
    say=lambda line: print(line, file=sys.stderr, flush=True),
    save=lambda measured: None if out is None else serving_load.write(measured, out),
  )
  print(serving_load.table(result))


def _draws(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  methods = options.methods or list(noise_draws.METHODS)
  machines = options.targets if options["targets"].present else []
  entries = []
  for name in options.workloads or list(noise_draws.WORKLOADS):
    for machine in machines:
      entries += noise_draws.compiled_for(machine, name, methods)
    if not machines:
      entries += noise_draws.measure(name, methods, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      noise_draws.write(entries, out)
  print(noise_draws.table(entries))


def _secure_sums(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  methods = options.methods or list(sum_overhead.METHODS)
  for method in methods:
    validate.one_of(sum_overhead.METHODS, methods=method)
  entries = []
  asked = sum_overhead.sizes(options.workloads or []) or sum_overhead.SIZES
  for method, clients, length, dropped in sum_overhead.cases(methods, asked):
    entries.append(
      sum_overhead.measure(
        method,
        clients,
        length,
        dropped=dropped,
        repeats=options.repeats,
        fresh_process=options.peak_rss,
      )
    )
    print(f"measured {method} {clients}x{length}", file=sys.stderr, flush=True)
    if out is not None:
      sum_overhead.write(entries, out)
  print(sum_overhead.table(entries))


def _sum_messages(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  entries = sum_messages.measure(
    sum_overhead.sizes(options.workloads or []) or sum_messages.SIZES
  )
  if out is not None:
    sum_messages.write(entries, out)
  print(sum_messages.table(entries))


def _data(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  if not options.folder:
    raise validate.UserError(
      "must be given: where a million records are made", field="folder"
    )
  validate.folder(folder=options.folder)
  kinds = options.workloads or ["arrays"]
  for kind in kinds:
    validate.one_of(data_speed.KINDS, workloads=kind)
  sizes = [_count("records", text) for text in options.records]
  entries = []
  for kind in kinds:
    entries += data_speed.measure(
      pathlib.Path(options.folder),
      kind,
      sizes,
      repeats=options.repeats,
      fresh_process=options.peak_rss,
    )
    print(f"measured {kind}", file=sys.stderr, flush=True)
    if out is not None:
      data_speed.write(entries, out)
  print(data_speed.table(entries))


def _compiled(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  names = options.workloads or list(workloads.NAMES)
  methods = options.methods or list(compiled.METHODS)
  compiled.check(names, methods, options.targets)
  print(compiled.table(compiled.measure(names, methods, options.targets, out=out)))


def _allocator(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  names = options.workloads or allocator_speed.WORKLOADS
  entries = []
  for name in names:
    validate.one_of(allocator_speed.WORKLOADS, workloads=name)
  for name in names:
    entries += allocator_speed.measure(name, repeats=options.repeats)
    print(f"measured {name}", file=sys.stderr, flush=True)
    if out is not None:
      allocator_speed.write(entries, out)
  print(allocator_speed.table(entries))


def _parts(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  entries = card_parts.measure(options.workloads or card_parts.KINDS, out=out)
  print(card_parts.table(entries))


def _correlated(options: flags.FlagValues, out: pathlib.Path | None) -> None:
  names = options.workloads or list(correlated_cost.WORKLOADS)
  methods = options.methods or list(correlated_cost.METHODS)
  for name in names:
    validate.one_of(correlated_cost.WORKLOADS, workloads=name)
  entries = []
  for name in names:
    entries += correlated_cost.measure(
      name, methods, repeats=options.repeats if options.timed else 0
    )
    print(f"measured {name}", file=sys.stderr, flush=True)
    # Results are written after each model, so that an interrupted run keeps them.
    if out is not None:
      correlated_cost.write(entries, out)
  print(correlated_cost.table(entries))


def _count(name: str, text: str) -> int:
  if not (text.isascii() and text.isdigit() and len(text) < 9) or int(text) < 1:
    raise validate.UserError(
      "must be integers in [1, 99999999]", field=name, value=text[:40]
    )
  return int(text)


if __name__ == "__main__":
  app.run(main)
