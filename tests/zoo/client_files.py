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


def flair(path, splits, labels, *, side=8, fine=()):
  """pfl-research's file of FLAIR. splits: {split: {user: [(shade, its labels), ...]}}"""
  import h5py

  coarse_places = {label: place for place, label in enumerate(sorted(labels))}
  fine_places = {label: place for place, label in enumerate(sorted(fine))}
  with h5py.File(path, "w") as file:
    for split, users in splits.items():
      for user, images in users.items():
        pairs = [(row, label) for row, (_, held) in enumerate(images) for label in held]
        for prefix, places, dtype in (
          ("labels", coarse_places, np.uint8), ("fine_grained_labels", fine_places, np.uint16)
        ):  # fmt: skip
          known = [(row, places[label]) for row, label in pairs if label in places]
          rows = np.asarray([row for row, _ in known], np.uint16)
          file[f"/{split}/{user}/{prefix}_row"] = rows
          columns = np.asarray([column for _, column in known], dtype)
          file[f"/{split}/{user}/{prefix}_col"] = columns
        ids = np.asarray([f"{user}-{row}" for row in range(len(images))], dtype="S")
        file[f"/{split}/{user}/image_ids"] = ids
        pixels = [np.full((side, side, 3), shade, np.uint8) for shade, _ in images]
        file.create_dataset(f"/{split}/{user}/images", data=np.stack(pixels))
    file["/metadata/label_mapping"] = json.dumps(coarse_places)
    file["/metadata/fine_grained_label_mapping"] = json.dumps(fine_places)
  return path


def pfl_sentences(path, splits, *, vocab_size=20, length=6):
  """pfl-research's file of StackOverflow. splits: {split: {user: [words, ...]}}"""
  import h5py

  with h5py.File(path, "w") as file:
    file["/metadata/vocabulary_size"] = vocab_size
    file["/metadata/unk_symbol"] = vocab_size - 3
    file["/metadata/pad_symbol"] = 0
    file["/metadata/max_sequence_length"] = length
    for split, users in splits.items():
      for user, sentences in users.items():
        ids = [words[: length + 1] + [0] * (length + 1 - len(words)) for words in sentences]
        ids = np.array(ids, np.int32)
        file.create_dataset(f"/{split}/{user}/inputs", data=ids[:, :-1])
        file.create_dataset(f"/{split}/{user}/targets", data=ids[:, 1:])
      tokens = {user: sum(map(len, held)) for user, held in users.items()}
      file[f"/metadata/num_tokens/{split}"] = json.dumps(tokens)
  return path
