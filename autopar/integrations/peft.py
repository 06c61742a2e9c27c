"""PEFT: the adapters of a model whose parameters lie in shards, saved in PEFT's own format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import quiet_torchao
from autopar.errors import AutoparError
from autopar.integrations.prepared import PreparedModel
from autopar.runtime.formats.weights import PathLike
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.ranks.all_ranks import AllRanks

with quiet_torchao():  # which these import
    from peft import PeftModel, get_peft_model_state_dict


def save_adapters(model: nn.Module, folder: PathLike) -> None:
    """Writes the adapters of a model of PEFT as `PeftModel.from_pretrained` reads them, and nothing of its base model.

    Every rank calls it, with a folder that the first one writes. The first rank holds all adapters meanwhile, and no
    rank holds a whole base model.

    Args:
        model: what `autopar.compile` or an accelerator made of a model of PEFT, or that model itself.
        folder: folder of `adapter_config.json` and `adapter_model.safetensors`; of each further adapter, a folder in
            it with the adapter's name.

    Raises AutoparError on every rank for a model without adapters or with pipeline stages, and for what cannot be
    written; PeerError if another rank died or hangs.
    """
    compiled = model.module if isinstance(model, PreparedModel) else model
    if isinstance(compiled, CompiledModule) and compiled.has_stages:
        raise AutoparError(
            "save_adapters cannot collect adapters from several pipeline stages. Export all weights (model.export)."
        )
    original = compiled.original if isinstance(compiled, CompiledModule) else compiled
    if not isinstance(original, PeftModel):
        raise AutoparError(
            f"{type(original).__name__} has no adapters of PEFT: give what get_peft_model returned, compiled or "
            "prepared. model.export writes all weights of a model."
        )
    ranks = AllRanks(f"Saving the adapters to {folder}")
    weights = adapter_weights(original)
    ranks.first_alone(lambda: original.save_pretrained(str(Path(folder)), state_dict=weights))


def adapter_weights(model: PeftModel) -> dict[str, Tensor]:
    """The part of the state dict that PEFT saves, whole on the CPU of the first rank; empty on the others.

    Every rank calls it. The tensors are gathered one after the other. Raises AutoparError for kinds of adapters whose
    saved tensors are none of the state dict.
    """
    state = model.state_dict()
    chosen = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state, adapter_name=name).values()
    }
    if not chosen <= {id(value) for value in state.values()}:
        kinds = ", ".join(str(config.peft_type) for config in model.peft_config.values())
        raise AutoparError(
            f"The adapters ({kinds}) are saved in another form than they are trained in, which is not supported for "
            "sharded parameters (LoRA's form is the same). Save a checkpoint (autopar.checkpoint.save_checkpoint)."
        )
    keep = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    weights = {}
    for name, value in state.items():
        if id(value) in chosen:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            weights[name] = whole.detach().cpu() if keep else torch.empty(0)
    return weights if keep else {}
