"""How often a step carries prompts, and of how many attention groups.

Every group replaces its own sequences, at random steps. All groups wait for the slowest at the experts, so that a step
with one group's prompt takes as long as one with a prompt of each: engines can let a prompt wait for those of other
groups, and lose what its slot would have decoded meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple


class PromptMeeting(NamedTuple):
    """How prompts wait for each other.

    Attributes:
        prompts: That come into the same step, each of another group, on average.
        waits: Steps that one of them waits, on average.
        running_share: Of the requests in flight, those that decode and do not wait.
    """

    prompts: float
    waits: float
    running_share: float


def prompt_meeting(wait_steps: int, batch: int, dp: int, answer_steps: float) -> PromptMeeting:
    """Prompts that one of them waits for.

    In the steps that the first one waits at most, others arrive at an even rate, and all of them start together. The
    first waits longest and the last not at all. [assumed] of engines, which wait for a prompt of each group or for
    so many steps. A request waits no longer than an answer takes, whatever the setting.

    Args:
        wait_steps: Most steps that a prompt waits; 0 where none does.
        batch: Requests of one microbatch over all attention groups.
        dp: Attention groups.
        answer_steps: Steps of an answer.

    >>> prompt_meeting(60, 256, 8, 1024)  # a slot waits 14 of 1024 steps until 8 groups have one each
    PromptMeeting(prompts=8, waits=14.0, running_share=0.9865125240847784)
    >>> prompt_meeting(60, 64, 8, 1024).prompts
    4.75
    """
    per_step = batch / answer_steps
    prompts = min(dp, 1 + min(wait_steps, answer_steps) * per_step)
    waits = (prompts - 1) / (2 * per_step)
    return PromptMeeting(prompts, waits, 1 / (1 + waits / answer_steps))


class MixedSteps(NamedTuple):
    """The steps that carry prompts.

    Attributes:
        share: Of all steps.
        prompts: In one of them, on all groups; a fraction where a prompt is cut into chunks.
        busiest_prompts: The same of a group that has any.
    """

    share: float
    prompts: float
    busiest_prompts: float


def mixed_steps(per_step: float, chunks: int, groups: int, met: float) -> MixedSteps:
    """Steps with prompts where so many are computed per step.

    A group's steps carry a chunk as often as its prompts take steps; groups whose prompts meet are as one. Share,
    prompts and the busiest group's never fall when prompts per step grow, which bounds of the exact optimum rest on.

    Args:
        per_step: Prompts per step, of all groups.
        chunks: Steps that a prompt takes.
        groups: Attention groups with requests.
        met: Prompts that come into the same step; see `PromptMeeting`.

    >>> mixed_steps(0.25, 1, 1, 1)
    MixedSteps(share=0.25, prompts=1.0, busiest_prompts=1.0)
    >>> mixed_steps(0.25, 1, 4, 4)
    MixedSteps(share=0.0625, prompts=4.0, busiest_prompts=1.0)
    """
    own_share = min(1.0, per_step * chunks / groups)
    streams = max(1.0, groups / met)
    share = own_share if streams == 1 else 1 - (1 - own_share) ** streams
    return MixedSteps(share, per_step / share, per_step / groups / own_share)
