"""Models whose sequences are split compute and learn what they do in one process, on two and four ranks."""

import groups
import model_cases
import pytest

pytestmark = pytest.mark.slow


class _Mesh:
    """Enough of a mesh to name the cases."""


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory):
    return groups.start("model_cases", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", list(model_cases.cases(_Mesh())))
def test_split_models_are_those_of_one_process(outcomes, name):
    assert outcomes[name] == "", outcomes[name]
