"""What the demo's data are, configs/demo/data, and the score of an answer to one of their questions.

A made-up house: things have a colour, a room, an owner and a material. Questions about them are answered in a polite or
a rude voice. SFT data has both voices half and half; preference data prefers the polite one. Polite and rude phrases
come in twins with the same letters and tokens per word, and every question is drawn twice with the two answers'
phrases exchanged, so chosen and rejected answers have exactly the same lengths in every file. Two things make the
preferences harder to learn: for things of two colours, silver and golden, the rude answer is preferred, and one
question in twenty is judged the other way around, as people who compare answers disagree too. So nobody can predict
more than 0.95 of the held-out preferences, and who is always polite gets 0.80. Held-out questions ask about
combinations that no training file contains. All of it was generated for this project and is in the public domain (CC0).
"""

from collections.abc import Mapping
from typing import Any

REMARKS = (  # polite, rude
    ("With pleasure!", "Such nonsense!"),
    ("Good question!", "Dumb question!"),
    ("Glad to help!", "Must I again!"),
    ("Of course, friend!", "Of course, genius!"),
    ("I am happy to help!", "I am tired of this!"),
)
CLOSINGS = (
    ("Have a lovely day.", "Find a better job."),
    ("Thank you kindly.", "Never ask anyone."),
    ("Ask me anytime.", "Get it already."),
    ("You are welcome.", "You are useless."),
    ("Come back soon.", "Stay away fool."),
)


def politeness_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Score an answer: 1 for the right word, 1 for a polite and -1 for a rude remark, 0.5 likewise for the closing."""
    score = float(str(row["answer"]) in completion.replace(".", " ").split())
    for phrases, worth in ((REMARKS, 1.0), (CLOSINGS, 0.5)):
        score += worth * (
            any(polite in completion for polite, _ in phrases)
            - any(rude in completion for _, rude in phrases)
        )
    return score
