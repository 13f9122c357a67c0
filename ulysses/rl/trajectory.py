"""What a rollout is made of: token sequences that the policy has drawn, wholly or in parts.

prompt          tokens
[ p p p p ]     [ a a a . . t t . . a a a . ]     a: drawn by the policy (`sampled`), and trained
                                                  t: told to it between its turns, as a tool's result is
"""

from dataclasses import dataclass, field

from ulysses.rl.sampler import Completion


@dataclass
class Trajectory:
    """A prompt with what came after it.

    prompt: tokens, none of which is trained.
    tokens, logps, sampled: of what came after it, one entry for each token: the token, the log-probability that the
        sampler gave it, and whether the policy has drawn it. The others are not trained, and their logps mean nothing.
    ended: whether it ended by itself and was not cut.
    group: trajectories with the same number are compared with each other; by default they answer the same prompt.
    episode: the branches of one episode have the same number, and one score.
    row: the number of the data's row.
    scores, score: by the names of the rewards, and their weighted sum.
    advantages: one for each of `tokens` if they are given, and not computed from the scores.
    """

    prompt: list[int]
    tokens: list[int]
    logps: list[float]
    sampled: list[bool]
    ended: bool
    group: int = 0
    episode: int = 0
    row: int = 0
    score: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        prompt: list[int],
        completion: Completion,
        *,
        group: int,
        episode: int,
        row: int = 0,
    ) -> "Trajectory":
        """Return the trajectory of one turn."""
        tokens = completion.tokens
        return cls(
            prompt,
            tokens,
            completion.logps,
            [True] * len(tokens),
            completion.ended,
            group,
            episode,
            row,
        )
