"""Hits beside the states they cost: each way a prefix is met again, on the tiny Qwen3-Next."""

import random
import tempfile
from pathlib import Path

from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import LLM, SamplingParams
from dalsegno.models.tiny import make_tiny_model


def main() -> None:
    """Play the sightings and print tokens hit, beside the prompt's length less one, and states kept."""
    arguments = parse_arguments(__doc__ or "", ("shared", 600), ("answer", 40))
    rng = random.Random(0)

    def fresh(count: int) -> list[int]:
        return [rng.randrange(4096) for _ in range(count)]

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", model)
        with LLM(model, kv_cache_memory_bytes=2**29) as llm:

            def send(name: str, prompt: list[int], max_tokens: int = 1) -> list[int]:
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
                [result] = llm.generate([prompt], params, use_tqdm=False)
                states = result.metrics.num_states_kept
                hit, most = float(result.num_cached_tokens or 0), float(len(prompt) - 1)
                rows.append(Row(f"{name}: tokens hit", hit, "tokens", most, hit / most, command_line()))
                rows.append(Row(f"{name}: states kept", float(states), "states", 16.0, states / 16, command_line()))
                return result.outputs[0].token_ids

            shared = fresh(arguments.shared)
            prompt = shared + fresh(37)
            answer = send("first sighting", prompt, arguments.answer)
            send("resend", prompt)
            send("extension by 1", prompt + fresh(1))
            send("extension by 2", prompt + fresh(2))
            send("extension by H", prompt + fresh(16))
            send("next turn", prompt + answer + fresh(25))
            send("second on a shared prefix", shared + fresh(50))
            send("third on a shared prefix", shared + fresh(50))
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
