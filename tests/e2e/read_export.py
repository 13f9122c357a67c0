"""Read exports with the transformers that is installed; test_export_elsewhere.py runs it in two environments.

python read_export.py FOLDER...    prints what `read_all` returns, as JSON
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

CONVERSATION = [
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "So. <|im_end|>"},
]


@torch.no_grad()
def read(folder: Path) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (folder / "adapter_config.json").exists():
        from peft import PeftModel

        settings = json.loads((folder / "adapter_config.json").read_text())
        start = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
        model = PeftModel.from_pretrained(start, folder).eval()
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt")
    ids = inputs["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")  # all that the model may say
    said = model.generate(
        **inputs, max_new_tokens=4, do_sample=False, prefix_allowed_tokens_fn=lambda *_: [end],
        generation_config=model.generation_config,
    )  # fmt: skip
    return {
        "text": text, "ids": ids[0].tolist(), "eos": tokenizer.eos_token,
        "special": sorted(tokenizer.all_special_tokens),
        "said": said.shape[1] - ids.shape[1], "logits": model(ids).logits[0, -1, :8].tolist(),
    }  # fmt: skip


def read_all(folders: list[Path]) -> dict[str, object]:
    return {"version": transformers.__version__, "found": [read(folder) for folder in folders]}


if __name__ == "__main__":
    print(json.dumps(read_all([Path(folder) for folder in sys.argv[1:]])))
