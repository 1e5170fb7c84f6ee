"""Writers of tiny files in the true formats that keep clients apart."""

import json
import sqlite3

import numpy as np


def leaf(root, splits):
  """LEAF's folder. splits: {"train": [files of {user: (xs, ys)}], ...}"""
  for split, files in splits.items():
    (root / split).mkdir(parents=True)
    for number, users in enumerate(files):
      held = {
        "users": list(users),
        "num_samples": [len(ys) for _, ys in users.values()],
        "user_data": {user: {"x": xs, "y": ys} for user, (xs, ys) in users.items()},
      }
      (root / split / f"all_data_{number}.json").write_text(json.dumps(held))
  return root


def example(**features):
  """A serialised tf.train.Example: text, integers or floats."""
  from tensorflow_datasets.proto import tf_example_pb2

  proto = tf_example_pb2.Example()
  for key, value in features.items():
    feature, values = proto.features.feature[key], np.atleast_1d(value).ravel().tolist()
    kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
    getattr(feature, kind).value.extend(values)
  return proto.SerializeToString()


def sqlite(path, splits, told=None):
  """TFF's database. splits: {name: [(client, record), ...]}; told: of client_metadata."""
  counts = {}
  for split, rows in splits.items():
    for client, _ in rows:
      counts[client, split] = counts.get((client, split), 0) + 1
  with sqlite3.connect(path) as base:
    base.execute(
      "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    base.execute(
      "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
    )
    flat = [(split, *row) for split, rows in splits.items() for row in rows]
    base.executemany("INSERT INTO examples VALUES (?, ?, ?)", flat)
    lines = [(client, split, n) for (client, split), n in (told or counts).items()]
    base.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", lines)
  base.close()
  return path


def emnist(n, label=0, shade=0.5):
  """Records of n images of one shade, as TFF writes them."""
  pixels = np.full(784, shade)
  return [example(pixels=pixels, label=label + i) for i in range(n)]
