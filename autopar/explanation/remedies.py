"""Changes with which a step fits into memory; each one is searched and priced as a question by itself.

another recipe, recomputation, micro-batches, tensor parallelism    settings of the question's own cluster
parameters stored and updated on the host                           the same question, which allows it
other optimizer states, pure 16-bit training, fewer tokens          the same question with other words
adapters on layers in 4 bits                                        the same question about a model with them
more nodes, larger devices                                          the same question on another cluster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.cost_model.catalogue import HARDWARE
from autopar.cost_model.items import TrainingState
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.cost_model.sizes import Sizes
from autopar.errors import AutoparError
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh, R, Tensor
from autopar.ir.plan import recipe_in_use
from autopar.models.adapted import RANK, SUFFIX
from autopar.search.candidates.request_filters import allows
from autopar.search.candidates.settings import DATA, ClusterSetting, PricedCandidate
from autopar.search.request.request import Request

FACTORS = (2, 4, 8, 16, 32, 64)  # multiples and parts of the number of nodes to try
_STATES = ("adamwbf16", "adamw8bit", "adamw4bit", "adafactor")
_SHORTER = (2, 4)  # divisors of the sequence length to try
_KEPT = ("parameters", "gradients", "optimizer", "buffers", "reserved")  # whatever the tokens
_LARGER_DEVICES = 2  # devices of the catalogue that are offered

Found = tuple[str, str, Explanation]  # the change in words, the options that ask for it, what is planned then


def remedies(question: Question, asked: Explanation, setting: ClusterSetting) -> Iterator[Found]:
    """Yields changes with which a step fits that does not fit as asked.

    Args:
        question: the model and the request.
        asked: explanation of the smallest setting that the question allows.
        setting: the smallest setting that the question allows.
    """
    yield from _settings(question, setting)
    yield from _offloaded(question, setting)
    yield from _states(question, asked)
    yield from _fewer_tokens(question, asked)
    yield from _adapters(question)
    yield from _clusters(question)


def answered(question: Question, settings: Sequence[PricedCandidate] | None = None) -> Explanation | None:
    """The fastest setting of a question that fits, searched and priced as `explain` does; None for none.

    Args:
        question: what is asked.
        settings: settings to choose among, from a question with the same constraints on as many ranks; None
            for all settings that the question leaves.
    """
    try:
        priced = question.settings if settings is None else question.priced(settings)
    except AutoparError:  # its ranks and the batch have no common divisor
        return None
    return _first_that_fits(question, [each for each in priced if each.memory_bytes <= question.bound_bytes])


# --- another setting of the same cluster


def _settings(question: Question, setting: ClusterSetting) -> Iterator[Found]:
    """Changes of the setting: for each kind of change the smallest one that fits; if none does, several at once."""
    # What the request rules out stays ruled out; a change may break all its other constraints.
    freed, in_node = _freed(question.request), question.cluster.devices_per_node
    allowed = [p for p in question.space.price() if allows(freed, p.setting, in_node)]
    fitting = [p for p in allowed if p.memory_bytes <= question.bound_bytes]
    found = 0
    for what, near, order in _kinds(setting):
        same = sorted((p for p in fitting if near(p.setting)), key=lambda p: (order(p.setting), p.seconds))
        advice = _first_that_fits(question, same)
        if advice is not None and advice.setting is not None:
            found += 1
            yield what(advice.setting), _options(advice.setting), advice
    if not found and (advice := _first_that_fits(question, fitting)) and advice.setting:
        yield "several changes at once", _options(advice.setting), advice


def _first_that_fits(question: Question, priced: list[PricedCandidate]) -> Explanation | None:
    """The first of three settings whose searched plan fits, as their estimates do."""
    explained = (question.explain(each) for each in priced[:3])
    return next((advice for advice in explained if advice.fits), None)


def _options(setting: ClusterSetting) -> str:
    """The options of the command line that ask for a setting."""
    return f"{_place_options(setting)} --recompute {setting.recompute}"


def _place_options(setting: ClusterSetting) -> str:
    """The options that ask for a setting's mesh, recipe and micro-batches."""
    mesh = setting.world_mesh
    recipe = f"pp:{setting.schedule},{setting.recipe}" if setting.schedule else setting.recipe
    return (
        f"--mesh {mesh.used or 'dp=1'} --recipe {recipe_in_use(recipe, mesh)} --micro-batches {setting.micro_batches}"
    )


_Kind = tuple[Callable[[ClusterSetting], str], Callable[[ClusterSetting], bool], Callable[[ClusterSetting], float]]


def _kinds(s: ClusterSetting) -> list[_Kind]:
    """For every kind of change: its words, whether a setting differs only in it, and a sort key."""

    def alike(other: ClusterSetting, **changed: object) -> bool:
        values = {name: getattr(other, name) for name in changed}
        return other == replace(s, **values)

    return [
        (
            lambda o: f"{o.data} instead of {s.data}",
            lambda o: alike(o, data=1) and DATA.index(o.data) > DATA.index(s.data),
            lambda o: DATA.index(o.data),
        ),
        (
            lambda o: "recomputation of all layers in backward",
            lambda o: alike(o, recompute=1) and o.recompute != s.recompute == "none",
            lambda o: 0,
        ),
        (
            lambda o: (
                f"longer accumulation: {o.micro_batches} micro-batches of {o.micro_batch} "
                f"instead of {s.micro_batches} of {s.micro_batch}"
            ),
            lambda o: alike(o, micro_batch=1, micro_batches=1) and o.micro_batch < s.micro_batch,
            lambda o: -o.micro_batch,
        ),
        (
            lambda o: f"{o.data}, and recomputation of all layers in backward",
            lambda o: alike(o, data=1, recompute=1) and o.recompute != s.recompute == "none" and o.data != s.data,
            lambda o: DATA.index(o.data),
        ),
        (
            lambda o: f"tp={o.tp} instead of tp={s.tp}",
            lambda o: alike(o, tp=1, inner=1, dp=1, tensor=1, data=1, micro_batch=1, micro_batches=1) and o.tp > s.tp,
            lambda o: o.tp,
        ),
    ]


def _freed(request: Request) -> Request:
    """The request without what it fixes of mesh, recipe and micro-batches; what it rules out stays."""
    return request.but(mesh=None, recipe="auto", schedule=None, chunks=None, micro_batches=None, recompute=None)


# --- the same on the host, with other states, or fewer tokens


def _offloaded(question: Question, setting: ClusterSetting) -> Iterator[Found]:
    """Parameters, gradients and optimizer states in the host's memory, as far as that is enough.

    The setting stays; only if it does not fit even so, all settings are searched, which takes many times as long.
    """
    if not question.request.may_offload:
        return
    anywhere = question.request.but(offload=True)
    here = anywhere.but(
        mesh=setting.world_mesh,
        recipe=setting.recipe,
        micro_batches=setting.micro_batches,
        stages=None,
        schedule=setting.schedule or None,
        chunks=None,
    )
    for request, options in ((here, f"{_place_options(setting)} --offload"), (anywhere, "--offload")):
        try:
            advice = question.on(request).answer()
        except AutoparError:  # nothing fits with the host either
            continue
        yield "parameters stored and updated on the host", options, advice
        return


def _states(question: Question, asked: Explanation) -> Iterator[Found]:
    """Optimizer states that take less than those that were asked for, and training without float32 masters."""
    own = asked.run.training_state
    for name in _STATES:
        yield from _with_state(question, own, f"optimizer states of {name}", name)
    if own.master_bytes and question.request.precision is None:
        yield from _with_state(question, own, "pure bf16: no float32 masters", _PURE)


_PURE = "gradients=2 masters=0"
# One matrix stands for all; its states are the larger part of those of every model.
_MATRIX = Tensor("", ((4096,), (4096,)), (("",), ("",)), 2, True)


def _with_state(question: Question, own: TrainingState, what: str, words: str) -> Iterator[Found]:
    state = TrainingState.parse(words, own)
    if _state_bytes(state) >= _state_bytes(own):
        return
    given = f"{question.training_state} {words}".strip()
    advice = answered(question.on(question.request, given), question.settings)
    if advice is not None:
        yield what, f"--training-state '{given}'", advice


def _state_bytes(state: TrainingState) -> float:
    """Bytes of gradient, master and states of a matrix."""
    sizes = Sizes(Mesh((("dp", 1),)))
    gradient = state.gradient_bytes or _MATRIX.itemsize_bytes
    return float(gradient * 4096**2 + state.optimizer_bytes(_MATRIX, (R,), sizes))


def _fewer_tokens(question: Question, asked: Explanation) -> Iterator[Found]:
    """The longest part of the sequence that is enough; nothing where what is kept between steps is too much."""
    has_sequence = not question.model.own_batch and "seq" in asked.graph.factors
    if not has_sequence or keeps_too_much(question, asked):
        return
    whole = asked.graph.factors["seq"].size
    for part in _SHORTER:
        if whole % part == 0:
            advice = answered(question.at(whole // part), question.settings)
            if advice is not None:
                yield f"sequences of {whole // part:,} tokens", f"--seq {whole // part}", advice
                return


def keeps_too_much(question: Question, asked: Explanation) -> bool:
    """Whether what is kept between steps exceeds the memory, so that smaller activations do not help."""
    return sum(part.value for part in asked.memory.parts if part.name in _KEPT) > question.bound_bytes


def _adapters(question: Question) -> Iterator[Found]:
    """Adapters of low rank, where only these are trained, on layers in 4 bits."""
    target = question.target
    if not isinstance(target, str) or target.endswith(SUFFIX) or not question.model.stacks:
        return
    advice = answered(replace(question, target=target + SUFFIX, _captured={}, _plans={}))
    if advice is not None:
        yield f"adapters of rank {RANK} alone trained, on layers in 4 bits", f"{target}{SUFFIX}", advice


# --- another cluster


def _clusters(question: Question) -> Iterator[Found]:
    """Larger clusters on which the model fits: that with the fewest nodes, and that whose devices have least memory."""
    cluster = question.cluster
    if cluster.hardware.kinds:  # of which kind there should be more is not asked
        return
    for factor in FACTORS:
        more = Cluster(cluster.hardware, cluster.nodes * factor)
        what, option = f"{factor} times the nodes, {more.ranks} ranks", _cluster_option(more)
        alone, freed = question.request.but(mesh=None), _freed(question.request)
        if (advice := answered(_on(question, more, alone))) is not None:
            yield what, option, advice
            break
        if freed == alone or (advice := answered(_on(question, more, freed))) is None:
            continue
        if advice.setting is not None:
            yield f"{what}, in another setting", f"{option} {_options(advice.setting)}", advice
            break
    if question.request.memory_bytes is None:
        yield from _devices(question)


def _devices(question: Question) -> Iterator[Found]:
    """Larger devices of the catalogue, as many of them as were asked for."""
    cluster, found = question.cluster, set[tuple[float, float]]()
    larger = sorted(
        (h for h in HARDWARE.values() if h.memory_bytes > cluster.hardware.memory_bytes),
        key=lambda h: (h.memory_bytes, h.name),
    )
    for hardware in larger:
        if len(found) == _LARGER_DEVICES or hardware.devices_per_node < cluster.devices_per_node:
            continue
        there = replace(hardware, devices_per_node=cluster.devices_per_node)
        other = with_eager_runs(Cluster(there, cluster.nodes))
        advice = answered(_on(question, other, question.request), question.settings)
        # In one node two machines that differ in their network are alike.
        if advice is not None and (figures := (advice.memory_bytes, advice.step_seconds)) not in found:
            found.add(figures)
            what = f"{hardware.name}, {hardware.memory_bytes / 1e9:.0f} GB"
            yield what, _cluster_option(other), advice


def _on(question: Question, cluster: Cluster, request: Request) -> Question:
    """The question on another cluster."""
    ranks = cluster.ranks if request.mesh is None else request.ranks
    return question.on(replace(request, hardware=cluster.hardware, ranks=ranks))


def _cluster_option(cluster: Cluster) -> str:
    return f"--cluster {cluster}"
