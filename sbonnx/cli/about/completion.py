"""``sbonnx completion``: print the completion script of a shell."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError
from sbonnx.present.text.printer import Printer

HELP: Final = "Print the completion script of a shell. Completes verbs, options, backends, recipe keys and rules."

SHELLS: Final = ("bash", "zsh", "fish")

VARIABLE: Final = "_SBONNX_COMPLETE"
"""Environment variable by which the scripts ask for completions."""

SHELL: Final[CommandOption[str]] = CommandOption(
    "shell", (), str, "The shell.", "|".join(SHELLS), inspect.Parameter.empty, choices=lambda _: SHELLS
)

OPTIONS: Final = (SHELL, *options.COMMON)


@dataclass(frozen=True)
class CompletionOutput:
    """Output of completion.

    Attributes:
        shell: the shell.
        script: its completion script.
    """

    shell: str
    script: str


def run(given: Arguments) -> int:
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    shell = given[SHELL]
    if shell not in SHELLS:
        raise RecipeError(f"no completion for the shell '{shell}': choose {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    script = get_completion_script(prog_name="sbonnx", complete_var=VARIABLE, shell=shell)
    if shell == "bash":  # the value of a recipe key follows its name without a blank
        script = script.replace(
            "return 0", "[[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null\n    return 0"
        )
    printer = given.printer()
    printer.value("completion", CompletionOutput(shell, script))
    if not printer.as_json:
        Printer().text(script)
    return 0
