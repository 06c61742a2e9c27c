"""A drawing of the repeated block as a graph: ops with their layouts, and collectives on the edges between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar import units
from autopar.views.layers import Placed, Vertex, place
from autopar.views.markup import Markup, join, tag
from autopar.views.page import BlockCollective, BlockNode
from autopar.views.palette import REST, Colour
from autopar.views.stack import swatch
from autopar.views.svg import drawing, fitted, rect, text, text_width

GAP, BEND = 26.0, 6.0  # between boxes of a layer, and around an edge that passes them
BETWEEN = 24.0  # layers
WIDEST = 300.0
LINE, CHIP = 17.0, 20.0
PILLS = frozenset({"input", "parameter", "output"})
SMALL, NORMAL = 11.0, 12.5


@dataclass(frozen=True)
class Box:
    """The drawing of an op, with the collectives of its parameters on top, or of a single collective.

    Attributes:
        width: width in units of the drawing.
        height: height of the box with everything in it.
        node: the op; None for a collective on its own.
        layouts: (axis, what is split over it) pairs to write out.
        collectives: collectives of parameters and of other tensors from outside the block, or the single one.
    """

    width: float
    height: float
    node: BlockNode | None = None
    layouts: tuple[tuple[str, str], ...] = ()
    collectives: tuple[BlockCollective, ...] = ()


def block_graph(nodes: Sequence[BlockNode], colours: Mapping[str, Colour]) -> Markup:
    """The drawing, with a key of the axes."""
    boxes, edges = _boxes(nodes)
    placed = place({n: b.width for n, b in boxes.items()}, edges, gap=GAP, bend=BEND)
    tops = _tops(placed, boxes)
    total = sum(node.seconds for node in nodes)
    drawn = [_edge(route, placed, tops) for route in placed.routes.values()]
    for name, box in boxes.items():
        layer = next(i for i, row in enumerate(placed.layers) if name in row)
        x = placed.middle[name] - box.width / 2 + GAP
        y = tops[layer] + (tops[layer + 1] - BETWEEN - tops[layer] - box.height) / 2
        drawn.append(_drawn(box, x, y, colours, total))
    svg = drawing("The repeated block", tops[-1], *drawn, width=placed.width + 2 * GAP)
    return join((_key(nodes, colours), tag("div", svg, class_="tall")))


def _boxes(nodes: Sequence[BlockNode]) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Boxes by name in topological order, and edges; collectives stand between source and op."""
    boxes: dict[str, Box] = {}
    edges: list[tuple[str, str]] = []
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        inside = [o for o in dict.fromkeys(node.operands) if o in boxes]
        heads = {operand: operand for operand in inside}
        on_top = []
        for each in node.collectives:
            operand = each.operand or (inside[0] if len(inside) == 1 else "")
            if operand in heads:
                heads[operand] = _on_the_way(each, heads[operand], boxes, edges)
            else:
                on_top.append(each)
        boxes[node.name] = _op_box(node, [by_name[o] for o in inside], tuple(on_top))
        edges.extend((head, node.name) for head in heads.values())
    return boxes, edges


def _on_the_way(each: BlockCollective, head: str, boxes: dict[str, Box], edges: list[tuple[str, str]]) -> str:
    """The name of the box of a collective; ops that share a converted tensor share the box."""
    name = f"{each.name}@{each.axis} after {head}: {each.bytes} {each.seconds}"
    if name not in boxes:
        alone = each._replace(operand="")
        boxes[name] = Box(_chip_width(alone), CHIP, collectives=(alone,))
        edges.append((head, name))
    return name


def _chip_width(each: BlockCollective) -> float:
    return min(WIDEST, text_width(_collective_words(each), SMALL) + 18)


def _collective_words(each: BlockCollective) -> str:
    operand = f" {each.operand.rpartition('.')[2]}" if each.operand else ""
    figures = f"{units.format_bytes(each.bytes)}, {units.format_seconds(each.seconds)}"
    return f"{each.name}{operand} @{each.axis}: {figures}"


def _op_box(node: BlockNode, sources: Sequence[BlockNode], on_top: tuple[BlockCollective, ...]) -> Box:
    """The box of an op. It shows the op's layouts only if a source has others; hovering always shows them."""
    changed = not sources or any(node.layouts != source.layouts for source in sources)
    layouts = node.layouts if changed and node.kind not in PILLS else ()
    wide = max(text_width(_head(node), NORMAL) + 22, _tags_width(layouts) + 20)
    wide = max([min(WIDEST, wide), *map(_chip_width, on_top)])
    height = 26.0 + (LINE + 6 if layouts else 0) + CHIP * len(on_top)
    return Box(wide, height, node, layouts, on_top)


def _head(node: BlockNode) -> str:
    """Kind, last part of the module path, and time."""
    return "  ".join(part for part in _head_parts(node) if part)


def _head_parts(node: BlockNode) -> tuple[str, str, str]:
    if node.kind in PILLS:
        return node.name, "", ""
    module = node.module.rpartition(".")[2]
    seconds = units.format_seconds(node.seconds) if node.seconds else ""
    return (node.kind.removeprefix("aten."), "" if module.isdigit() or module == "*" else module, seconds)


def _tags_width(layouts: Sequence[tuple[str, str]]) -> float:
    return sum(text_width(f"{axis} {what}", SMALL) + 16 for axis, what in layouts)


def _tops(placed: Placed, boxes: Mapping[str, Box]) -> list[float]:
    """The y of the top of every layer, and of the bottom of the drawing at the end."""
    tops = [10.0]
    for row in placed.layers:
        high = max((boxes[v].height for v in row if isinstance(v, str)), default=0.0)
        tops.append(tops[-1] + high + BETWEEN)
    return tops


def _edge(route: Sequence[Vertex], placed: Placed, tops: Sequence[float]) -> Markup:
    """A line from the middle of one box through its bends to the middle of another."""
    layer_of = {v: i for i, row in enumerate(placed.layers) for v in row}
    path, x, y = "", 0.0, 0.0
    for vertex in route:
        layer, to_x = layer_of[vertex], placed.middle[vertex] + GAP
        top, bottom = tops[layer], tops[layer + 1] - BETWEEN
        if path:
            half = (y + top) / 2
            path += f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {top:.1f}"
        else:
            path = f"M{to_x:.1f} {(top + bottom) / 2:.1f}"
        # Upright inside a layer, where it would else cross its neighbours; boxes are drawn over it.
        stop = (top + bottom) / 2 if vertex == route[-1] else bottom
        path += f"V{stop:.1f}"
        x, y = to_x, bottom
    return tag("path", d=path, class_="edge")


def _drawn(box: Box, x: float, y: float, colours: Mapping[str, Colour], total: float) -> Markup:
    """The collectives from the top, then the op."""
    drawn = [_chip(each, x, y + CHIP * i, box.width, colours) for i, each in enumerate(box.collectives)]
    if box.node is not None:
        y += CHIP * len(drawn)
        drawn.append(_op(box, box.node, x, y, box.height - CHIP * len(drawn), colours, total))
    return tag("g", *drawn)


def _chip(each: BlockCollective, x: float, y: float, wide: float, colours: Mapping[str, Colour]) -> Markup:
    colour = colours.get(each.axis, REST)
    words = _collective_words(each)
    shown = fitted(words, wide - 10, SMALL)
    title = f"{each.name} {each.operand}\n{words}" if each.operand else words
    return tag(
        "g",
        rect(x, y, wide, CHIP, rx=9, fill=colour.fill, class_="chip", title=title),
        text(x + wide / 2, y + 14, shown, fill=colour.ink, font_size=SMALL, text_anchor="middle"),
    )


def _op(
    box: Box, node: BlockNode, x: float, y: float, height: float, colours: Mapping[str, Colour], total: float
) -> Markup:
    pill = node.kind in PILLS
    frame = rect(x, y, box.width, height, rx=13 if pill else 5, class_="pill" if pill else "op", title=_title(node))
    share = node.seconds / total if total else 0.0
    foot = rect(x, y + height - 3, box.width * share, 3, class_="share") if share else None
    kind, module, seconds = _head_parts(node)
    shown = fitted(f"{kind}  {module}".rstrip(), box.width - 20 - text_width(seconds, SMALL), NORMAL)
    head, _, tail = shown.partition("  ")
    words = tag("text", tag("tspan", head, class_="strong"), x=x + 9, y=y + 17, font_size=NORMAL)
    if tail:
        second = tag("tspan", f"  {tail}", class_="faint")
        words = tag(
            "text", tag("tspan", head, class_="strong"), second, x=x + 9, y=y + 17, font_size=NORMAL, class_="spaced"
        )
    time = (
        text(x + box.width - 9, y + 17, seconds, class_="faint", font_size=SMALL, text_anchor="end")
        if seconds
        else None
    )
    return tag("g", frame, foot, words, time, *_tags(box, x, y, colours))


def _tags(box: Box, x: float, y: float, colours: Mapping[str, Colour]) -> list[Markup]:
    """Tags that say what is split over which axis, each in the colour of the axis."""
    found, at = [], x + 8
    for axis, what in box.layouts:
        words = f"{axis} {what}"
        wide = text_width(words, SMALL) + 12
        colour = colours.get(axis, REST)
        found.append(rect(at, y + 24, wide, LINE, rx=3, stroke=colour.fill, class_="tag"))
        found.append(text(at + 6, y + 24 + 12.5, words, font_size=SMALL))
        at += wide + 4
    return found


def _title(node: BlockNode) -> str:
    words = [f"{node.name}: {node.kind}", node.module]
    words.extend(f"{axis}: {what}" for axis, what in node.layouts)
    words.append(f"takes {', '.join(node.operands)}" if node.operands else "")
    words.append(units.format_seconds(node.seconds) if node.seconds else "")
    return "\n".join(word for word in words if word)


def _key(nodes: Sequence[BlockNode], colours: Mapping[str, Colour]) -> Markup:
    axes = dict.fromkeys(
        axis for node in nodes for axis in (*(a for a, _ in node.layouts), *(c.axis for c in node.collectives))
    )
    swatches = [tag("span", swatch(colours.get(axis, REST)), f" {axis}", class_="key") for axis in axes]
    words = (
        "Filled: a collective over the axis, with bytes sent and time; on top of an op where it is"
        " for a parameter. Framed: what the op splits over the axis, written where it changes."
        " Line at the foot: the op's share of the block's time."
    )
    return tag("p", *swatches, tag("span", words, class_="quiet"), class_="keys")
