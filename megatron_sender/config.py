"""The recipe: one typed description of a trainer, its engines and the refit between them.

A recipe holds facts and choices. Facts (what the trainer and the engines are) are read by the preflight and the plan, which
never set them: the trainer and the engine have their own configuration. Choices (the `refit` part) are what this project does.
Unknown keys are errors. Units are in the names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_refit_ext.core.messages import DEADLINE_S, CachePolicy

Count = Annotated[int, Meta(ge=1, le=65536)]
Capability = Annotated[str, Meta(pattern=r"^\d{1,2}\.\d$")]
Bytes = Annotated[int, Meta(ge=1, le=1 << 50)]
Speed = Annotated[float, Meta(gt=0, le=1e18)]
Dtype = Literal["bfloat16", "float16", "float32"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a recipe. Unknown keys are refused."""


class Model(Part, frozen=True, kw_only=True):
    """What is trained and served, as its Hugging Face configuration says it."""

    name: Annotated[str, Meta(min_length=1, description="Name of the checkpoint, for people and reports.")]
    hf_config: Annotated[
        str | dict[str, Any],
        Meta(
            description="The Hugging Face configuration: a mapping, or the path of a JSON file relative to the recipe. "
            "`load_recipe` replaces a path by what the file holds."
        ),
    ]


class Hardware(Part, frozen=True, kw_only=True):
    """The machines. The plan predicts seconds from the link speeds; the preflight decides what can be reached how."""

    device: Annotated[Literal["cuda", "cpu"], Meta(description="Where the weights live.")] = "cuda"
    gpus_per_host: Annotated[Count, Meta(description="Ranks that share one host. Memory of another host can't be mapped.")] = 8
    compute_capability: Annotated[
        Capability | None,
        Meta(description='Of the engines\' GPUs, as in "9.0". Decides which MXFP8 kernels exist. Null: not checked.'),
    ] = None
    gpu_memory_bytes: Annotated[
        Bytes | None, Meta(description="Memory of one GPU, in bytes. Null: the memory check is left out.")
    ] = None
    copy_bytes_per_second: Annotated[Speed | None, Meta(description="Device-to-device copy, bytes read plus bytes written.")] = (
        None
    )
    host_bytes_per_second: Annotated[Speed | None, Meta(description="One GPU to another of the same host, one direction.")] = None
    network_bytes_per_second: Annotated[Speed | None, Meta(description="One GPU to a GPU of another host, one direction.")] = None


class Parallelism(Part, frozen=True, kw_only=True):
    """How Megatron cuts the model. `dp` follows from `world_size`; when written it must agree."""

    tp: Annotated[Count, Meta(description="Tensor parallel size of everything but routed experts.")] = 1
    pp: Annotated[Count, Meta(description="Pipeline parallel size.")] = 1
    vpp: Annotated[Count | None, Meta(description="Model chunks a pipeline rank holds (virtual pipeline).")] = None
    ep: Annotated[Count, Meta(description="Expert parallel size.")] = 1
    etp: Annotated[
        Count, Meta(description="Tensor parallel size of routed experts (unset, Megatron takes tp; write it here).")
    ] = 1
    cp: Annotated[Count, Meta(description="Context parallel size. Its ranks hold equal weights.")] = 1
    dp: Annotated[Count | None, Meta(description="Data parallel size. Null: world_size / (tp * cp * pp).")] = None
    pipeline_layout: Annotated[
        str | list[list[str]] | None,
        Meta(description='Megatron\'s pipeline_model_parallel_layout, such as "Et*3|(tt|)*29m|L" or lists of names.'),
    ] = None
    first_stage_layers: Annotated[
        Count | None, Meta(description="Decoder layers of the first pipeline stage, when it differs.")
    ] = None
    last_stage_layers: Annotated[
        Count | None, Meta(description="Decoder layers of the last pipeline stage, when it differs.")
    ] = None
    embedding_counts_as_layer: Annotated[bool, Meta(description="Megatron's account_for_embedding_in_pipeline_split.")] = False
    loss_counts_as_layer: Annotated[bool, Meta(description="Megatron's account_for_loss_in_pipeline_split.")] = False


class Trainer(Part, frozen=True, kw_only=True):
    """The Megatron trainer, as it is."""

    world_size: Annotated[Count, Meta(description="Ranks of the trainer.")]
    parallelism: Annotated[Parallelism, Meta(description="How the model is cut.")] = Parallelism()
    dtype: Annotated[Dtype, Meta(description="Type of the stored parameters.")] = "bfloat16"
    fp8_storage: Annotated[
        Literal["none", "blockwise", "mxfp8", "tensorwise", "delayed"],
        Meta(
            description="How parameters are stored when Megatron keeps them in FP8 (`fp8_param`). Only `none` can be sent; FP8 "
            "compute over BF16 storage is `none`."
        ),
    ] = "none"


class Quantization(Part, frozen=True, kw_only=True):
    """The engine's weight format."""

    format: Annotated[
        Literal["mxfp8"],
        Meta(description="`mxfp8`: E4M3 values with one E8M0 scale for 32 elements along K."),
    ]
    ignore: Annotated[
        list[str],
        Meta(
            description="Modules that stay unquantised: names of Hugging Face modules, parts of names, or shell patterns, "
            "read as vLLM reads ModelOpt's `ignore`. A pattern that matches nothing is an error."
        ),
    ] = []


class Engine(Part, frozen=True, kw_only=True):
    """One kind of vLLM engine; `count` of them run."""

    count: Annotated[Count, Meta(description="Independent engines of this shape.")] = 1
    tp: Annotated[Count, Meta(description="Tensor parallel size.")] = 1
    pp: Annotated[Count, Meta(description="Pipeline parallel size.")] = 1
    dp: Annotated[Count, Meta(description="Data parallel size inside one engine (vLLM's data_parallel_size).")] = 1
    ep: Annotated[
        Count, Meta(description="Expert parallel size: 1, or tp * dp, which is what vLLM's enable_expert_parallel gives.")
    ] = 1
    dtype: Annotated[Dtype, Meta(description="Type of unquantised parameters.")] = "bfloat16"
    quantization: Annotated[Quantization | None, Meta(description="Weight format. Null: unquantised.")] = None
    moe_backend: Annotated[
        Literal["auto", "flashinfer_trtllm", "marlin", "deep_gemm", "triton", "flashinfer_cutlass"],
        Meta(description="vLLM's MoE kernels; they decide the layout that is written."),
    ] = "auto"
    eplb: Annotated[bool, Meta(description="Expert load balancing. Refused: it moves experts after the plan is made.")] = False
    draft: Annotated[
        Literal["none", "mtp"],
        Meta(
            description="`mtp`: the engine drafts with the model's own MTP layers, which take memory and keep the weights that "
            "they started with: draft models are not refitted. Worse drafts cost time, never a wrong token."
        ),
    ] = "none"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of a GPU's memory that the engine may take.")
    ] = 0.9
    sleep_level: Annotated[
        Literal[0, 1, 2],
        Meta(description="Sleep between rollouts: 0 never, 1 weights kept on the host, 2 weights dropped."),
    ] = 0


class Refit(Part, frozen=True, kw_only=True):
    """What this project is asked to do."""

    placement: Annotated[
        Literal["colocated", "disaggregated"],
        Meta(description="`colocated`: engines use the trainer's GPUs, in turn. `disaggregated`: they have their own."),
    ]
    wire: Annotated[
        Literal["ipc", "shm", "nixl", "collective"],
        Meta(
            description="`ipc`: the engine reads GPU memory of the trainer on its own host. `shm`: through host shared memory. "
            "`nixl`: the engine reads the trainer's memory on any host over NIXL. `collective`: shard to shard over NCCL or gloo."
        ),
    ]
    mode: Annotated[
        Literal["direct", "staged"] | None,
        Meta(
            description="`direct` (wire `ipc` only): no buffers between. `staged`: through buffers; with `ipc` this is the "
            "sender's wire `ring`, whose buffers are the trainer's. Null: direct for `ipc`, staged for the others."
        ),
    ] = None
    bucket_bytes: Annotated[
        int,
        Meta(ge=4096, le=1 << 40, description="Most payload of one message of a wire that stages; each holds two such buffers."),
    ] = 512 << 20
    prequantize: Annotated[
        bool, Meta(description="The sender quantises its shards, so MXFP8 is sent. Off: BF16 is sent, the writer quantises.")
    ] = False
    running_requests: Annotated[
        Literal["wait", "abort", "keep"],
        Meta(
            description="How the training loop pauses the engine before a refit (vLLM's pause modes); the preflight holds it "
            "against `caches`. `keep`: requests in flight go on with the new weights."
        ),
    ] = "wait"
    caches: Annotated[
        CachePolicy,
        Meta(
            description="Prefix and encoder caches at commit. `reset` clears them and fails if requests still use "
            "them; `reset_running` preempts those first; `keep` serves values computed with older weights."
        ),
    ] = "reset"
    max_steps_off: Annotated[
        int, Meta(ge=0, le=1024, description="Trainer steps by which sampled tokens may be older than the weights trained.")
    ] = 0
    deadline_s: Annotated[
        float, Meta(gt=0, le=86400, description="Seconds within which one whole refit, and so every wait in it, must end.")
    ] = DEADLINE_S

    def effective_mode(self) -> Literal["direct", "staged"]:
        """The mode with its default filled in."""
        return self.mode or ("direct" if self.wire == "ipc" else "staged")


class Recipe(Part, frozen=True, kw_only=True):
    """A whole recipe."""

    name: Annotated[str, Meta(min_length=1, description="Short name, for reports.")]
    summary: Annotated[str, Meta(description="One line for people.")] = ""
    model: Annotated[Model, Meta(description="What is trained and served.")]
    hardware: Annotated[Hardware, Meta(description="The machines.")] = Hardware()
    trainer: Annotated[Trainer, Meta(description="The Megatron trainer.")]
    engines: Annotated[list[Engine], Meta(min_length=1, max_length=4096, description="The vLLM engines.")]
    refit: Annotated[Refit, Meta(description="What this project is asked to do.")]
