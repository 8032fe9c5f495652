"""What a request asks of the sampler, and what a sampled token means for it. Pure functions."""

from dalsegno.request import FinishReason, Request
from dalsegno.types import PromptRows, SampleSpec, TokenLogprobs

__all__ = ["finish_of", "prompt_rows", "sample_spec", "take_row"]


def sample_spec(request: Request) -> SampleSpec:
    """Ask for the request's next token, and for its siblings' first ones while they wait for its prefill."""
    params = request.params
    forbidden: frozenset[int] = frozenset()
    if request.num_output_tokens < params.min_tokens:
        forbidden = request.end_token_ids.union(params.stop_token_ids)
    return SampleSpec(
        params=params,
        seed=request.seed,
        sample_indices=(request.sample_index, *(sibling.sample_index for sibling in request.siblings)),
        position=request.num_tokens,
        forbidden_token_ids=tuple(sorted(forbidden)),
        known_token_ids=request.token_ids if params.has_penalties else None,
        num_prompt_tokens=request.num_prompt_tokens,
        witness=request.num_tokens < request.witness_until,
    )


def take_row(request: Request, row: TokenLogprobs) -> None:
    """Keep a report on the token just appended as far as its caller asked for it, and whole as a witness."""
    if request.num_tokens - 1 < request.witness_until:
        request.witness.append((request.num_tokens - 1, row))
    if request.params.logprobs is not None:
        request.logprobs.append(row.likeliest(request.params.logprobs))


def prompt_rows(request: Request, start: int, end: int) -> PromptRows | None:
    """Ask for what tokens `[start, end)` say about the prompt tokens behind them and was not delivered before."""
    count = request.params.prompt_logprobs
    if count is None or not request.awaits_prompt_logprobs:
        return None
    first, last = max(start, request.num_prompt_rows), min(end, request.num_prompt_tokens - 1)
    return PromptRows(request.token_ids[first + 1 : last + 1], first - start, count) if first < last else None


def finish_of(request: Request, token: int, max_model_len: int) -> tuple[FinishReason | None, int | str | None]:
    """Whether `token`, just appended, ends the request: (reason, stop reason), both None if it goes on."""
    params = request.params
    if request.num_output_tokens >= params.min_tokens:
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        if token in request.end_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
    if request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None, None
