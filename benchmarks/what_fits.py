"""Print, as Markdown, which sequence lengths fit on common machines: python benchmarks/what_fits.py > docs/what-fits.md

Predicted by ulysses/memory/plan.py; needs no GPU and no weights.
"""

from math import gcd

from models.arch import ARCHITECTURES, ModelConfig
from ulysses.memory.case import GIB, Machine, Model, Options
from ulysses.memory.plan import FILL, HOST_FILL, longest_sequence
from ulysses.memory.tiling import head_chunk_counts
from ulysses.training.memory import plain_model

MACHINES = (
    (1, 24, 96),
    (4, 24, 256),
    (1, 80, 192),
    (8, 80, 1024),
    (8, 141, 1536),
)  # GPUs, GiB each, host GiB
SIZES = (
    "qwen2.5-0.5b", "llama3.2-1b", "qwen2.5-1.5b", "qwen2.5-3b", "llama3.2-3b", "qwen2.5-7b", "llama3.1-8b",
    "qwen2.5-14b", "qwen2.5-32b", "llama3-70b", "qwen2.5-72b",
)  # fmt: skip
RANK = 16
LIMIT = 16 << 20  # tokens; nothing longer is worth a table

TEXT = f"""# What fits

Longest single sequence in tokens for one training step (SFT), **predicted** by the planner, not measured: bfloat16
weights, float32 AdamW states, sequence parallelism over all GPUs of the machine; {FILL:.0%} of each GPU's memory may be taken,
CUDA and NCCL included, and {HOST_FILL:.0%} of the host's, a checkpoint on its way to the disk included. All else is `auto`:
recompute by layer, MLP and vocabulary in tiles, heads in groups where only that fits. `+ host` adds `memory.offload = "auto"`
with the host memory in the column's head, and, marked `\\*`, `memory.offload_optimizer = true` where nothing fits without it (16
bytes per trained parameter move to the host, and the update is slow). `-` means that not even 1,024 tokens fit. "141 GiB" is a
GPU of that size; an H200 reports 139.8. A pair (DPO, RM) holds two sequences: half the length on each side.

Where it was measured (1 to 4 H200, layers of Llama-3-8B, Qwen2.5-7B and Qwen2.5-0.5B, up to 1,048,576 tokens, full
fine-tuning) the planner is within 5% for memory (`python benchmarks/plan_accuracy.py`). Other cards, adapters, offload and
lengths beyond that are extrapolated; CUDA and NCCL are counted as on H200s, 1.2 GiB and with several GPUs 3.2 GiB, of which
smaller cards may need less. A length says nothing about the time a step takes, and the model's own `max_position_embeddings`
may be shorter.

Made by `python benchmarks/what_fits.py > docs/what-fits.md`. Your own case:
`python train.py --config FILE.toml --dry-run --gpus 8 --gpu-memory 80 --host-memory 1024`.
"""


def model_of(shape: ModelConfig, rank: int) -> Model:
    """Return a shape for full fine-tuning (rank 0) or with adapters of that rank on every projection."""
    D, F = shape.hidden_size, shape.intermediate_size
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return plain_model(
        shape, adapters=shape.num_hidden_layers * rank * (2 * (D + q) + 2 * (D + k) + 3 * (D + F))
    )


def cell(model: Model, machine: Machine, offload: str) -> str:
    """Return the longest sequence; with a host, its optimizer moves there where nothing fits otherwise (marked)."""
    chunks = head_chunk_counts(model.heads, model.kv_heads, gcd(machine.gpus, model.heads))
    for optimizer in (False, True) if offload == "auto" else (False,):
        options = Options(saves=True, offload_optimizer=optimizer, head_chunks=chunks)
        length = longest_sequence(
            model, machine, machine.gpus, options, offload=offload, limit=LIMIT
        )
        mark = " \\*" if optimizer else ""
        if length >= LIMIT // 2:
            return f"> {LIMIT >> 21}M{mark}"
        if length >= 1024:
            return (f"{length / 2**20:.1f}M" if length >= 1 << 20 else f"{length >> 10}k") + mark
    return "-"


def page() -> str:
    """Return the whole page as Markdown."""
    lines = [TEXT]
    for title, rank in (("Full fine-tuning", 0), (f"LoRA, rank {RANK}, all projections", RANK)):
        lines.append(f"## {title}\n")
        heads = [
            f"{g} x {gib} GiB{kind}"
            for g, gib, host in MACHINES
            for kind in ("", f" + host {host}")
        ]
        lines.append(f"| model | {' | '.join(heads)} |")
        lines.append("|---" * (1 + len(heads)) + "|")
        for name in SIZES:
            model = model_of(ARCHITECTURES[name], rank)
            cells = [
                cell(model, Machine(g, gib * GIB, host * GIB), offload)
                for g, gib, host in MACHINES
                for offload in ("none", "auto")
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    print(page(), end="")


if __name__ == "__main__":
    main()
