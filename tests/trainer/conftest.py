"""What tests of the trainer share."""

import pytest

from tests.helpers.datasets import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Small images, for the tests of one file."""
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory)
    return directory
