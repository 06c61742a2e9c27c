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
        ("ps=2,dp=3 of four", "Cannot read 'four' in the mesh .*: after 'of' comes the number"),
        ("ps=2,dp=3 of 7", "has 7 ranks for 6 places; it takes 1 to 6"),
        ("dp=2,tp=4 order ", "Cannot read '' .*: after 'order' come the axes; write dp=2,tp=4 order tp,dp"),
        ("dp=2,tp=4 order tp,", "Cannot read 'tp,' in the mesh"),
        ("pp=2,dp=2 of 3", "vacant places and the axis pp"),
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


def test_an_order_leaves_the_placement_as_it_is():
    # Ranks 0 to 7 are placed as (dp, tp) = (0, 0) (0, 1) (0, 2) (0, 3) (1, 0) ...; only what is major changes.
    mesh = Mesh.parse("dp=2,tp=4 order tp,dp")
    assert mesh.axes == (("tp", 4), ("dp", 2)) and mesh.placed == Mesh.parse("dp=2,tp=4")
    assert [mesh.coordinates(rank) for rank in (0, 1, 4)] == [(0, 0), (1, 0), (0, 1)]
    assert mesh.peers(6, mesh.index("dp")) == (2, 6) and mesh.peers(6, mesh.index("tp")) == (4, 5, 6, 7)
    assert all(mesh.rank_at(mesh.coordinates(rank)) == rank for rank in range(8))


def test_an_order_is_part_of_the_text_where_it_differs():
    text = "dp=2,tp=4 order tp,dp"
    assert str(Mesh.parse(text)) == text and Mesh.parse(text) != Mesh.parse("dp=2,tp=4")
    assert Mesh.parse("dp=2,tp=4 order dp,tp") == Mesh.parse("dp=2,tp=4")
    assert Mesh.parse(text).ordered(["dp", "tp"]) == Mesh.parse("dp=2,tp=4")


def test_axes_come_and_go_in_order_and_placement():
    mesh = Mesh.parse("z=2,x=4 order x,z")
    assert str(mesh.with_axis("pp", 2, 0)) == "pp=2,z=2,x=4 order pp,x,z"
    assert mesh.with_axis("pp", 2, 1).without_axis("pp") == mesh
    assert str(mesh.without_axis("x")) == "z=2" and Mesh.parse("z=2").without_axis("z") is None
    assert str(mesh.with_split_axis("x", "y", 2)) == "z=2,x=2,y=2 order x,y,z"


@pytest.mark.parametrize("order", ["dp", "dp,tp,pp", "dp,dp"])
def test_an_order_names_each_axis_once(order):
    with pytest.raises(MeshError, match=f"The order {order} does not fit the mesh dp=2,tp=3"):
        Mesh.parse(f"dp=2,tp=3 order {order}")


def test_the_last_places_of_a_mesh_may_be_vacant():
    mesh = Mesh.parse("ps=2,dp=3 of 4")
    assert Mesh.parse(str(mesh)) == mesh != mesh.filled
    assert (mesh.size, mesh.ranks, mesh.filled.ranks) == (6, 4, 6)
    assert Mesh.parse("ps=2,dp=3 of 6") == mesh.filled  # none is vacant


@pytest.mark.parametrize("size", ["9" * 5000, "\u0663", ""])
def test_a_size_that_is_no_count_is_refused(size):
    with pytest.raises(MeshError, match="Cannot read"):
        Mesh.parse(f"dp={size}")
