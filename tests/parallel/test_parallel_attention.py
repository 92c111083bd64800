"""Attention over sequences that are split equals that of one process, on one, two and four ranks."""

import attention_cases
import groups
import pytest

from nomax.parallel import Layout


class _Mesh:
    """Enough of a mesh to name the cases."""

    def size(self):
        return 1


NAMES = list(attention_cases.cases(_Mesh()))


@pytest.fixture(scope="module", params=[1, 2, 4])
def outcomes(request, tmp_path_factory):
    return groups.start("attention_cases", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_process_does(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


def test_a_layout_holds_every_position_once():
    assert Layout.contiguous(7, 3).segments == (((0, 2),), ((2, 4),), ((4, 7),))
    assert Layout.zigzag(8, 2).segments == (((0, 2), (6, 8)), ((2, 6),))
    assert Layout.zigzag(3, 4).length == 3
    assert Layout.sized((2, 0, 3)).sizes == (2, 0, 3)
    for wrong in ((((0, 2),), ((1, 3),)), (((1, 2),),), (((0, 0),),), ()):
        with pytest.raises(ValueError, match="every position"):
            Layout(wrong)


def test_zigzag_gives_every_rank_as_much_causal_attention():
    layout = Layout.zigzag(64, 4)
    seen = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(seen) == min(seen)
