"""From the inputs of a run to its parts: opened data, loaders of steps, and the partitioned models."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import nn

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from models.kinds import model_class
from ulysses.check.input_files import RunInputs, check_examples
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.data.read.sources import parse_sources
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader
from ulysses.data.serve.tokenise import Tokenising
from ulysses.memory.levels import LayerMemory
from ulysses.memory.offload import Offloader
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.layer_cost import LayerSetup, layer_costs
from ulysses.plan.step_cost import Plan
from ulysses.stages.base import Stage
from ulysses.zero.construct import build_partitioned
from ulysses.zero.engine import TrainedEngine, ZeroEngine
from ulysses.zero.settings import ZeroSettings, derive
from ulysses.zero.update import ParameterGroup


def open_data(inputs: RunInputs) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Open the training and held-out data, tokenising them once per node if needed.

    Raises ConfigError for data that are missing or broken, or that the run cannot train on.
    """
    config, data, stage = inputs.config, inputs.config.data, inputs.stage

    def opened(setting: object, kind: str, held_out: bool = False) -> TokenizedDataset:
        sources = parse_sources(setting)
        with error_context("data", absent=any(source.is_on_hub for source in sources)):
            tokenising = Tokenising(
                sources,
                kind,
                inputs.tokenizer,
                inputs.template,
                data,
                held_out,
                vocabulary=inputs.shape.vocab_size,
            )
            return tokenising.open(share_prompts=config.batch.share_prompts)

    train = opened(data.train, stage.trained_type or stage.dataset_type)
    held_out = None
    if data.eval_fraction:
        held_out = opened(data.train, stage.dataset_type, held_out=True)
    elif data.eval:
        held_out = opened(data.eval, stage.dataset_type)
    with error_context():
        check_examples(stage, train, held_out)
    return train, held_out


def step_loader(
    inputs: RunInputs,
    dataset: TokenizedDataset,
    tokens_per_microbatch: int,
    groups: int,
    group: int = 0,
    *,
    evaluation: bool = False,
) -> StepLoader:
    """Serve a dataset's steps, in micro-batches of so many tokens, to one of several data-parallel groups.

    An evaluation takes every example once, in order.
    """
    config, shape = inputs.config, inputs.shape
    # "auto" was chosen by the training data; other data may have longer examples
    if config.batch.tokens_per_microbatch == "auto":
        tokens_per_microbatch = max(tokens_per_microbatch, int(dataset.lengths.max()))
    return StepLoader(
        inputs.stage.groups_of(dataset),
        inputs.stage.requirements.examples_per_load,
        tokens_per_microbatch=tokens_per_microbatch,
        seed=config.run.seed,
        data_parallel_size=groups,
        dp_rank=group,
        shuffle=not evaluation,
        attention_length=ATTENTION_WIDTHS * shape.hidden_size,
        windows=shape.windows,
    )


def trained_engine(
    stage: Stage,
    weights: InitialWeights,
    mesh: ParallelMesh,
    plan: Plan,
    attention: str,
) -> TrainedEngine:
    """Create the model that a stage trains as ZeRO-3 shards, with its optimizer; all ranks call it together.

    `plan` says what its layers keep for the backward pass; `attention` names the kernel by which they attend.
    """
    config = stage.config
    requirements = stage.requirements
    memory = layer_memory(plan)
    model, optimizer = config.model, config.optimizer
    chosen_class = model_class(reward=stage.reward, value=requirements.value)
    if model.lora.rank:
        from models.lora import add_adapters

    def create() -> nn.Module:
        module = chosen_class(
            weights.shape,
            mesh,
            quantize=model.quantize,
            attention=attention,
            memory=memory,
        )
        if model.freeze_router:
            for layer in module.model.layers:
                if layer.kind.feed_forward == "experts":
                    layer.mlp.router_module.requires_grad_(False)
        return add_adapters(module, model.lora) if model.lora.rank else module

    settings = _zero_settings(config, weights.shape)
    built = build_partitioned(create, settings, weights.fill, resident=plan.resident).train()
    groups = parameter_groups(
        built,
        optimizer.weight_decay,
        requirements.scopes,
        betas=optimizer.betas,
        eps=optimizer.eps,
        eight_bit=optimizer.moments == "8bit",
    )
    return TrainedEngine(
        built,
        settings,
        groups,
        offload_optimizer=config.memory.offload_optimizer,
        reduce_between=getattr(torch, optimizer.reduce_dtype),
        graphs=memory.graphs,
    )


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    scopes: dict[str, float] | None = None,
    **adamw: Any,
) -> list[ParameterGroup]:
    """Split the trainable parameters into groups: matrices decay, norms and biases do not. A group has one dtype.

    Args:
        scopes: submodules with a factor for their learning rate; each has groups of its own, and the first one takes
            all parameters that are in no other. None is one scope for all.
        adamw: further fields of every group: betas, eps and eight_bit.
    """
    rates = scopes or {"default": 1.0}
    members: dict[tuple[str, bool, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            first = name.partition(".")[0]
            scope = first if first in rates else next(iter(rates))
            # a sharded parameter is itself empty between its uses
            shape = getattr(p, "shard", p).shape
            # the biases of experts have two dimensions
            decays = len(shape) > 1 and "_bias" not in name
            members[scope, decays, p.dtype].append(p)
    return [
        ParameterGroup(
            parameters, weight_decay if decays else 0.0, scope, rates[scope], **adamw
        )
        for (scope, decays, _), parameters in members.items()
    ]


def layer_memory(plan: Plan) -> LayerMemory:
    """Return what the layers of the trained model keep, and where.

    The first layers' activations wait longest for their backward pass, so they leave the GPU first.
    """
    away = plan.offloaded_layers
    offloader = None
    if away:
        offloader = Offloader("cuda" if torch.cuda.is_available() else "cpu")
    return LayerMemory(
        plan.levels, offloader=offloader, offloaded_layers=away, graphs=plan.graphs
    )


def frozen_engine(
    config: Config,
    weights: InitialWeights,
    mesh: ParallelMesh,
    attention: str,
    *,
    reward: bool = False,
    resident: bool = False,
) -> ZeroEngine:
    """Create a language model or a reward model that is only run; `resident` keeps its weights whole on every rank."""
    chosen_class = model_class(reward=reward)
    settings = _zero_settings(config, weights.shape)
    create = partial(chosen_class, weights.shape, mesh, attention=attention)
    built = build_partitioned(create, settings, weights.fill, resident=resident)
    return ZeroEngine(built.eval().requires_grad_(False), settings)


def _zero_settings(config: Config, shape: ModelConfig) -> ZeroSettings:
    largest = max(layer.parameters for layer in layer_costs(shape, LayerSetup()))
    return derive(
        dtype=getattr(torch, config.model.dtype),
        offload_parameters=config.memory.offload_parameters,
        layer_matrices=int(largest),
        vocabulary_matrices=2 * shape.vocab_size * shape.hidden_size,
        raw=config.deepspeed.zero_optimization,
    )
