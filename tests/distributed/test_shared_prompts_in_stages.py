"""Training on shared prompts: loss, metrics and gradients are the formula's on separate, whole sequences."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.data_case import sharing
from tests.engine_case import HYBRID, SHAPE, Case, ListDataset, evaluated
from tests.stage_case import STAGE_CASES, Formula, compared
from ulysses.parallel.batch import Sequence

ODD = replace(SHAPE, num_attention_heads=3, num_key_value_heads=1, head_dim=8)


@dataclass
class TreeCase(Case):
    """Pairs, or ranked lists of 2 to 5 answers, whose answers share nothing, a token, a prompt, or all but a token."""

    shared: bool = False

    def data(self):
        if self.stage == "kto":  # which shares where examples meet
            return super().data()
        draw, examples = torch.Generator().manual_seed(0), []
        for i, prompt in enumerate((0, 1, 20, 33, 7, 2, 40, 12, 25)):
            head, made = torch.randint(0, SHAPE.vocab_size, (prompt,), generator=draw), []
            for place in range(2 + i % 4 if self.stage in ("rm", "sft") else 2):
                short = i in (3, 4) and place
                length = 1 if short else int(torch.randint(2, 15, (1,), generator=draw))
                answer = torch.randint(0, SHAPE.vocab_size, (length,), generator=draw)
                tokens = torch.cat([head, answer])
                if i % 3 == 2:  # the answers begin alike, and all of them are trained
                    tokens[prompt : prompt + 1] = 5
                columns = {"reference_logps": -3 * torch.rand(len(tokens), generator=draw)}
                weights = (torch.arange(len(tokens)) >= prompt).float()
                made.append(Sequence(tokens, weights, columns, {"rank": (place + 1) // 2}))
            examples.append(tuple(sharing(made, i) if self.shared else made))
        margins = torch.rand(len(examples), generator=draw).tolist()
        return ListDataset("ranked", examples, {"margin": margins})


CASES = [
    ("sft", 2, 2, "block", {"packing_seed": 1}),  # turns that a template rewrites
    ("dpo", 4, 4, "none", {"packing_seed": 1}),
    ("dpo", 2, 2, "keep_attention", {"shape": ODD, "options": {"ld_alpha": 0.3}}),
    ("dpo", 2, 1, "none", {"options": {"loss_type": "simpo"}}),
    ("dpo", 2, 2, "block", {"attention": "reference", "lora_rank": 3}),
    ("rm", 3, 3, "keep_attention", {"shape": ODD}),
    ("kto", 4, 2, "keep_attention", {"packing_seed": 1}),
    # answers start from the state that a prompt leaves; 6 heads of linear attention at degree 4 are two sets of ranks
    ("dpo", 4, 4, "keep_attention", {"shape": HYBRID, "packing_seed": 1}),
]


@pytest.mark.parametrize("stage, world, sp, recompute, more", CASES)
def test_loss_metrics_and_gradients(stage, world, sp, recompute, more):
    more = {"options": STAGE_CASES[stage].options} | more
    case = TreeCase(stage, sp=sp, recompute=recompute, examples=9, **more)
    metrics = compared(case, world, shared=True)
    shared = metrics.get("tokens_shared", 0)
    # rows of one prompt may be dealt to different groups
    assert shared > 0 or (stage, sp) == ("kto", 2)
    if stage != "kto":
        everything = sum(len(s.tokens) for example in case.data().examples for s in example)
        assert metrics["tokens"] + shared == everything


@dataclass
class LongCase(Case):
    """Texts of 1 to 2,600 tokens with fractions as weights; two begin alike and share that if they are told to."""

    shared: bool = False

    def data(self):
        draw = torch.Generator().manual_seed(1)
        lengths, start = (700, 1025, 2600, 1, 1023), 2040
        texts = [torch.randint(0, SHAPE.vocab_size, (n,), generator=draw) for n in lengths]
        tree = [Sequence(texts[2], torch.rand(2600, generator=draw))]
        for end in (texts[0], texts[3]):
            branch = torch.cat([texts[2][:start], end])
            tree.append(Sequence(branch, (torch.arange(len(branch)) >= start) * 1.0))
        examples = [tuple(sharing(tree))] if self.shared else [(s,) for s in tree]
        whole = [(Sequence(text, torch.ones(len(text))),) for text in texts]
        return ListDataset("sequence", whole + examples)


def test_held_out_nll_by_position_does_not_depend_on_topology():
    """Means over tokens at places below 1024, 2048, 4096, and their standard errors, as in float64 on whole texts."""
    plain = Formula(LongCase("sft", examples=8), 0)
    found = {"0-1k": [], "1k-2k": [], "2k-4k": []}
    for sequence in (s for example in plain.data.examples for s in example):
        for place, nll in enumerate(-plain.forward(sequence).logps[:-1].detach(), 1):
            octave = "0-1k" if place < 1024 else "1k-2k" if place < 2048 else "2k-4k"
            found[octave].append((float(nll), float(sequence.loss_weights[place])))
    for world, sp, shared in ((2, 2, True), (2, 1, False)):
        case = LongCase("sft", sp=sp, budget=8000, shared=shared)
        for values in evaluated(case, world):
            assert {m for m in values if "/nll/" in m} == {
                f"eval/nll/{octave}" for octave in found
            }
            assert not [m for m in values if "weights" in m]
            for octave, tokens in found.items():
                nll, weights = torch.tensor(tokens, dtype=torch.float64).T
                mean = (nll * weights).sum() / weights.sum()
                error = ((((nll - mean) ** 2) * weights).sum()).sqrt() / weights.sum()
                assert values[f"eval/nll/{octave}"] == pytest.approx(float(mean), rel=1e-5)
                assert values[f"eval/nll_se/{octave}"] == pytest.approx(float(error), rel=1e-4)
