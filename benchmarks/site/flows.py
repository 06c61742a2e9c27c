"""Pictures of what follows what: compiler, guards, proof, casts, keys of random numbers, graphs of the backend."""

from __future__ import annotations

from benchmarks.site.drawing import MARGIN, WIDTH, Box, arrow, centred, columns, flow, picture


def design() -> str:
    return flow(
        "A model is captured as a graph; its factors are named; the search picks a plan at the cost model's prices; "
        "passes write the program of one rank; torch.distributed runs it",
        (
            Box("your model, for one device", ("a torch.nn.Module and a loss",)),
            Box("a graph of operators", ("one capture by torch.export",), "capture"),
            Box("factors and choices", ("batch, heads, ffn ...; every op's ways to be split",), "analysis"),
            Box("a plan", ("a line for every parameter, input and op",), "search, by price"),
            Box("the program of one rank", ("local shapes, with the collectives",), "passes"),
            Box("training steps", ("parameters are DTensors under their names",), "torch.distributed"),
        ),
    )


def guards() -> str:
    boxes = (
        Box("same values", ("run the program", "that is there")),
        Box("known values", ("seen before: run", "their program")),
        Box("a new value", ("capture again;", "same plan if legal")),
    )
    drawn, bottom = columns(boxes, 108)
    start = Box("before every step", ("are the values that forward read the same?",))
    first, below = columns((start,), MARGIN)
    arrows = [arrow(x, below + 4, x, 104) for x in (76, WIDTH / 2, WIDTH - 76)]
    last, end = columns((Box("the step", ("and what forward writes: counters, numbers",)),), 220)
    back = [arrow(x, bottom + 4, x, 216) for x in (76, WIDTH / 2, WIDTH - 76)]
    label = (
        "Before every step autopar compares the values that forward read when it was captured. If they are the same "
        "the program runs; a value seen before brings back its program; a new one captures the model again"
    )
    return picture(label, end + MARGIN, first, drawn, last, *arrows, *back)


def verify() -> str:
    boxes = (
        Box("one device", ("float64: the truth", "", "model, loss, backward")),
        Box("the plan", ("all ranks in one process,", "op by op in lockstep,", "with every collective")),
    )
    first, below = columns((Box("the same weights and batch"),), MARGIN)
    drawn, bottom = columns(boxes, below + 30)
    last, end = columns(
        (Box("compared", ("loss, gradients, buffers",)), Box("PASSED or FAILED", ("error and bound by tensor",))),
        bottom + 30,
    )
    xs = (WIDTH / 4 + 4, WIDTH * 3 / 4 - 4)
    arrows = [arrow(x, y + 4, x, y + 26) for y in (below, bottom) for x in xs[: 2 if y == below else 1]]
    arrows += [arrow(xs[1], bottom + 4, xs[1], bottom + 14)]
    label = (
        "verify runs the single-device model in float64 and the plan with all ranks in one process on the same weights "
        "and batch, and compares the loss, every gradient and every buffer"
    )
    return picture(label, end + MARGIN, first, drawn, last, *arrows[:3])


def precision() -> str:
    return flow(
        "A parameter stored in float32 shards is cast to bfloat16, gathered and used; its gradient is reduced into "
        "float32 shards, which the optimizer reads",
        (
            Box("parameter at rest", ("float32, a shard on every rank",)),
            Box("bfloat16 shard", (), "cast"),
            Box("whole parameter, for one use", ("bfloat16: half the bytes on the wire",), "all-gather"),
            Box("gradient of the use", ("bfloat16",), "forward and backward"),
            Box("gradient of the shard", ("float32, summed in float32",), "cast, reduce-scatter"),
            Box("optimizer", ("float32 parameters and moments",), "step"),
        ),
    )


def randomness() -> str:
    return flow(
        "From torch's generator come the number of a step, a seed for every micro-batch and stage, a key for every op; "
        "ranks that split the op add their position, replicas draw the same",
        (
            Box("torch's generator", ("the first rank's",)),
            Box("number of a step", ("the same on all ranks",), "one small broadcast"),
            Box("seed of a micro-batch on a stage"),
            Box("key of an op", ("recomputation draws from the same key",)),
            Box("numbers on a rank", ("replicas draw the same, parts draw their own",), "+ position of the part"),
        ),
    )


def shapes() -> str:
    boxes = (
        Box("a known shape", ("its program runs",)),
        Box("a new shape", ("captured and planned", "once; parameters stay")),
    )
    first, below = columns((Box("a batch comes", ("another length, an uneven last one",)),), MARGIN)
    drawn, bottom = columns(boxes, below + 30)
    last, end = columns((Box("loss and gradients", ("those of one device on that batch",)),), bottom + 30)
    xs = (WIDTH / 4 + 4, WIDTH * 3 / 4 - 4)
    arrows = [arrow(x, below + 4, x, below + 26) for x in xs]
    arrows += [arrow(x, bottom + 4, x, bottom + 26) for x in xs]
    label = (
        "A batch of a known shape runs its program; a new shape is captured and planned once, while parameters stay "
        "where they are; loss and gradients are those of one device"
    )
    return picture(label, end + MARGIN, first, drawn, last, *arrows)


def backend() -> str:
    graphs = (
        Box("graph 1", ("split over the ranks",)),
        Box("Python", ("as written",)),
        Box("graph 2", ("split over the ranks",)),
    )
    first, below = columns((Box("your script", ("torch.compile(model, backend='autopar')",)),), MARGIN)
    drawn, bottom = columns(graphs, below + 48)
    words = centred(WIDTH / 2 + 60, below + 30, "Dynamo, cut where Python decides")
    last, end = columns((Box("loss.backward()", ("gradients of the whole batch, in shards",)),), bottom + 30)
    arrows = [arrow(76, below + 4, 76, below + 44), arrow(WIDTH / 2, bottom + 4, WIDTH / 2, bottom + 26)]
    label = (
        "With the backend, Dynamo gives one graph or several with plain Python between them; each graph is planned and "
        "split over the ranks, and backward leaves gradients in shards"
    )
    return picture(label, end + MARGIN, first, drawn, last, words, *arrows)
