"""Ulysses without an engine: torchrun --nproc_per_node 2 examples/library.py, or plain python on one process."""

import os

import torch
import torch.distributed as dist

from losses import linear_logprobs, token_nll
from ulysses import ParallelMesh, Sequence, UlyssesAttention, pack_shard

# documents of one packed batch; any lengths, on any number of ranks
LENGTHS = (700, 1, 93, 250)


def gradient_norm(mesh: ParallelMesh, documents: list[Sequence]) -> float:
    torch.manual_seed(0)  # the same weights on every rank
    embed, out = torch.nn.Embedding(100, 96), torch.nn.Linear(96, 96)
    q, k, v = torch.nn.Linear(96, 96), torch.nn.Linear(96, 32), torch.nn.Linear(96, 32)
    attention = UlyssesAttention(mesh, num_heads=6, num_kv_heads=2, head_dim=16)
    mine = pack_shard(documents, mesh)  # this rank's tokens, targets and weights
    x = embed(mine.tokens)
    heads = (layer(x).unflatten(-1, (-1, 16)) for layer in (q, k, v))
    x = x + out(attention(*heads, plan=mine.attention_plan).flatten(-2))
    logps = linear_logprobs(x, embed.weight, mine.targets.clamp(min=0)).logps
    count = sum(len(document.tokens) - 1 for document in documents)
    loss = token_nll(logps, mine.loss_weights)[0] / count  # local sum / global count
    grads = torch.autograd.grad(
        loss, [p for m in (embed, q, k, v, out) for p in m.parameters()]
    )
    flat = torch.cat([g.flatten() for g in grads])
    if mesh.sp_group is not None:
        # a rank holds its tokens' share: the sum is the gradient
        dist.all_reduce(flat, group=mesh.sp_group)
    return flat.norm().item()


if __name__ == "__main__":
    if "RANK" in os.environ:  # a launcher has started several processes
        dist.init_process_group("gloo")
    draw = torch.Generator().manual_seed(1)
    documents = [
        Sequence(torch.randint(100, (n,), generator=draw), torch.ones(n)) for n in LENGTHS
    ]
    world = int(os.environ.get("WORLD_SIZE", 1))
    mesh = ParallelMesh(world, num_heads=6)
    many = gradient_norm(mesh, documents)
    one = gradient_norm(ParallelMesh(1), documents)
    if mesh.is_main:
        print(f"gradient norm on {world} processes {many:.6f}, on one process {one:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()
