"""Whether ``[narrowcast.placement]`` can work with a job."""

from narrowcast.placement.correlation import MIN_TOKENS
from narrowcast.util import check_writable
from torchtitan_ext.across_ranks import naming
from torchtitan_ext.job import Job
from torchtitan_ext.placement.dispatcher import check_placeable
from torchtitan_ext.placement.planner import Planner
from torchtitan_ext.placement.source import (
    SECTION,
    given_key,
    plan_file,
    read_placement,
    read_trace,
)
from torchtitan_ext.private import check_checkpoints, owner
from torchtitan_ext.routed_model import RoutedModel


def check_placement(job: Job) -> None:
    """Check that the section can work with a job, apart from the files that it names.

    Raises:
        ValueError: it cannot; the message names the key and the cure.
    """
    config, steps = job.config.narrowcast.placement, job.config.training.steps
    degree = job.config.parallelism.expert_parallel_degree
    if degree == 1:
        raise ValueError(
            f"{SECTION} cannot work with parallelism.expert_parallel_degree = 1: all experts "
            "are on one rank. Give a degree above 1, or no placement"
        )
    if degree % config.nodes:
        raise ValueError(
            f"{SECTION}.nodes = {config.nodes} does not divide "
            f"parallelism.expert_parallel_degree = {degree}"
        )
    if config.after_steps > steps:
        raise ValueError(
            f"{SECTION}.after_steps = {config.after_steps}, but training ends with "
            f"training.steps = {steps}"
        )
    check_checkpoints(owner(type(job.config.checkpoint)))
    model = RoutedModel.of_job(job, SECTION)
    if model.num_experts % degree:
        raise ValueError(
            f"{SECTION} cannot work with {model.num_experts} experts and "
            f"parallelism.expert_parallel_degree = {degree}: give a degree that divides the experts"
        )
    for name, moe in job.moe_layers.items():
        check_placeable(moe.routed_experts.token_dispatcher, name)
    if config.after_steps:
        Planner(config, model).recording().check(job)
        _check_tokens(job)


def check_placement_files(job: Job) -> None:
    """Raise a ValueError if the files that the section names are not of this job, or plans cannot
    be written."""
    config, model = job.config.narrowcast.placement, RoutedModel.of_job(job, SECTION)
    with naming(given_key(config)):
        if config.file:
            read_placement(config.file, model)
        elif config.trace:
            read_trace(config, model)
        else:
            check_writable(plan_file(job.config, 0))


def _check_tokens(job: Job) -> None:
    """Whether ``after_steps`` gives as many tokens as a placement takes."""
    after_steps = job.config.narrowcast.placement.after_steps
    if job.sequences_a_step is None:
        return
    tokens = job.sequences_a_step * job.config.training.seq_len
    if after_steps * tokens < MIN_TOKENS:
        raise ValueError(
            f"{SECTION}.after_steps = {after_steps}: with {tokens} tokens a step that is less than "
            f"the {MIN_TOKENS} tokens that a placement takes. Record more steps"
        )
