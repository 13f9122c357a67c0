"""What samplers have in common: the one of this process (engine_sampler.py), and servers (outside_sampler.py)."""

from collections.abc import Iterable, Mapping
from itertools import chain

from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.rl.sampler import Completion, Requests, SamplingOptions


class AnySampler:
    """Who answers requests."""

    mesh: ParallelMesh
    options: SamplingOptions

    def synchronise(self, rollout: int = 0) -> None:
        """Bring it the current weights, if the rollout asks for it; all ranks call it together."""

    def check_gap(self, gap: float) -> None:
        """Compare the log-probabilities of the first rollout, or the first one with a server that came back.

        Args:
            gap: mean |trainer - sampler| per token.

        Raises UserCodeError if the same weights cannot explain it.
        """

    def sample_together(
        self, prompts: Mapping[int, list[int]], rollout: int
    ) -> dict[int, Completion]:
        """Answer prompts, each on one rank, and return all completions by the prompts' numbers in the rollout.

        All ranks call it together. Where servers have just had their first weights, their answers are compared with
        the trainer's log-probabilities.
        """
        mine = [*prompts][self.mesh.rank :: self.mesh.world_size]
        drawn = gather(self.sample({n: prompts[n] for n in mine}, rollout))
        return dict(sorted(chain(*(each.items() for each in drawn))))

    def sample(
        self, prompts: Mapping[int, Iterable[int]], rollout: int = 0
    ) -> dict[int, Completion]:
        """Return the completion of every prompt, by the prompt's number in the rollout, as `serve` does it."""
        requests = Requests(prompts, self.options.max_new_tokens)
        self.serve(requests, rollout)
        return requests.completions

    def serve(self, requests: Requests, rollout: int = 0) -> None:
        """Answer requests until there will be none."""
        raise NotImplementedError

    def close(self) -> None:
        """Let a call of `serve` in another thread end soon, without asking for more."""
