"""Chat templates, rendered in a child process with limits of time and memory: they come with downloaded models.

The sandbox of jinja2 keeps a template from the files and the objects of the process, but not from endless loops and
texts. The child answers one line of JSON with one line of JSON and ends with its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from sbonnx.system.isolation import python_command

SECONDS: Final = 10
"""CPU time of one conversation, and of the compilation."""

WALL_SECONDS: Final = 120
"""Time after which the child is ended in any case, on loaded machines and systems without timers of CPU time."""

MEMORY: Final = 1 << 30
"""Address space of the child in bytes."""

LONGEST: Final = 1 << 24
"""Maximum length of a rendered conversation."""


class TemplateFault(ValueError):
    """The reason why a template or a conversation is rejected."""


@final
class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            names: special tokens by the name in the template.

        Raises:
            TemplateFault: it has an error, or exceeds the limits.
            OSError: the child process cannot be started.
        """
        self._child = subprocess.Popen(
            python_command(__name__, serve.__name__, SECONDS, MEMORY),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt reaches this process alone; its end is the end of the input
        )
        self._end = weakref.finalize(self, _end, self._child)
        self._answer({"template": text, "names": dict(names)})

    def render(self, messages: list[Any]) -> str:
        """Render a conversation.

        Raises:
            TemplateFault: the template rejects it, or exceeds the limits.
        """
        return self._answer({"messages": messages})

    def _answer(self, question: dict[str, Any]) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        timer = threading.Timer(WALL_SECONDS, self._child.kill)
        timer.daemon = True
        timer.start()
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if not line:
            raise TemplateFault(f"it needs more than {SECONDS} s or {MEMORY >> 20} MiB")
        answer: dict[str, str] = json.loads(line)
        if "fault" in answer:
            raise TemplateFault(answer["fault"])
        return answer["text"]


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def serve(seconds: int, memory: int) -> None:
    """Answer the questions on standard input: the entry point of the child.

    Args:
        seconds, memory: `SECONDS` and `MEMORY`.
    """
    import jinja2  # noqa: F401 - before the limits

    start_timer = _set_limits(seconds, memory)
    template: Any = None
    for line in sys.stdin.buffer:
        start_timer()
        question = json.loads(line)
        answer = {}
        try:
            if "template" in question:
                template, answer = _compiled(**question), {"text": ""}
            else:
                answer = {"text": _rendered(template, question["messages"])}
        except Exception as error:  # templates reach any code of jinja2 and of their values
            answer = {"fault": " ".join(str(error).split())[:300] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _compiled(template: str, names: dict[str, str]) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {**names, "raise_exception": _raise}
    return environment.from_string(template)


def _rendered(template: Any, messages: list[Any]) -> str:
    parts, length = [], 0
    for part in template.generate(messages=messages, add_generation_prompt=False):
        parts.append(part)
        length += len(part)
        if length > LONGEST:
            raise ValueError(f"the conversation becomes longer than {LONGEST} characters")
    return "".join(parts)


def _raise(message: object) -> None:
    raise ValueError(message)


def _set_limits(seconds: int, memory: int) -> Callable[[], object]:
    """Limit the memory of this process; returns a function that limits the CPU time from now on."""
    if sys.platform == "win32":
        return lambda: None
    import resource
    import signal

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in native code too
    return lambda: signal.setitimer(signal.ITIMER_PROF, seconds)
