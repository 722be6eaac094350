"""A chat client for vLLM's server: token ids of prompt and answer, thinking kept apart, retries of what may pass.

Why token ids from the server: tokenizing the text again need not give the tokens that the model saw and produced, and
the loss mask must fall exactly on the produced ones. aiohttp is what every vLLM environment has (tenacity is not there);
the retry policy is the dozen lines of `_post`. Must not import torch.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
BACKOFF_S = 0.5
BACKOFF_LIMIT_S = 30.0


class Refused(Exception):
    """The server answered and will not answer otherwise: a wrong request, or an answer without what we need."""


class Unreachable(Exception):
    """No answer after every retry: the server is down, or far too slow."""


@dataclass(frozen=True)
class Answer:
    """One generation. `prompt_ids` and `answer_ids` are what the model saw and produced."""

    prompt_ids: list[int]
    answer_ids: list[int]
    reasoning: str
    response: str
    finish_reason: str


class ChatClient:
    """Bounded concurrency over one session; safe to use from many tasks."""

    def __init__(self, url: str, model: str, *, concurrency: int, timeout_s: float, retries: int) -> None:
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._model = model
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # trust_env stays off: a proxy of the host has no business between two programs on it.
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, messages: Sequence[dict[str, Any]], params: dict[str, Any]) -> Answer:
        """Generate one answer.

        Raises:
            Refused: permanent; Unreachable: every retry failed.
        """
        body = {**params, "model": self._model, "messages": list(messages), "return_token_ids": True}
        async with self._slots:
            return read_answer(await self._post(body))

    async def _post(self, body: dict[str, Any]) -> Any:
        session = self._session
        if session is None:
            raise RuntimeError("ChatClient is used inside `async with` only")
        last = ""
        for attempt in range(self._retries + 1):
            if attempt:
                # Full jitter: hundreds of requests fail together when a server stumbles.
                await asyncio.sleep(random.uniform(0, min(BACKOFF_LIMIT_S, BACKOFF_S * 2**attempt)))
            try:
                async with session.post(self._url, json=body) as answer:
                    if answer.status == 200:
                        return await answer.json(content_type=None)
                    last = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                    if answer.status not in RETRIED_STATUSES:
                        raise Refused(last)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
                last = f"{type(error).__name__}: {error}"
        raise Unreachable(last)


def read_answer(data: Any) -> Answer:
    """Take an answer of /v1/chat/completions apart.

    Raises:
        Refused: it holds no token ids (vLLM before 0.10.2, or another server), or nothing was generated.
    """
    try:
        choice = data["choices"][0]
        message = choice["message"]
        prompt_ids, answer_ids = data.get("prompt_token_ids"), choice.get("token_ids")
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(f"unexpected answer: {str(data)[:300]}") from error
    if not prompt_ids or answer_ids is None:
        raise Refused("the server returned no token ids: it must support return_token_ids (vLLM >= 0.10.2)")
    if not answer_ids:
        raise Refused("nothing was generated")
    reasoning, response = split_reasoning(
        message.get("reasoning") or message.get("reasoning_content"), message.get("content") or ""
    )
    return Answer(list(prompt_ids), list(answer_ids), reasoning, response, str(choice.get("finish_reason")))


def split_reasoning(reasoning: str | None, content: str) -> tuple[str, str]:
    """(thinking, answer): as the server's reasoning parser split it, else at `</think>` in the text."""
    if reasoning is not None:
        return reasoning, content
    head, closed, tail = content.partition("</think>")
    if closed:
        return head.removeprefix("<think>").strip("\n"), tail.lstrip("\n")
    if content.lstrip().startswith("<think>"):  # cut off while thinking: there is no answer yet
        return content.lstrip().removeprefix("<think>").strip("\n"), ""
    return "", content
