"""Small models on one GPU, where the host decides: full training steps on packs of many short documents.

    python benchmarks/small_models.py --peer plain_loop.py

`--peer` names a plain training loop that takes the shape (--hidden --intermediate --heads --kv --layers --vocab --tie),
--length and --documents, prints a JSON line with step_s for each number of documents, and runs after ours on the same
GPU. Any of train.py's settings may follow.
"""

from typing import Any

from common import add_options, launch, plain_parser, table

from models.arch import ARCHITECTURES

# SmolLM2-135M's shape; of Qwen2.5's the published ones
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
PEER = {
    "hidden": "hidden_size", "intermediate": "intermediate_size", "heads": "num_attention_heads",
    "kv": "num_key_value_heads", "layers": "num_hidden_layers", "vocab": "vocab_size",
}  # fmt: skip
# name, shape to start from, changes, documents of a step, their length
CASES: list[tuple[str, str, dict[str, Any], list[int], int]] = [
    ("SmolLM2-135M", "llama3-8b", SMOLLM2, [28, 256], 256),
    ("Qwen2.5-0.5B", "qwen2.5-0.5b", {}, [16], 512),
    ("Qwen2.5-1.5B", "qwen2.5-1.5b", {}, [16], 512),
]
COLUMNS = "model documents seq graphs seconds peer_s ratio tok_s_gpu mfu peak_gib".split()


def main() -> None:
    p = plain_parser(__doc__)
    add_options(
        p,
        models=([name for name, *_ in CASES], "some of them"),
        steps=(9, "optimizer steps"),
        peer=("", "the plain loop's file"),
    )
    a, rest = p.parse_known_args()
    rows: list[dict[str, Any]] = []
    for name, arch, changes, counts, length in CASES:
        if name not in a.models:
            continue
        shape, peers = vars(ARCHITECTURES[arch]) | changes, {}
        if a.peer:
            asked = [f"--{key}={shape[field]}" for key, field in PEER.items()]
            asked += ["--tie"] * shape["tie_word_embeddings"]
            asked += [
                f"--length={length}",
                f"--steps={a.steps + 3}",
                "--documents",
                *map(str, counts),
            ]
            peers = {row["tokens"]: row["seconds"] for row in launch(1, [a.peer, *asked])[0]}
        given = [f"--model.config.{key}={value}".lower() for key, value in changes.items()]
        for count in counts:
            options = [
                f"--arch={arch}",
                f"--seq={length}",
                f"--documents={count}",
                f"--steps={a.steps}",
            ]
            found, _ = launch(1, ["benchmarks/throughput.py", *options, *given, *rest])
            for row in found:
                peer = peers.get(row["tokens"])
                row |= {"model": name, "peer_s": peer}
                row["ratio"] = peer and f"{peer / row['seconds']:.2f}x"
                rows.append(row)
    print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
