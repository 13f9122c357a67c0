"""Plain transformers and FSDP2, with Ulysses attention: torchrun --nproc_per_node 2 examples/fsdp2.py

The processes share one packed batch and take a few AdamW steps; the losses are the same on any number of processes.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from losses import linear_logprobs, token_nll
from ulysses import ParallelMesh, Sequence, UlyssesAttention, pack_shard

# documents of the packed batch; any lengths, on any number of ranks
LENGTHS = (300, 1, 93, 150)
SHAPE = LlamaConfig(vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
                    num_attention_heads=6, num_key_value_heads=2, attn_implementation="ulysses")  # fmt: skip

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
heads, kv_heads = SHAPE.num_attention_heads, SHAPE.num_key_value_heads
mesh = ParallelMesh(world, num_heads=heads)  # all processes share each batch
attend = UlyssesAttention(mesh, heads, kv_heads, SHAPE.head_dim)


def ulysses(module, query, key, value, attention_mask, *, plan, scaling, **_):
    """Attend as transformers asks: [1, heads, tokens, head dim] in, [1, tokens, heads, head dim] out."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key, value, plan=plan, softmax_scale=scaling)[None], None


class SummedLoss(torch.nn.Module):
    """This rank's sum of the negative log-likelihoods; the head's tiles never hold all logits."""

    def __init__(self):
        super().__init__()
        self.llama = LlamaForCausalLM(SHAPE)

    def forward(self, batch):
        positions, plan = batch.positions[None], batch.attention_plan
        hidden = self.llama.model(batch.tokens[None], position_ids=positions, plan=plan)[0][0]
        targets = batch.targets.clamp(min=0)
        logps = linear_logprobs(hidden, self.llama.lm_head.weight, targets).logps
        return token_nll(logps, batch.loss_weights)[0]


AttentionInterface.register("ulysses", ulysses)
torch.manual_seed(0)  # the same weights on every rank
model = SummedLoss().to(device)
for layer in model.llama.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

draw = torch.Generator().manual_seed(1)
documents = [Sequence(torch.randint(256, (n,), generator=draw), torch.ones(n)) for n in LENGTHS]
# trained tokens of the whole batch, known before the first backward pass
count = sum(n - 1 for n in LENGTHS)
batch = pack_shard(documents, mesh, device)  # this rank's tokens, targets and weights
for step in range(5):
    loss = model(batch) / count
    (world * loss).backward()  # FSDP takes the mean over the processes
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())  # the sum of the processes' shares
    if rank == 0:
        print(
            f"step {step}: loss {loss.item():.6f}, gradient norm {norm.item():.6f}", flush=True
        )
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # interpreter shutdown can abort while communication threads still run
