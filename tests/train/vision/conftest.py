import pytest
import tiny_images


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")
