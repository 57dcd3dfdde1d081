"""An episode as one growing sequence of tokens, for trainers that learn from a whole episode at once: the
first prompt, then replies of the policy and texts of the environment in turn. No token is ever re-encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Parse = Callable[[str], str]
_REPLY = "\x00reply\x00"


def first_line(text: str) -> str:
    """The action in a reply.

    >>> first_line(" open door \\nand leave")
    'open door'
    """
    return (text.strip().splitlines() or [""])[0].strip()


@dataclass(slots=True, kw_only=True)
class TokenizedEpisode:
    """Tokens of one episode, and which of them the policy sampled."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """After the prompt."""
    mask: list[int] = field(default_factory=list)
    """1: sampled by the policy."""
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    rewards: list[float] = field(default_factory=list)

    @property
    def everything(self) -> list[int]:
        return self.prompt + self.tokens

    def reply(self, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens
        self.mask += [1] * len(tokens)
        self.logprobs += logprobs
        self.turns += 1

    def observe(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


class Conversation:
    """How an episode is written for a tokenizer: by its chat template, or as lines where it has none."""

    def __init__(self, tokenizer: Any, *, system: str = "") -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._chat = getattr(tokenizer, "chat_template", None) is not None
        self.stop: tuple[str, ...] = () if self._chat else ("\n",)
        """Texts that end a reply, beside the model's own end of turn."""

    def first(self, instruction: str, text: str) -> list[int]:
        """The tokens before the first reply."""
        if not self._chat:
            start = f"{self._system}\n" if self._system else ""
            return self._encode(f"{start}Task: {instruction}\n{text}\n>")
        return self._encode(self._rendered(self._messages(f"{instruction}\n\n{text}"), prompt=True))

    def then(self, text: str, last: list[int]) -> list[int]:
        """The tokens between a reply, which ends with `last`, and the next one."""
        if not self._chat:
            return self._encode(f"{text}\n>" if self._ends(last, "\n") else f"\n{text}\n>")
        messages = [*self._messages("x"), {"role": "assistant", "content": _REPLY}]
        said = self._rendered([*messages, {"role": "user", "content": text}], prompt=True)
        after = said.partition(_REPLY)[2]
        end = self._tokenizer.eos_token
        if end and after.startswith(end) and last[-1:] == [self._tokenizer.eos_token_id]:
            after = after.removeprefix(end)
        return self._encode(after)

    def _messages(self, user: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": user}]

    def _rendered(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _ends(self, tokens: list[int], text: str) -> bool:
        return bool(tokens) and str(self._tokenizer.decode(tokens[-1:])).endswith(text)
