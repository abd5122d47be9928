"""The rows that a sample becomes as the model's own chat template writes it, and what of them is learned.

`launch/prepare_data.py` carries the text of this class, so that what was counted is what is trained on.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from planner.samples.rows import REASONING, DataError, Row, num_shared


class ChatTemplate:
    """What the chat template of a tokenizer makes of samples (`planner.samples.rows.sample_of`).

    Args:
        write: transformers' `apply_chat_template` to a text; end: the tokenizer's end-of-sequence token.
    """

    def __init__(self, write: Callable[..., str], end: str) -> None:
        self.write, self.end = write, end

    @cached_property
    def takes_parts(self) -> bool:
        """Whether contents come in parts, as in templates of models with pictures."""
        try:
            return "PROBE" not in self.write([{"role": "user", "content": "PROBE"}])
        except Exception:  # what templates raise has no class of its own
            return True

    @cached_property
    def writes_end(self) -> bool:
        """Whether anything stands behind an answer."""
        try:
            text = self.render([{"role": role, "content": "PROBE"} for role in ("user", "assistant")])
        except DataError:
            return True
        return bool(text.rpartition("PROBE")[2].strip())

    def render(self, turns: list[Row], tools: Any = None, *, asks: bool = False) -> str:
        """Turns as text, with `asks` as far as an answer begins; where the template knows no system, what that says
        begins the first question.

        Raises:
            DataError: the template takes no such chat.
        """
        messages = self.named(turns)
        if self.takes_parts:
            messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        try:
            return self.write(messages, tools=tools or None, add_generation_prompt=asks)
        except Exception as error:
            if len(turns) < 2 or turns[0]["role"] != "system":
                roles = [turn["role"] for turn in turns]
                raise DataError(
                    f"the model's chat template takes no chat of {', '.join(roles)[:200]}: {error}",
                    "take such turns out, or a model whose template knows them",
                ) from error
            return self.render(self.folded(turns), tools, asks=asks)

    @staticmethod
    def named(turns: list[Row]) -> list[Row]:
        """Turns with their reasoning under each name that templates read.

        Source: transformers 5.23 `utils/chat_template_utils.py` (_alias_reasoning_fields).
        """
        thoughts = [dict.fromkeys(REASONING, turn[REASONING[0]]) if REASONING[0] in turn else {} for turn in turns]
        return [
            {key: turn[key] for key in turn if key != "train"} | thought
            for turn, thought in zip(turns, thoughts, strict=True)
        ]

    @staticmethod
    def folded(turns: list[Row]) -> list[Row]:
        """Turns whose first question begins with what the system says."""
        return [{**turns[1], "content": turns[0]["content"] + "\n\n" + turns[1]["content"]}, *turns[2:]]

    def rows(self, sample: Row, loss_on: str = "answers") -> list[tuple[str, list[tuple[int, int]]]]:
        """[(text, [(start, end) of what the loss is on, in characters]), ...]: one text, and one more for every answer
        that the template writes otherwise once the chat goes on (those of models that reason).

        Raises:
            DataError: the template takes no such chat; a turn that is not learned where all is.
        """
        if "messages" not in sample:
            question = sample.get("prompt", "")
            text = question + sample.get("completion", sample.get("text")) + self.end
            return [(text, [(0 if loss_on == "all" else len(question), len(text))])]
        turns, tools = sample["messages"], sample.get("tools")
        if loss_on == "all":
            if not all(turn.get("train", True) for turn in turns):
                raise DataError(
                    "a turn has weight 0 and the loss is on all", "take the loss on answers, or the turn out"
                )
            whole = self.render(turns, tools)
            return [(whole, [(0, len(whole))])]
        rows: list[tuple[str, list[tuple[int, int]]]] = []
        for number in reversed(range(len(turns))):
            if turns[number]["role"] != "assistant" or not turns[number].get("train", True):
                continue
            question, answered = (self.render(turns[:num], tools, asks=num == number) for num in (number, number + 1))
            start = len(question)
            if not answered.startswith(question):
                start = self._begin(turns[:number], tools, question, answered)
            text = answered.rstrip()
            for longer, spans in reversed(rows):
                if longer.startswith(text):
                    spans.insert(0, (start, len(text)))
                    break
            else:
                rows.append((answered, [(start, len(text))]))
        return [self.ended(text, spans) for text, spans in reversed(rows)]

    def _begin(self, before: list[Row], tools: Any, question: str, answered: str) -> int:
        """Where an answer begins after turns that the template writes otherwise once it is there."""
        start = num_shared(question, answered)
        try:
            other = self.render([*before, {"role": "assistant", "content": "\ufffd"}], tools)
            opening = question.removeprefix(self.render(before, tools))
        except DataError:
            return start
        at = answered.rfind(opening, 0, num_shared(other, answered)) if opening else -1
        return max(start, at + len(opening)) if at >= 0 else start

    @staticmethod
    def unwritten(sample: Row, rows: list[tuple[str, list[tuple[int, int]]]]) -> bool:
        """Whether the template leaves out what a turn to be learned thinks, or the tools that it calls."""
        text = "".join(text for text, _ in rows)
        turns = [turn for turn in sample.get("messages", ()) if turn.get("train", True)]
        calls = [call.get("function") or call for turn in turns for call in turn.get("tool_calls", ())]
        parts = [turn.get(REASONING[0], "").strip() for turn in turns] + [str(call.get("name", "")) for call in calls]
        return not all(part in text for part in parts)

    def ended(self, text: str, spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """The same with the tokenizer's own end where the template writes none behind an answer: where to stop is
        learned too."""
        if self.writes_end:
            return text, spans
        first, last = spans[-1]
        text = text[:last] + self.end
        return text, [*spans[:-1], (first, len(text))]

    @staticmethod
    def labelled(ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
        """The ids of tokens that lie in one of the spans, -100 for the others."""
        labels, at = [], 0
        for token, (start, end) in zip(ids, offsets, strict=True):
            while at < len(spans) and start < end and spans[at][1] <= start:
                at += 1
            labels.append(token if at < len(spans) and start < end and spans[at][0] < end else -100)
        return labels
