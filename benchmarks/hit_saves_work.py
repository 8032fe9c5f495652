"""What a hit is worth: first token of a long cached prompt plus a few new tokens, beside the same length uncached.

Both are measured in turn in one process, on prompts never seen before, and the median of the pairwise ratios is given.
"""

import random
import statistics
import tempfile
from pathlib import Path

from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import LLM, SamplingParams
from dalsegno.models.tiny import make_tiny_model


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__ or "", ("cached", 3000), ("new", 16), ("repeats", 5))
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def fresh(count: int) -> list[int]:
        return [rng.randrange(4096) for _ in range(count)]

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", model)
        with LLM(model, kv_cache_memory_bytes=2**30) as llm:

            def first_token(prompt: list[int]) -> tuple[float, int, int]:
                [result] = llm.generate([prompt], params, use_tqdm=False)
                metrics = result.metrics
                assert metrics.first_token_time is not None
                cached = result.num_cached_tokens or 0
                return metrics.first_token_time - metrics.arrival_time, cached, metrics.num_prefilled_tokens

            first_token(fresh(arguments.cached))
            pairs = []
            for _ in range(arguments.repeats):
                cold, cached, prefilled = first_token(fresh(arguments.cached + arguments.new))
                assert (cached, prefilled) == (0, arguments.cached + arguments.new)
                prefix = fresh(arguments.cached)
                first_token(prefix)
                hit, cached, prefilled = first_token(prefix + fresh(arguments.new))
                assert cached == arguments.cached // 16 * 16
                assert prefilled == arguments.cached + arguments.new - cached
                pairs.append((hit, cold))
    hit, cold = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(h / c for h, c in pairs)
    name = f"first token, {arguments.cached} cached + {arguments.new} new tokens"
    print_rows([Row(name, hit, "s", cold, ratio, command_line())], as_json=arguments.json)


if __name__ == "__main__":
    main()
