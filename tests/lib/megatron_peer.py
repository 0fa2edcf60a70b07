"""Processes of megatron-core on the CPU that train a model and save it as `torch_dist`.

`python megatron_peer.py CASES.json` forks the ranks of one case after the other.  Every rank also
saves what its distributed optimizer holds: for each parameter the range of its elements, and these
of each kind of state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

STEPS = 2
_KINDS = {torch.bfloat16: "BFloat16Tensor", torch.float16: "HalfTensor"}


def on_the_cpu() -> None:
    """Put the CPU in the place of the accelerator that megatron-core asks for by name."""
    # A process that collects what was written; a spawned one would import all of megatron-core.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    name_of, make = torch.Tensor.type, torch.tensor
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[assignment]
    torch.Tensor.type = lambda tensor, *to: (  # type: ignore[assignment]
        name_of(tensor, *to) if to else f"torch.cuda.{_KINDS.get(tensor.dtype, 'FloatTensor')}"
    )
    torch.tensor = lambda data, *, dtype=None, device=None: make(data, dtype=dtype)  # type: ignore[assignment]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add = lambda name, seed: None
    tracker.fork = lambda name="": contextlib.nullcontext()


def models(settings: dict[str, Any]) -> list[GPTModel | BertModel]:
    """Return the parts of the model of this rank."""
    args, dtype = settings["args"], getattr(torch, settings["dtype"])
    swiglu = args["swiglu"]
    config = TransformerConfig(
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else None,
        kv_channels=args["kv_channels"],
        ffn_hidden_size=args["ffn_hidden_size"],
        normalization=args["normalization"],
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        add_bias_linear=args["add_bias_linear"],
        add_qkv_bias=args["add_qkv_bias"],
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=settings["tensor"],
        pipeline_model_parallel_size=settings["pipeline"],
        virtual_pipeline_model_parallel_size=settings["virtual"]
        if settings["virtual"] > 1
        else None,
        **settings.get("config", {}),
    )
    parts = []
    for part in range(settings["virtual"]):
        stage = part if settings["virtual"] > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and part == 0
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        common = {
            "config": config,
            "vocab_size": args["padded_vocab_size"],
            "max_sequence_length": args["max_position_embeddings"],
            "pre_process": first,
            "post_process": last and part == settings["virtual"] - 1,
            "parallel_output": True,
            "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
            "vp_stage": stage,
        }
        parts.append(_model(args, common).to(dtype))
    return parts


def _model(args: dict[str, Any], common: dict[str, Any]) -> GPTModel | BertModel:
    """Return one part of a model."""
    if "bert_binary_head" in args:
        head = args["bert_binary_head"]
        return BertModel(
            num_tokentypes=2 if head else 0,
            transformer_layer_spec=bert_layer_local_spec,
            add_binary_head=head,
            **common,
        )
    return GPTModel(
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args["normalization"]),
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        **common,
    )


def train(parts: list[Any], replicas: list[Any], optimizer: Any) -> None:
    """Do a few steps whose gradients depend on the name and the rank of tensor parallelism only."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for step in range(STEPS):
        for part, (model, replica) in enumerate(zip(parts, replicas, strict=True)):
            replica.zero_grad_buffer()
            for name, parameter in model.named_parameters():
                tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
                key = "embedding.word_embeddings.weight" if tied else f"{part}.{stage}.{name}"
                key = key.replace("0.0.embedding.word", "embedding.word")
                seed = sum(ord(letter) * 31**place for place, letter in enumerate(key)) + rank
                generator = torch.Generator().manual_seed(seed % 2**40 + step)
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        for one in optimizer.chained_optimizers:
            one.prepare_grads()
            one.step_with_ready_grads()
        for replica in replicas:
            replica.start_param_sync(force_sync=True)


def held(parts: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return the state of this rank, by part and name: weight, range of elements, shards."""
    found = {}
    for part, model in enumerate(parts):
        for name, parameter in model.named_parameters():
            one = {"weight": parameter.detach().clone(), "range": None}
            for inner in optimizer.chained_optimizers:
                if parameter in inner.model_param_gbuf_map:
                    with contextlib.suppress(KeyError):
                        place = inner._get_model_param_range_map(parameter)["param"]
                        state = inner._get_main_param_and_optimizer_states(parameter)
                        one |= {
                            key: state[key].clone() for key in ("param", "exp_avg", "exp_avg_sq")
                        }
                        one["range"] = (place.start, place.end)
            found[f"{part}.{name}"] = one
    return found


def save(parts: list[Any], optimizer: Any, settings: dict[str, Any]) -> None:
    """Save the model and the optimizer as Megatron does."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "dp_cp_group": group,
        "distrib_optim_sharding_type": settings["sharding"],
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": settings.get("by_layer", False),
    }
    keys = ["model"] if len(parts) == 1 else [f"model{part}" for part in range(len(parts))]
    tensors = {
        key: model.sharded_state_dict(metadata=metadata)
        for key, model in zip(keys, parts, strict=True)
    }
    content: dict[str, Any] = {
        "args": argparse.Namespace(**settings["args"]),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        **tensors,
        "optimizer": optimizer.sharded_state_dict(
            tensors if len(parts) > 1 else tensors["model"], metadata=metadata
        ),
    }
    del metadata["dp_cp_group"]
    directory = Path(settings["out"]) / f"iter_{STEPS:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(content, str(directory), content_metadata=metadata)


def work(rank: int, settings: dict[str, Any]) -> None:
    """Be one rank."""
    out = Path(settings["out"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}.store",
        rank=rank,
        world_size=settings["world"],
    )
    on_the_cpu()
    virtual = settings["virtual"]
    parallel_state.initialize_model_parallel(
        settings["tensor"],
        settings["pipeline"],
        virtual if virtual > 1 else None,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(settings.get("seed", 0))
    parts = models(settings)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.get("distributed", True),
        grad_reduce_in_fp32=True,
        bucket_size=settings.get("bucket"),
        overlap_grad_reduce=settings.get("bucket") is not None,
    )
    replicas = [
        DistributedDataParallel(model.config, ddp, model, disable_bucketing=part > 0)
        for part, model in enumerate(parts)
    ]
    dtype = getattr(torch, settings["dtype"])
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        adam_beta1=0.85,
        adam_beta2=0.95,
        adam_eps=1e-6,
        weight_decay=0.2,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        loss_scale=1.0,
        params_dtype=dtype,
        use_distributed_optimizer=settings.get("distributed", True),
    )
    optimizer = get_megatron_optimizer(config, replicas)
    train(parts, replicas, optimizer)
    if settings.get("distributed", True):
        where = [
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        ]
        content = {"where": where, "state": held(parts, optimizer)}
        torch.save(content, f"{out}.{rank}.state")
    save(parts, optimizer, settings)
    dist.barrier()
    dist.destroy_process_group()


def run(settings: dict[str, Any]) -> bool:
    """Fork the ranks; return True if all ended well."""
    children = []
    for rank in range(settings["world"]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank, settings)
                status = 0
            except BaseException:  # noqa: BLE001 - the process ends here
                traceback.print_exc()
            sys.stderr.flush()
            for process in multiprocessing.active_children():
                process.terminate()
            os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    done = [run(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    sys.exit(not all(done))
