"""`dalsegno generate`: answers on stdout, in order, while they come; everything else on stderr."""

import json
import re
from typing import Any

import pytest

from dalsegno.cli.generate import AnswerPrinter
from dalsegno.sampling_params import SamplingParams
from tests.cli.stand_in import Engines, run

GREEDY = ["--temperature", "0", "--ignore-eos"]


def _texts(engines: Engines, prompts: list[str], count: int, n: int = 1) -> list[list[str]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=n)
    return [[answer.text for answer in output.outputs] for output in engines.reference().generate(prompts, params)]


def test_one_answer_is_all_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run("generate", "m", "-p", "The fox", *GREEDY, "--max-tokens", "9")
    assert result.exit_code == 0
    assert result.stdout == _texts(engines, ["The fox"], 9)[0][0] + "\n"
    assert re.search(r"prompt tokens, 0 cached, (\d+) prefilled \(shorter_than_unit \1\)", result.stderr)
    assert "9 generated" in result.stderr
    assert engines.workers[0].closed


def test_several_prompts_are_answered_in_one_batch_and_printed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    prompts = ["The fox", "quer über den Deich", "dog"]
    result = run(
        "generate", "m", *(flag for prompt in prompts for flag in ("-p", prompt)), *GREEDY, "--max-tokens", "7"
    )
    assert result.stdout == "".join(texts[0] + "\n" for texts in _texts(engines, prompts, 7))
    assert "2: quer über den Deich" in result.stderr
    assert engines.workers[0].num_steps < 2 * 7


def test_samples_of_a_prompt_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run("generate", "m", "-p", "fox", "--n", "2", *GREEDY, "--max-tokens", "4")
    assert result.stdout == "".join(text + "\n" for text in _texts(engines, ["fox"], 4, n=2)[0])
    assert "1.2: fox" in result.stderr


def test_flags_reach_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    seen: list[SamplingParams] = []

    def keep(plan: Any) -> None:
        seen.extend(request.sample.params for request in plan.requests if request.sample)

    engines.before_step = keep
    flags = "--temperature 0.5 --top-p 0.9 --top-k 3 --stop END --stop HALT --stop-token-ids 9 --min-tokens 1"
    run("generate", "m", "-p", "fox", *flags.split(), "--ignore-eos", "--max-tokens", "2")
    assert seen[0] == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop=["END", "HALT"],
        stop_token_ids=[9],
        min_tokens=1,
        max_tokens=2,
        ignore_eos=True,
    )
    seen.clear()
    run("generate", "m", "-p", "fox", "--ignore-eos")
    assert seen[0] == SamplingParams(top_k=7, max_tokens=256, ignore_eos=True), (
        "the checkpoint's default, a longer answer"
    )


def test_json_is_one_object_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run("generate", "m", "-p", "fox", "-p", "dog", "--json", *GREEDY, "--max-tokens", "3")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["prompt"] for one in found] == ["fox", "dog"]
    assert [[a["text"] for a in one["outputs"]] for one in found] == _texts(engines, ["fox", "dog"], 3)
    assert found[0]["outputs"][0]["finish_reason"] == "length"
    assert sum(found[0]["lost"].values()) == found[0]["num_prompt_tokens"] == found[0]["num_prefilled_tokens"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_answer_is_status_1(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    engines = Engines(monkeypatch)

    def fail(_plan: Any) -> None:
        raise RuntimeError("no more")

    engines.before_step = fail
    result = run("generate", "m", "-p", "fox", *flags)
    assert result.exit_code == 1
    assert "engine error: 1 answers failed" in result.stderr
    assert "no more" in (result.stdout if flags else result.stderr)


def test_a_later_prompt_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = Engines(monkeypatch).reference()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = list(llm.stream(["fox", "dog"], params))
    first, second = ([output for output in outputs if output.request_id == name] for name in ("0", "1"))
    printer = AnswerPrinter(["fox", "dog"], 1)
    for output in second:
        printer.show(1, output)
    assert capsys.readouterr().out == ""
    printer.show(0, first[0])
    assert capsys.readouterr().out == first[0].outputs[0].text
    for output in first:
        printer.show(0, output)
    assert capsys.readouterr().out.endswith("\n" + second[-1].outputs[0].text + "\n")
