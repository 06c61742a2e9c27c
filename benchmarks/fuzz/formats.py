"""All formats that are read: a sample of each, its reader, and what a changed file may mean.

`meaning` tells a change that counts from one that does not. Where the format has a digest or checksums (`is_sealed`), a
changed file must be refused or mean the same. Elsewhere a person may have written it: it must be refused, or be read so
that writing it out and reading it back gives the same again, and no unknown field may be passed over.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from autopar.calibrate.at_start import kept_text
from autopar.capture.export import capture_step
from autopar.cost_model import CPU_GLOO, find_hardware
from autopar.cost_model.machines.cluster import find_cluster
from autopar.cost_model.machines.hardware_toml import HardwareFile, parse_hardware, read_hardware
from autopar.cost_model.machines.hardware_writing import format_hardware
from autopar.errors import AutoparError
from autopar.explanation.differences import Side
from autopar.ir import Mesh, Plan
from autopar.ir.order import Order
from autopar.ir.precision import MixedPrecision
from autopar.ir.recompute import format_recompute, parse_recompute
from autopar.models.hugging_face import Pretrained
from autopar.planning.cache_files import KEY_VARIABLE, cache_key, write_cached
from autopar.planning.planning import make_plan, prepare_step
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures, is_same_capture
from autopar.planning.stored_plans import StoredPlans
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, load_optimizer_state, save_checkpoint
from autopar.runtime.formats.checkpoint_folder import read_saved
from autopar.runtime.formats.weights import read_weights
from autopar.search.request.request import Request
from autopar.views.trace import read_trace
from benchmarks.fuzz.plans import PLANS

X = torch.arange(32.0).reshape(8, 4)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: name for the table.
        content: the sample.
        read: reads the file at a path and returns what it means, which compares by `==`.
        ending: ending of the file's name.
        is_sealed: whether each change has to be found.
        again: what a meaning means after it was written and read back; None where nothing writes it.
        values: the values of a text, all of which the reader has to take; None where it may pass over some.
    """

    name: str
    content: bytes
    read: Callable[[Path], Any]
    ending: str = ".json"
    is_sealed: bool = False
    again: Callable[[Any], Any] | None = None
    values: Callable[[str], Any] | None = None

    @property
    def is_json(self) -> bool:
        """Whether the sample is one JSON text."""
        return self.content[:1] in (b"{", b"[")


def model() -> nn.Module:
    """The model of all samples."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def _state(found: nn.Module) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in found.state_dict().items()}


def formats(folder: Path) -> list[Format]:
    """The formats, with samples that are made in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *_plans(folder),
        *_plans_of_features(),
        *_hardware(),
        _config(),
        _trace(),
        *_checkpoints(folder),
        *_weights(folder),
        _stored_plan(folder),
        *_stored_captures(folder),
        _kept_times(folder),
        _kinds(folder),
        _key(),
        *_texts(),
    ]


def _plan() -> Plan:
    prepared = prepare_step(model(), (X, X), loss_fn=nn.functional.mse_loss)
    return make_plan(prepared, Request(find_hardware("h100"), mesh={"dp": 2, "tp": 2}))


def _plans(folder: Path) -> list[Format]:
    plan = _plan()
    plan.save(folder / "saved.json")
    own = json.dumps(plan.to_json()).encode()
    return [
        Format("saved plan", (folder / "saved.json").read_bytes(), Plan.load, is_sealed=True),
        Format("plan of a person", own, Plan.load, again=lambda x: Plan.from_json(x.to_json()), values=json.loads),
        _in_text("text of a plan", str(plan), Plan.parse),
        Format("answer of explain", b'{"plan": ' + own + b"}", lambda p: Side.load(p).plan),
    ]


def _plans_of_features() -> Iterator[Format]:
    """Plans that a person has written, with fields that few plans have."""
    for name, text in PLANS.items():
        own = json.dumps(Plan.parse(text).to_json()).encode()
        yield Format(
            f"plan with {name}", own, Plan.load, again=lambda x: Plan.from_json(x.to_json()), values=json.loads
        )
        yield _in_text(f"text of a plan with {name}", text, Plan.parse)


def _in_text(name: str, text: str, parse: Callable[[str], Any], say: Callable[[Any], str] = str) -> Format:
    """The format of a text that is parsed, and that `say` writes."""
    return Format(name, text.encode(), lambda p: parse(_text(p)), ".txt", again=lambda x: parse(say(x)))


def _text(path: Path) -> str:
    """Text that a caller has: of a string, bytes that are no UTF-8 cannot come."""
    return path.read_bytes().decode("utf-8", "replace")


def _hardware() -> list[Format]:
    def again(found: HardwareFile) -> HardwareFile:
        text = format_hardware(found.hardware, nodes=found.nodes, curves=found.curves)
        return dataclasses.replace(found, hardware=parse_hardware(text, "again").hardware)

    def values(text: str) -> Any:
        found = tomllib.loads(text)
        found.get("nodes", {}).pop("source", None)  # a text for people, which is not kept
        found["like"] = str(found.get("like")).lower()  # names of the catalogue are found in any case
        return found

    whole = resources.files("autopar.cost_model").joinpath("catalogue", "h100.toml").read_bytes()
    small = b"""name = "mine"
like = "h100"
nodes = {value = 2, kind = "guess", source = "as rented"}
devices_per_node = {value = 4, kind = "guess", source = "as rented"}
"""
    measured = (
        small
        + b"""
[[matmul]]
dtype = "bfloat16"
rows = 1024
columns = 1024
inner = 1024
seconds = 5.0e-6
predicted_seconds = 5.5e-6

[[collective]]
name = "all_reduce"
link = "inside_node"
ranks = 4
bytes = 1048576
seconds = 2.0e-5
predicted_seconds = 1.8e-5
"""
    )
    samples = {"hardware": whole, "hardware like another": small, "hardware with measurements": measured}
    return [
        Format(name, content, read_hardware, ".toml", again=again, values=values) for name, content in samples.items()
    ]


def _config() -> Format:
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }

    def read(path: Path) -> Any:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            found = Pretrained.read(path)
            found.build()
            return found.config.to_json_string()

    return Format("config.json", json.dumps(values).encode(), read)


def _trace() -> Format:
    event = {"ph": "X", "cat": "compute", "name": "linear", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 0, "args": {}}
    return Format("trace", json.dumps({"traceEvents": [event]}).encode(), read_trace)


def _checkpoints(folder: Path) -> list[Format]:
    saved = folder / "checkpoint"
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    nn.functional.mse_loss(trained(X), X).backward()
    optimizer.step()
    save_checkpoint(saved, trained, optimizer, step=3)
    samples = {name: (saved / name).read_bytes() for name in ("shard-00001.safetensors", "state.pt")}

    def reader(name: str, seal: Callable[[bytes], bytes] = bytes) -> Callable[[Path], Any]:
        def read(path: Path) -> Any:
            own = seal(path.read_bytes())
            for each, content in samples.items():
                (saved / each).write_bytes(own if each == name else content)
            fresh = model()
            adam = torch.optim.AdamW(fresh.parameters())
            before = _state(fresh)
            try:
                extra = load_checkpoint(saved, fresh, adam)
            except AutoparError:
                assert _state(fresh) == before, "a refused load leaves the model as it was"
                raise
            moments = [x.numpy().tobytes() for s in adam.state.values() for x in s.values()]
            return _state(fresh), moments, dict(extra), adam.param_groups[0]["lr"]

        return read

    return [
        *(
            Format(f"checkpoint: {name}", content, reader(name), ".bin", is_sealed=True)
            for name, content in samples.items()
        ),
        Format(
            "checkpoint: state.pt, saved anew",
            json.dumps(torch.load(saved / "state.pt", weights_only=True)).encode(),
            reader("state.pt", _as_state),
        ),
        _plain_state(folder, optimizer),
    ]


def _as_state(content: bytes) -> bytes:
    """A file of `torch.save` with the values of a JSON text, as somebody else could have written it."""
    buffer = io.BytesIO()
    state = _parsed(content)
    if isinstance(state, dict) and isinstance(state.get("groups"), list):
        state["groups"] = [tuple(each) if isinstance(each, list) else each for each in state["groups"]]
    torch.save(state, buffer)
    return buffer.getvalue()


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise AutoparError("it has no values") from None


def _plain_state(folder: Path, optimizer: torch.optim.Optimizer) -> Format:
    """The `optimizer.pt` of a plain Trainer of transformers."""
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def read(path: Path) -> Any:
        own = model()
        adam = torch.optim.AdamW(own.parameters())
        load_optimizer_state(own, adam, read_saved(path))
        moments = [x.numpy().tobytes() for s in adam.state.values() for x in s.values()]
        return moments, adam.param_groups[0]["lr"]

    content = (folder / "optimizer.pt").read_bytes()
    return Format("optimizer.pt of a Trainer", content, read, ".pt", is_sealed=True)


def _weights(folder: Path) -> list[Format]:
    """The bytes of tensors have no checksum in this format of others: their headers are mutated alone."""
    place = folder / "weights"
    place.mkdir()
    save_file(model().state_dict(), place / "model-1.safetensors")
    content = (place / "model-1.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    names = dict.fromkeys(model().state_dict(), "model-1.safetensors")
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": names}).encode()

    files = {
        "model-1.safetensors": content,
        "model.safetensors.index.json": index,
        "config.json": b'{"dtype": "float32"}',
    }

    def read(name: str, own: bytes) -> Any:
        for each, sample in files.items():
            (place / each).write_bytes(own if each == name else sample)
        fresh = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        read_weights(fresh, place)
        return _state(fresh)

    tensors, names_of_files, config = files
    return [
        Format(
            "safetensors header", content[:begin], lambda p: read(tensors, p.read_bytes() + content[begin:]), ".bin"
        ),
        Format("weights index", index, lambda p: read(names_of_files, p.read_bytes())),
        Format("config.json beside weights", files[config], lambda p: read(config, p.read_bytes())),
    ]


def _stored_plan(folder: Path) -> Format:
    prepared = prepare_step(model(), (X, X), loss_fn=nn.functional.mse_loss)
    request = Request(find_hardware("h100"), mesh={"dp": 2})
    stored, place = StoredPlans(folder / "plans"), folder / "plans"
    plan = stored.plan(make_plan, prepared, request)
    (path,) = place.iterdir()

    def read(given: Path) -> Any:
        path.write_bytes(given.read_bytes())
        return stored.plan(lambda *_, **__: plan, prepared, request)

    return Format("stored plan", path.read_bytes(), read, is_sealed=True)


def _stored_captures(folder: Path) -> list[Format]:
    """A stored capture, and one whose digest was made anew by somebody who may write the file."""
    own, place = model(), folder / "captures"
    stored = StoredCaptures(place)
    question = CaptureQuestion(own, (X, X), {}, nn.functional.mse_loss, True, None, ())

    def capture() -> Any:
        return capture_step(own, (X, X), {}, loss_fn=nn.functional.mse_loss)

    first = stored.captured(question, capture)
    (path,) = place.iterdir()

    class Same:
        """Equal to every capture that is the first one again."""

        def __init__(self, found: Any) -> None:
            self.found = found

        def __eq__(self, other: object) -> bool:
            assert isinstance(other, Same)
            return is_same_capture(self.found, other.found)

        __hash__ = None  # type: ignore[assignment]

    def read(content: bytes) -> Any:
        path.write_bytes(content)
        return Same(stored.captured(question, lambda: first))

    def sealed(body: bytes) -> bytes:
        write_cached(body.decode("utf-8", "replace"), path)
        return path.read_bytes()

    whole = path.read_bytes()
    body = whole.rpartition(b"\n")[0]
    return [
        Format("stored capture", whole, lambda p: read(p.read_bytes()), ".capture", is_sealed=True),
        Format("stored capture, sealed anew", body, lambda p: read(sealed(p.read_bytes())), ".capture"),
    ]


def _kept_times(folder: Path) -> Format:
    """The times of a machine, which a search starts with."""
    path, text = folder / "cpu-gloo-2.toml", format_hardware(CPU_GLOO)
    write_cached(text, path)

    def read(given: Path) -> Any:
        path.write_bytes(given.read_bytes())
        return kept_text(path) or text  # measured again

    return Format("times of a machine", path.read_bytes(), read, ".toml", is_sealed=True)


def _kinds(folder: Path) -> Format:
    """A cluster of several kinds of machines, one of which has a file of its own."""
    (folder / "slow.toml").write_text(format_hardware(dataclasses.replace(find_hardware("h100"), name="slow")))
    text = """name = "ours"
kinds = ["h100x8x2", "slow.toml x 8 x 1"]

[between_kinds]
bandwidth_bytes_per_second = {value = 12e9, kind = "measured", source = "nccl-tests over both"}
latency_seconds = {value = 2e-5, kind = "guess", source = "two switches"}
"""

    def read(given: Path) -> Any:
        own = folder / "ours.toml"
        own.write_bytes(given.read_bytes())
        found = find_cluster(own)
        return found.hardware.name, found.kinds, found.hardware.between

    def values(given: str) -> Any:
        found = tomllib.loads(given)
        for figure in found["between_kinds"].values():
            del figure["kind"], figure["source"]  # which are not kept
        found["kinds"] = [str(find_cluster(folder / each if ".toml" in each else each)) for each in found["kinds"]]
        return found

    return Format("kinds of machines", text.encode(), read, ".toml", values=values)


def _texts() -> list[Format]:
    selection = '{"layers.*": ["mlp.act/gelu"]}'
    return [
        _in_text("text of a mesh", "dp=2,tp=4", Mesh.parse),
        _in_text("name of a cluster", "h100x8x2+a100x4x3", find_cluster),
        _in_text("text of recomputation", selection, parse_recompute, format_recompute),
        _in_text("text of an order", "0+1 0= 0+1 1+1 1= 0= meet", lambda text: Order.parse(2, text)),
        _in_text("text of a precision", "bfloat16 reduce=float32 products=float8 exempt=lm_head", MixedPrecision.parse),
    ]


def _key() -> Format:
    """The key of a cache folder, which a variable of the environment names."""

    def read(path: Path) -> Any:
        path.chmod(0o600)
        with mock.patch.dict(os.environ, {KEY_VARIABLE: str(path)}):
            return cache_key()

    return Format("key of a cache", bytes(range(64)), read, ".key")
