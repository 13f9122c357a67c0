"""What merging adapters onto other weights than those that they were trained on does to the logits.

    quantised base + adapters   --weight by weight-->  logits  --+
                                                                 +-->  the largest difference
    original weights, merged    --weight by weight-->  logits  --+

A layer's weights are held only while it runs, in float32 on the CPU, so that a model of any size can be compared.

Shapes: S sampled tokens, D width, V vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.decoder import empty_model
from models.hf_format import WeightFiles
from models.rope import rotary_table
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh

TOKENS = 64


@torch.no_grad()
def sample_logits(config: ModelConfig, weights: Iterable[Tensor]) -> Tensor:
    """Return the logits [S, V] of random tokens, or a reward model's values [S, 1].

    `weights` are the model's parameters in their own order; each is asked for when it is needed.
    """
    parameters, decoder = iter(weights), empty_model(config).model
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=draw)
    batch = pack_shard([Sequence(tokens, torch.ones(TOKENS))], ParallelMesh())
    rope = rotary_table(batch.positions, config)

    def filled(module: nn.Module) -> nn.Module:
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            parameter.copy_(next(parameters).view_as(parameter))
        return module

    embedding = next(parameters).view(-1, config.hidden_size)
    hidden = embedding[tokens].float()
    for layer in decoder.layers:
        hidden = filled(layer)(hidden, rope, batch.attention_plan)
        layer.to("meta")
    hidden = filled(decoder.norm)(hidden)
    head = next(parameters, embedding)  # there is none if the embeddings are tied
    return hidden @ head.view(-1, config.hidden_size).float().T


def merge_note(
    config: ModelConfig, folder: Path, trained: Iterable[tuple[str, Tensor]], kind: str
) -> str:
    """Say in a sentence how far the logits of the merged model in `folder` are from the trained ones.

    `trained` yields the whole model's parameters in their order: the base as it was quantised, to `kind`, with the
    adapters added.
    """
    files = WeightFiles(folder)
    names = empty_model(config, reward="score.weight" in files.tensors).named_parameters()
    exact = sample_logits(config, (tensor for _, tensor in trained))
    merged = sample_logits(config, (files.read(name) for name, _ in names))
    return (
        f"the adapters were trained on a base quantised to {kind}; after merging, the logits of {TOKENS} random tokens "
        f"differ by at most {(merged - exact).abs().max():.3g} from those of that base with the adapters, whose "
        f"standard deviation is {exact.std():.3g}"
    )
