"""The number format of a model's weights: decided, or refused by name, before any is loaded.

A checkpoint that is quantised already is loaded by transformers with the package of its method.
Others can be quantised while they are loaded (`model.weights`, `worker/execution/int8.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from worker.execution import int8
from worker.execution.model import UnsupportedModel
from worker.startup.memory import DoesNotFit, gib
from worker.startup.spec import INT8, EngineSpec, Weights

ON_GPUS_ONLY = ("fp8", "mxfp8")  # unpacked where the model computes on a CPU
MARGIN = 1.1  # over the planned bytes; a few small layers are kept in float32


def plan_weights(spec: EngineSpec, setting: str) -> Weights:
    """The weights that `model.weights` asks for, or that the checkpoint's own quantisation allows.

    Raises UnsupportedModel, which names the method, what is missing and what is possible.
    """
    asked, shape, dtype, device = spec.config.model.weights, spec.shape, spec.dtype, spec.device
    plain_bytes, kernels = shape.weight_count * dtype.itemsize, spec.config.model.cpu_kernels
    own = own_quantisation(spec.hf_config)
    if own is not None:
        return _own(own, spec, setting, plain_bytes)
    if asked != INT8:
        if device.type == "cpu" and dtype == torch.float32 and kernels != "torch":
            # Packed: a head that is tied to an embedding is kept beside it.
            plain_bytes = (shape.linears.weights + shape.linears.kept) * dtype.itemsize
        return Weights(str(dtype).removeprefix("torch."), plain_bytes, plain_bytes)
    if device.type != "cpu":
        raise UnsupportedModel(
            f"model.weights=int8 is for models on a CPU, and this one is on {device.type}; use "
            "model.weights=auto, with a checkpoint that is quantised where memory is short, or "
            "model.device=cpu"
        )
    if int8.ENGINE not in torch.backends.quantized.supported_engines:
        raise UnsupportedModel(
            "model.weights=int8 needs torch's FBGEMM kernels, which are for x86 CPUs with AVX2; "
            "use model.weights=auto"
        )
    if dtype == torch.float64:
        raise UnsupportedModel(
            "model.weights=int8 computes in float32 at most, model.dtype=float64 was asked for; "
            "use model.dtype=float32, or model.weights=auto"
        )
    if not shape.linears.prevail:
        raise UnsupportedModel(
            f"{shape.family}: model.weights=int8 packs linear layers, and most weights of this "
            "model are in others, such as experts; use model.weights=auto"
        )
    format = INT8 if int8.input_levels() == int8.LEVELS else f"{INT8}, inputs of 7 bits"
    return Weights(format, shape.linears.size_bytes(dtype.itemsize), plain_bytes)


def own_quantisation(hf_config: PretrainedConfig) -> dict[str, Any] | None:
    """The checkpoint's `quantization_config` with its `quant_method`; None without one."""
    text = hf_config.get_text_config(decoder=True)
    found = getattr(hf_config, "quantization_config", None)
    found = found or getattr(text, "quantization_config", None)
    if found is None:
        return None
    own: dict[str, Any] = dict(found if isinstance(found, dict) else found.to_dict())
    if own.get("load_in_8bit") or own.get("load_in_4bit"):
        own["quant_method"] = "bitsandbytes"
    return own | {"quant_method": own.get("quant_method") or "no method that it names"}


def _own(own: dict[str, Any], spec: EngineSpec, setting: str, plain_bytes: int) -> Weights:
    method, dtype, device = str(own["quant_method"]), spec.dtype, spec.device
    if spec.config.model.weights == INT8:
        raise UnsupportedModel(
            f"model.weights=int8: {setting} is quantised already, by {method}; use "
            "model.weights=auto, or a copy of the model that is not quantised"
        )
    if device.type == "cpu" and method in ON_GPUS_ONLY:
        own = own | {"dequantize": True}
        spec.hf_config.quantization_config = own  # or it is not unpacked where there is a GPU too
    try:
        if method == "gguf":
            raise ValueError("GGUF blocks are not read, convert them to safetensors first")
        quantizer: Any = AutoHfQuantizer.from_config(dict(own), pre_quantized=True)
        quantizer.validate_environment(device_map={"": str(device)}, weights_only=True)
        needed = quantizer.update_dtype(dtype)
    except Exception as error:
        raise refusal(f"{setting}: its weights", method, device, error) from error
    if getattr(quantizer.quantization_config, "dequantize", False):
        return Weights(f"{method}, unpacked", plain_bytes, plain_bytes)
    if needed != dtype or dtype == torch.float64:
        names = [str(x).removeprefix("torch.") for x in (dtype, needed)]
        possible = "float32, bfloat16 or float16" if needed == dtype else names[1]
        raise UnsupportedModel(
            f"{setting}: its weights are quantised by {method}, which does not compute in "
            f"model.dtype={names[0]} here; use model.dtype={possible}"
        )
    size_bytes = tensor_bytes(spec.directory)
    return Weights(method, size_bytes, size_bytes, packed=True)


def refusal(what: str, method: str, device: torch.device, error: BaseException) -> UnsupportedModel:
    """One message for any error of a package, or its absence."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > 400:
        reason = f"{reason[:400]} ..."
    instead = "; on a CPU model.weights=int8 then packs it" if device.type == "cpu" else ""
    return UnsupportedModel(
        f"{what} are quantised by {method}, which cannot be served on this {device.type}: "
        f"{reason}. Install what is missing, or give a copy of the model that is not quantised"
        + instead
    )


def tensor_bytes(directory: Path) -> int:
    """Bytes of all tensors as stored in the safetensors files of a model."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    total = 0
    for path in files:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - header
    return total


def load_weights(spec: EngineSpec) -> Any:
    """The model on its device, its weights as stored or as its quantizer unpacks them."""
    # Packed weights are placed by their quantizer; some forbid to move them.
    weights = spec.weights
    where = {"device_map": {"": str(spec.device)}} if weights.packed else {}
    with refusing(weights, spec.device):
        hf: Any = AutoModelForCausalLM.from_pretrained(
            spec.directory, config=spec.hf_config, dtype=spec.dtype, **where
        ).eval()
    if not weights.packed:
        hf = hf.to(spec.device)
    return hf


def check_size(hf: nn.Module, weights: Weights) -> None:
    """Raises DoesNotFit where weights take more than was planned."""
    held = held_bytes(hf)
    if held > MARGIN * weights.size_bytes + (1 << 20):
        raise DoesNotFit(
            f"the weights ({weights.format}) take {gib(held)} once they are loaded and "
            f"{gib(weights.size_bytes)} were planned: this transformers unpacked them. Give a copy "
            "of the model that is not quantised, whose size is known before"
        )


@contextmanager
def refusing(weights: Weights, device: torch.device) -> Iterator[None]:
    """Turn any failure with packed weights into a refusal that names their method."""
    try:
        yield
    except (UnsupportedModel, DoesNotFit):
        raise
    except Exception as error:
        if not weights.packed:
            raise
        raise refusal("the weights", weights.format, device, error) from error


def held_bytes(model: nn.Module) -> int:
    """Bytes of parameters, buffers and packed layers; shared memory counts once."""
    found: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, name))
        else:
            found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    for tensor in (*model.parameters(), *model.buffers()):
        add(tensor)
    packed = {x.packed.handle: x.packed for x in model.modules() if isinstance(x, int8.Int8Linear)}
    return sum(found.values()) + sum(
        one.outputs * (one.inputs + int8.ROW_BYTES) for one in packed.values()
    )
