import pytest

from autopar.errors import MeshError
from autopar.ir import Mesh

MESH = Mesh.of({"dp": 2, "tp": 3})


def test_ranks_are_numbered_row_major():
    # rank 4 = 1 * 3 + 1
    assert MESH.size == 6
    assert MESH.coordinates(4) == (1, 1)
    assert [MESH.coordinates(rank) for rank in (0, 2, 3)] == [(0, 0), (0, 2), (1, 0)]


def test_peers_differ_along_one_axis():
    assert MESH.peers(4, 0) == (1, 4)
    assert MESH.peers(4, 1) == (3, 4, 5)


def test_text_reads_back():
    assert Mesh.parse(str(MESH)) == MESH == Mesh.parse(" dp = 2, tp=3 ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp", "Cannot read 'dp' in the mesh 'dp'; write dp=2,tp=4."),
        ("dp=0", "Axis 'dp' has size 0"),
        ("dp=2,dp=2", "repeat"),
        ("2x=2", "not an identifier"),
    ],
)
def test_bad_meshes_say_why(text, says):
    with pytest.raises(MeshError, match=says.replace("(", r"\(")):
        Mesh.parse(text)


def test_a_mesh_is_made_of_a_mapping_or_its_text():
    assert Mesh.of({"dp": 2, "tp": 3}) == Mesh.of("dp=2,tp=3") == Mesh.of(MESH) == MESH
    with pytest.raises(MeshError, match=r"names its axes, as in .*; \(2,\) does not"):
        Mesh.of((2,))


def test_unknown_axis_is_named():
    with pytest.raises(MeshError, match="The mesh dp=2,tp=3 has no axis 'pp'"):
        MESH.index("pp")
