"""What the tests of data share: where prepared data is, and a writer of tiny data sets."""

from tests.core.data.conftest import tfds_dir, tfds_files

__all__ = ["tfds_dir", "tfds_files"]
