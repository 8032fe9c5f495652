"""Command-line flags made from the definitions of engine options and sampling parameters.

An option of the engine is a flag of the same name with dashes; there is no second list. Options of vLLM that we do not
have are hidden flags, so that they are accepted or refused here exactly as in Python.
"""

import functools
import json
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Annotated, Any, get_type_hints

import typer

from dalsegno.engine.foreign_options import FOREIGN_OFF_VALUES
from dalsegno.engine.options import option_specs
from dalsegno.errors import OptionError

__all__ = ["SAMPLING_FLAGS", "with_engine_flags", "with_sampling_flags"]

SAMPLING_FLAGS: dict[str, tuple[Any, str]] = {
    "n": (int, "Samples per prompt."),
    "temperature": (float, "0 always takes the likeliest token."),
    "top_p": (float, "Sample from the smallest set of tokens with this probability."),
    "top_k": (int, "Sample from this many likeliest tokens; 0 is all."),
    "min_p": (float, "Drop tokens less likely than this share of the likeliest."),
    "presence_penalty": (float, "Makes tokens that were in the answer less likely; -2 to 2."),
    "frequency_penalty": (float, "The same, for each time they were; -2 to 2."),
    "repetition_penalty": (float, "Makes tokens of prompt and answer less likely when above 1."),
    "logit_bias": (dict, "Token ids and what to add to their logits, as JSON."),
    "stop": (list[str], "Text that ends the answer; may be given several times."),
    "stop_token_ids": (list[int], "Token id that ends the answer; may be given several times."),
    "ignore_eos": (bool, "Go on after the model's end token."),
    "max_tokens": (int, "Most tokens to generate; default: the checkpoint's, else 256."),
    "min_tokens": (int, "Fewest tokens to generate."),
}
"""Flag name -> type and help of each sampling parameter; the seed is the engine's, no command prints logprobs."""

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", list[int]: "INTEGER", list[str]: "TEXT", dict: "JSON"}


_IDS_ONLY = "skip_tokenizer_init"
"""Of no use on a command line, which reads and writes text: hidden, and refused before anything is loaded."""


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every engine option as a flag; it receives those that were given as `engine_options`."""
    flags = []
    for spec in option_specs():
        text = spec.help if spec.default is None else f"{spec.help}  [default: {_shown(spec.default)}]"
        flags.append(_flag(spec.name, _inner_type(spec.type), text, hidden=spec.name == _IDS_ONLY))
    flags.append(_flag("prefix_match_unit", int, "", hidden=True))
    for name, off_values in FOREIGN_OFF_VALUES.items():
        kind = bool if any(isinstance(value, bool) for value in off_values) else str
        flags.append(_flag(name, kind, "", hidden=True))
    return _extended(command, "engine_options", flags, _parse_foreign)


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling parameters as flags; it receives those that were given as `sampling_options`."""
    flags = [_flag(name, kind, text) for name, (kind, text) in SAMPLING_FLAGS.items()]
    return _extended(command, "sampling_options", flags, _parse_sampling)


def _flag(name: str, kind: Any, text: str, *, hidden: bool = False) -> Parameter:
    dashed = "--" + name.replace("_", "-")
    names = f"{dashed}/--no-{dashed[2:]}" if kind is bool else dashed
    option = typer.Option(names, help=text, hidden=hidden, show_default=False, metavar=_METAVARS.get(kind))
    # What is written in JSON comes as text.
    kind = str if kind is dict else kind
    # None stands for "not given", so that what is given can be told from what is default.
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _inner_type(kind: Any) -> Any:
    """The type of an option that may also be None."""
    inner = [part for part in getattr(kind, "__args__", ()) if part is not type(None)]
    return inner[0] if inner else kind


def _shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else str(default)


def _parse_foreign(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of foreign flags, which come as text, the way they are written in Python.

    Raises:
        OptionError: there is to be no tokenizer.
    """
    if given.get(_IDS_ONLY):
        raise OptionError("prompts on the command line are texts and need a tokenizer: skip_tokenizer_init must be off")
    return {name: _literal(value) if name in FOREIGN_OFF_VALUES else value for name, value in given.items()}


def _parse_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out lists that were not given, and read what is written in JSON."""
    return {
        name: _literal(value) if SAMPLING_FLAGS[name][0] is dict else value
        for name, value in given.items()
        if value != []
    }


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value in ("None", "none", "null"):
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def _extended(
    command: Callable[..., None],
    target: str,
    flags: list[Parameter],
    parse: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    """Wrap a command so that the flags take the place of its parameter `target`."""
    names = [flag.name for flag in flags]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        command(**values, **{target: parse({name: value for name, value in given.items() if value is not None})})

    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation), kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(command).parameters.values()
        if parameter.name != target
    ]
    everything = [*own, *flags]
    # The wrapped command's hints would be read instead of the signature's.
    del wrapper.__wrapped__
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
    vars(wrapper)["__signature__"] = signature(command).replace(parameters=everything)
    return wrapper
