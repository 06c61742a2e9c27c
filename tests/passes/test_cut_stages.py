"""Text in, text out: which calls each stage runs, what it takes, gives on and returns."""

import re
import textwrap

import torch
from torch import fx, nn

from autopar.passes import cut_stage_graphs, verify_graph
from autopar.passes.cut_stages import stage_numbers

aten = torch.ops.aten
OPS = {"mul": aten.mul.Tensor, "relu": aten.relu.default, "rand": aten.rand_like.default}


def read(text):
    """A graph and the stage of its calls; `---` stands between stages."""
    graph, nodes, stage, stage_of = fx.Graph(), {}, 0, {}
    for line in textwrap.dedent(text).strip().splitlines():
        word, _, rest = line.partition(" ")
        if word == "take":
            nodes |= {name: graph.placeholder(name) for name in rest.split()}
        elif word == "---":
            stage += 1
        elif word == "give":
            graph.output([nodes[name] for name in rest.split()])
        else:
            kind, *names = re.findall(r"\w+", rest)
            arguments = tuple(nodes[name] for name in names)
            nodes[word] = graph.create_node("call_function", OPS[kind], arguments, name=word)
            stage_of[nodes[word]] = stage
    return fx.GraphModule(nn.Module(), graph), stage_of


def cut(text, kept, weights=(), early_outputs=()):
    """The stages as text: `take` what a stage has of its own and receives, `give` what it returns and sends."""
    module, stage_of = read(text)
    count = max(stage_of.values()) + 1
    stages = cut_stage_graphs(module, stage_of, count, kept=kept, weights=weights, early_outputs=early_outputs)
    for stage in stages:
        verify_graph(stage.module, after="cutting")
    return [written(stage, module) for stage in stages]


def written(stage, whole):
    kinds = {op: kind for kind, op in OPS.items()}
    results = whole.graph.output_node().args[0]
    returned = [results[i].name for i in stage.outputs]
    lines = [f"take {' '.join(stage.leaves)} | {' '.join(n.name for n in stage.received)}"]
    for node in stage.module.graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {kinds[node.target]}({', '.join(map(str, node.args))})")
    lines.append(f"give {' '.join(returned)} | {' '.join(n.name for n in stage.sent)}")
    taken = [n.name for n in stage.module.graph.find_nodes(op="placeholder")]
    assert taken == [*stage.leaves, *(n.name for n in stage.received)]
    given = [n.name for n in stage.module.graph.output_node().args[0]]
    assert given == [*returned, *(n.name for n in stage.sent)]
    return [line.rstrip() for line in lines]


def test_a_value_is_carried_through_the_stage_between():
    stages = cut(
        """
        take w0 w1 w2 x
        a = mul(w0, x)
        ---
        b = mul(w1, a)
        ---
        h = mul(a, b)
        c = mul(w2, h)
        give c
        """,
        kept=["w0", "w1", "w2"],
    )
    assert stages == [
        ["take w0 x |", "a = mul(w0, x)", "give  | a"],
        ["take w1 | a", "b = mul(w1, a)", "give  | a b"],
        ["take w2 | a b", "h = mul(a, b)", "c = mul(w2, h)", "give c |"],
    ]


def test_what_is_made_of_one_weight_is_made_where_it_is_used():
    """ZeRO-3 gathers a tied table once for both of its uses: it is not sent with every micro-batch."""
    stages = cut(
        """
        take w0 w1 x
        full = relu(w0)
        a = mul(full, x)
        ---
        b = mul(w1, a)
        c = mul(full, b)
        give c
        """,
        kept=["w0", "w1"],
        weights=["w0", "w1"],
    )
    assert stages == [
        ["take w0 x |", "full = relu(w0)", "a = mul(full, x)", "give  | a"],
        ["take w0 w1 | a", "full = relu(w0)", "b = mul(w1, a)", "c = mul(full, b)", "give c |"],
    ]


def test_what_depends_on_no_parameter_is_recomputed_where_it_is_used():
    stages = cut(
        """
        take w0 w1 x y
        mask = relu(x)
        a = mul(w0, mask)
        ---
        b = mul(a, mask)
        target = relu(y)
        ---
        c = mul(b, target)
        d = mul(w1, c)
        give d
        """,
        kept=["w0", "w1"],
    )
    assert stages == [
        ["take w0 x |", "mask = relu(x)", "a = mul(w0, mask)", "give  | a"],
        ["take x | a", "mask = relu(x)", "b = mul(a, mask)", "give  | b"],
        ["take w1 y | b", "target = relu(y)", "c = mul(b, target)", "d = mul(w1, c)", "give d |"],
    ]


def test_what_is_drawn_is_drawn_once_and_carried():
    stages = cut(
        """
        take w0 x
        drawn = rand(x)
        mask = relu(drawn)
        a = mul(w0, x)
        ---
        b = mul(a, mask)
        give b
        """,
        kept=["w0"],
    )
    assert stages == [
        ["take w0 x |", "drawn = rand(x)", "mask = relu(drawn)", "a = mul(w0, x)", "give  | mask a"],
        ["take  | mask a", "b = mul(a, mask)", "give b |"],
    ]


def test_what_a_changed_buffer_gives_is_carried_and_its_new_value_returned_where_it_is_made():
    """`seen` is kept: if stage 1 recomputed from it, it would see the new value."""
    stages = cut(
        """
        take w0 seen x
        new = mul(seen, x)
        a = mul(w0, x)
        ---
        b = mul(a, new)
        give new b
        """,
        kept=["w0", "seen"],
        early_outputs=[0],
    )
    assert stages == [
        ["take w0 seen x |", "new = mul(seen, x)", "a = mul(w0, x)", "give new | new a"],
        ["take  | new a", "b = mul(a, new)", "give b |"],
    ]


def test_a_result_that_stays_is_returned_where_it_is_made_and_not_carried():
    stages = cut(
        """
        take w0 w1 kept0 kept1 x
        keys0 = mul(w0, kept0)
        a = mul(keys0, x)
        ---
        keys1 = mul(w1, kept1)
        b = mul(keys1, a)
        give b keys0 keys1
        """,
        kept=["w0", "w1"],
        early_outputs=[1, 2],
    )
    assert stages == [
        ["take w0 kept0 x |", "keys0 = mul(w0, kept0)", "a = mul(keys0, x)", "give keys0 | a"],
        ["take w1 kept1 | a", "keys1 = mul(w1, kept1)", "b = mul(keys1, a)", "give b keys1 |"],
    ]


def test_an_early_output_of_nothing_but_inputs_is_returned_once():
    """Every stage could make such an output, a batch norm's counter for example, and the first does."""
    stages = cut(
        """
        take w0 x
        a = mul(w0, x)
        ---
        count = relu(x)
        b = relu(a)
        give count b
        """,
        kept=["w0"],
        early_outputs=[0],
    )
    assert stages == [
        ["take w0 x |", "a = mul(w0, x)", "count = relu(x)", "give count | a"],
        ["take  | a", "b = relu(a)", "give b |"],
    ]


def test_a_tied_parameter_is_taken_at_both_ends():
    stages = cut(
        """
        take w0 w1 x
        a = mul(w0, x)
        ---
        b = mul(w1, a)
        ---
        c = mul(w0, b)
        give c
        """,
        kept=["w0", "w1"],
    )
    assert [lines[0] for lines in stages] == ["take w0 x |", "take w1 | a", "take w0 | b"]
    assert stages[1][-1] == "give  | b"


def test_what_is_made_of_a_parameter_alone_is_carried_not_recomputed():
    """Else its gradient would be made on two stages of which one holds the parameter only for that."""
    stages = cut(
        """
        take w0 x
        a = relu(w0)
        b = mul(a, x)
        ---
        c = mul(a, b)
        give c
        """,
        kept=["w0"],
    )
    assert stages[0][-1] == "give  | a b"
    assert stages[1] == ["take  | a b", "c = mul(a, b)", "give c |"]


def test_results_leave_the_last_stage_wherever_they_are_made():
    stages = cut(
        """
        take w0 w1 x
        a = mul(w0, x)
        ---
        b = mul(w1, a)
        ---
        c = mul(b, b)
        give c a w1 x
        """,
        kept=["w0", "w1"],
    )
    assert stages[0][-1] == "give  | a"
    assert stages[1][-1] == "give  | a b"
    assert stages[2] == ["take w1 x | a b", "c = mul(b, b)", "give c a w1 x |"]


def test_what_nobody_uses_stays_on_its_stage_and_travels_nowhere():
    stages = cut(
        """
        take w0 x
        a = mul(w0, x)
        b = relu(a)
        ---
        c = mul(a, a)
        give c
        """,
        kept=["w0"],
    )
    assert stages[0] == ["take w0 x |", "a = mul(w0, x)", "b = relu(a)", "give  | a"]


def test_a_conversion_lies_where_its_op_does_and_what_a_pass_adds_where_its_inputs_do():
    module, _ = read(
        """
        take w x
        first = mul(w, x)
        gathered = relu(first)
        second = relu(gathered)
        added = relu(second)
        give added
        """
    )
    origins = {"first": "mul_1", "gathered": "relu_1", "second": "relu_1", "added": ""}
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["origin"] = origins[node.name]
    numbers = stage_numbers(module, {"mul_1": 0, "relu_1": 1}, [1])
    assert {node.name: number for node, number in numbers.items()} == {
        "first": 0,
        "gathered": 1,
        "second": 1,
        "added": 1,
    }
